// SPDX-License-Identifier: Apache-2.0

// Package host is the part of gpufence-agent that works on the node itself: it puts the programs of
// the image and the engine's configuration in place, keeps gpufenced running, starts canaries, asks
// the engine what it has loaded, and hands what it found to the part that speaks with the API server
// through a file. It has no token.
//
// It promises: what is in place already is not written again and nothing is restarted for it; a
// program that runs is replaced by rename, never in place; a canary is started when gpufenced was
// started anew, when the last one was not held, and every [Options.Every].
package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/enforcer/kube/cri"
)

// enginePatience is how long an engine may be away, as while it is started again, until what it said
// last does not count any more.
const enginePatience = 30 * time.Second

// Engine says which handlers the container engine has loaded; [cri.Node] is one.
type Engine interface {
	Ask(ctx context.Context) (cri.Engine, error)
}

// Commander runs a command on the node, as root in its mount namespace.
type Commander interface {
	Run(ctx context.Context, argv ...string) (stdout []byte, err error)
}

// Options of [New].
type Options struct {
	Install     bool
	Image       string   // where the image has what is to be put on the node: bin, lib, systemd
	Root        string   // the node's root as we see it: /proc/1/root
	InstallDir  string   // on the node
	Runtime     string   // containerd, crio
	InstallArgs []string // more for `gpufence install`
	Engine      Engine   // who is asked what it has loaded
	Handler     string   // that it must have
	Program     string   // gpufence on the node; "" looks in InstallDir and in /usr/bin
	Socket      string   // gpufenced's on the node; "" is its default
	ResultFile  string   // on the node
	Every       time.Duration
	Tick        time.Duration // how often the node is looked at
	Commander   Commander
	Now         func() time.Time
	Log         *logrus.Logger
}

// Host is one.
type Host struct {
	o    Options
	last kube.Canary
	// heard is when the engine last answered.
	heard time.Time
	said  string
}

// New makes one.
func New(o Options) (*Host, error) {
	if !filepath.IsAbs(o.InstallDir) || filepath.Clean(o.InstallDir) != o.InstallDir {
		return nil, fmt.Errorf("install on the node: --install-dir %q is not a plain absolute path", o.InstallDir)
	}
	if o.Engine == nil || o.Handler == "" {
		return nil, errors.New("look at the node: it is not known which engine to ask for which handler: set --runtime and --handler")
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = logrus.New()
	}
	if o.Tick <= 0 {
		o.Tick = 5 * time.Second
	}
	if o.Every <= 0 {
		o.Every = 10 * time.Minute
	}
	return &Host{o: o}, nil
}

// Run works until the context ends. What fails is said and tried again.
func (h *Host) Run(ctx context.Context) {
	for {
		err := h.step(ctx)
		switch {
		case err == nil:
			h.said = ""
		case ctx.Err() == nil && err.Error() != h.said:
			h.said = err.Error() // once, not each time
			h.o.Log.WithError(err).Error("the node is not as it should be")
		}
		t := time.NewTimer(h.o.Tick)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

func (h *Host) step(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if h.o.Install {
		if err := h.install(ctx); err != nil {
			return err
		}
	}
	return h.canary(ctx)
}

// install makes the node as the image is.
func (h *Host) install(ctx context.Context) error {
	changed, err := h.copyAll()
	if err != nil {
		return err
	}
	if len(changed) > 0 {
		h.o.Log.WithField("files", strings.Join(changed, " ")).Info("put on the node")
		for _, argv := range [][]string{
			{"systemctl", "daemon-reload"}, {"systemctl", "enable", "gpufenced.socket", "gpufenced.service"},
			// Containers that run are not disturbed by it.
			{"systemctl", "restart", "gpufenced.socket", "gpufenced.service"},
		} {
			if _, err := h.o.Commander.Run(ctx, argv...); err != nil {
				return err
			}
		}
	} else if _, err := h.o.Commander.Run(ctx, "systemctl", "is-active", "--quiet", "gpufenced.service"); err != nil {
		if _, err := h.o.Commander.Run(ctx, "systemctl", "start", "gpufenced.service"); err != nil {
			return err
		}
	}
	// It changes nothing where all is as it should be.
	argv := append([]string{filepath.Join(h.o.InstallDir, "bin/gpufence"), "install", "--runtime", h.o.Runtime}, h.o.InstallArgs...)
	_, err = h.o.Commander.Run(ctx, argv...)
	return err
}

// copyAll copies what differs, and says what that was. Folders of the image below Image: bin and lib
// go to InstallDir, systemd to the node's units, where the install folder stands for /usr.
func (h *Host) copyAll() ([]string, error) {
	var changed []string
	for _, part := range []struct{ from, to string }{
		{"lib", filepath.Join(h.o.InstallDir, "lib")}, {"bin", filepath.Join(h.o.InstallDir, "bin")}, {"systemd", "/etc/systemd/system"},
	} {
		from := filepath.Join(h.o.Image, part.from)
		err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(from, path)
			if err != nil {
				return err
			}
			to := filepath.Join(h.o.Root, part.to, rel)
			if d.IsDir() {
				return os.MkdirAll(to, 0o755)
			}
			did, err := h.copy(path, to, d)
			if did {
				changed = append(changed, filepath.Join(part.to, rel))
			}
			return err
		})
		if err != nil {
			return changed, fmt.Errorf("put %s on the node: %w", part.from, err)
		}
	}
	return changed, nil
}

func (h *Host) copy(from, to string, d fs.DirEntry) (bool, error) {
	if d.Type()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(from)
		if err != nil {
			return false, err
		}
		if old, err := os.Readlink(to); err == nil && old == target {
			return false, nil
		}
		next := to + ".gpufence-new"
		if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		if err := os.Symlink(target, next); err != nil {
			return false, err
		}
		return true, os.Rename(next, to)
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return false, err
	}
	info, err := d.Info()
	if err != nil {
		return false, err
	}
	if strings.HasSuffix(to, ".service") {
		text = bytes.ReplaceAll(text, []byte("/usr/bin/"), []byte(filepath.Join(h.o.InstallDir, "bin")+"/"))
	}
	if old, err := os.ReadFile(to); err == nil && bytes.Equal(old, text) {
		return false, nil
	}
	return true, write(to, text, info.Mode().Perm())
}

// write replaces a file by rename: who runs the old one keeps it.
func write(to string, text []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(to), ".gpufence-")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), to)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // it may be there half
	}
	return err
}

// program is gpufence on the node.
func (h *Host) program() (string, error) {
	if h.o.Program != "" {
		return h.o.Program, nil
	}
	tried := []string{filepath.Join(h.o.InstallDir, "bin/gpufence"), "/usr/bin/gpufence"}
	for _, p := range tried {
		if _, err := os.Stat(filepath.Join(h.o.Root, p)); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("find gpufence on the node: it is neither %s: install the package, or let the chart do it (host.install)", strings.Join(tried, " nor "))
}

// started is when gpufenced was, as it says itself; zero if it does not answer.
func (h *Host) started(ctx context.Context, program string) (time.Time, error) {
	out, err := h.o.Commander.Run(ctx, h.command(program, "doctor", "-o", "json")...)
	// doctor fails where something is wrong, and says the same.
	var got struct {
		Node *struct {
			Started time.Time `json:"started"`
		} `json:"node"`
	}
	if jsonErr := json.Unmarshal(out, &got); jsonErr != nil {
		return time.Time{}, errors.Join(fmt.Errorf("ask gpufence on the node: %w", jsonErr), err)
	}
	if got.Node == nil {
		return time.Time{}, nil
	}
	return got.Node.Started, nil
}

func (h *Host) command(program string, args ...string) []string {
	argv := append([]string{program}, args...)
	if h.o.Socket != "" {
		argv = append(argv, "--socket", h.o.Socket)
	}
	return argv
}

// canary starts one if it is time, asks the engine, and hands over what is new of the two.
func (h *Host) canary(ctx context.Context) error {
	program, err := h.program()
	if err != nil {
		return err
	}
	started, err := h.started(ctx, program)
	if err != nil {
		return err
	}
	next := h.last
	if !h.last.Held || !h.last.Started.Equal(started) || h.o.Now().Sub(h.last.Time) >= h.o.Every {
		next = h.try(ctx, program, started)
	}
	// The canary does not go through the engine: that it would is asked each time.
	next.Engine = h.engine(ctx)
	if err := h.handOver(next); err != nil {
		return err
	}
	if !next.Held {
		err = fmt.Errorf("the canary was not held: %s", next.Why)
	}
	if next.Engine != "" {
		err = errors.Join(err, errors.New(next.Engine))
	}
	return err
}

// try starts a canary.
func (h *Host) try(ctx context.Context, program string, started time.Time) kube.Canary {
	out, runErr := h.o.Commander.Run(ctx, h.command(program, "canary", "-o", "json")...)
	var next kube.Canary
	if err := json.Unmarshal(out, &next); err != nil {
		return kube.Canary{Time: h.o.Now(), Started: started, Why: fmt.Sprintf("it could not be tried: %v", errors.Join(runErr, err))}
	}
	if next.Undecided && h.last.Held && h.last.Started.Equal(next.Started) {
		// There was no room: what was known of this gpufenced holds.
		next.Held, next.Level, next.Steps, next.Why = true, h.last.Level, h.last.Steps, ""
	}
	return next
}

// engine is why the engine starts nothing through gpufence, "" if it does.
func (h *Host) engine(ctx context.Context) string {
	got, err := h.o.Engine.Ask(ctx)
	switch now := h.o.Now(); {
	case err == nil:
		h.heard = now
		err = got.Through(h.o.Handler)
	case !h.heard.IsZero() && now.Sub(h.heard) < enginePatience:
		return h.last.Engine
	default:
		err = fmt.Errorf("the engine does not say what it has loaded: %w", err)
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

// handOver writes what was found, if it is new.
func (h *Host) handOver(next kube.Canary) error {
	if h.last.Time.Equal(next.Time) && h.last.Held && next.Held && h.last.Engine == next.Engine && h.last.Started.Equal(next.Started) {
		return nil
	}
	text, err := json.MarshalIndent(next, "", " ")
	if err != nil {
		return fmt.Errorf("hand the canary's result over: %w", err)
	}
	if err := write(filepath.Join(h.o.Root, h.o.ResultFile), append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("hand the canary's result over: %w", err)
	}
	h.last = next
	return nil
}
