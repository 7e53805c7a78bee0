// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gpufence/gpufence/tests/process"
)

// node is a clean Debian with processes of its own, which see no others: the packages' scripts look at
// what runs.
type node struct {
	t    *testing.T
	root string
	init int // its process 1, as we see it
	// through leads into it where that is no chroot.
	through []string
}

// startNode unpacks one and starts nothing in it.
func startNode(t *testing.T) *node {
	t.Helper()
	need(t, "debootstrap", "unshare", "nsenter")
	if os.Geteuid() != 0 {
		missing(t, "this is not root")
	}
	tar := strings.TrimSpace(must(t, "./root.sh"))
	n := &node{t: t, root: filepath.Join(t.TempDir(), "root")}
	if err := os.Mkdir(n.root, 0o755); err != nil {
		t.Fatal(err)
	}
	must(t, "tar", "-C", n.root, "--numeric-owner", "-xf", tar)
	// Process 1 reaps what is left to it, and says when it is there.
	script := `mount -t proc proc "$1/proc" && mount -t tmpfs tmpfs "$1/dev" && mount -t tmpfs -o mode=755 tmpfs "$1/run" && mknod -m 666 "$1/dev/null" c 1 3 &&
		exec chroot "$1" /bin/sh -c 'echo ready; while read -r line; do :; done'`
	var in io.Closer // it ends with its input
	p, err := process.Start(t.Context(), process.Options{Name: "the node", Log: filepath.Join(t.TempDir(), "log"), Edit: func(cmd *exec.Cmd) (err error) {
		in, err = cmd.StdinPipe()
		return err
	}}, "unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-c", script, "sh", n.root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), p.Await(context.Background())); err != nil || !p.State().Success() {
			t.Errorf("end of the node: %v, %v\n%s", p.State(), err, p.Said())
		}
	})
	if err := p.Ready(t.Context(), p.Says("ready\n")); err != nil {
		t.Fatal(err)
	}
	if n.init, err = p.Child(); err != nil {
		t.Fatal(err)
	}
	return n
}

// enter is a command line in the node.
func (n *node) enter(argv ...string) []string {
	through := n.through
	if through == nil {
		through = []string{"nsenter", "--target", fmt.Sprint(n.init), "--mount", "--pid", "--uts", "--ipc", "chroot", n.root}
	}
	return slices.Concat(through, []string{"env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"}, argv)
}

func (n *node) try(argv ...string) (string, error) {
	return command(n.t.Context(), "", nil, n.enter(argv...)...)
}

func (n *node) do(argv ...string) string {
	n.t.Helper()
	out, err := n.try(argv...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// take copies a file into the node.
func (n *node) take(file string) string {
	n.t.Helper()
	to := "/tmp/" + filepath.Base(file)
	if err := copyFile(file, n.root+to, 0o644); err != nil {
		n.t.Fatal(err)
	}
	return to
}

func (n *node) write(at, text string) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.root+at), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(n.root+at, []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) there(at string) bool {
	_, err := os.Lstat(n.root + at)
	return err == nil
}

func (n *node) folder(at string) bool {
	info, err := os.Lstat(n.root + at)
	return err == nil && info.IsDir()
}

// holder is a process that has a library as a container's has it: bound into its own mount namespace
// below /dev/gpufence, and mapped.
type holder struct {
	n       *node
	nsenter *process.Process
	pid     int
	inode   uint64
	sum     string
}

func (n *node) hold(library string) *holder {
	n.t.Helper()
	script := `mkdir -p /dev/gpufence/lib64 && : >/dev/gpufence/lib64/libgpufence.so && mount --bind "$1" /dev/gpufence/lib64/libgpufence.so &&
		LD_PRELOAD=/dev/gpufence/lib64/libgpufence.so exec sh -c 'echo ready; read -r line'`
	h := &holder{n: n}
	argv := n.enter("unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, "sh", library)
	var in io.Closer // it ends by it
	var err error
	h.nsenter, err = process.Start(n.t.Context(), process.Options{Name: "a process that holds " + library, Log: filepath.Join(n.t.TempDir(), "log"), Edit: func(cmd *exec.Cmd) (err error) {
		in, err = cmd.StdinPipe()
		return err
	}}, argv[0], argv[1:]...)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		_ = in.Close() // it may be gone
		if err := h.nsenter.Await(context.Background()); err != nil {
			n.t.Error(err)
		}
	})
	if err := h.nsenter.Ready(n.t.Context(), h.nsenter.Says("ready\n")); err != nil {
		n.t.Fatal(err)
	}
	// nsenter forks to get into the pid namespace.
	if h.pid, err = h.nsenter.Child(); err != nil {
		n.t.Fatal(err)
	}
	h.inode, h.sum = h.look()
	return h
}

// look reads the library where the process has it.
func (h *holder) look() (uint64, string) {
	h.n.t.Helper()
	file := fmt.Sprintf("/proc/%d/root/dev/gpufence/lib64/libgpufence.so", h.pid)
	var st syscall.Stat_t
	if err := syscall.Stat(file, &st); err != nil {
		h.n.t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		h.n.t.Fatal(err)
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", h.pid))
	if err != nil {
		h.n.t.Fatal(err)
	}
	if !strings.Contains(string(maps), fmt.Sprintf(" %d ", st.Ino)) {
		h.n.t.Errorf("the process does not have the library mapped:\n%s", maps)
	}
	return st.Ino, fmt.Sprintf("%x", sha256.Sum256(text))
}

// untouched says whether the process has what it had.
func (h *holder) untouched(when string) {
	h.n.t.Helper()
	if inode, sum := h.look(); inode != h.inode || sum != h.sum {
		h.n.t.Errorf("after %s the running process has another library", when)
	}
}

func (h *holder) end() {
	h.n.t.Helper()
	if err := syscall.Kill(h.pid, syscall.SIGKILL); err != nil {
		h.n.t.Fatal(err)
	}
	if err := h.nsenter.Await(h.n.t.Context()); err != nil {
		h.n.t.Fatal(err)
	}
}

// files are all of the node's: what they are and, but for the logs and databases of the package managers,
// what is in them.
func (n *node) files() map[string]string {
	n.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(n.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at := strings.TrimPrefix(path, n.root)
		switch at {
		case "/proc", "/dev", "/run", "/tmp", "/var/lib/rpm", "/root":
			return filepath.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("%s has no owner", path)
		}
		say := fmt.Sprintf("%v %d:%d", info.Mode(), st.Uid, st.Gid)
		database := strings.HasPrefix(at, "/var/lib/dpkg/") || strings.HasPrefix(at, "/var/log/") || strings.HasPrefix(at, "/var/cache/ldconfig/") ||
			at == "/etc/group-" || at == "/etc/gshadow-" // groupdel's own copies of what was before
		switch {
		case database || d.IsDir():
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			say += " -> " + target
		case info.Mode().IsRegular():
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			say += fmt.Sprintf(" %x", sha256.Sum256(text))
		}
		out[at] = say
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// compare says what of the node is not as it was.
func compare(t *testing.T, before, after map[string]string, but func(string) bool) {
	t.Helper()
	for at, was := range before {
		if is := after[at]; is != was && !but(at) {
			t.Errorf("%s is %q, and was %q", at, is, was)
		}
	}
	for at, is := range after {
		if _, there := before[at]; !there && !but(at) {
			t.Errorf("%s is left over: %s", at, is)
		}
	}
}
