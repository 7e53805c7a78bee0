// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// What engines really call, as their sources and traces show it.
func TestParseArgsOfEngines(t *testing.T) {
	const k8s = "/run/containerd/runc/k8s.io"
	const task = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/abc"
	const podman = "/var/lib/containers/storage/overlay-containers/abc/userdata"
	tests := []struct {
		name string
		args string
		want Command
	}{
		{"containerd introspection", "features", Command{Name: "features"}},
		{
			"containerd create",
			"--root " + k8s + " --log " + task + "/log.json --log-format json --systemd-cgroup create --bundle " + task + " --pid-file " + task + "/init.pid abc",
			Command{Name: "create", ID: "abc", Bundle: task, Root: k8s, Log: task + "/log.json", LogFormat: "json"},
		},
		{
			"containerd create with a terminal and descriptors",
			"--root " + k8s + " --log l --log-format json create --bundle " + task + " --pid-file p --console-socket /tmp/pty.sock --preserve-fds 2 --no-new-keyring abc",
			Command{Name: "create", ID: "abc", Bundle: task, Root: k8s, Log: "l", LogFormat: "json"},
		},
		{
			"containerd restore",
			"--root " + k8s + " --log l --log-format json restore --image-path /img --work-path /w --manage-cgroups-mode soft --tcp-established --empty-ns network --bundle " + task + " --detach --pid-file p abc",
			Command{Name: "restore", ID: "abc", Bundle: task, Root: k8s, Log: "l", LogFormat: "json"},
		},
		{"containerd start", "--root " + k8s + " --log l --log-format json start abc", Command{Name: "start", Root: k8s, Log: "l", LogFormat: "json"}},
		{"containerd state", "--root " + k8s + " state abc", Command{Name: "state", Root: k8s}},
		{"containerd kill", "--root " + k8s + " kill --all abc 9", Command{Name: "kill", Root: k8s}},
		{"containerd delete", "--root " + k8s + " delete --force abc", Command{Name: "delete", Root: k8s}},
		{
			"containerd exec, of a program named create",
			"--root " + k8s + " --log l --log-format json exec --process /tmp/p --detach --pid-file /tmp/pid abc create",
			Command{Name: "exec", Root: k8s, Log: "l", LogFormat: "json"},
		},
		{"containerd update", "--root " + k8s + " update --resources - abc", Command{Name: "update", Root: k8s}},
		{"containerd ps", "--root " + k8s + " ps --format json abc", Command{Name: "ps", Root: k8s}},
		{"containerd events", "--root " + k8s + " events --stats abc", Command{Name: "events", Root: k8s}},
		{
			"docker create",
			"--root /var/run/docker/runtime-runc/moby --log /x/log.json --log-format json create --bundle /x --pid-file /x/init.pid abc",
			Command{Name: "create", ID: "abc", Bundle: "/x", Root: "/var/run/docker/runtime-runc/moby", Log: "/x/log.json", LogFormat: "json"},
		},
		{"docker version", "--version", Command{Help: true}},
		{
			"podman through conmon, runc",
			"--log-format=json --log " + podman + "/oci-log create --bundle " + podman + " --pid-file /p abc",
			Command{Name: "create", ID: "abc", Bundle: podman, Log: podman + "/oci-log", LogFormat: "json"},
		},
		{
			"podman through conmon, crun",
			"--cgroup-manager systemd --log-format=json --log=/l --root=/run/crun create --bundle " + podman + " --pid-file /p abc",
			Command{Name: "create", ID: "abc", Bundle: podman, Root: "/run/crun", Log: "/l", LogFormat: "json"},
		},
		{
			"buildah run",
			"--root /r run --bundle /b --no-pivot abc",
			Command{Name: "run", ID: "abc", Bundle: "/b", Root: "/r"},
		},
		{
			"cri-o through conmon",
			"--root=/run/runc --systemd-cgroup create --bundle /c/userdata --pid-file /c/userdata/pidfile abc",
			Command{Name: "create", ID: "abc", Bundle: "/c/userdata", Root: "/run/runc"},
		},
		{"crun with its own configuration file", "run -f /tmp/c.json -b /b abc", Command{Name: "run", ID: "abc", Bundle: "/b", Config: "/tmp/c.json"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := ParseArgs(strings.Fields(test.args))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseArgsForms(t *testing.T) {
	create := func(c Command) Command {
		c.Name = "create"
		if c.ID == "" {
			c.ID = "c1"
		}
		return c
	}
	tests := []struct {
		args []string
		want Command
	}{
		{[]string{"create", "-b", "/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "-b=/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "--bundle", "/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "--bundle=/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "-bundle", "/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "-bundle=/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "--b", "/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "c1"}, create(Command{})},
		{[]string{"create", "--bundle", "/a", "-b", "/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "-b=/a", "--bundle=/b", "c1"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "c1", "--bundle", "/b"}, create(Command{Bundle: "/b"})},
		{[]string{"create", "--bundle=/b=c", "c1"}, create(Command{Bundle: "/b=c"})},
		{[]string{"create", "--bundle=", "c1"}, create(Command{})},
		{[]string{"create", "--bundle", "create", "c1"}, create(Command{Bundle: "create"})},
		{[]string{"create", "--pid-file", "run", "create"}, create(Command{ID: "create"})},
		{[]string{"create", "--", "-c1"}, create(Command{ID: "-c1"})},
		{[]string{"--", "create", "c1"}, create(Command{})},
		{[]string{"-log", "/l", "-root=/r", "--debug", "create", "c1"}, create(Command{Log: "/l", Root: "/r"})},
		{[]string{"--log", "a", "--log=b", "create", "c1"}, create(Command{Log: "b"})},
		{[]string{"--root", "create", "create", "c1"}, create(Command{Root: "create"})},
		{[]string{"--debug=true", "create", "c1"}, create(Command{})},
		{[]string{"--rootless", "false", "--criu", "create", "create", "c1"}, create(Command{})},
		// Flags of runtimes that do not exist yet.
		{[]string{"--new-switch", "create", "c1"}, create(Command{})},
		{[]string{"--new-value", "x", "create", "c1"}, create(Command{})},
		{[]string{"create", "--new-switch", "c1"}, create(Command{})},
		{[]string{"create", "--new-value", "x", "c1"}, create(Command{})},
		{[]string{"create", "c1", "--new-value", "x"}, create(Command{})},
		{[]string{"create", "--new-value=x", "c1"}, create(Command{})},
		// Nothing is created.
		{nil, Command{}},
		{[]string{"--help"}, Command{Help: true}},
		{[]string{"-v"}, Command{Help: true}},
		{[]string{"--version", "create", "c1"}, Command{Name: "create", Help: true}},
		{[]string{"create", "--help"}, Command{Name: "create", Help: true}},
		{[]string{"create", "-h", "x", "y"}, Command{Name: "create", Help: true}},
		{[]string{"--version=false", "create", "c1"}, create(Command{})},
		{[]string{"help", "create"}, Command{Name: "help"}},
		{[]string{"spec", "--bundle", "/b"}, Command{Name: "spec"}},
		{[]string{"delete", "create"}, Command{Name: "delete"}},
		{[]string{"--log"}, Command{}},
		{[]string{"-"}, Command{Name: "-"}},
	}
	for _, test := range tests {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			got, err := ParseArgs(test.args)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			if want := test.want.Name == "create" && !test.want.Help; got.Creates() != want {
				t.Errorf("Creates() = %v", got.Creates())
			}
		})
	}
}

func TestParseArgsWithoutID(t *testing.T) {
	for _, args := range []string{"create", "run --bundle /b", "create a b", "create --bundle", "restore --new x y z w"} {
		_, err := ParseArgs(strings.Fields(args))
		if !errors.Is(err, quota.CodeUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
	if _, err := ParseArgs([]string{"create", ""}); !errors.Is(err, quota.CodeUsage) {
		t.Errorf("empty id: %v", err)
	}
}

// TestParseArgsOfUnclearBundles: getopt takes them for the bundle, and we must not fence another one.
func TestParseArgsOfUnclearBundles(t *testing.T) {
	for _, args := range []string{
		"create --bun /b id", "create --bund=/b id", "create -b/b id", "run -f/c.json id", "run --conf c.json id", "create --co=c id", "restore -bundl /b id",
	} {
		if c, err := ParseArgs(strings.Fields(args)); !errors.Is(err, quota.CodeUsage) || !strings.Contains(err.Error(), "which configuration") {
			t.Errorf("%q: %+v %v", args, c, err)
		}
	}
	for _, args := range []string{"create --pidfd-socket /s --bundle /b id", "create --bundle /b --cons x id", "create --bundle /b -x id", "state -b/b id", "create --bundles=x --bundle /b id"} {
		if c, err := ParseArgs(strings.Fields(args)); err != nil || c.Creates() && (c.ID != "id" || c.Bundle != "/b") {
			t.Errorf("%q: %+v %v", args, c, err)
		}
	}
}

func TestCommandPaths(t *testing.T) {
	tests := []struct{ bundle, config, wantBundle, wantConfig string }{
		{"", "", "/cwd", "/cwd/config.json"},
		{"b", "", "/cwd/b", "/cwd/b/config.json"},
		{"../b/", "", "/b", "/b/config.json"},
		{"/x//y/", "", "/x/y", "/x/y/config.json"},
		{"/x", "c.json", "/x", "/cwd/c.json"},
		{"/x", "/y/c.json", "/x", "/y/c.json"},
	}
	for _, test := range tests {
		c := Command{Bundle: test.bundle, Config: test.config}
		if got := c.BundleDir("/cwd"); got != test.wantBundle {
			t.Errorf("BundleDir(%q) = %s", test.bundle, got)
		}
		if got := c.ConfigPath("/cwd"); got != test.wantConfig {
			t.Errorf("ConfigPath(%q, %q) = %s", test.bundle, test.config, got)
		}
	}
}

func FuzzParseArgs(f *testing.F) {
	for _, s := range []string{
		"create\x00--bundle\x00/b\x00id", "--root\x00r\x00run\x00-b=/b\x00id", "--x\x00state\x00id", "create\x00--\x00-x",
		"--log=l\x00--log-format\x00json\x00restore\x00id", "exec\x00id\x00create", "-\x00--\x00-=", "create\x00-b",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, joined string) {
		args := strings.Split(joined, "\x00")
		c, err := ParseArgs(args)
		if err != nil {
			if !errors.Is(err, quota.CodeUsage) {
				t.Fatalf("error without a code: %v", err)
			}
			return
		}
		if !c.Creates() {
			return
		}
		if c.ID == "" {
			t.Fatalf("%q creates a container without id", args)
		}
		if !filepath.IsAbs(c.BundleDir("/cwd")) || !filepath.IsAbs(c.ConfigPath("/cwd")) {
			t.Fatalf("%q: relative paths from %+v", args, c)
		}
		// The same without the command is never a creation of the same container.
		if again, err := ParseArgs(append([]string{"state"}, args...)); err != nil || again.Creates() {
			t.Fatalf("state with %q creates: %+v, %v", args, again, err)
		}
	})
}
