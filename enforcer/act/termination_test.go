// SPDX-License-Identifier: Apache-2.0

package act

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

func TestTerminationMessage(t *testing.T) {
	const line = "GPU memory limit exceeded: used 4.3 GiB > memory.max 4 GiB on GPU-1; raise gpufence.dev/memory.max"
	for name, c := range map[string]struct{ before, after string }{
		"empty":       {"", line + "\n"},
		"with lines":  {"bye\n", "bye\n" + line + "\n"},
		"without end": {"bye", "bye\n" + line + "\n"},
		"nearly full": {strings.Repeat("x", 4000) + "\n", strings.Repeat("x", 4000) + "\n" + line[:94] + "\n"},
		"just room":   {strings.Repeat("x", 4096-len(line)-2) + "\n", strings.Repeat("x", 4096-len(line)-2) + "\n" + line + "\n"},
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte(c.before), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := TerminationMessage(path, line); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(b) != c.after || len(b) > 4096 {
			t.Errorf("%s: %d bytes, ends %q", name, len(b), b[max(0, len(b)-120):])
		}
	}
}

func TestTerminationMessageRefuses(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(path("victim"), []byte("keep"), 0o600))
	must(os.Symlink(path("victim"), path("link")))
	must(os.Mkdir(path("dir"), 0o700))
	must(os.WriteFile(path("dir/log"), nil, 0o600))
	must(os.Symlink(path("dir"), path("dirlink")))
	must(unix.Mkfifo(path("fifo"), 0o600))
	must(unix.Mknod(path("null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	must(os.Link(path("victim"), path("hard")))
	must(os.WriteFile(path("full"), []byte(strings.Repeat("x", 4095)), 0o600))
	for name, want := range map[string]error{
		path("link"):         ErrSymlink,
		path("dirlink/log"):  ErrSymlink,
		path("dir"):          ErrNotRegular,
		path("fifo"):         ErrNotRegular,
		path("null"):         ErrNotRegular,
		path("hard"):         ErrNotRegular,
		path("full"):         ErrFull,
		path("none"):         fs.ErrNotExist,
		path("victim/x"):     unix.ENOTDIR,
		"relative":           unix.EINVAL,
		dir + "/dir/../link": unix.EINVAL,
	} {
		if err := TerminationMessage(name, "line"); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if errors.Is(want, unix.EINVAL) {
			continue
		}
		// The same without openat2.
		if fd, err := openStepwise(name); err == nil {
			must(unix.Close(fd))
		} else if errors.Is(want, ErrSymlink) != errors.Is(err, ErrSymlink) {
			t.Errorf("stepwise %s: %v", name, err)
		}
	}
	if b, err := os.ReadFile(path("victim")); err != nil || string(b) != "keep" {
		t.Errorf("the target was written: %q, %v", b, err)
	}
	if _, err := openStepwise(path("victim/x")); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("stepwise below a file: %v", err)
	}
	if _, err := openStepwise(path("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stepwise nothing: %v", err)
	}
}

func TestCut(t *testing.T) {
	for _, n := range []int{5, 6, 7, 8} {
		got := cut("aéé bcdef\n", n)
		if len(got) > n || !utf8.ValidString(got) || !strings.HasSuffix(got, "\n") {
			t.Errorf("cut to %d: %q", n, got)
		}
	}
}

// A link of root's own in folders that only root may write is followed, as where the kubelet's folder
// was moved to another disk; any other is not, and the last component never.
func TestTerminationMessageThroughRootsLink(t *testing.T) {
	if os.Geteuid() != 0 {
		cannot(t, "it takes root's folders")
	}
	dir, err := os.MkdirTemp("/run", "gpufence-act-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	path := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(path("disk/kubelet/pods"), 0o755))
	must(os.WriteFile(path("disk/kubelet/pods/log"), nil, 0o666))
	must(os.Symlink(path("disk/kubelet"), path("absolute")))
	must(os.Symlink("disk/../disk/kubelet", path("relative")))
	must(os.Symlink("absolute", path("twice")))
	must(os.Symlink("loop", path("loop")))
	must(os.Symlink("disk/kubelet", path("theirs")))
	must(os.Lchown(path("theirs"), 1000, 1000))
	must(os.Symlink("log", path("disk/kubelet/pods/last")))
	must(os.Mkdir(path("open"), 0o777))
	must(os.Chmod(path("open"), 0o777))
	must(os.Symlink(path("disk/kubelet"), path("open/link")))
	for name, want := range map[string]error{
		"disk/kubelet/pods/log": nil, "absolute/pods/log": nil, "relative/pods/log": nil, "twice/pods/log": nil,
		"loop/pods/log": ErrSymlink, "theirs/pods/log": ErrSymlink, "open/link/pods/log": ErrSymlink,
		"disk/kubelet/pods/last": ErrSymlink, "absolute/pods/last": ErrSymlink,
		"absolute/pods/none": fs.ErrNotExist, "absolute/pods/log/below": unix.ENOTDIR,
	} {
		if err := TerminationMessage(path(name), "x"); !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
