// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// cannot skips loudly where this machine lacks something, and fails where it was told that it
// must not.
func cannot(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("cannot run here, and GPUFENCE_MUST=1: %s", why)
	}
	fmt.Fprintf(os.Stderr, "SKIPPED %s: %s\n", t.Name(), why)
	t.Skip(why)
}

func built(t *testing.T, name string) string {
	t.Helper()
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dist = filepath.Join("..", "..", "dist")
	}
	path, err := filepath.Abs(filepath.Join(dist, "bin", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run make build first", err)
	}
	return path
}

// node answers as gpufenced would, and looks at the container that it is told of.
type node struct {
	server.Service
	files  []api.SharedFile
	refuse error

	mu     sync.Mutex
	heard  []string
	cgroup string
}

func (n *node) hear(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.heard = append(n.heard, what)
}

const uuid = "GPU-11111111-2222-3333-4444-555555555555"

func (n *node) Prepare(_ context.Context, r api.PrepareRequest) (api.PrepareResponse, error) {
	n.hear("prepare " + r.Key.ID)
	return api.PrepareResponse{
		Grant:      quota.Grant{GPUs: []quota.GPU{{UUID: uuid, TotalBytes: 16 << 30, AllocatableBytes: 15 << 30}}, Mode: quota.ModeEnforce, Require: quota.LevelReactive},
		CDIDevices: []string{"gpufence.dev/simgpu=0"},
		Files:      n.files,
	}, nil
}

func (n *node) Register(_ context.Context, r api.RegisterRequest) (api.RegisterResponse, error) {
	n.hear("register " + r.Key.ID)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", r.PID))
	n.mu.Lock()
	n.cgroup = string(text)
	n.mu.Unlock()
	return api.RegisterResponse{Level: quota.LevelReactive}, errors.Join(err, n.refuse)
}

func (n *node) Unregister(_ context.Context, r api.UnregisterRequest) error {
	n.hear("unregister " + r.Key.ID)
	return nil
}

// TestRunc starts a container through the built wrapper, the real runc and the built hook.
func TestRunc(t *testing.T) {
	runc, err := exec.LookPath("runc")
	if err != nil {
		cannot(t, "runc is not installed")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		cannot(t, "busybox is not installed")
	}
	if os.Geteuid() != 0 {
		cannot(t, "not root")
	}
	wrapper, hook := built(t, "gpufence-runtime"), built(t, "gpufence-hook")

	refused := quota.NewError(quota.CodeLevelNotReached, "require is hard, and this node reaches reactive")
	for name, refuse := range map[string]error{"fenced": nil, "refused": refused} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			id := fmt.Sprintf("gpufence-test-%d-%s", os.Getpid(), name)
			bundle := makeBundle(t, dir, busybox, "/"+id)
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
					t.Fatal(err)
				}
				return path
			}
			n := &node{refuse: refuse, files: []api.SharedFile{
				{Source: write("run/limits", "the limits\n"), Destination: "/dev/gpufence/limits"},
				{Source: write("run/ledger", "a ledger\n"), Destination: "/dev/gpufence/ledger", Writable: true},
				{Source: write("run/preload", "# ours\n"), Destination: "/etc/ld.so.preload"},
			}}
			serve(t, n, filepath.Join(dir, "sock"))
			write("cdi/simgpu.json", `{"cdiVersion":"0.6.0","kind":"gpufence.dev/simgpu","devices":[{"name":"0","containerEdits":{
				"deviceNodes":[{"path":"/dev/simgpu/gpu0","hostPath":"/dev/null","type":"c","major":1,"minor":3}],"env":["SIMGPU=yes"]}}]}`)
			config := write("config.toml", fmt.Sprintf("runtimes = [%q]\nsocket = %q\nrun-dir = %q\nhook-path = %q\ncdi-spec-dirs = [%q]\n",
				runc, filepath.Join(dir, "sock"), filepath.Join(dir, "run"), hook, filepath.Join(dir, "cdi")))

			call := func(ctx context.Context, args ...string) (string, string, error) {
				cmd := exec.CommandContext(ctx, wrapper, append([]string{
					"--root", filepath.Join(dir, "root"), "--log", filepath.Join(dir, "log.json"), "--log-format", "json", "--rootless", "false",
				}, args...)...)
				cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+config)
				var stdout, stderr bytes.Buffer
				cmd.Stdout, cmd.Stderr = &stdout, &stderr
				err := cmd.Run()
				return stdout.String(), stderr.String(), err
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			t.Cleanup(func() {
				// Whatever the test left; an error means that there is nothing.
				_, _, _ = call(context.Background(), "delete", "--force", id)
			})
			stdout, stderr, err := call(ctx, "run", "--bundle", bundle, id)

			n.mu.Lock()
			defer n.mu.Unlock()
			if !strings.Contains(n.cgroup, "/"+id) {
				t.Errorf("the first process was in the cgroup %q", n.cgroup)
			}
			if refuse != nil {
				if err == nil || stdout != "" || !strings.Contains(stderr, "E1406 require is hard") {
					t.Errorf("started: %v\n%s\n%s", err, stdout, stderr)
				}
				if log, err := os.ReadFile(filepath.Join(dir, "log.json")); err != nil || !strings.Contains(string(log), "gpufence: E1406 require is hard") {
					t.Errorf("log %s %v", log, err)
				}
				return
			}
			if err != nil {
				t.Fatalf("%v\n%s\n%s", err, stdout, stderr)
			}
			want := "limits: the limits\nlimits are read-only\nledger: a ledger\nledger was written\npreload: # ours\npreload is read-only\n" +
				"device is there\nNVIDIA_VISIBLE_DEVICES=void SIMGPU=yes\n"
			if diff := cmp.Diff(want, stdout); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff([]string{"prepare " + id, "register " + id, "unregister " + id}, n.heard); diff != "" {
				t.Error(diff)
			}
			if text, err := os.ReadFile(filepath.Join(dir, "run/ledger")); err != nil || string(text) != "a ledger\nx\n" {
				t.Errorf("ledger %q %v", text, err)
			}
		})
	}
}

func serve(t *testing.T, svc server.Service, socket string) {
	t.Helper()
	l, err := server.Listen(socket, -1)
	if err != nil {
		t.Fatal(err)
	}
	s := server.New(svc, server.Options{Logf: t.Logf})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Shutdown(context.Background()), <-done); err != nil {
			t.Error(err)
		}
	})
}

// makeBundle writes a bundle whose program looks at what it was given. It lowers no OOM score
// and raises no limit, which not every machine allows.
func makeBundle(t *testing.T, dir, busybox, cgroup string) string {
	t.Helper()
	bundle := filepath.Join(dir, "bundle")
	bin := filepath.Join(bundle, "rootfs", "bin")
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.MkdirAll(bin, 0o755), os.WriteFile(filepath.Join(bin, "busybox"), program, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"proc", "dev", "etc"} {
		if err := os.Mkdir(filepath.Join(bundle, "rootfs", d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script := `
b=/bin/busybox
echo "limits: $($b cat /dev/gpufence/limits)"
(echo x >/dev/gpufence/limits) 2>/dev/null || echo "limits are read-only"
echo "ledger: $($b cat /dev/gpufence/ledger)"
echo x >>/dev/gpufence/ledger && echo "ledger was written"
echo "preload: $($b cat /etc/ld.so.preload)"
(echo x >/etc/ld.so.preload) 2>/dev/null || echo "preload is read-only"
[ -c /dev/simgpu/gpu0 ] && echo x >/dev/simgpu/gpu0 && echo "device is there"
echo "NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES SIMGPU=$SIMGPU"
`
	spec := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"user": map[string]any{"uid": 0, "gid": 0}, "cwd": "/",
			"args":         []string{"/bin/busybox", "sh", "-c", script},
			"env":          []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=" + uuid},
			"capabilities": map[string]any{"bounding": []string{"CAP_CHOWN"}},
		},
		"root": map[string]any{"path": "rootfs", "readonly": true},
		"mounts": []map[string]any{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755", "size=64k"}},
		},
		"linux": map[string]any{
			"cgroupsPath": cgroup,
			"resources":   map[string]any{"devices": []map[string]any{{"allow": false, "access": "rwm"}}},
			"namespaces":  []map[string]string{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}},
		},
		"annotations": map[string]string{"gpufence.dev/memory.max": "4Gi"},
	}
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	return bundle
}
