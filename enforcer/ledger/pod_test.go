// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// cannot skips a test for want of a right, loudly, and fails where everything must be tested.
func cannot(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("GPUFENCE_MUST=1, but %s", why)
	}
	t.Skipf("NOT TESTED: %s", why)
}

// newPod makes a pod folder, on a real tmpfs where we may mount.
func newPod(t *testing.T, slots int, plain bool) *Pod {
	t.Helper()
	if !plain && os.Geteuid() != 0 {
		cannot(t, "mounting a tmpfs needs root")
	}
	dir := filepath.Join(t.TempDir(), "pods", "p1")
	p, err := CreatePod(dir, Options{Slots: slots, Plain: plain})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Remove(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func addContainer(t *testing.T, p *Pod, name string, index uint32) *Container {
	t.Helper()
	c, err := p.AddContainer(name, index)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

var sampleLimits = Limits{Generation: 7, GPU: []LimitsGPU{
	{UUID: [16]byte{1, 2, 3}, Present: true, Fenced: true, TotalBytes: 16 << 30, ContextBytes: 300 << 20, MaxBytes: 4 << 30, HighBytes: Unlimited, SwapMaxBytes: 1, PodMaxBytes: 6 << 30, PodHighBytes: Unlimited, PodSwapMaxBytes: 2, ExcessBytes: 5, PodExcessBytes: 6, ModuleBytes: 8},
	{},
	{UUID: [16]byte{9}, Present: true, MaxBytes: Unlimited, PodMaxBytes: Unlimited},
}}

// TestPoints: what others are mounted over, and links, take just their inodes, also beside a
// container that an earlier version has made without.
func TestPoints(t *testing.T) {
	p := newPod(t, 8, false)
	points := []Point{{Name: LedgerName}, {Name: "lib64/l.so"}, {Name: "lib/x/l.so", Link: "../../lib64/l.so"}, {Name: "lib/l.so", Link: "../lib64/l.so"}}
	full := func(when string) {
		t.Helper()
		var s unix.Statfs_t
		if err := unix.Statfs(p.Dir(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Bfree != 0 || s.Ffree != 0 {
			t.Errorf("%s: %d blocks and %d inodes are free", when, s.Bfree, s.Ffree)
		}
	}
	before := addContainer(t, p, "before", 1)
	for _, name := range []string{"new", "before"} {
		c, err := p.AddContainer(name, 1, points...)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		full(name)
		for _, point := range points {
			fi, err := os.Lstat(filepath.Join(c.Dir(), point.Name))
			if err != nil || (fi.Mode().Type() == fs.ModeSymlink) != (point.Link != "") || point.Link == "" && (fi.Size() != 0 || fi.Mode() != 0o444) {
				t.Errorf("%s of %s: %v, %v", point.Name, name, fi, err)
			}
			if to, err := filepath.EvalSymlinks(filepath.Join(c.Dir(), point.Name)); point.Link != "" && (err != nil || to != filepath.Join(c.Dir(), "lib64/l.so")) {
				t.Errorf("%s of %s leads to %s, %v", point.Name, name, to, err)
			}
		}
		for _, folder := range []string{"", "lib", "lib/x", "lib64"} {
			if fi, err := os.Stat(filepath.Join(c.Dir(), folder)); err != nil || fi.Mode().Perm() != 0o755 {
				t.Errorf("folder %q of %s: %v, %v", folder, name, fi, err)
			}
		}
	}
	if err := before.Publish(sampleLimits); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"../x", "/x"} {
		if _, err := p.AddContainer("out", 2, Point{Name: name}); err == nil {
			t.Errorf("%s was made", name)
		}
	}
	if names, err := p.Containers(); err != nil || len(names) != 2 {
		t.Errorf("containers: %v, %v", names, err)
	}
}

func TestPodOnTmpfs(t *testing.T) {
	p := newPod(t, 8, false)
	var s unix.Statfs_t
	if err := unix.Statfs(p.Dir(), &s); err != nil {
		t.Fatal(err)
	}
	if s.Bfree != 0 || s.Ffree != 0 {
		t.Errorf("%d blocks and %d inodes are free in an empty pod: a tenant could fill them", s.Bfree, s.Ffree)
	}
	if want := int64(unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC); s.Flags&want != want {
		t.Errorf("mount flags %#x lack some of %#x", s.Flags, want)
	}
	for i, name := range []string{"main", "sidecar", "third"} {
		c := addContainer(t, p, name, uint32(i))
		if err := c.Publish(sampleLimits); err != nil {
			t.Fatal(err)
		}
		if err := c.WriteFiles(true, []FileGPU{{UUID: "GPU-1", FileLevel: FileLevel{Max: 1}}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Statfs(p.Dir(), &s); err != nil {
		t.Fatal(err)
	}
	if s.Bfree != 0 || s.Ffree != 0 {
		t.Errorf("%d blocks and %d inodes are free with containers", s.Bfree, s.Ffree)
	}
	// A tenant has the ledger open for writing: it cannot make it longer.
	f, err := os.OpenFile(p.LedgerPath(), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 64<<10)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("appending to the ledger: %v, want ENOSPC", err)
	}
	// Containers come and go; the folder does not grow without end.
	for range 20 {
		c, err := p.AddContainer("again", 9)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(c.Close(), p.RemoveContainer("again")); err != nil {
			t.Fatal(err)
		}
	}
	blocks := s.Blocks
	if err := unix.Statfs(p.Dir(), &s); err != nil {
		t.Fatal(err)
	}
	if s.Blocks > blocks+2*containerPages {
		t.Errorf("the tmpfs grew from %d to %d blocks", blocks, s.Blocks)
	}
	mode := func(name string) fs.FileMode {
		info, err := os.Stat(filepath.Join(p.Dir(), name))
		if err != nil {
			t.Fatal(err)
		}
		return info.Mode().Perm()
	}
	if m := mode("ledger"); m != 0o666 {
		t.Errorf("ledger has mode %o", m)
	}
	if m := mode("containers/main/limits"); m != 0o444 {
		t.Errorf("limits has mode %o", m)
	}
	if m := mode("."); m != 0o700 {
		t.Errorf("folder has mode %o", m)
	}
	// What a container has mounted outlives the folder, and removing works meanwhile.
	if err := p.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Stat(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(p.Dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Remove the folder is there: %v", err)
	}
}

func TestPodTmpfsIsAdoptedAfterRestart(t *testing.T) {
	p := newPod(t, 4, false)
	c := addContainer(t, p, "main", 3)
	for _, err := range []error{c.Publish(sampleLimits), c.Beat(), c.BeginSample(41), c.Close(), p.Close()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := OpenPod(p.Dir(), Options{Slots: 5}); err == nil {
		t.Error("a folder of 4 slots was opened as one of 5")
	}
	// Creating again adopts, too: prepare may be repeated.
	for _, open := range []func(string, Options) (*Pod, error){OpenPod, CreatePod} {
		again, err := open(p.Dir(), Options{})
		if err != nil {
			t.Fatal(err)
		}
		names, err := again.Containers()
		if err != nil || !cmp.Equal(names, []string{"main"}) {
			t.Fatalf("containers %v, %v", names, err)
		}
		before, err := ReadLimits(filepath.Join(again.Dir(), "containers/main/limits"))
		if err != nil {
			t.Fatal(err)
		}
		c, err := again.AddContainer("main", 3)
		if err != nil {
			t.Fatal(err)
		}
		after, err := c.Published()
		if err != nil {
			t.Fatal(err)
		}
		if after.WriterEpoch != before.WriterEpoch+1 {
			t.Errorf("writer epoch went from %d to %d", before.WriterEpoch, after.WriterEpoch)
		}
		if !cmp.Equal(after.Limits, sampleLimits) || after.Heartbeat != 1 || after.Sample != 41 || after.ContainerIndex != 3 {
			t.Errorf("adopted page says %+v", after)
		}
		if _, err := again.AddContainer("main", 4); err == nil {
			t.Error("a container was adopted under another index")
		}
		if err := errors.Join(c.Close(), again.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPodFolderErrors(t *testing.T) {
	dir := t.TempDir()
	for name, f := range map[string]func() error{
		"too many slots": func() error {
			_, err := CreatePod(filepath.Join(dir, "a"), Options{Plain: true, Slots: 1 << 20})
			return err
		},
		"nothing there": func() error { _, err := OpenPod(filepath.Join(dir, "b"), Options{Plain: true}); return err },
		"not mounted":   func() error { _, err := OpenPod(dir, Options{}); return err },
		"below a file": func() error {
			if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := CreatePod(filepath.Join(dir, "f", "p"), Options{Plain: true})
			return err
		},
		"slots file is garbage": func() error {
			p := newPod(t, 2, true)
			if err := os.WriteFile(filepath.Join(p.Dir(), slotsName), []byte("many"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := OpenPod(p.Dir(), Options{Plain: true})
			return err
		},
		"container name": func() error { _, err := newPod(t, 2, true).AddContainer("../x", 1); return err },
		"removed name":   func() error { return newPod(t, 2, true).RemoveContainer("..") },
		"page of another abi": func() error {
			p := newPod(t, 2, true)
			c := addContainer(t, p, "x", 1)
			path := filepath.Join(c.Dir(), LimitsName)
			corrupt(t, path, limitsMajor, []byte{9})
			_, err := p.AddContainer("x", 1)
			if !errors.Is(err, ErrBroken) {
				t.Errorf("error is %v, want ErrBroken", err)
			}
			return err
		},
	} {
		if err := f(); err == nil {
			t.Errorf("%s: no error", name)
		} else if s := err.Error(); strings.Contains(s, "\n") || s != strings.TrimSpace(s) {
			t.Errorf("%s: %q is not one sentence", name, s)
		}
	}
	if err := newPod(t, 2, true).RemoveContainer("unknown"); err != nil {
		t.Errorf("removing an unknown container: %v", err)
	}
}

// TestCreateAfterCrash repeats CreatePod and AddContainer over what a crash may have left.
func TestCreateAfterCrash(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "p")
	for _, name := range []string{dir, filepath.Join(dir, containersDir), filepath.Join(dir, containersDir, newPrefix+"main")} {
		if err := os.Mkdir(name, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{slotsName, newPrefix + LedgerName} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("4"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p, err := CreatePod(dir, Options{Plain: true, Slots: 6})
	if err != nil {
		t.Fatal(err)
	}
	if p.Ledger().Slots() != 6 {
		t.Errorf("%d slots", p.Ledger().Slots())
	}
	if names, err := p.Containers(); err != nil || len(names) != 0 {
		t.Errorf("a half container counts: %v, %v", names, err)
	}
	addContainer(t, p, "main", 0)
	if _, err := p.Ledger().Snapshot(); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func corrupt(t *testing.T, path string, offset int64, b []byte) {
	t.Helper()
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, offset); err != nil {
		t.Fatal(err)
	}
}

func TestLimitsPage(t *testing.T) {
	c := addContainer(t, newPod(t, 2, true), "main", 5)
	path := filepath.Join(c.Dir(), LimitsName)
	view, err := ReadLimits(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(view.GPU) != 0 || view.Generation != 0 {
		t.Errorf("a new page says %+v", view)
	}
	latch := func() uint64 { return c.page.load(limitsLatch) }
	for i := range 5 {
		l := sampleLimits
		l.Generation = uint64(i)
		before := latch()
		for range 2 { // the second changes nothing
			if err := c.Publish(l); err != nil {
				t.Fatal(err)
			}
		}
		if i > 0 && latch() != before+1 {
			t.Errorf("latch went from %d to %d", before, latch())
		}
		view, err := ReadLimits(path)
		if err != nil {
			t.Fatal(err)
		}
		if !cmp.Equal(view.Limits, l) || view.ContainerIndex != 5 {
			t.Error(cmp.Diff(l, view.Limits))
		}
	}
	if err := c.Publish(Limits{GPU: make([]LimitsGPU, GPUs+1)}); err == nil {
		t.Error("17 GPUs were published")
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{c.Publish(sampleLimits), c.Beat(), c.BeginSample(1), c.WriteFiles(true, nil)} {
		if !errors.Is(err, fs.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}

func TestLimitsPageBroken(t *testing.T) {
	for name, change := range map[string]struct {
		offset int64
		bytes  []byte
	}{
		"magic": {limitsMagic, []byte{0}}, "abi": {limitsMajor, []byte{2}}, "header": {limitsHeaderBytes, []byte{1}},
		"gpu size": {limitsGPUSize, []byte{1}}, "copy size": {limitsCopySize, []byte{1}},
		"checksum": {limitsCopies + limitsCopyBytes + limitsCopyGPU + limitsGPUMax, []byte{0xff}},
		"count":    {limitsCopies + limitsCopyBytes + limitsCopyGPUCount, []byte{0xff}},
	} {
		c := addContainer(t, newPod(t, 2, true), "main", 5)
		if err := c.Publish(sampleLimits); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(c.Dir(), LimitsName)
		corrupt(t, path, change.offset, change.bytes)
		if _, err := ReadLimits(path); !errors.Is(err, ErrBroken) {
			t.Errorf("%s: ReadLimits = %v", name, err)
		}
		if _, err := c.Published(); !errors.Is(err, ErrBroken) {
			t.Errorf("%s: Published = %v", name, err)
		}
	}
	// A wrong count with a right checksum.
	b := encodeCopy(sampleLimits)
	binary.LittleEndian.PutUint32(b[limitsCopyGPUCount:], 17)
	if _, err := decodeCopy(b); err == nil {
		t.Error("17 GPUs were decoded")
	}
	if _, err := ReadLimits(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no page: %v", err)
	}
}

// TestCutPageIsAnError cuts a mapped page: an error, not the end of the program.
func TestCutPageIsAnError(t *testing.T) {
	c := addContainer(t, newPod(t, 2, true), "main", 5)
	path := filepath.Join(c.Dir(), LimitsName)
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{"Publish": c.Publish(sampleLimits), "Beat": c.Beat(), "BeginSample": c.BeginSample(3)} {
		if !errors.Is(err, ErrBroken) {
			t.Errorf("%s on a cut page: %v", name, err)
		}
	}
	if _, err := c.Published(); !errors.Is(err, ErrBroken) {
		t.Errorf("Published on a cut page: %v", err)
	}
	if _, err := ReadLimits(path); !errors.Is(err, ErrBroken) {
		t.Errorf("ReadLimits on a cut page: %v", err)
	}
}

// TestGuardedPanicsPass lets every panic through that is no fault.
func TestGuardedPanicsPass(t *testing.T) {
	defer func() {
		if r := recover(); r != "mistake" {
			t.Errorf("recovered %v", r)
		}
	}()
	m := &mapping{}
	_ = m.guarded(func() error { panic("mistake") })
}

// TestLimitsNeverTorn reads a page while it is written.
func TestLimitsNeverTorn(t *testing.T) {
	c := addContainer(t, newPod(t, 2, true), "main", 5)
	path := filepath.Join(c.Dir(), LimitsName)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			l := Limits{Generation: n, GPU: make([]LimitsGPU, 16)}
			for i := range l.GPU {
				l.GPU[i].MaxBytes, l.GPU[i].PodExcessBytes = n, n
			}
			if err := c.Publish(l); err != nil {
				t.Error(err)
				return
			}
		}
	})
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := mapShared(f, 0, limitsBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer m.unmap()
	good := 0
	deadline := time.Now().Add(time.Second)
	for time.Now().Before(deadline) {
		// As the header says a reader reads.
		latch := m.load(limitsLatch)
		b := loadCopy(m, latch)
		if m.load(limitsLatch) != latch {
			continue
		}
		l, err := decodeCopy(b)
		if err != nil {
			t.Fatalf("torn: %v", err)
		}
		for _, g := range l.GPU {
			if g.MaxBytes != l.Generation || g.PodExcessBytes != l.Generation {
				t.Fatalf("torn: generation %d has %+v", l.Generation, g)
			}
		}
		good++
	}
	close(stop)
	wg.Wait()
	if good == 0 {
		t.Error("no read succeeded")
	}
}

func TestFiles(t *testing.T) {
	c := addContainer(t, newPod(t, 2, true), "main", 5)
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(c.Dir(), name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	inode := func(name string) uint64 {
		var s unix.Stat_t
		if err := unix.Stat(filepath.Join(c.Dir(), name), &s); err != nil {
			t.Fatal(err)
		}
		return s.Ino
	}
	before := inode(MaxName)
	long := []FileGPU{
		{
			UUID: "GPU-a",
			FileLevel: FileLevel{
				Max: 4294967296, High: 3, Min: 2, SwapMax: 0, Current: 1234567890, Peak: 2345678901,
				Events: FileEvents{1, 2, 3, 4, 5, 6}, Local: FileEvents{0, 1, 2, 3, 4, 5},
			},
			Pod: FileLevel{
				Max: Unlimited, High: Unlimited, Min: 7, SwapMax: Unlimited, Current: 8, Peak: 9,
				Events: FileEvents{10, 20, 30, 40, 50, 60}, Local: FileEvents{OOM: 1},
			},
		},
		{UUID: "GPU-b", FileLevel: FileLevel{Max: Unlimited}},
	}
	if err := c.WriteFiles(true, long); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		MaxName:     "GPU-a 4294967296\nGPU-b max\n",
		CurrentName: "GPU-a 1234567890\nGPU-b 0\n",
		PeakName:    "GPU-a 2345678901\nGPU-b 0\n",
		EventsName: "GPU-a high=1 max=2 device=3 oom=4 oom_kill=5 oom_group_kill=6\n" +
			"GPU-b high=0 max=0 device=0 oom=0 oom_kill=0 oom_group_kill=0\n",
		EventsLocalName: "GPU-a high=0 max=1 device=2 oom=3 oom_kill=4 oom_group_kill=5\n" +
			"GPU-b high=0 max=0 device=0 oom=0 oom_kill=0 oom_group_kill=0\n",
		HighName:              "GPU-a 3\nGPU-b 0\n",
		MinName:               "GPU-a 2\nGPU-b 0\n",
		SwapMaxName:           "GPU-a 0\nGPU-b 0\n",
		OOMGroupName:          "1\n",
		"pod/memory.max":      "GPU-a max\nGPU-b 0\n",
		"pod/memory.high":     "GPU-a max\nGPU-b 0\n",
		"pod/memory.min":      "GPU-a 7\nGPU-b 0\n",
		"pod/memory.peak":     "GPU-a 9\nGPU-b 0\n",
		"pod/memory.current":  "GPU-a 8\nGPU-b 0\n",
		"pod/memory.swap.max": "GPU-a max\nGPU-b 0\n",
		"pod/memory.events": "GPU-a high=10 max=20 device=30 oom=40 oom_kill=50 oom_group_kill=60\n" +
			"GPU-b high=0 max=0 device=0 oom=0 oom_kill=0 oom_group_kill=0\n",
		"pod/memory.events.local": "GPU-a high=0 max=0 device=0 oom=1 oom_kill=0 oom_group_kill=0\n" +
			"GPU-b high=0 max=0 device=0 oom=0 oom_kill=0 oom_group_kill=0\n",
	} {
		if got := read(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if err := c.WriteFiles(false, []FileGPU{{UUID: "GPU-a", FileLevel: FileLevel{Max: 1}}}); err != nil {
		t.Fatal(err)
	}
	if got := read(OOMGroupName); got != "0\n" {
		t.Errorf("memory.oom.group: %q", got)
	}
	if got := read(MaxName); got != "GPU-a 1\n" {
		t.Errorf("shorter content: %q", got)
	}
	if inode(MaxName) != before {
		t.Error("the file was replaced: a container would still see the old one")
	}
	if err := c.WriteFiles(true, nil); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(read(MaxName)); got != "" {
		t.Errorf("no GPU: %q", got)
	}
}

// A folder that an earlier version made has fewer files, and is adopted as it is.
func TestFilesOfAnEarlierVersion(t *testing.T) {
	p := newPod(t, 2, true)
	c := addContainer(t, p, "main", 5)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{HighName, EventsLocalName, OOMGroupName} {
		if err := os.Remove(filepath.Join(c.Dir(), name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(c.Dir(), PodDirName)); err != nil {
		t.Fatal(err)
	}
	c = addContainer(t, p, "main", 5)
	if err := c.WriteFiles(true, []FileGPU{{UUID: "GPU-a", FileLevel: FileLevel{Max: 1}}}); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(filepath.Join(c.Dir(), MaxName)); err != nil || string(b) != "GPU-a 1\n" {
		t.Errorf("%q, %v", b, err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(c.Dir(), PeakName)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.AddContainer("main", 5); err == nil {
		t.Error("a folder without memory.peak was adopted")
	}
}

func TestParseUUID(t *testing.T) {
	want := [16]byte{0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10}
	for _, s := range []string{"GPU-01234567-89ab-cdef-fedc-ba9876543210", "MIG-01234567-89AB-cdef-fedc-ba9876543210"} {
		if id, err := ParseUUID(s); err != nil || id != want {
			t.Errorf("ParseUUID(%q) = %x, %v", s, id, err)
		}
	}
	for _, s := range []string{"", "GPU-", "01234567-89ab-cdef-fedc-ba9876543210", "GPU-0123456789ab-cdef-fedc-ba9876543210--", "GPU-01234567-89ab-cdef-fedc-ba987654321g", "GPU-01234567-89ab-cdef-fedc-ba98765432100", "GPU-0123456--9ab-cdef-fedc-ba98765432100"} {
		if _, err := ParseUUID(s); err == nil {
			t.Errorf("ParseUUID(%q) worked", s)
		}
	}
}

func TestBootID(t *testing.T) {
	path := filepath.Join(t.TempDir(), "boot_id")
	if _, err := readBootID(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for text, ok := range map[string]bool{"01234567-89ab-cdef-fedc-ba9876543210\n": true, "garbage": false, "": false} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readBootID(path); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// writer plays a shim of this pod: it has the ledger mapped, as C has.
type writer struct {
	t *testing.T
	m *mapping
	f *os.File
}

func newWriter(t *testing.T, p *Pod) *writer {
	t.Helper()
	f, err := os.OpenFile(p.LedgerPath(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	m, err := mapShared(f, 0, int(ledgerBytes(p.Ledger().Slots())))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.unmap(), f.Close()); err != nil {
			t.Error(err)
		}
	})
	return &writer{t, m, f}
}

func (w *writer) word(slot, offset int) int { return int(slotOffset(slot)) + offset }

func (w *writer) lock(slot int) {
	w.t.Helper()
	lk := unix.Flock_t{Type: unix.F_WRLCK, Start: slotOffset(slot), Len: slotBytes}
	if err := unix.FcntlFlock(w.f.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) claim(slot int, generation, pid uint32) {
	w.t.Helper()
	w.lock(slot)
	w.m.store(w.word(slot, slotOwner), Owner{generation, SlotLive, pid}.pack())
	if w.m.load(headerHighSlot) <= uint64(slot) {
		w.m.store(headerHighSlot, uint64(slot)+1)
	}
}

func (w *writer) gpu(slot, gpu, offset int) int {
	return w.word(slot, slotGPU+gpu*slotGPUBytes+offset)
}

func counter(generation uint32, units uint64) uint64 { return uint64(generation)<<unitsBits | units }

func TestSnapshot(t *testing.T) {
	p := newPod(t, 16, true)
	w := newWriter(t, p)
	s, err := p.Ledger().Snapshot()
	if err != nil || len(s.Slots) != 0 {
		t.Fatalf("empty ledger: %+v, %v", s, err)
	}
	w.claim(3, 9, 77)
	w.m.store(w.word(3, slotPidnsInode), 4026531836)
	w.m.store(w.word(3, slotStartTicks), 555)
	w.m.store(w.word(3, slotContainerIndex), 2|uint64(0x10000)<<32)
	w.m.store(w.word(3, slotAllocs), 11)
	w.m.store(w.word(3, slotFrees), 12)
	w.m.store(w.gpu(3, 1, slotGPUDevice), counter(9, 256))
	w.m.store(w.gpu(3, 1, slotGPUManaged), counter(9, 2))
	w.m.store(w.gpu(3, 1, slotGPUSwap), counter(8, 99)) // another generation's
	w.m.store(w.gpu(3, 1, slotGPUPeak), counter(40, 300))
	w.m.store(w.gpu(3, 1, slotGPUPeak+8), counter(41, 256))
	w.m.store(w.gpu(3, 1, slotGPUEventsMax), 1)
	w.m.store(w.gpu(3, 1, slotGPUEventsDevice), 2)
	w.m.store(w.gpu(3, 1, slotGPUEventsHigh), 3)
	w.m.store(w.word(3, slotThrottled), 4<<32)            // of GPU 1: two halves a word
	w.m.store(w.gpu(16, 0, slotGPUDevice), counter(0, 5)) // overflow
	w.m.store(headerReclaimRequest, 4)
	if s, err = p.Ledger().Snapshot(); err != nil {
		t.Fatal(err)
	}
	want := &Snapshot{ReclaimRequest: 4, Overflow: Slot{Index: 16}}
	want.Overflow.GPU[0].DeviceBytes = 5 * UnitBytes
	slot := Slot{Index: 3, Owner: Owner{9, SlotLive, 77}, PIDNSInode: 4026531836, StartTicks: 555, ContainerIndex: 2, ShimABI: 0x10000, Allocs: 11, Frees: 12}
	slot.GPU[1] = SlotGPU{DeviceBytes: 1 << 20, ManagedBytes: 8192, Peak: [2]Peak{{40, 300 * UnitBytes}, {41, 1 << 20}}, Events: SlotEvents{1, 2, 3, 4}}
	want.Slots = []Slot{slot}
	if diff := cmp.Diff(want, s); diff != "" {
		t.Error(diff)
	}
	g := &s.Slots[0].GPU[1]
	if b, ok := g.PeakDuring(40); !ok || b != 300*UnitBytes {
		t.Errorf("PeakDuring(40) = %d, %v", b, ok)
	}
	if b, ok := g.PeakDuring(1<<24 + 41); !ok || b != 1<<20 {
		t.Errorf("PeakDuring(2^24+41) = %d, %v", b, ok)
	}
	if _, ok := g.PeakDuring(42); ok {
		t.Error("PeakDuring(42) found something")
	}
	if diff := cmp.Diff(map[uint64]uint64{40: 300 * UnitBytes, 41: 1 << 20}, g.Peaks(41)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[uint64]uint64{41: 1 << 20}, g.Peaks(42)); diff != "" {
		t.Error(diff)
	}
	// Imports are believed of shims that know the field.
	for _, test := range []struct{ abi, want uint64 }{{1<<16 | 2, 0}, {1<<16 | 3, 4}, {1<<16 | 4, 4}} {
		w.m.store(int(slotOffset(3))+slotContainerIndex, test.abi<<32|2)
		w.m.store(int(slotOffset(3))+slotImports, 4)
		if s, err = p.Ledger().Snapshot(); err != nil || s.Slots[0].Imports != test.want || uint64(s.Slots[0].ShimABI) != test.abi {
			t.Errorf("shim %#x: %+v, %v", test.abi, s, err)
		}
	}
	// A hint that shrinks hides nothing that was seen.
	w.m.store(headerHighSlot, 0)
	if s, err = p.Ledger().Snapshot(); err != nil || len(s.Slots) != 1 {
		t.Errorf("after lowering high_slot: %+v, %v", s, err)
	}
	w.m.store(headerHighSlot, math.MaxUint64)
	if _, err = p.Ledger().Snapshot(); err != nil {
		t.Errorf("with a high_slot beyond the end: %v", err)
	}
}

func TestSnapshotBroken(t *testing.T) {
	for name, f := range map[string]func(*writer, *Pod){
		"magic":       func(w *writer, _ *Pod) { w.m.store(headerMagic, 0) },
		"abi":         func(w *writer, _ *Pod) { w.m.store(headerMajor, 7) },
		"total":       func(w *writer, _ *Pod) { w.m.store(headerTotalBytes, 1<<40) },
		"slots":       func(w *writer, _ *Pod) { w.m.store(headerSlotCount, 1<<31) },
		"gpus":        func(w *writer, _ *Pod) { w.m.store(headerGPUCountMax, 1) },
		"state":       func(w *writer, _ *Pod) { w.m.store(w.word(1, slotOwner), 0x01_09_00000001) },
		"no owner":    func(w *writer, _ *Pod) { w.m.store(w.word(1, slotOwner), Owner{1, SlotLive, 0}.pack()) },
		"underflow":   func(w *writer, _ *Pod) { w.m.store(w.gpu(0, 0, slotGPUDevice), counter(1, unitsMask)) },
		"overflow":    func(w *writer, _ *Pod) { w.m.store(w.gpu(4, 0, slotGPUManaged), counter(0, unitsMask-5)) },
		"cut":         func(_ *writer, p *Pod) { truncate(p.LedgerPath(), 5000) },
		"cut to 0":    func(_ *writer, p *Pod) { truncate(p.LedgerPath(), 0) },
		"grown":       func(_ *writer, p *Pod) { truncate(p.LedgerPath(), 1<<20) },
		"other magic": func(w *writer, _ *Pod) { w.m.store(headerMagic, LimitsMagic) },
	} {
		p := newPod(t, 4, true)
		w := newWriter(t, p)
		w.claim(0, 1, 10)
		w.claim(1, 1, 11)
		f(w, p)
		_, err := p.Ledger().Snapshot()
		var broken *BrokenError
		if !errors.As(err, &broken) || !errors.Is(err, ErrBroken) || broken.Why == "" || broken.Path != p.LedgerPath() {
			t.Errorf("%s: Snapshot = %v", name, err)
		}
		// Nor do the writing calls end the program or hang.
		for _, err := range []error{p.Ledger().MarkDying(3, 1), p.Ledger().Reclaim(3, 1, true)} {
			if err == nil {
				t.Errorf("%s: changing a free slot worked", name)
			}
		}
		if _, err := p.Ledger().ClearOverflow(); err != nil && !errors.Is(err, ErrBroken) {
			t.Errorf("%s: ClearOverflow = %v", name, err)
		}
		// Other pods do not notice; adopting the broken one works.
		if again, err := OpenPod(p.Dir(), Options{Plain: true}); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if err := again.Close(); err != nil {
			t.Error(err)
		}
	}
}

func truncate(path string, size int64) {
	if err := os.Truncate(path, size); err != nil {
		panic(err)
	}
}

func TestLockAndReclaim(t *testing.T) {
	p := newPod(t, 4, true)
	l := p.Ledger()
	w := newWriter(t, p)
	free := func(slot int) bool {
		t.Helper()
		ok, err := l.LockFree(slot)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if !free(1) {
		t.Error("the lock of a fresh slot is held")
	}
	w.claim(1, 0xffffff, 10)
	w.m.store(w.gpu(1, 0, slotGPUDevice), counter(0xffffff, 7))
	w.m.store(w.gpu(1, 0, slotGPUEventsMax), 7)
	if free(1) || !free(2) {
		t.Error("LockFree is wrong about a claimed slot")
	}
	if err := l.Reclaim(1, 0xffffff, false); !errors.Is(err, ErrBusy) {
		t.Errorf("reclaiming a live owner's slot: %v", err)
	}
	if err := l.MarkDying(1, 3); !errors.Is(err, ErrMoved) {
		t.Errorf("marking another generation: %v", err)
	}
	if err := l.MarkDying(1, 0xffffff); err != nil {
		t.Fatal(err)
	}
	if err := l.MarkDying(1, 0xffffff); !errors.Is(err, ErrMoved) {
		t.Errorf("marking twice: %v", err)
	}
	s, err := l.Snapshot()
	if err != nil || len(s.Slots) != 1 || s.Slots[0].State != SlotDying || s.Slots[0].GPU[0].DeviceBytes != 7*UnitBytes {
		t.Fatalf("dying slot: %+v, %v", s, err)
	}
	// The owner exited, a child still has its file: no reason to keep the slot.
	if err := l.Reclaim(1, 0xffffff, true); err != nil {
		t.Fatal(err)
	}
	if got := unpackOwner(w.m.load(w.word(1, slotOwner))); got != (Owner{Generation: 0}) {
		t.Errorf("owner after reclaim: %+v", got)
	}
	// The late write of the old owner counts for nobody.
	old := w.m.load(w.gpu(1, 0, slotGPUDevice))
	w.m.store(w.gpu(1, 0, slotGPUDevice), old+1)
	w.m.store(w.word(1, slotOwner), Owner{0, SlotLive, 12}.pack())
	if s, err = l.Snapshot(); err != nil || s.Slots[0].GPU[0].DeviceBytes != 0 {
		t.Errorf("late write counts: %+v, %v", s.Slots[0].GPU[0], err)
	}
	if err := l.Reclaim(1, 0xffffff, true); !errors.Is(err, ErrMoved) {
		t.Errorf("reclaiming a past generation: %v", err)
	}

	// Left by exec: the lock is free. The events stay for the totals.
	w.m.store(w.word(2, slotOwner), Owner{5, SlotLive, 10}.pack())
	w.m.store(w.gpu(2, 3, slotGPUEventsHigh), 99)
	if err := l.Reclaim(2, 5, false); err != nil {
		t.Fatal(err)
	}
	if got := w.m.load(w.gpu(2, 3, slotGPUEventsHigh)); got != 99 {
		t.Errorf("events after reclaim: %d", got)
	}
	if !free(2) {
		t.Error("reclaim kept the lock")
	}
	if err := l.Reclaim(2, 6, false); !errors.Is(err, ErrMoved) {
		t.Errorf("reclaiming a free slot: %v", err)
	}
	for _, slot := range []int{-1, 4, 5} {
		if _, err := l.LockFree(slot); err == nil {
			t.Errorf("slot %d was probed", slot)
		}
		if l.MarkDying(slot, 0) == nil || l.Reclaim(slot, 0, true) == nil {
			t.Errorf("slot %d was changed", slot)
		}
	}
}

// TestReclaimRaces lets a peer that found the heartbeat stale take slots over while gpufenced
// comes back and reclaims them: exactly one of the two gets each.
func TestReclaimRaces(t *testing.T) {
	p := newPod(t, 1, true)
	w := newWriter(t, p)
	taken, reclaimed := 0, 0
	for range 2000 {
		word := w.m.load(w.word(0, slotOwner))
		g := unpackOwner(word).Generation
		dead := Owner{g, SlotLive, 10}.pack()
		w.m.store(w.word(0, slotOwner), dead)
		var wg sync.WaitGroup
		peer := false
		wg.Go(func() {
			peer = w.m.swap(w.word(0, slotOwner), dead, Owner{nextGeneration(g), SlotLive, 20}.pack())
		})
		err := p.Ledger().Reclaim(0, g, true)
		wg.Wait()
		got := unpackOwner(w.m.load(w.word(0, slotOwner)))
		switch {
		case err == nil && !peer && got.State == SlotFree && got.Generation == nextGeneration(g):
			reclaimed++
		case errors.Is(err, ErrMoved) && peer && got.PID == 20 && got.State == SlotLive:
			taken++
		default:
			t.Fatalf("reclaim %v, peer %v, slot %+v", err, peer, got)
		}
	}
	t.Logf("%d reclaimed, %d taken over", reclaimed, taken)
}

func TestClearOverflow(t *testing.T) {
	p := newPod(t, 2, true)
	l := p.Ledger()
	if cleared, err := l.ClearOverflow(); cleared || err != nil {
		t.Errorf("an empty overflow slot: %v, %v", cleared, err)
	}
	w := newWriter(t, p)
	at := w.gpu(2, 0, slotGPUDevice)
	w.m.store(at, 5)
	w.m.store(w.gpu(2, 0, slotGPUEventsMax), 8)
	share := unix.Flock_t{Type: unix.F_RDLCK, Start: slotOffset(2), Len: slotBytes}
	if err := unix.FcntlFlock(w.f.Fd(), unix.F_OFD_SETLK, &share); err != nil {
		t.Fatal(err)
	}
	if cleared, err := l.ClearOverflow(); cleared || err != nil || w.m.load(at) != 5 {
		t.Errorf("an overflow slot in use: %v, %v", cleared, err)
	}
	share.Type = unix.F_UNLCK
	if err := unix.FcntlFlock(w.f.Fd(), unix.F_OFD_SETLK, &share); err != nil {
		t.Fatal(err)
	}
	if cleared, err := l.ClearOverflow(); !cleared || err != nil || w.m.load(at) != 0 || w.m.load(w.gpu(2, 0, slotGPUEventsMax)) != 8 {
		t.Errorf("an overflow slot that nobody uses: %v, %v", cleared, err)
	}
	if cleared, err := l.ClearOverflow(); cleared || err != nil {
		t.Errorf("clearing twice: %v, %v", cleared, err)
	}
	share.Type = unix.F_RDLCK
	if err := unix.FcntlFlock(w.f.Fd(), unix.F_OFD_SETLK, &share); err != nil {
		t.Errorf("clearing kept the lock: %v", err)
	}
}

func TestClosedLedger(t *testing.T) {
	p := newPod(t, 2, true)
	l := p.Ledger()
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Fatal(err)
	}
	_, a := l.Snapshot()
	_, b := l.LockFree(0)
	_, c := l.ClearOverflow()
	for i, err := range []error{a, b, c, l.MarkDying(0, 0), l.Reclaim(0, 0, true)} {
		if !errors.Is(err, fs.ErrClosed) {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

func TestTotals(t *testing.T) {
	var totals Totals
	slot := func(index int, generation uint32, e SlotEvents) *Snapshot {
		s := &Snapshot{Slots: []Slot{{Index: index, Owner: Owner{generation, SlotLive, 1}}}}
		s.Slots[0].GPU[2].Events = e
		return s
	}
	owner := "a"
	observe := func(s *Snapshot) {
		totals.Observe(s, func(s *Slot) string {
			if s.Index == 0 && s.PID == 0 {
				return "" // the overflow slot
			}
			return owner
		})
	}
	check := func(name string, want uint64) {
		t.Helper()
		if got := totals.Of("a", 2); got.Max != want {
			t.Errorf("%s: %+v, want max %d", name, got, want)
		}
	}
	observe(slot(1, 1, SlotEvents{Max: 5, Device: 1, High: 2}))
	check("first", 5)
	observe(slot(1, 1, SlotEvents{Max: 7}))
	check("grown", 7)
	observe(slot(1, 1, SlotEvents{Max: 3}))
	check("a counter that fell", 7)
	observe(slot(1, 1, SlotEvents{Max: 8}))
	check("and rose again", 8)

	// Saved and restored, with what was counted meanwhile.
	type state struct {
		Totals Totals `json:"totals"`
	}
	b, err := json.Marshal(state{totals})
	if err != nil {
		t.Fatal(err)
	}
	var back state
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	totals = back.Totals
	observe(slot(1, 1, SlotEvents{Max: 10}))
	check("after a restart", 10)
	if err := json.Unmarshal([]byte(`{"seen": 3}`), &totals); err == nil {
		t.Error("garbage was restored")
	}
	check("after garbage", 10)

	observe(slot(1, 2, SlotEvents{Max: 1}))
	check("begun anew", 11)
	observe(slot(1, 3, SlotEvents{Max: 4}))
	check("reclaimed or taken over: events go on", 14)
	owner = ""
	observe(slot(1, 3, SlotEvents{Max: 6}))
	check("nobody's", 14)
	owner = "a"
	observe(slot(1, 3, SlotEvents{Max: 6}))
	check("found later", 16)
	observe(slot(1, 3, SlotEvents{Max: math.MaxUint64}))
	observe(slot(2, 1, SlotEvents{Max: math.MaxUint64}))
	check("saturated", math.MaxUint64)
	totals.Forget("a")
	check("forgotten", 0)
}

func TestTotalsOnlyGrow(t *testing.T) {
	var totals Totals
	r := rand.New(rand.NewPCG(1, 2))
	last := map[string]SlotEvents{}
	for range 5000 {
		s := &Snapshot{}
		for i := range r.IntN(4) {
			slot := Slot{Index: i, Owner: Owner{uint32(r.IntN(3)), SlotLive, 1}}
			slot.GPU[0].Events = SlotEvents{r.Uint64N(10), r.Uint64N(1 << r.IntN(64)), r.Uint64(), r.Uint64N(1 << 32)}
			s.Slots = append(s.Slots, slot)
		}
		totals.Observe(s, func(s *Slot) string { return string(rune('a' + r.IntN(2))) })
		for _, c := range []string{"a", "b"} {
			now := totals.Of(c, 0)
			if now.Max < last[c].Max || now.Device < last[c].Device || now.High < last[c].High || now.ThrottledMS < last[c].ThrottledMS {
				t.Fatalf("%s went from %+v to %+v", c, last[c], now)
			}
			last[c] = now
		}
	}
}

// FuzzParseLedger feeds the parser what a container may write. It must neither panic nor let a
// number through that cannot be.
func FuzzParseLedger(f *testing.F) {
	const slots = 4
	whole := make([]byte, headerBytes+(slots+1)*slotBytes)
	le := binary.LittleEndian
	le.PutUint64(whole[headerMagic:], LedgerMagic)
	le.PutUint16(whole[headerMajor:], ABIMajor)
	le.PutUint32(whole[headerHeaderBytes:], ledgerHeaderBytes)
	le.PutUint64(whole[headerTotalBytes:], uint64(ledgerBytes(slots)))
	le.PutUint32(whole[headerSlotCount:], slots)
	le.PutUint32(whole[headerSlotBytes:], slotBytes)
	le.PutUint32(whole[headerGPUCountMax:], GPUs)
	f.Add(whole, uint16(0))
	live := bytes.Clone(whole)
	le.PutUint64(live[headerBytes+slotOwner:], Owner{3, SlotLive, 9}.pack())
	le.PutUint64(live[headerBytes+slotGPU:], counter(3, 1000))
	f.Add(live, uint16(slots))
	under := bytes.Clone(live)
	le.PutUint64(under[headerBytes+slotGPU:], counter(3, unitsMask))
	f.Add(under, uint16(2))
	f.Add([]byte{}, uint16(1))
	f.Fuzz(func(t *testing.T, b []byte, n uint16) {
		head := b[:min(len(b), headerBytes)]
		rest := b[len(head):]
		overflow := rest[max(0, len(rest)-slotBytes):]
		read := rest[:min(len(rest), int(n%(slots+1))*slotBytes)]
		s, why := parseLedger(head, read, overflow, slots)
		if (s == nil) == (why == "") {
			t.Fatalf("snapshot %v, why %q", s, why)
		}
		if s == nil {
			return
		}
		for _, slot := range append(s.Slots, s.Overflow) {
			if slot.Index > slots || slot.Index < slots && (slot.PID == 0 || slot.State != SlotLive && slot.State != SlotDying) {
				t.Fatalf("slot %+v", slot.Owner)
			}
			for _, g := range slot.GPU {
				if limit := unitsMask / 2 * UnitBytes; g.DeviceBytes > limit || g.ManagedBytes > limit || g.SwapBytes > limit || g.Peak[0].Bytes > limit || g.Peak[1].Bytes > limit {
					t.Fatalf("slot %d: %+v", slot.Index, g)
				}
			}
		}
	})
}

// FuzzParseLimits does the same for a limits page.
func FuzzParseLimits(f *testing.F) {
	page := make([]byte, limitsBytes)
	f.Add(page)
	le := binary.LittleEndian
	le.PutUint64(page[limitsMagic:], LimitsMagic)
	le.PutUint16(page[limitsMajor:], ABIMajor)
	le.PutUint32(page[limitsHeaderBytes:], limitsCopies)
	le.PutUint32(page[limitsGPUSize:], limitsGPUBytes)
	le.PutUint32(page[limitsCopySize:], limitsCopyBytes)
	copy(page[limitsCopies:], encodeCopy(sampleLimits))
	f.Add(page)
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := parseLimits("page", b)
		if err != nil && !errors.Is(err, ErrBroken) {
			t.Fatal(err)
		}
		if err == nil && len(v.GPU) > GPUs {
			t.Fatalf("%d GPUs", len(v.GPU))
		}
	})
}

// TestSnapshotAgain looks at a ledger again and again: the same snapshot while nothing has changed,
// another one after any change of the pod's GPUs, and an error soon after anything else was done to it.
func TestSnapshotAgain(t *testing.T) {
	for name, hurt := range map[string]func(t *testing.T, path string){
		"cut to nothing": func(t *testing.T, path string) { truncateTo(t, path, 0) },
		"cut in a page":  func(t *testing.T, path string) { truncateTo(t, path, ledgerBytes(8)-8) },
		"grown":          func(t *testing.T, path string) { truncateTo(t, path, ledgerBytes(8)+8) },
		"scribbled where no GPU is": func(t *testing.T, path string) {
			writeWord(t, path, slotOffset(8)+slotGPU+5*slotGPUBytes, unitsMask)
		},
		"a slot in no state": func(t *testing.T, path string) { writeWord(t, path, slotOffset(0)+slotOwner, 7<<32) },
	} {
		t.Run(name, func(t *testing.T) {
			p, err := CreatePod(t.TempDir(), Options{Plain: true, Slots: 8})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			l := p.Ledger()
			writeWord(t, p.LedgerPath(), headerHighSlot, 1)
			first, err := l.SnapshotOf(1)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 * wholeEvery {
				if again, err := l.SnapshotOf(1); err != nil || again != first {
					t.Fatalf("%p, %v, want %p", again, err, first)
				}
			}
			writeWord(t, p.LedgerPath(), slotOffset(0)+slotOwner, Owner{Generation: 1, State: SlotLive, PID: 7}.pack())
			writeWord(t, p.LedgerPath(), slotOffset(0)+slotGPU+slotGPUDevice, 1<<unitsBits|3)
			second, err := l.SnapshotOf(1)
			if err != nil || second == first || len(second.Slots) != 1 || second.Slots[0].GPU[0].DeviceBytes != 3*UnitBytes {
				t.Fatalf("%+v, %v", second, err)
			}
			hurt(t, p.LedgerPath())
			for range wholeEvery {
				if _, err = l.SnapshotOf(1); err != nil {
					break
				}
			}
			if !errors.Is(err, ErrBroken) {
				t.Errorf("%v", err)
			}
		})
	}
}

// A glance may find late what is in the head of a slot alone, a peek what is in a slot, and nothing
// else; and what we have changed ourselves never.
func TestGlance(t *testing.T) {
	word := func(at int64, word uint64) func(*testing.T, *Pod) {
		return func(t *testing.T, p *Pod) { writeWord(t, p.LedgerPath(), at, word) }
	}
	const (
		header = iota // what is looked at each time
		ours          // what we have changed ourselves, of which a look knows
		charges
		heads
	)
	for name, c := range map[string]struct {
		change func(*testing.T, *Pod)
		where  int
	}{
		"a charge":                              {word(slotOffset(1)+slotGPU+slotGPUDevice, 1<<unitsBits|4), charges},
		"a peak":                                {word(slotOffset(0)+slotGPU+slotGPUPeak+8, 9<<unitsBits|4), charges},
		"a refusal":                             {word(slotOffset(1)+slotGPU+slotGPUEventsMax, 1), charges},
		"the high slot":                         {word(headerHighSlot, 3), header},
		"a request":                             {word(headerReclaimRequest, 3), header},
		"marked by us":                          {func(t *testing.T, p *Pod) { noError(t, p.Ledger().MarkDying(1, 1)) }, ours},
		"reclaimed by us":                       {func(t *testing.T, p *Pod) { noError(t, p.Ledger().Reclaim(0, 1, true)) }, ours},
		"imports":                               {word(slotOffset(1)+slotImports, 1), heads},
		"an owner":                              {word(slotOffset(0)+slotOwner, 0), heads},
		"an unfounded use of the overflow slot": {word(slotOffset(8)+slotGPU+slotGPUDevice, 4), heads},
	} {
		made := func(t *testing.T) *Pod {
			p, err := CreatePod(t.TempDir(), Options{Plain: true, Slots: 8})
			noError(t, err)
			writeWord(t, p.LedgerPath(), headerHighSlot, 2)
			for slot := range 2 {
				writeWord(t, p.LedgerPath(), slotOffset(slot)+slotShimABI-4, importsABI<<32)
				writeWord(t, p.LedgerPath(), slotOffset(slot)+slotOwner, Owner{Generation: 1, State: SlotLive, PID: 7}.pack())
			}
			return p
		}
		for _, l := range []struct {
			name string
			look func(*Ledger) (*Snapshot, error)
			most [heads + 1]int // looks until it is found
		}{
			{"glance", func(l *Ledger) (*Snapshot, error) { return l.GlanceOf(1) }, [...]int{1, 1, 1, headsEvery}},
			{"peek", func(l *Ledger) (*Snapshot, error) { return l.PeekOf(1) }, [...]int{1, 1, slotsEvery, 2 * slotsEvery}},
		} {
			for before := range wholeEvery { // wherever it stands between two looks that look at more
				t.Run(fmt.Sprint(name, " by a ", l.name, " after ", before), func(t *testing.T) {
					p := made(t)
					defer p.Close()
					first, err := l.look(p.Ledger())
					noError(t, err)
					for range before {
						if again, err := l.look(p.Ledger()); err != nil || again != first {
							t.Fatalf("%p, %v, want %p", again, err, first)
						}
					}
					c.change(t, p)
					looks := 0
					for now := first; now == first && looks <= l.most[c.where]; looks++ {
						now, err = l.look(p.Ledger())
						noError(t, err)
					}
					if looks > l.most[c.where] {
						t.Errorf("it was not found by look %d", l.most[c.where])
					}
				})
			}
			t.Run(name+" in a snapshot after a "+l.name, func(t *testing.T) {
				p := made(t)
				defer p.Close()
				first, err := p.Ledger().SnapshotOf(1)
				noError(t, err)
				for range 2 {
					_, err = l.look(p.Ledger())
					noError(t, err)
				}
				c.change(t, p)
				if now, err := p.Ledger().SnapshotOf(1); err != nil || now == first {
					t.Errorf("%p, %v", now, err)
				}
			})
		}
	}
	t.Run("a glance sees what peeks have left out", func(t *testing.T) {
		p, err := CreatePod(t.TempDir(), Options{Plain: true, Slots: 8})
		noError(t, err)
		defer p.Close()
		writeWord(t, p.LedgerPath(), headerHighSlot, 1)
		first, err := p.Ledger().PeekOf(1)
		noError(t, err)
		writeWord(t, p.LedgerPath(), slotOffset(0)+slotGPU+slotGPUDevice, 4)
		if now, err := p.Ledger().PeekOf(1); err != nil || now != first {
			t.Fatalf("%p, %v: a peek looks at slots", now, err)
		}
		if now, err := p.Ledger().GlanceOf(1); err != nil || now == first {
			t.Errorf("%p, %v", now, err)
		}
	})
	t.Run("the overflow slot when all slots are used", func(t *testing.T) {
		p, err := CreatePod(t.TempDir(), Options{Plain: true, Slots: 8})
		noError(t, err)
		defer p.Close()
		writeWord(t, p.LedgerPath(), headerHighSlot, 8)
		first, err := p.Ledger().GlanceOf(1)
		noError(t, err)
		writeWord(t, p.LedgerPath(), slotOffset(8)+slotGPU+slotGPUDevice, 4)
		if now, err := p.Ledger().GlanceOf(1); err != nil || now == first {
			t.Errorf("%p, %v", now, err)
		}
	})
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func truncateTo(t *testing.T, path string, size int64) {
	t.Helper()
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

func writeWord(t *testing.T, path string, at int64, word uint64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, word), at); err != nil {
		t.Fatal(err)
	}
}
