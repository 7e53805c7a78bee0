// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/enforcer/kube/cri"
)

// fakeNode answers as a node does.
type fakeNode struct {
	calls   []string
	started time.Time
	canary  kube.Canary
	dead    bool
	broken  string
	// What the engine has loaded, and why it does not answer.
	handlers map[string]cri.Handler
	mute     error
	asked    int
}

func (n *fakeNode) Ask(context.Context) (cri.Engine, error) {
	n.asked++
	return cri.Engine{Name: "containerd", Version: "v2", Handlers: n.handlers}, n.mute
}

func (n *fakeNode) Run(_ context.Context, argv ...string) ([]byte, error) {
	line := strings.Join(argv, " ")
	n.calls = append(n.calls, line)
	switch {
	case strings.Contains(line, " doctor "):
		return []byte(fmt.Sprintf(`{"level":"reactive","node":{"started":%q}}`, n.started.Format(time.RFC3339Nano))), errors.New("exit status 1")
	case strings.Contains(line, " canary "):
		if n.broken != "" {
			return []byte(n.broken), errors.New("exit status 127")
		}
		n.canary.Started = n.started
		text, err := json.Marshal(n.canary)
		return text, err
	case strings.Contains(line, "is-active") && n.dead:
		return nil, errors.New("exit status 3")
	}
	return nil, nil
}

func (n *fakeNode) count(part string) (c int) {
	for _, line := range n.calls {
		if strings.Contains(line, part) {
			c++
		}
	}
	return c
}

func newHost(t *testing.T, install bool) (*Host, *fakeNode, *time.Time) {
	t.Helper()
	image, root := t.TempDir(), t.TempDir()
	for name, text := range map[string]string{
		"bin/gpufence": "one", "lib/libgpufence.so": "so", "systemd/gpufenced.service": "ExecStart=/usr/bin/gpufenced\n",
	} {
		file := filepath.Join(image, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("gpufence", filepath.Join(image, "bin/gpufence-runtime.cri")), os.MkdirAll(filepath.Join(root, "run/gpufence"), 0o755)); err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1e9, 0).UTC()
	n := &fakeNode{started: now, canary: kube.Canary{Held: true, Level: "reactive", Time: now}, handlers: map[string]cri.Handler{"runc": {}, "gpufence": {}}}
	log := logrus.New()
	log.SetOutput(io.Discard)
	h, err := New(Options{Install: install, Image: image, Root: root, InstallDir: "/opt/gpufence", Runtime: "containerd", InstallArgs: []string{"--wrap=nvidia"},
		ResultFile: "/run/gpufence/canary.json", Every: 10 * time.Minute, Commander: n, Engine: n, Handler: "gpufence", Now: func() time.Time { return now }, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return h, n, &now
}

func TestInstall(t *testing.T) {
	h, n, _ := newHost(t, true)
	if err := h.step(t.Context()); err != nil {
		t.Fatal(err)
	}
	unit, err := os.ReadFile(filepath.Join(h.o.Root, "etc/systemd/system/gpufenced.service"))
	if err != nil || string(unit) != "ExecStart=/opt/gpufence/bin/gpufenced\n" {
		t.Errorf("%s, %v", unit, err)
	}
	if target, err := os.Readlink(filepath.Join(h.o.Root, "opt/gpufence/bin/gpufence-runtime.cri")); err != nil || target != "gpufence" {
		t.Errorf("%q, %v", target, err)
	}
	if !slices.Contains(n.calls, "/opt/gpufence/bin/gpufence install --runtime containerd --wrap=nvidia") || n.count("systemctl restart") != 1 {
		t.Errorf("%q", n.calls)
	}
	// Nothing has changed: nothing is restarted.
	n.calls = nil
	if err := h.step(t.Context()); err != nil || n.count("restart") != 0 || n.count("start gpufenced") != 0 {
		t.Errorf("%v, %q", err, n.calls)
	}
	n.calls, n.dead = nil, true
	if err := h.step(t.Context()); err != nil || n.count("systemctl start gpufenced.service") != 1 {
		t.Errorf("%v, %q", err, n.calls)
	}
	// A new program is a new file: who runs the old one keeps it.
	file := filepath.Join(h.o.Root, "opt/gpufence/bin/gpufence")
	before, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(h.o.Image, "bin/gpufence"), []byte("two"), 0o755); err != nil {
		t.Fatal(err)
	}
	n.calls = nil
	if err := h.step(t.Context()); err != nil || n.count("systemctl restart") != 1 {
		t.Errorf("%v, %q", err, n.calls)
	}
	after, err := os.Stat(file)
	if err != nil || os.SameFile(before, after) || after.Mode().Perm() != 0o755 {
		t.Errorf("%v, same file or wrong mode: %v", err, after.Mode())
	}
	if left, _ := filepath.Glob(filepath.Join(h.o.Root, "opt/gpufence/bin/.gpufence-*")); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

func handedOver(t *testing.T, h *Host) (c kube.Canary) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(h.o.Root, h.o.ResultFile))
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestEngine: a canary that is held says nothing about an engine that has not read its files.
func TestEngine(t *testing.T) {
	h, n, now := newHost(t, true)
	loaded := n.handlers
	for _, s := range []struct {
		name     string
		handlers map[string]cri.Handler
		mute     error
		later    time.Duration
		want     string // "": it starts containers through gpufence
		canaries int
	}{
		{"installed, not restarted", map[string]cri.Handler{"runc": {}}, nil, 0, "containerd has not loaded the handler gpufence, only runc", 1},
		{"still not", map[string]cri.Handler{"runc": {}}, nil, 5 * time.Second, "systemctl restart containerd", 0},
		{"restarted", loaded, nil, 5 * time.Second, "", 0},
		{"away for a moment", nil, errors.New("refused"), 20 * time.Second, "", 0},
		{"away", nil, errors.New("refused"), 20 * time.Second, "the engine does not say what it has loaded: refused", 0},
		{"back", loaded, nil, 0, "", 0},
		{"wrapped no more", map[string]cri.Handler{"gpufence": {Detailed: true, Program: "/usr/bin/runc"}}, nil, 0, "starts /usr/bin/runc and not gpufence-runtime", 0},
		{"away for a moment again", nil, errors.New("refused"), 5 * time.Second, "starts /usr/bin/runc and not gpufence-runtime", 0},
		{"an old engine", nil, nil, 0, "does not say which handlers it has loaded", 0},
	} {
		n.calls, n.handlers, n.mute, *now = nil, s.handlers, s.mute, now.Add(s.later)
		asked := n.asked
		err := h.step(t.Context())
		got := handedOver(t, h)
		if s.want == "" && (err != nil || got.Engine != "") || s.want != "" && (err == nil || !strings.Contains(err.Error(), s.want) || !strings.Contains(got.Engine, s.want)) {
			t.Errorf("%s: %v, handed over %q, want %q", s.name, err, got.Engine, s.want)
		}
		if c := n.count(" canary "); c != s.canaries || n.asked != asked+1 || !got.Held {
			t.Errorf("%s: %d canaries, want %d; asked %d times; held %v", s.name, c, s.canaries, n.asked-asked, got.Held)
		}
	}
	// One that never answered is not given time.
	h, n, _ = newHost(t, true)
	n.mute = errors.New("no socket")
	if err := h.step(t.Context()); err == nil || !strings.Contains(handedOver(t, h).Engine, "no socket") {
		t.Errorf("%v", err)
	}
	if _, err := New(Options{InstallDir: "/opt/gpufence", Handler: "gpufence"}); err == nil || !strings.Contains(err.Error(), "--runtime and --handler") {
		t.Error(err)
	}
}

func TestCanary(t *testing.T) {
	h, n, now := newHost(t, true)
	result := func() kube.Canary { t.Helper(); return handedOver(t, h) }
	step := func(wantErr string, wantCanaries int) {
		t.Helper()
		n.calls = nil
		err := h.step(t.Context())
		if wantErr == "" && err != nil || wantErr != "" && (err == nil || !strings.Contains(err.Error(), wantErr)) {
			t.Errorf("%v, want %q", err, wantErr)
		}
		if got := n.count(" canary "); got != wantCanaries {
			t.Errorf("%d canaries, want %d: %q", got, wantCanaries, n.calls)
		}
	}
	step("", 1)
	if !result().Held {
		t.Error("not handed over")
	}
	step("", 0) // it holds
	n.started = n.started.Add(time.Second)
	step("", 1) // another gpufenced
	*now = now.Add(11 * time.Minute)
	n.canary.Time = *now
	n.canary.Held, n.canary.Undecided, n.canary.Why = false, true, "no room"
	step("", 1)
	if got := result(); !got.Held || got.Why != "" {
		t.Errorf("a GPU without room is a verdict: %+v", got)
	}
	n.started = n.started.Add(time.Second)
	step("no room", 1) // nothing is known of this gpufenced yet
	n.canary = kube.Canary{Why: "the limit is not inside", Time: *now}
	step("the limit is not inside", 1)
	if result().Held {
		t.Error("held all the same")
	}
	step("the limit is not inside", 1) // tried again each time
	n.broken = "not ours"
	step("could not be tried", 1)
	n.broken, n.canary = "", kube.Canary{Held: true, Time: *now}
	step("", 1)
}

func TestNoProgram(t *testing.T) {
	h, _, _ := newHost(t, false)
	if err := h.step(t.Context()); err == nil || !strings.Contains(err.Error(), "install the package") {
		t.Error(err)
	}
}

func TestWrongDir(t *testing.T) {
	for _, dir := range []string{"", "opt", "/opt/../etc", "/opt/"} {
		if _, err := New(Options{InstallDir: dir}); err == nil {
			t.Errorf("%q is taken", dir)
		}
	}
}

// TestEnter runs a command in a mount namespace, and stays outside itself.
func TestEnter(t *testing.T) {
	before, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	e := Enter{Namespace: "/proc/self/ns/mnt"}
	out, err := e.Run(t.Context(), "sh", "-c", "pwd; echo out; echo err >&2")
	if errors.Is(err, fs.ErrPermission) || err != nil && strings.Contains(err.Error(), "not permitted") {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal(err)
		}
		t.Skipf("SKIP: %v", err)
	}
	if err != nil || string(out) != "/\nout\n" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err := e.Run(t.Context(), "sh", "-c", "echo because >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "because") {
		t.Error(err)
	}
	if _, err := e.Run(t.Context(), "/nonexistent"); err == nil {
		t.Error("it ran")
	}
	if after, err := os.Readlink("/proc/thread-self/ns/mnt"); err != nil || after != before {
		t.Errorf("%q became %q, %v", before, after, err)
	}
}
