// SPDX-License-Identifier: Apache-2.0

// Package images starts containers from root file systems of every kind under the real runc and
// gpufence-runtime, on a simulated GPU: the oldest and the newest glibc that the archive offers,
// musl, static programs, 32-bit ones, a read-only root, a user namespace. Each must start, print
// nothing of ours, end as it would, and `gpufence inspect` must say what the shim did.
//
// The root file systems are unpacked from packages by fetch.sh, and kept in gpufence/images of
// the user's cache folder, by suite.
package images

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

// suites of the archive, the oldest first; those that it no longer has are passed over.
var suites = []string{"bullseye", "bookworm", "trixie"}

// newest is the suite with the newest glibc.
const newest = "sid"

// greeting is what every container's shell does before its program.
const greeting = "echo hello; /bin/busybox ls /nothing; exec "

// complaint is what that prints on standard error.
const complaint = "ls: /nothing: No such file or directory\n"

type image struct {
	name     string
	root     string
	args     []string
	stderr   string
	readonly bool
	userns   bool
	client   bool   // its program is the test client
	exits    bool   // it ends with 7 once it reads a line
	shim     string // what inspect says of the shim's fence
}

func missing(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf(format, args...)
	}
	t.Skipf("SKIP: "+format, args...)
}

func distDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("GPUFENCE_DIST")
	if dir == "" {
		dir = filepath.Join("..", "..", "dist")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bin/gpufence-runtime", "bin/simgpu", "clients/bypass", "lib/libgpufence32.so"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Fatalf("run make build first: %v", err)
		}
	}
	return dir
}

// bench is what the images share.
type bench struct {
	node *node.Node
	dist string
	dir  string // for bundles
	old  string // the client and the simulated driver, built for the oldest glibc
	uuid string
}

// errUnavailable: the archive cannot be reached, or has no such suite.
var errUnavailable = errors.New("cannot be fetched from the archive")

// fetch unpacks packages of a suite, or finds them in the cache.
func fetch(ctx context.Context, suite, arch, name string, packages ...string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	args := append([]string{filepath.Join(cache, "gpufence", "images"), suite, arch, name}, packages...)
	cmd := exec.CommandContext(ctx, "./fetch.sh", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 3 {
		return "", fmt.Errorf("%v of %s %w: %s", packages, suite, errUnavailable, strings.TrimSpace(stderr.String()))
	}
	if err != nil {
		return "", fmt.Errorf("fetch %v of %s: %w: %s", packages, suite, err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
}

// oldest finds the first suite that is still there, unpacks its C library, and builds the client
// and the simulated driver against that.
func (b *bench) oldest(ctx context.Context) (root string, err error) {
	var suite string
	for _, suite = range suites {
		if root, err = fetch(ctx, suite, "amd64", "run", "libc6", "busybox"); !errors.Is(err, errUnavailable) {
			break
		}
	}
	if err != nil {
		return "", err
	}
	dev, err := fetch(ctx, suite, "amd64", "dev", "libc6", "libc6-dev", "linux-libc-dev")
	if err != nil {
		return "", err
	}
	lib := filepath.Join(dev, "usr/lib/x86_64-linux-gnu")
	cc := "CC=gcc --sysroot=" + dev + " -B" + lib + " -L" + lib + " -L" + filepath.Join(dev, "lib/x86_64-linux-gnu")
	b.old = filepath.Join(b.dir, "old")
	for _, args := range [][]string{{"../simgpu", "libs"}, {"../clients", b.old + "/clients/client"}} {
		out, err := exec.CommandContext(ctx, "make", "-s", "-C", args[0], args[1], "OUT="+b.old, cc).CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("build %s for %s: %w: %s", args[1], suite, err, out)
		}
	}
	return root, nil
}

// spec is the container's specification, of the usual kind.
func (b *bench) spec(im image, id string) specs.Spec {
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SYS_CHROOT"}
	s := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: im.args, Cwd: "/", NoNewPrivileges: true,
			Env:          []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "NVIDIA_VISIBLE_DEVICES=" + b.uuid},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Root:        &specs.Root{Path: "rootfs", Readonly: im.readonly},
		Annotations: map[string]string{"gpufence.dev/memory.max": "1Gi"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + filepath.Base(b.node.Dir) + "-" + id,
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace},
			},
		},
	}
	if im.userns {
		ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
		s.Linux.UIDMappings, s.Linux.GIDMappings = ids, ids
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	}
	return s
}

func copyFile(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

// bundle writes a container.
func (b *bench) bundle(ctx context.Context, im image, id string) (string, error) {
	dir := filepath.Join(b.dir, id)
	root := filepath.Join(dir, "rootfs")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "cp", "-a", im.root, root).CombinedOutput(); err != nil {
		return "", fmt.Errorf("copy the image: %w: %s", err, out)
	}
	for _, d := range []string{"proc", "dev", "etc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return "", err
		}
	}
	if im.client {
		if err := copyFile(filepath.Join(b.old, "clients/client"), filepath.Join(root, "client")); err != nil {
			return "", err
		}
	}
	if im.userns { // as engines do
		if out, err := exec.CommandContext(ctx, "chown", "-R", "100000:100000", root).CombinedOutput(); err != nil {
			return "", fmt.Errorf("give the image to its user namespace: %w: %s", err, out)
		}
	}
	text, err := json.MarshalIndent(b.spec(im, id), "", " ")
	if err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
}

// running is a container whose output is read.
type running struct {
	stdin  io.WriteCloser
	lines  chan string
	stderr bytes.Buffer
	cmd    *exec.Cmd
}

// start runs a container in the foreground.
func (b *bench) start(ctx context.Context, im image, id string) (*running, error) {
	dir, err := b.bundle(ctx, im, id)
	if err != nil {
		return nil, err
	}
	r := &running{lines: make(chan string, 4096)}
	r.cmd = exec.CommandContext(ctx, b.node.Dist("bin/gpufence-runtime"), "--root", filepath.Join(b.dir, "runc"),
		"--log", filepath.Join(dir, "log.json"), "--log-format", "json", "run", "--bundle", dir, id)
	r.cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+b.node.ConfigPath())
	r.cmd.Stderr = &r.stderr
	r.cmd.WaitDelay = node.Patience
	if r.stdin, err = r.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := r.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(r.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			r.lines <- s.Text()
		}
	}()
	return r, nil
}

// next is the container's next line.
func (r *running) next() (string, error) {
	select {
	case line, ok := <-r.lines:
		if !ok {
			return "", fmt.Errorf("it has ended: %s", r.stderr.String())
		}
		return line, nil
	case <-time.After(node.Patience):
		return "", errors.New("it says nothing")
	}
}

// ask gives the client a line, and gets whether it could, and else the driver's word.
func (r *running) ask(line string) (bool, string, error) {
	if _, err := io.WriteString(r.stdin, line+"\n"); err != nil {
		return false, "", err
	}
	text, err := r.next()
	if err != nil {
		return false, "", err
	}
	var reply struct {
		Op         string `json:"op"`
		OK         bool   `json:"ok"`
		ResultName string `json:"result_name"`
	}
	if err := json.Unmarshal([]byte(text), &reply); err != nil || reply.Op != strings.Fields(line)[0] {
		return false, "", fmt.Errorf("the answer to %q is %q", line, text)
	}
	return reply.OK, reply.ResultName, nil
}

// shimFence is what `gpufence inspect` prints of the shim.
func (b *bench) shimFence(ctx context.Context, id string) (string, error) {
	out, err := exec.CommandContext(ctx, b.node.Dist("bin/gpufence"), "--socket", b.node.Socket, "inspect", id).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("inspect: %w: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if rest, ok := strings.CutPrefix(strings.Join(strings.Fields(line), " "), "fence shim "); ok {
			state, _, _ := strings.Cut(rest, " pids ")
			return state, nil
		}
	}
	return "", fmt.Errorf("inspect shows no shim: %s", out)
}

func (b *bench) check(t *testing.T, im image) {
	ctx := t.Context()
	random := make([]byte, 6)
	if _, err := rand.Read(random); err != nil {
		t.Fatal(err)
	}
	id := hex.EncodeToString(random)
	r, err := b.start(ctx, im, id)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		// Only after a failure is there anything to end.
		_ = r.cmd.Process.Kill()
		out, err := exec.CommandContext(context.WithoutCancel(ctx), b.node.Dist("bin/gpufence-runtime"), "--root", filepath.Join(b.dir, "runc"), "delete", "--force", id).CombinedOutput()
		if err != nil {
			t.Errorf("delete the container: %v: %s", err, out)
		}
	}()
	line, err := r.next()
	if err != nil || line != "hello" {
		t.Fatalf("it says %q, %v", line, err)
	}
	if im.client {
		for _, step := range []struct {
			line, result string
			ok           bool
		}{
			{"context", "", true}, {"alloc 64", "", true}, {"alloc 2048", "CUDA_ERROR_OUT_OF_MEMORY", false},
			{"alloc 512", "", true}, {"free 0", "", true},
		} {
			ok, result, err := r.ask(step.line)
			if err != nil || ok != step.ok || !ok && result != step.result {
				t.Fatalf("%s: %v %s %v", step.line, ok, result, err)
			}
		}
	}
	if !im.exits {
		// Its shell has been replaced by the program.
		if _, err := r.next(); err != nil {
			t.Fatal(err)
		}
	}
	said := ""
	if err := node.Until(ctx, "inspect says what the shim did", func() (bool, error) {
		said, err = b.shimFence(ctx, id)
		return said == im.shim, err
	}); err != nil {
		t.Errorf("the shim is %s, want %s: %v", said, im.shim, err)
	}
	if !im.exits {
		c, err := b.node.Client.Container(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		proc, err := os.FindProcess(c.PID)
		if err != nil {
			t.Fatal(err)
		}
		if err := proc.Kill(); err != nil {
			t.Fatal(err)
		}
	} else if _, err := io.WriteString(r.stdin, "exit 7\n"); err != nil {
		t.Fatal(err)
	}
	for line := range r.lines {
		var reply api.Event // a line of the client's, of whatever kind
		if im.exits && !im.client || json.Unmarshal([]byte(line), &reply) != nil {
			t.Errorf("it also says %q", line)
		}
	}
	err = r.cmd.Wait()
	want := 7
	if !im.exits {
		want = 137
	}
	if r.cmd.ProcessState.ExitCode() != want {
		t.Errorf("it ended with %v, want exit status %d", err, want)
	}
	if got := r.stderr.String(); got != im.stderr {
		t.Errorf("standard error is %q, want %q", got, im.stderr)
	}
	if said, err := b.shimFence(ctx, id); err != nil || said != im.shim {
		t.Errorf("after its end the shim is %s, want %s: %v", said, im.shim, err)
	}
}

// small makes a root file system of a few files: their places, and where they come from.
func small(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for to, from := range files {
		file, err := filepath.EvalSymlinks(from)
		if err == nil {
			err = copyFile(file, filepath.Join(root, to))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// wide makes of an image one whose 64-bit loader takes $LIB for lib, which is compiled into it. Such
// are Arch's, with the C library in /lib, and Nix's, with it elsewhere.
func wide(t *testing.T, from string, inLib bool) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", from, root).CombinedOutput(); err != nil {
		t.Fatalf("copy the image: %v: %s", err, out)
	}
	lib := filepath.Join(root, "usr/lib")
	loader := filepath.Join(lib, "x86_64-linux-gnu", "ld-linux-x86-64.so.2")
	text, err := os.ReadFile(loader)
	if err != nil {
		t.Fatal(err)
	}
	is, becomes := []byte("\x00lib/x86_64-linux-gnu\x00"), make([]byte, len("\x00lib/x86_64-linux-gnu\x00"))
	copy(becomes, "\x00lib")
	if bytes.Count(text, is) != 1 {
		t.Fatalf("%s has %q not once", loader, is)
	}
	if err := os.WriteFile(loader, bytes.Replace(text, is, becomes, 1), 0o755); err != nil {
		t.Fatal(err)
	}
	if !inLib {
		return root
	}
	if err := copyFile(filepath.Join(lib, "x86_64-linux-gnu", "libc.so.6"), filepath.Join(lib, "libc.so.6")); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestImages(t *testing.T) {
	if os.Geteuid() != 0 {
		missing(t, "containers need root")
	}
	if runtime.GOARCH != "amd64" {
		missing(t, "the images are for amd64")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		missing(t, "%v", err)
	}
	ctx := t.Context()
	dist := distDir(t)
	n, err := node.New(ctx, node.Options{Dist: dist, Sim: []string{"--gpus", "1", "--model", "t4", "--memory", "16GiB"}})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{node: n, dist: dist, dir: n.Path("images")}
	t.Cleanup(func() {
		if err := n.Close(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	for _, dir := range []string{b.dir, filepath.Join(b.dir, "runc"), n.Path("cdi")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// A container's root in a user namespace is nobody here.
	if err := os.Chmod(n.Dir, 0o711); err != nil {
		t.Fatal(err)
	}
	gpus, err := n.Client.GPUs(ctx)
	if err != nil || len(gpus) != 1 {
		t.Fatalf("GPUs %v, %v", gpus, err)
	}
	b.uuid = gpus[0].UUID

	oldRoot, oldErr := b.oldest(ctx)
	newRoot, newErr := "", oldErr
	if oldErr == nil {
		newRoot, newErr = fetch(ctx, newest, "amd64", "run", "libc6", "busybox")
	}
	narrowRoot, narrowErr := fetch(ctx, "bookworm", "i386", "run", "libc6", "busybox")
	if oldErr == nil {
		if out, err := exec.CommandContext(ctx, n.Dist("bin/simgpu"), "--dir", n.Path("sim"), "cdi", "--lib-dir", filepath.Join(b.old, "simgpu"), "--out", n.Path("cdi", "simgpu.json")).CombinedOutput(); err != nil {
			t.Fatalf("write the CDI specification: %v: %s", err, out)
		}
	}
	shell := []string{"/bin/busybox", "sh", "-c"}
	client := append(shell[:3:3], greeting+"/client")
	waits := append(shell[:3:3], "echo hello; /bin/busybox ls /nothing; read -r line; exit 7")
	for _, test := range []struct {
		image
		err   error
		needs string // a command that makes its root; "ld": its loader is changed
	}{
		{image{name: "oldest glibc", root: oldRoot, args: client, stderr: complaint, client: true, exits: true, shim: "seen"}, oldErr, ""},
		{image{name: "newest glibc", root: newRoot, args: client, stderr: complaint, client: true, exits: true, shim: "seen"}, newErr, ""},
		{image{name: "read-only root", root: newRoot, args: client, stderr: complaint, readonly: true, client: true, exits: true, shim: "seen"}, newErr, ""},
		{image{name: "user namespace", root: newRoot, args: client, stderr: complaint, userns: true, client: true, exits: true, shim: "seen"}, newErr, ""},
		{image{name: "64-bit lib", root: newRoot, args: client, stderr: complaint, client: true, exits: true, shim: "seen"}, newErr, "ld"},
		{image{name: "library elsewhere", root: newRoot, args: client, stderr: complaint, client: true, exits: true, shim: "seen"}, newErr, "ld"},
		{image{name: "no GPU program", root: newRoot, args: waits, stderr: complaint, exits: true, shim: "delivered"}, newErr, ""},
		{image{name: "32-bit", root: narrowRoot, args: waits, stderr: complaint, exits: true, shim: "delivered"}, narrowErr, ""},
		{image{name: "static", args: append(shell[:3:3], greeting+"/bypass 16 10 128"), stderr: complaint, shim: "absent(static)"}, oldErr, "busybox"},
		{image{name: "musl", args: []string{"/say"}, exits: true, shim: "absent(musl)"}, nil, "musl-gcc"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.err != nil {
				if errors.Is(test.err, errUnavailable) {
					missing(t, "%v", test.err)
				}
				t.Fatal(test.err)
			}
			program, err := exec.LookPath(test.needs)
			if test.needs != "" && test.needs != "ld" && err != nil {
				missing(t, "%v", err)
			}
			switch test.needs {
			case "ld":
				test.root = wide(t, newRoot, test.name == "64-bit lib")
			case "busybox":
				test.root = small(t, map[string]string{"bin/busybox": program, "bypass": filepath.Join(dist, "clients/bypass")})
			case "musl-gcc":
				say := filepath.Join(t.TempDir(), "say")
				if out, err := exec.CommandContext(ctx, program, "-O2", "-o", say, "programs/say.c").CombinedOutput(); err != nil {
					t.Fatalf("build with musl: %v: %s", err, out)
				}
				test.root = small(t, map[string]string{"say": say, "lib/ld-musl-x86_64.so.1": "/lib/ld-musl-x86_64.so.1"})
			}
			b.check(t, test.image)
		})
	}
}
