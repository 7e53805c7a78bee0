// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// onKernel skips, loudly, where nobody may load programs.
func onKernel(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 && runtime.GOARCH == "amd64" {
		return
	}
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatal("needs root on x86-64")
	}
	t.Skip("SKIPPED: needs root on x86-64")
}

// bpffs is a bpf filesystem of the test's own.
func bpffs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatalf("mount a bpf filesystem: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the bpf filesystem: %v", err)
		}
	})
	return dir
}

// left is what lies below a folder.
func left(t *testing.T, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if path != dir {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// typed checks that an error of the kernel's is one of ours, with a reason that can be, and without a verifier's log.
func typed(t *testing.T, err error) *Error {
	t.Helper()
	var missing *Error
	if !errors.As(err, &missing) {
		t.Fatalf("no typed reason: %v", err)
	}
	if !slices.Contains([]Reason{ReasonRefused, ReasonTooOld, ReasonNoBTF}, missing.Reason) || missing.What == "" || strings.Contains(err.Error(), "\n") {
		t.Errorf("reason %q: %v", missing.Reason, err)
	}
	return missing
}

// TestThisKernel asks the kernel that the test runs on, whatever it is, for the gate: it opens and goes without a trace,
// or the reason is typed and nothing is left.
func TestThisKernel(t *testing.T) {
	onKernel(t)
	spec, err := loadGate()
	if err != nil {
		t.Fatal(err)
	}
	takes := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		c, err := load([]string{name}, nil, nil)
		if takes[name] = err == nil; err != nil {
			t.Logf("%s (%s): %s: %v", name, spec.Programs[name].SectionName, typed(t, err).Reason, err)
			continue
		}
		c.Close()
		t.Logf("%s (%s): taken", name, spec.Programs[name].SectionName)
	}
	if !takes["adjust_usage"] {
		t.Error("not even the program that hangs on nothing is taken")
	}
	for _, carrier := range []Carrier{CarrierLSM, CarrierFmodRet} {
		t.Run(string(carrier), func(t *testing.T) {
			dir := bpffs(t)
			pins := filepath.Join(dir, "gpufence", PinVersion)
			all := true
			for _, name := range slices.Concat(always, doors[carrier]) {
				all = all && takes[name]
			}
			own := left(t, dir) // the kernel's
			if err := TryLoad(carrier); (err == nil) != all {
				t.Errorf("each program by itself is taken: %v, all together: %v", all, err)
			}
			g, err := Open(pins, carrier)
			if err != nil {
				t.Logf("%s: %v", typed(t, err).Reason, err)
				if names := left(t, dir); !slices.Equal(names, own) {
					t.Errorf("left behind: %v", names)
				}
				return
			}
			t.Log("opened")
			if !all {
				t.Error("it was opened with programs that the kernel does not take")
			}
			if err := g.Remove(); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(pins); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("left behind: %v", left(t, pins))
			}
		})
	}
}

// TestRefusedLeavesAnEarlierOnesPins: what lies there already may hold running containers.
func TestRefusedLeavesAnEarlierOnesPins(t *testing.T) {
	onKernel(t)
	if TryLoad(CarrierLSM) == nil {
		t.Log("this kernel refuses nothing")
		return
	}
	pins := filepath.Join(bpffs(t), "gpufence", PinVersion)
	earlier := accounts(t)
	if err := os.MkdirAll(filepath.Join(pins, "maps"), 0o700); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(pins, "maps", "usages")
	if err := earlier.maps["usages"].Pin(kept); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(pins, CarrierLSM); err == nil {
		t.Fatal("it was opened with programs that the kernel does not take")
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("the account of an earlier one: %v", err)
	}
}

// TestAdoptingAnotherLayout: maps of another layout are left alone, and said to be.
func TestAdoptingAnotherLayout(t *testing.T) {
	onKernel(t)
	pins := filepath.Join(bpffs(t), "gpufence", PinVersion)
	if err := os.MkdirAll(filepath.Join(pins, "maps"), 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	kept := filepath.Join(pins, "maps", "usages")
	if err := m.Pin(kept); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(pins, CarrierLSM); err == nil || !strings.Contains(err.Error(), "usages: it has another layout") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("it was taken away: %v", err)
	}
}

// TestSupersede: what other versions have pinned goes, with what their links hold, and nothing else.
func TestSupersede(t *testing.T) {
	dir := filepath.Join(bpffs(t), "gpufence")
	g := accounts(t)
	g.dir = filepath.Join(dir, PinVersion)
	for _, name := range []string{PinVersion, "v1", "v10", "v", "vm", "other"} {
		if err := os.MkdirAll(filepath.Join(dir, name, "maps"), 0o700); err != nil {
			t.Fatal(err)
		}
		m, err := g.maps["usages"].Clone()
		if err == nil {
			err = errors.Join(m.Pin(filepath.Join(dir, name, "maps", "usages")), m.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	there := func() (names []string) {
		t.Helper()
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if err := g.Supersede(); err != nil {
		t.Fatal(err)
	}
	if names := there(); !slices.Equal(names, []string{"other", "v", PinVersion, "vm"}) {
		t.Errorf("superseded: %v", names)
	}
	if err := os.Mkdir(filepath.Join(dir, "v1"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Unpin(g.dir); err != nil {
		t.Fatal(err)
	}
	if names := there(); !slices.Equal(names, []string{"other", "v", "vm"}) {
		t.Errorf("unpinned: %v", names)
	}
	if err := Unpin(g.dir); err != nil {
		t.Errorf("a second time: %v", err)
	}
	// A folder of another name is one of ours alone.
	if err := Unpin(filepath.Join(dir, "vm")); err != nil {
		t.Fatal(err)
	}
	if names := there(); !slices.Equal(names, []string{"other", "v"}) {
		t.Errorf("another's name: %v", names)
	}
	g.dir = filepath.Join(dir, "other", "maps", "usages", PinVersion)
	if err := g.Supersede(); err == nil {
		t.Error("where no folder can be, nothing was said")
	}
}

// TestAnAccountHasABirth: two of the same cgroup are told apart, and a changed policy leaves it.
func TestAnAccountHasABirth(t *testing.T) {
	g := accounts(t)
	born := func() uint64 {
		t.Helper()
		if err := g.SetPolicy(7, Policy{LimitBytes: 1}); err != nil {
			t.Fatal(err)
		}
		var u gateUsage
		if err := g.maps["usages"].Lookup(uint64(7), &u); err != nil {
			t.Fatal(err)
		}
		return u.Born
	}
	first, changed := born(), born()
	if err := g.DropPolicy(7); err != nil {
		t.Fatal(err)
	}
	if next := born(); first == 0 || changed != first || next <= first {
		t.Errorf("born %d, after a change %d, made anew %d", first, changed, next)
	}
}

// accounts is a gate of maps and the program that adjusts accounts: what kernels take that refuse the doors.
func accounts(t testing.TB) *Gate {
	t.Helper()
	onKernel(t)
	c, err := load([]string{"adjust_usage"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return &Gate{maps: c.Maps, progs: c.Programs}
}

// TestAccounts are in this kernel's maps.
func TestAccounts(t *testing.T) {
	g := accounts(t)
	const cgroup = 1 << 40
	if _, err := g.Adjust(cgroup, 1, false); !errors.Is(err, ErrUnmanaged) {
		t.Errorf("of nobody: %v", err)
	}
	if err := g.SetPolicy(cgroup, Policy{LimitBytes: 100, Minors: []int{0, 255}, GPU: true, Enforce: true}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		bytes      int64
		reset      bool
		used, peak uint64
	}{{70, false, 70, 70}, {-20, false, 50, 50}, {0, true, 50, 50}, {-50, false, 0, 50}, {30, false, 30, 50}, {0, true, 30, 50}, {0, false, 30, 30}} {
		u, err := g.Adjust(cgroup, tt.bytes, tt.reset)
		if err != nil || u.Used != tt.used || u.Peak != tt.peak || u.Charged != 0 || u.Credited != 0 {
			t.Errorf("%+d: %+v, %v", tt.bytes, u, err)
		}
	}
	for _, tt := range []struct {
		bytes, credited uint64
		done            bool
	}{{10, 1, false}, {10, 0, true}} {
		if done, err := g.GiveBack(cgroup, tt.bytes, tt.credited); err != nil || done != tt.done {
			t.Errorf("give back %d, judged when %d were credited: %v, %v", tt.bytes, tt.credited, done, err)
		}
	}
	if _, err := g.Adjust(cgroup, 10, true); err != nil {
		t.Fatal(err)
	}
	var sum int64
	if err := g.maps["adjusted"].Lookup(uint64(cgroup), &sum); err != nil || sum != 30 {
		t.Errorf("adjusted by %d, %v", sum, err)
	}
	if err := g.SetDevices([]Device{{Major: 512, Kind: KindClosed}}); err == nil || !strings.Contains(err.Error(), "512:0") {
		t.Errorf("a device that there cannot be was guarded: %v", err)
	}
	if err := g.SetPolicy(cgroup, Policy{Minors: []int{256}}); err == nil {
		t.Error("a GPU that there cannot be was granted")
	}
	if err := g.DropPolicy(cgroup); err != nil {
		t.Error(err)
	}
	if err := g.maps["adjusted"].Lookup(uint64(cgroup), &sum); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("the sum of who has ended: %v", err)
	}
	if err := g.DropPolicy(cgroup); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

// TestChangedPoliciesBeginAGeneration: else tasks would be judged by what they know of policies that were.
func TestChangedPoliciesBeginAGeneration(t *testing.T) {
	g := accounts(t)
	const cgroup = 1 << 40
	generation := func() (n uint64) {
		if err := g.maps["counters"].Lookup(uint32(gateCounterGENERATION), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	set := func() error { return g.SetPolicy(cgroup, Policy{LimitBytes: 1}) }
	drop := func() error { return g.DropPolicy(cgroup) }
	adjust := func() error { _, err := g.Adjust(cgroup, 1, false); return err }
	for i, tt := range []struct {
		do     func() error
		begins uint64
	}{{set, 1}, {set, 1}, {adjust, 0}, {drop, 1}, {drop, 1}} {
		before := generation()
		if err := tt.do(); err != nil {
			t.Fatal(err)
		}
		if n := generation() - before; n != tt.begins {
			t.Errorf("step %d: %d generations began, want %d", i, n, tt.begins)
		}
	}
}

// FuzzAdopted: whatever lies in the maps that were adopted, gpufenced brings them to what it wants, and knows who is
// managed.
func FuzzAdopted(f *testing.F) {
	g := accounts(f)
	f.Add([]byte("\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00"))
	f.Add([]byte(strings.Repeat("\xff", 160)))
	f.Add([]byte{})
	clearMap := func(t *testing.T, name string) {
		t.Helper()
		m := g.maps[name]
		for {
			key, err := m.NextKeyBytes(nil)
			if err != nil {
				t.Fatal(err)
			}
			if key == nil {
				return
			}
			if err := m.Delete(key); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, name := range []string{"policies", "usages", "devices", "exempt", "adjusted", "tainted"} {
			clearMap(t, name)
			m := g.maps[name]
			key, value := int(m.KeySize()), int(m.ValueSize())
			for rest := b; len(rest) >= key; rest = rest[min(len(rest), key+value):] {
				v := make([]byte, value)
				copy(v, rest[key:])
				if err := m.Put(rest[:key], v); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := []uint64{}
		var id uint64
		var p gatePolicy
		it := g.maps["policies"].Iterate()
		for it.Next(&id, &p) {
			if p.Flags&uint32(gatePolicyFlagsF_CANARY) == 0 {
				want = append(want, id)
			}
		}
		slices.Sort(want)
		managed, err := g.Managed()
		if err != nil || !slices.Equal(managed, want) {
			t.Fatalf("managed %v, want %v: %v", managed, want, err)
		}
		devices := []Device{{195, 255, KindCTL}, {195, 0, KindGPU}}
		if err := g.SetDevices(devices); err != nil {
			t.Fatal(err)
		}
		var number, kind uint32
		it = g.maps["devices"].Iterate()
		found := 0
		for it.Next(&number, &kind) {
			i := slices.IndexFunc(devices, func(d Device) bool { return d.key() == number })
			switch {
			case i >= 0 && devices[i].value() == kind:
				found++
			case i >= 0 || Kind(kind&0xff) != kindCanary:
				t.Errorf("device %#x is of kind %#x", number, kind)
			}
		}
		if found != len(devices) {
			t.Errorf("%d devices are guarded", found)
		}
		var looked uint32
		if err := g.maps["majors"].Lookup(uint32(195), &looked); err != nil || looked != 1 {
			t.Errorf("devices of their major number are not looked at: %d, %v", looked, err)
		}
		exempt := []uint64{7, 1 << 50}
		if err := g.SetExempt(exempt); err != nil {
			t.Fatal(err)
		}
		var have []uint64
		var v uint32
		it = g.maps["exempt"].Iterate()
		for it.Next(&id, &v) {
			have = append(have, id)
		}
		slices.Sort(have)
		if !slices.Equal(have, exempt) {
			t.Errorf("exempt: %v", have)
		}
		// Everybody can be managed anew, adjusted, and let go.
		for _, id := range append(managed, 9) {
			if err := g.SetPolicy(id, Policy{LimitBytes: 1, Enforce: true}); err != nil {
				t.Fatal(err)
			}
			before, err := g.Adjust(id, 0, false)
			if err != nil {
				t.Fatal(err)
			}
			after, err := g.Adjust(id, 5, true)
			if err != nil || after.Used != before.Used+5 || after.Peak < after.Used {
				t.Errorf("%+v after %+v: %v", after, before, err)
			}
			if err := g.DropPolicy(id); err != nil {
				t.Fatal(err)
			}
		}
		if managed, err = g.Managed(); err != nil || len(managed) > 0 {
			t.Errorf("still managed: %v, %v", managed, err)
		}
	})
}

// FuzzForDriver: whatever the driver calls itself, only versions in the table are said to be.
func FuzzForDriver(f *testing.F) {
	for _, v := range []string{"570.133.20", "", "525", "-1.2", "99999999999999999999.1", "596.1", " 570.1", "0570.1"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, version string) {
		abi, ok := ForDriver(version)
		if abi.NVOS21Status != 24 && abi.NVOS21Status != 28 || abi.NVOS64Status >= abi.NVOS64Bytes || abi.NVOS64Bytes > 48 ||
			abi.ParamsBytes != 0 && abi.ParamsBytes != 120 && abi.ParamsBytes != 128 {
			t.Errorf("%q: %+v", version, abi)
		}
		if ok != (abi.ParamsBytes != 0) || abi.Known && !ok {
			t.Errorf("%q: known %v, in the table %v: %+v", version, abi.Known, ok, abi)
		}
	})
}
