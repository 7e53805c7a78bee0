// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/mounts"
	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/ociimage"
	"github.com/gpufence/gpufence/tests/process"
)

const (
	mib = uint64(1) << 20
	// contextBytes is what a context takes on the simulated T4.
	contextBytes = 104 * mib
	// patience bounds what is waited for; only what hangs takes so long.
	patience = 90 * time.Second

	clientImage = "localhost/gpufence-clients:engines"
	pauseImage  = "localhost/gpufence-pause:engines"
	handler     = "gpufence"
)

// skip says why something cannot run here; where it must, that is a failure.
func skip(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("GPUFENCE_MUST=1, but "+format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// site is a node with folders for engines.
type site struct {
	*node.Node
	dist   string
	disk   string            // for images and layers; the node's own folder is in memory
	bins   map[string]string // of tests/programs, by set/program
	images []string          // tars
	uuid   string
}

// newSite starts a simulated GPU and a gpufenced, and makes the images.
func newSite(ctx context.Context, t *testing.T, sets ...string) *site {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "container engines need root")
	}
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dist, _ = filepath.Abs("../../dist")
	}
	if _, err := os.Stat(filepath.Join(dist, "clients/client")); err != nil {
		skip(t, "%s is not built: run make build", dist)
	}
	s := &site{dist: dist, bins: map[string]string{}}
	if len(sets) > 0 {
		cmd := exec.CommandContext(ctx, "../programs/build", sets...)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("build the programs of the engines: %v", err)
		}
		for i, dir := range strings.Fields(string(out)) {
			entries, err := os.ReadDir(dir)
			must(t, err)
			for _, e := range entries {
				s.bins[sets[i]+"/"+e.Name()] = filepath.Join(dir, e.Name())
			}
		}
	}
	before := engineCgroups()
	t.Cleanup(func() {
		for _, dir := range engineCgroups() {
			if slices.Contains(before, dir) {
				continue
			}
			for _, d := range slices.Backward(foldersBelow(dir)) {
				_ = os.Remove(d) // only where it is empty: another engine may use it meanwhile
			}
		}
	})
	var err error
	s.disk, err = os.MkdirTemp("", "gpufence-engines-")
	must(t, err)
	t.Cleanup(func() {
		left, err := mounts.Detach(s.disk)
		if len(left) > 0 || err != nil {
			t.Errorf("left mounted: %q %v", left, err)
		}
		if err := os.RemoveAll(s.disk); err != nil {
			t.Error(err)
		}
	})
	// A start without gpufenced fails sooner than by default.
	s.Node, err = node.New(ctx, node.Options{Dist: dist, Sim: []string{"--gpus", "1", "--nvml-lag", "50ms"}, Config: []string{`wait-socket = "2s"`}})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of gpufenced's log:\n%s", s.DaemonLog())
		}
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	must(t, os.MkdirAll(s.Path("cdi"), 0o755))
	_, err = s.run(ctx, filepath.Join(dist, "bin/simgpu"), "--dir", s.Path("sim"), "cdi", "--lib-dir", filepath.Join(dist, "simgpu"), "--out", s.Path("cdi/simgpu.json"))
	must(t, err)
	gpus, err := s.Client.GPUs(ctx)
	must(t, err)
	s.uuid = gpus[0].UUID
	if len(sets) == 0 {
		return s
	}
	pause, err := ociimage.Pause(ctx, pauseImage, s.disk)
	must(t, err)
	clients, err := ociimage.Clients(ctx, clientImage, dist)
	must(t, err)
	for name, image := range map[string]ociimage.Image{"pause.tar": pause, "clients.tar": clients} {
		must(t, ociimage.Write(filepath.Join(s.disk, name), image))
		s.images = append(s.images, filepath.Join(s.disk, name))
	}
	return s
}

// engineCgroups are the cgroups below which engines put those of their containers, and leave behind.
func engineCgroups() []string {
	var out []string
	for _, name := range []string{"crio", "docker", "libpod_parent", "default", "k8s.io"} {
		for _, pattern := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
			found, err := filepath.Glob(pattern + name)
			if err == nil { // the patterns are right
				out = append(out, found...)
			}
		}
	}
	return out
}

// foldersBelow are a folder and all in it, outer ones first.
func foldersBelow(dir string) []string {
	var out []string
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			out = append(out, path)
		}
		return nil // what is gone meanwhile need not be listed
	})
	return out
}

// gpufence runs a command of the build.
func (s *site) gpufence(ctx context.Context, args ...string) (string, error) {
	return s.run(ctx, filepath.Join(s.dist, "bin/gpufence"), append([]string{"--socket", s.Socket}, args...)...)
}

// run runs a command to its end and gives its stdout; what it says on stderr is in the error.
func (s *site) run(ctx context.Context, program string, args ...string) (string, error) {
	return runEnv(ctx, nil, program, args...)
}

func runEnv(ctx context.Context, env []string, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	cmd.Env = append(os.Environ(), env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// start starts a program beside the test, which writes into log.
func start(ctx context.Context, name, log string, env []string, program string, args ...string) (*process.Process, error) {
	return process.Start(ctx, process.Options{Name: name, Log: log, Env: env, TimeoutStart: patience, TimeoutStop: 30 * time.Second}, program, args...)
}

// until waits for something that must come.
func until(ctx context.Context, what string, f func() (bool, error)) error {
	deadline := time.Now().Add(patience)
	for {
		ok, err := f()
		if ok || err != nil {
			return err
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("never: %s", what)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// killLeft kills what still runs from a folder, such as a shim whose engine is gone, and says so.
func killLeft(t *testing.T, dir string) {
	t.Helper()
	left, err := process.KillNaming(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left running: %q %v", left, err)
	}
}

// replies reads the test client's lines out of what it said.
func replies(text string) []node.Reply {
	var out []node.Reply
	for line := range strings.Lines(text) {
		i := strings.Index(line, "{")
		var r node.Reply
		if i >= 0 && json.Unmarshal([]byte(line[i:]), &r) == nil && r.Op != "" {
			out = append(out, r)
		}
	}
	return out
}

// view is what gpufenced says of the containers that run; others tests' cannot be among them.
func (s *site) running(ctx context.Context) ([]api.Container, error) {
	all, err := s.Client.Containers(ctx)
	return slices.DeleteFunc(all, func(c api.Container) bool { return c.State != "running" }), err
}
