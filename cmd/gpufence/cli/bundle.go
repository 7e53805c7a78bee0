// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Bounds of a bundle.
const (
	bundleEvents    = 5000    // of the journal, the newest
	bundleFileBytes = 4 << 20 // of each file that is copied
	bundleStates    = 2000    // state files
)

// bundled is what `support-bundle -o json` prints.
type bundled struct {
	File    string   `json:"file"`
	Entries []string `json:"entries"`
	// Missing is what could not be had, and why.
	Missing map[string]string `json:"missing,omitempty"`
}

func (a *app) supportBundle() *cobra.Command {
	var output, file, root string
	cmd := &cobra.Command{
		Use:   "support-bundle",
		Short: "pack what is worth knowing about this node into a file, for a bug report",
		Long: "support-bundle writes a tar.gz with configuration, state, the end of the journal, what ps, inspect,\n" +
			"doctor and the metrics say, and versions. Values of environment variables and of annotations that are\n" +
			"not gpufence's are left out; names of containers, pods and processes are in it. It works, with less,\n" +
			"where gpufenced does not answer.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				file = fmt.Sprintf("gpufence-support-%s.tar.gz", time.Now().UTC().Format("20060102-150405"))
			}
			b, err := a.bundle(cmd.Context(), file, root)
			if err != nil {
				return err
			}
			if output == "json" {
				return a.printJSON(b)
			}
			for _, name := range slices.Sorted(maps.Keys(b.Missing)) {
				fmt.Fprintf(a.stderr, "gpufence: note: without %s: %s\n", name, printable(b.Missing[name]))
			}
			_, err = fmt.Fprintln(a.stdout, b.File)
			return err
		},
	}
	outputFlag(cmd, &output, "table", "json")
	cmd.Flags().StringVar(&file, "file", "", "where to write it (default gpufence-support-<time>.tar.gz here)")
	cmd.Flags().StringVar(&root, "root", "/", "look at the node below this folder")
	if err := cmd.Flags().MarkHidden("root"); err != nil {
		panic(err) // it was added a line above
	}
	return cmd
}

// packer writes entries into the archive and keeps account.
type packer struct {
	tar  *tar.Writer
	now  time.Time
	into *bundled
}

func (p *packer) add(name string, text []byte) error {
	h := &tar.Header{Name: "gpufence-support/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: p.now, Format: tar.FormatPAX}
	if err := p.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("pack %s: %w", name, err)
	}
	if _, err := p.tar.Write(text); err != nil {
		return fmt.Errorf("pack %s: %w", name, err)
	}
	p.into.Entries = append(p.into.Entries, name)
	return nil
}

// addJSON packs what somebody answered, or why it did not.
func (p *packer) addJSON(name string, v any, err error) error {
	if err != nil {
		p.into.Missing[name] = oneSentence(err)
		return nil
	}
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("pack %s: %w", name, err)
	}
	return p.add(name, redactJSON(text))
}

// addFile packs a file of the node.
func (p *packer) addFile(name, path string, redact func([]byte) []byte) error {
	text, err := readBounded(path)
	if err != nil {
		p.into.Missing[name] = strings.Join(strings.Fields(err.Error()), " ")
		return nil
	}
	return p.add(name, redact(text))
}

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, bundleFileBytes))
}

func (a *app) bundle(ctx context.Context, file, root string) (_ bundled, err error) {
	b := bundled{File: file, Missing: map[string]string{}}
	failed := func(err error) *quota.Error {
		return quota.NewError(quota.CodeBundle, "the bundle %s cannot be written: %w", file, err)
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return b, failed(err).WithHint("name another file with --file")
	}
	defer func() {
		if closeErr := f.Close(); err == nil && closeErr != nil {
			err = failed(closeErr)
		}
		if err != nil {
			err = errors.Join(err, os.Remove(file))
		}
	}()
	z := gzip.NewWriter(f)
	p := &packer{tar: tar.NewWriter(z), now: time.Now(), into: &b}
	if err := a.pack(ctx, p, root); err != nil {
		return b, failed(err)
	}
	if err := errors.Join(p.tar.Close(), z.Close()); err != nil {
		return b, failed(err)
	}
	return b, nil
}

func (a *app) pack(ctx context.Context, p *packer, root string) error {
	c := a.client()
	v := versions{Client: api.BuildVersion}
	if daemon, err := c.Version(ctx); err == nil {
		v.Daemon = &daemon
	} else {
		v.Error = oneSentence(err)
	}
	node, nodeErr := c.Node(ctx)
	ex, exErr := a.examine(ctx, root)
	containers, containersErr := c.Containers(ctx)
	gpus, gpusErr := c.GPUs(ctx)
	metricsText, metricsErr := c.Metrics(ctx)
	var events []api.Event
	eventsErr := c.Events(ctx, 0, false, func(ev api.Event) error {
		if len(events) == 2*bundleEvents {
			events = slices.Clone(events[bundleEvents:])
		}
		events = append(events, ev)
		return nil
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var lines bytes.Buffer
	for _, ev := range events[max(0, len(events)-bundleEvents):] {
		line, err := json.Marshal(ev)
		if err != nil {
			return fmt.Errorf("pack events: %w", err)
		}
		lines.Write(append(redactJSON(line), '\n'))
	}
	if eventsErr != nil && lines.Len() == 0 {
		p.into.Missing["events.jsonl"] = oneSentence(eventsErr)
	}
	for _, err := range []error{
		p.addJSON("versions.json", v, nil),
		p.addJSON("node.json", node, nodeErr),
		p.addJSON("doctor.json", ex, exErr),
		p.addJSON("containers.json", containers, containersErr),
		p.addJSON("gpus.json", gpus, gpusErr),
		p.addRaw("metrics.txt", metricsText, metricsErr),
		p.addRaw("events.jsonl", lines.Bytes(), nil),
	} {
		if err != nil {
			return err
		}
	}
	at := func(path string) string { return filepath.Join(root, path) }
	path, lastGood, run := config.DefaultPath, filepath.Join(config.Default().StateDir, config.LastGoodName), config.Default().RunDir
	if nodeErr == nil {
		run = node.RunDir
		if node.Config.Path != "" {
			path = node.Config.Path
		}
		if node.Config.LastGood != "" {
			lastGood = node.Config.LastGood
		}
	}
	same := func(b []byte) []byte { return b }
	for _, f := range []struct {
		name, path string
		redact     func([]byte) []byte
	}{
		{"config.toml", path, same}, {config.LastGoodName, lastGood, same}, {"host/os-release", "/etc/os-release", same},
		{"host/kernel", "/proc/sys/kernel/osrelease", same}, {"host/cmdline", "/proc/cmdline", redactCmdline}, {"host/driver", "/proc/driver/nvidia/version", same},
		{"host/cgroups", "/proc/self/cgroup", same},
	} {
		if err := p.addFile(f.name, at(f.path), f.redact); err != nil {
			return err
		}
	}
	states, err := filepath.Glob(filepath.Join(at(run), "state", "*.json*"))
	if err != nil {
		states = nil // the pattern is ours, and right
	}
	for _, s := range states[:min(len(states), bundleStates)] {
		if err := p.addFile("state/"+filepath.Base(s), s, redactJSON); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) addRaw(name string, text []byte, err error) error {
	if err != nil {
		p.into.Missing[name] = oneSentence(err)
		return nil
	}
	return p.add(name, text)
}

// redacted stands for what is nobody's business.
const redacted = "<redacted>"

// redactJSON takes the values of environment variables and annotations out that are not ours. What
// is not JSON is not packed at all: nobody knows what is in it.
func redactJSON(text []byte) []byte {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return []byte(`{"redacted":"not JSON"}`)
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(redact(v)); err != nil {
		return []byte(`{"redacted":"not JSON"}`)
	}
	var line bytes.Buffer
	if !bytes.Contains(bytes.TrimSpace(text), []byte("\n")) && json.Compact(&line, out.Bytes()) == nil {
		return line.Bytes()
	}
	return out.Bytes()
}

// redactCmdline keeps of the kernel's command line what decides about fences: people put tokens
// there, too.
func redactCmdline(text []byte) []byte {
	words := strings.Fields(string(text))
	for i, w := range words {
		name, _, has := strings.Cut(w, "=")
		ours := slices.ContainsFunc([]string{"lsm", "security", "cgroup", "systemd.unified_cgroup", "systemd.legacy_systemd_cgroup", "nvidia", "iommu", "intel_iommu", "amd_iommu", "pci"},
			func(p string) bool { return strings.HasPrefix(name, p) })
		if has && !ours {
			words[i] = name + "=" + redacted
		}
	}
	return []byte(strings.Join(words, " ") + "\n")
}

func redact(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = redact(v[i])
		}
	case map[string]any:
		for k, inner := range v {
			switch name := strings.ToLower(k); {
			case name == "env":
				v[k] = redactEnv(inner)
			case name == "annotations" || name == "labels":
				v[k] = redactMap(inner)
			case strings.Contains(name, "token"), strings.Contains(name, "secret"), strings.Contains(name, "password"):
				v[k] = redacted
			default:
				v[k] = redact(inner)
			}
		}
	}
	return v
}

func redactEnv(v any) any {
	list, ok := v.([]any)
	if !ok {
		return redactMap(v)
	}
	for i, e := range list {
		s, ok := e.(string)
		name, _, has := strings.Cut(s, "=")
		switch {
		case !ok:
			list[i] = redacted
		case has && !quota.MatchEnv(name):
			list[i] = name + "=" + redacted
		}
	}
	return list
}

func redactMap(v any) any {
	m, ok := v.(map[string]any)
	if !ok {
		return redacted
	}
	for k := range m {
		if !quota.Ours(k) && !quota.MatchEnv(k) {
			m[k] = redacted
		}
	}
	return m
}
