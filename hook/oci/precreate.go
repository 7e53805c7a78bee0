// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// Edit does in memory what [Wrapper.Run] does to a bundle: text is a config.json whose relative paths
// begin at bundle, and what comes back is the same with the container's fences. Where it fails, the
// error is what a user is to read, and nothing must be started, unless the mode of the container's
// namespace says otherwise: then text comes back as it was, and the error among the notices.
func (w Wrapper) Edit(ctx context.Context, key api.ContainerKey, bundle string, text []byte) (edited []byte, notices []string, err error) {
	root, err := parseDocument(text)
	if err != nil {
		return nil, nil, quota.NewError(quota.CodeSpecInvalid, "the container's configuration %w", err)
	}
	doc := &document{path: "config.json", text: text, root: root}
	c, err := readContainer(doc, key.Engine, key.ID, bundle)
	if err != nil {
		return nil, nil, err
	}
	if w.Settings.Notice != "" {
		notices = append(notices, w.Settings.Notice)
	}
	changed, more, err := w.fence(ctx, key, c, doc, bundle)
	notices = once(append(notices, more...))
	switch {
	case err == nil && !changed:
		return text, notices, nil
	case err == nil:
		return doc.root.bytes(), notices, nil
	case w.Settings.failsOpen(err):
		return text, append(notices, Sentence(err)+" (started WITHOUT ANY LIMIT: fail-open = true)"), nil
	}
	if mode := w.mode(modeError{err, w.Settings.Policy.For(c.pod.Namespace).Mode}); mode != quota.ModeEnforce {
		return text, append(notices, Sentence(err)+" (started as it is: mode "+string(mode)+")"), nil
	}
	return nil, notices, err
}

// Runtime is the low-level runtime that the wrapper would execute.
func (w Wrapper) Runtime() (string, error) { return w.lookup().find() }

// maxSentenceBytes bounds what a refusal says through a hook's argument.
const maxSentenceBytes = 4 << 10

// Precreate is `gpufence-hook precreate`, a hook that Podman has beside the OCI's: a filter of
// config.json before the runtime sees it. It does the wrapper's work for containers that are
// started without the runtime gpufence.
//
// Podman shows nobody what such a hook says. So a refusal is a hook in the configuration that
// fails with the sentence: the runtime's error, which Podman does show, is our sentence then.
type Precreate struct {
	Wrapper Wrapper // Settings, SettingsErr; what it executes is not used
	Args    HookArgs
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
}

// Run filters and returns the exit status: not 0 where there is no configuration to answer with, and
// Podman starts nothing then.
func (p Precreate) Run(ctx context.Context) int {
	ctx, cancel := context.WithTimeout(ctx, precreateTime)
	defer cancel()
	edited, err := p.run(ctx)
	if err == nil {
		if _, err = p.Stdout.Write(append(edited, '\n')); err == nil {
			return 0
		}
		err = fmt.Errorf("answer Podman: %w", err)
	}
	fmt.Fprintln(p.Stderr, oneLine(Sentence(err)))
	return 1
}

// precreateTime is below the timeout that the hook's file gives it.
const precreateTime = 18 * time.Second

func (p Precreate) run(ctx context.Context) ([]byte, error) {
	text, err := readAll(ctx, p.Stdin, MaxConfigBytes)
	if err != nil {
		return nil, quota.NewError(quota.CodeSpecUnreadable, "the container's configuration cannot be read from stdin: %w", err)
	}
	if len(text) > MaxConfigBytes {
		return nil, quota.NewError(quota.CodeSpecTooLarge, "the container's configuration is larger than %d MiB", MaxConfigBytes>>20)
	}
	root, err := parseDocument(text)
	if err != nil {
		return nil, quota.NewError(quota.CodeSpecInvalid, "the container's configuration %w", err)
	}
	id, bundle, err := podmanID(root)
	if err == nil {
		var edited []byte
		var notices []string
		edited, notices, err = p.Wrapper.Edit(ctx, api.ContainerKey{Engine: p.Args.Engine, Scope: p.Args.Scope, ID: id}, bundle, text)
		for _, n := range notices {
			fmt.Fprintln(p.Stderr, oneLine(Sentence(fmt.Errorf("%s", n))))
		}
		if err == nil {
			return edited, nil
		}
	}
	if mode := p.Wrapper.mode(err); mode != quota.ModeEnforce {
		fmt.Fprintln(p.Stderr, oneLine(Sentence(err)+" (started as it is: mode "+string(mode)+")"))
		return text, nil
	}
	fmt.Fprintln(p.Stderr, oneLine(Sentence(err)))
	return p.refuse(root, oneLine(Sentence(err)))
}

// refuse makes a configuration that does not start and says why.
func (p Precreate) refuse(root *object, sentence string) ([]byte, error) {
	hook := p.Wrapper.hookPath()
	if err := checkHook(hook); err != nil {
		return nil, err
	}
	sentence = sentence[:min(len(sentence), maxSentenceBytes)]
	args := []string{path.Base(hook), StageRefuse, sentence}
	if err := renderHooks(root, []plan.Hook{{Stage: "createRuntime", Path: hook, Args: args, TimeoutSeconds: 10}}); err != nil {
		return nil, err
	}
	return root.bytes(), nil
}

// libpodCgroup is how Podman names a container's cgroup: .../libpod-ID, or SLICE:libpod:ID under systemd.
// Compiled where it is needed: the wrapper and other hooks are started for every container without it.
var libpodCgroup = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?:^|/)libpod-([0-9a-f]{64})(?:/container)?$|:libpod:([0-9a-f]{64})$`)
})

// podmanID finds the container's id, which Podman does not tell its hooks as such: its runtime will
// use it, and so its hooks at create. The folder that Podman keeps a file for the container in is named by it,
// too, where the container gets no cgroup of its own.
func podmanID(root *object) (id, bundle string, err error) {
	linux, err := root.child("linux")
	if err != nil {
		return "", "", invalid(err)
	}
	mounts, err := root.list("mounts")
	if err != nil {
		return "", "", invalid(err)
	}
	var cgroup string
	if raw := linux.get("cgroupsPath"); raw != nil {
		if err := json.Unmarshal(raw, &cgroup); err != nil {
			return "", "", invalid(fmt.Errorf("linux.cgroupsPath: %w", err))
		}
	}
	for _, raw := range mounts {
		m, err := parseMount(raw)
		if err != nil {
			return "", "", invalid(err)
		}
		dir := filepath.Dir(m.Source)
		if filepath.Base(dir) == "userdata" && slices.Contains([]string{"/run/.containerenv", "/etc/hosts", "/etc/resolv.conf", "/etc/hostname"}, path.Clean("/"+m.Destination)) {
			bundle = dir
			if name := filepath.Base(filepath.Dir(dir)); podmanName().MatchString(name) {
				id = name
			}
		}
	}
	if found := libpodCgroup().FindStringSubmatch(cgroup); found != nil {
		id = found[1] + found[2]
	}
	if id == "" {
		return "", "", quota.NewError(quota.CodeSpecInvalid, "the configuration on stdin does not say which container of Podman's it is").
			WithHint("start the container with --runtime gpufence")
	}
	return id, bundle, nil
}

var podmanName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f]{64}$`) })
