// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// fakeGate is a kernel that does as it is told.
type fakeGate struct {
	bpf      bpf.Settings
	devices  []bpf.Device
	exempt   []uint64
	policies map[uint64]bpf.Policy
	usage    map[uint64]*bpf.Usage
	carrier  bpf.Carrier
	copies   bpf.Copies
	misses   uint64
	failing  error // of Configure and Supersede
	history  []bpf.Settings
	events   chan bpf.Event
	between  func(*bpf.Usage) // its account was read and what is given back
	// superseded are who was managed when the gate of another version was taken down.
	superseded []uint64
}

func (f *fakeGate) Configure(s bpf.Settings) error {
	if f.failing != nil {
		return f.failing
	}
	f.bpf, f.history = s, append(f.history, s)
	return nil
}
func (f *fakeGate) SetDevices(d []bpf.Device) error   { f.devices = d; return nil }
func (f *fakeGate) SetExempt(c []uint64) error        { f.exempt = c; return nil }
func (f *fakeGate) DropPolicy(c uint64) error         { delete(f.policies, c); delete(f.usage, c); return nil }
func (f *fakeGate) AttachCopies() (bpf.Copies, error) { f.copies = bpf.CopiesBTF; return f.copies, nil }
func (f *fakeGate) ReleaseCopies() error              { f.copies = bpf.CopiesNone; return nil }
func (f *fakeGate) Carrier() bpf.Carrier              { return f.carrier }
func (f *fakeGate) Copies() bpf.Copies                { return f.copies }
func (f *fakeGate) Release() string                   { return "6.12.0" }
func (f *fakeGate) Misses() (uint64, error)           { return f.misses, nil }
func (f *fakeGate) Events(ctx context.Context, tell func(bpf.Event)) error {
	for {
		select {
		case e := <-f.events:
			tell(e)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
func (f *fakeGate) Close() error { return nil }
func (f *fakeGate) Supersede() error {
	f.superseded = slices.Sorted(maps.Keys(f.policies))
	return f.failing
}
func (f *fakeGate) Managed() ([]uint64, error) {
	var ids []uint64
	for id := range f.policies {
		ids = append(ids, id)
	}
	return ids, nil
}
func (f *fakeGate) SetPolicy(c uint64, p bpf.Policy) error {
	f.policies[c] = p
	if f.usage[c] == nil {
		f.usage[c] = &bpf.Usage{}
	}
	return nil
}
func (f *fakeGate) Adjust(c uint64, n int64, _ bool) (bpf.Usage, error) {
	u := f.usage[c]
	if u == nil {
		return bpf.Usage{}, bpf.ErrUnmanaged
	}
	u.Used = uint64(int64(u.Used) + n)
	return *u, nil
}

func (f *fakeGate) GiveBack(c, bytes, credited uint64) (bool, error) {
	u := f.usage[c]
	if u == nil {
		return false, bpf.ErrUnmanaged
	}
	if f.between != nil {
		f.between(u)
	}
	if u.Credited != credited {
		return false, nil
	}
	u.Used -= bytes
	return true, nil
}

// gateAt is a gate with a fake kernel and a /proc of one GPU with minor number 3.
func gateAt(t *testing.T, word string, strict bool) (*Gate, *fakeGate, Subject) {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"proc/devices": "Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n", "proc/self/cgroup": "0::/system.slice/gpufenced.service\n",
		"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t A100\nGPU UUID: \t GPU-a\nDevice Minor: \t 3\n",
		"cg/pod/main/x": "", "cg/system.slice/x": "",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	k := &fakeGate{policies: map[uint64]bpf.Policy{}, usage: map[uint64]*bpf.Usage{}, carrier: bpf.CarrierLSM}
	f := NewGate(GateOptions{Word: word, Strict: strict, CgroupRoot: filepath.Join(root, "cg"), Proc: filepath.Join(root, "proc"), Sys: filepath.Join(root, "sys"), Settle: time.Second})
	f.opts.Kernel = k
	f.Open(t.Context())
	if err := f.Driver("570.133.20"); err != nil {
		t.Fatal(err)
	}
	s := subject("GPU-a")
	s.Cgroup, s.PodCgroup = filepath.Join(root, "cg/pod/main"), filepath.Join(root, "cg/pod")
	s.Grant.Container = map[string]quota.Limits{"GPU-a": {Max: 4 << 30}}
	s.Grant.Pod = map[string]quota.Limits{"GPU-a": {Max: 6 << 30}}
	return f, k, s
}

func TestGateLevels(t *testing.T) {
	for _, tt := range []struct {
		word    string
		strict  bool
		carrier bpf.Carrier
		level   quota.Level
		state   State
		say     string
	}{
		{GateAuto, false, bpf.CarrierLSM, quota.LevelNone, Degraded, "counts only"},
		{GateAudit, true, bpf.CarrierLSM, quota.LevelNone, Degraded, "counts only"},
		{GateEnforce, false, bpf.CarrierLSM, quota.LevelReactive, Proven, ""},
		{GateEnforce, true, bpf.CarrierFmodRet, quota.LevelReactive, Proven, ""},
		{GateEnforce, true, bpf.CarrierLSM, quota.LevelHard, Proven, ""},
	} {
		f, k, s := gateAt(t, tt.word, tt.strict)
		k.carrier = tt.carrier
		if _, err := f.Raise(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		st := f.State(s, "GPU-a")
		if f.Level() != tt.level || st.State != tt.state || !strings.Contains(st.Why, tt.say) {
			t.Errorf("%s strict=%v %s: level %s, %+v", tt.word, tt.strict, tt.carrier, f.Level(), st)
		}
	}
}

func TestGateRaiseAndLower(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	own, err := cgroupID(s.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	pod, err := cgroupID(s.PodCgroup)
	if err != nil {
		t.Fatal(err)
	}
	p := k.policies[own]
	if p.LimitBytes != 4<<30+gateMargin(4<<30) || !p.Enforce || !p.GPU || !slices.Equal(p.Minors, []int{3}) {
		t.Errorf("container: %+v", p)
	}
	if p := k.policies[pod]; p.LimitBytes != 6<<30+gateMargin(6<<30) || !p.Enforce {
		t.Errorf("pod: %+v", p)
	}
	k.policies[77] = bpf.Policy{} // of a container that ended while nobody watched
	if err := f.Adopt(); err != nil || len(k.policies) != 2 {
		t.Errorf("%v, %v", err, k.policies)
	}
	if err := f.Supersede(); err != nil {
		t.Error(err)
	}
	if want := []uint64{min(own, pod), max(own, pod)}; !slices.Equal(k.superseded, want) {
		t.Errorf("while %v were managed another version's gate was taken down, want %v", k.superseded, want)
	}
	k.failing = errors.New("read-only file system")
	if err := f.Supersede(); !errors.Is(err, k.failing) {
		t.Errorf("another version's gate stays, and nobody says so: %v", err)
	}
	k.failing = nil
	s.Observed = true
	if err := f.Resize(t.Context(), s); err != nil || k.policies[own].Enforce {
		t.Errorf("observed, it refuses: %v", err)
	}
	if err := f.Lower(t.Context(), s); err != nil || len(k.policies) != 0 {
		t.Errorf("%v, %v", err, k.policies)
	}
}

// TestGateHoldsAContainerToItsPod: most containers have no limit of their own, and the kernel is told their pod's, also
// where the pod has no cgroup that could be held.
func TestGateHoldsAContainerToItsPod(t *testing.T) {
	const pod = 6<<30 + 6<<30/100
	for _, tt := range []struct {
		name  string
		own   uint64
		alone bool
		known bool // the pod's cgroup
		want  uint64
		state State
	}{
		{"pod's cgroup known", quota.Unlimited, false, true, pod, Proven},
		{"pod's cgroup unknown", quota.Unlimited, false, false, pod, Degraded},
		{"alone", quota.Unlimited, true, false, pod, Proven},
		{"more than its pod", 7 << 30, false, false, pod, Degraded},
		{"less than its pod", 1 << 30, false, true, 1<<30 + gateMargin(1<<30), Proven},
	} {
		f, k, s := gateAt(t, GateEnforce, false)
		s.Grant.Container = map[string]quota.Limits{"GPU-a": {Max: tt.own}}
		s.Alone = tt.alone
		if !tt.known {
			s.PodCgroup = ""
		}
		if _, err := f.Raise(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		own, err := cgroupID(s.Cgroup)
		if err != nil {
			t.Fatal(err)
		}
		if got := k.policies[own].LimitBytes; got != tt.want {
			t.Errorf("%s: the kernel holds it to %d, want %d", tt.name, got, tt.want)
		}
		if st := f.State(s, "GPU-a"); st.State != tt.state {
			t.Errorf("%s: %+v", tt.name, st)
		}
	}
}

// TestGateGivesBackOnce: a file closes after its account was read, and takes off itself what is to be given back.
func TestGateGivesBackOnce(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	own, err := cgroupID(s.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	pod, err := cgroupID(s.PodCgroup)
	if err != nil {
		t.Fatal(err)
	}
	const left, gone = 1 << 30, 2 << 30
	*k.usage[own] = bpf.Usage{Used: left + gone, Charged: left + gone, Ended: left + gone, Peak: left + gone}
	*k.usage[pod] = *k.usage[own]
	closes := true
	k.between = func(u *bpf.Usage) {
		if closes {
			for _, a := range []*bpf.Usage{u, k.usage[pod]} {
				a.Used, a.Credited, a.Peak = a.Used-gone, a.Credited+gone, left
			}
		}
		closes = false
	}
	for i := range 40 {
		if _, _, err := f.Sample(s.ID, "GPU-a", time.Duration(i)*100*time.Millisecond, 0, left, 0); err != nil {
			t.Fatal(err)
		}
		if u := k.usage[own].Used; u < left {
			t.Fatalf("sample %d: %d charged of %d", i, u, uint64(left))
		}
	}
	if closes || k.usage[own].Used != left || k.usage[pod].Used != left {
		t.Errorf("%d, and of the pod %d, charged of %d", k.usage[own].Used, k.usage[pod].Used, uint64(left))
	}
}

func TestGateOfAnUnknownGPUIsDegraded(t *testing.T) {
	f, _, s := gateAt(t, GateEnforce, false)
	s.Grant.GPUs = []quota.GPU{{UUID: "GPU-b"}}
	if _, err := f.Raise(t.Context(), s); err == nil || f.State(s, "GPU-b").State != Degraded {
		t.Errorf("%v, %+v", err, f.State(s, "GPU-b"))
	}
}

func TestGateQuiesceLetsTheModuleGo(t *testing.T) {
	f, k, _ := gateAt(t, GateEnforce, true)
	if !k.bpf.Commits || k.copies == bpf.CopiesNone {
		t.Fatalf("%+v", k.bpf)
	}
	if err := f.Quiesce(); err != nil || k.bpf.Commits || k.copies != bpf.CopiesNone {
		t.Errorf("%v, %+v", err, k.bpf)
	}
	if f.Level() != quota.LevelReactive {
		t.Errorf("level %s without the module", f.Level())
	}
}

func TestGateDeniesUnmanaged(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	if err := f.DenyUnmanaged(true, []string{"exe:/usr/bin/x", "comm:x", "cgroup:/pod/dcgm-*"}); err != nil || !k.bpf.CloseUnmanaged || len(k.exempt) != 1 {
		t.Errorf("%v, %+v, %v", err, k.bpf, k.exempt)
	}
	// An exempt cgroup that comes later is exempt, too, and one that has gone is forgotten.
	dcgm := filepath.Join(s.PodCgroup, "dcgm-1")
	if err := os.Mkdir(dcgm, 0o755); err != nil {
		t.Fatal(err)
	}
	id, err := cgroupID(dcgm)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.RefreshExempt(); err != nil || len(k.exempt) != 2 || !slices.Contains(k.exempt, id) {
		t.Errorf("%v, %v, want %d in it", err, k.exempt, id)
	}
	if err := os.Remove(dcgm); err != nil {
		t.Fatal(err)
	}
	if err := f.RefreshExempt(); err != nil || len(k.exempt) != 1 {
		t.Errorf("%v, %v", err, k.exempt)
	}
	// The driver comes up again, and it is kept.
	if err := f.Driver("580.95.05"); err != nil || !k.bpf.CloseUnmanaged {
		t.Errorf("%v, %+v", err, k.bpf)
	}
	if err := f.DenyUnmanaged(false, nil); err != nil || k.bpf.CloseUnmanaged || len(k.exempt) != 0 {
		t.Errorf("%v, %+v", err, k.bpf)
	}
	if err := f.DenyUnmanaged(true, []string{"cgroup:["}); err == nil || k.bpf.CloseUnmanaged {
		t.Errorf("a pattern that is none: %v, %+v", err, k.bpf)
	}
}

// TestGateDenyThatFailsIsNotInForce: what was refused is not done by the next driver either, when nobody is exempt.
func TestGateDenyThatFailsIsNotInForce(t *testing.T) {
	f, k, _ := gateAt(t, GateEnforce, false)
	own := filepath.Join(f.opts.Proc, "self/cgroup")
	for _, tt := range []struct {
		name string
		edit func() error
	}{
		{"gpufenced is in the root", func() error { return os.WriteFile(own, []byte("0::/\n"), 0o600) }},
		{"its cgroup cannot be read", func() error { return os.Remove(own) }},
		{"the kernel takes no settings", func() error {
			k.failing = os.ErrInvalid
			return os.WriteFile(own, []byte("0::/system.slice/gpufenced.service\n"), 0o600)
		}},
	} {
		if err := tt.edit(); err != nil {
			t.Fatal(err)
		}
		if err := f.DenyUnmanaged(true, nil); err == nil {
			t.Errorf("%s: no error", tt.name)
		}
		k.failing = nil
		if err := f.Driver("580.95.05"); err != nil || k.bpf.CloseUnmanaged {
			t.Errorf("%s: %v, %+v", tt.name, err, k.bpf)
		}
	}
}

// TestGateManagedMemory: ranges of managed memory have room in memory.max, and may spill as far as memory.swap.max
// says. By default what is longer is told.
func TestGateManagedMemory(t *testing.T) {
	for _, tt := range []struct {
		name            string
		word            string
		managed, alone  bool
		max, swap       uint64
		podMax, podSwap uint64
		want            uint64
		enforced, whole bool
		observed        bool
	}{
		{name: "counted", word: GateEnforce, max: 4 << 30, want: 4<<30 + gateMargin(4<<30), whole: true},
		{name: "enforced", word: GateEnforce, managed: true, max: 4 << 30, want: 4<<30 + gateMargin(4<<30), enforced: true, whole: true},
		{name: "with swap", word: GateEnforce, managed: true, max: 4 << 30, swap: 1 << 30, want: 5<<30 + gateMargin(4<<30), enforced: true, whole: true},
		{name: "unlimited", word: GateEnforce, managed: true, max: quota.Unlimited, want: math.MaxUint64, enforced: true, whole: true},
		{name: "unlimited swap", word: GateEnforce, managed: true, max: 4 << 30, swap: quota.Unlimited, want: math.MaxUint64, enforced: true, whole: true},
		{name: "of its pod", word: GateEnforce, managed: true, alone: true, max: quota.Unlimited, podMax: 2 << 30, podSwap: 1 << 30, want: 3<<30 + gateMargin(2<<30), enforced: true, whole: true},
		{name: "the gate audits", word: GateAudit, managed: true, max: 4 << 30, want: 4<<30 + gateMargin(4<<30)},
		{name: "observed", word: GateEnforce, managed: true, observed: true, max: 4 << 30, want: 4<<30 + gateMargin(4<<30)},
	} {
		f, k, s := gateAt(t, tt.word, false)
		f.opts.Managed, s.Alone, s.Observed = tt.managed, tt.alone, tt.observed
		s.Grant.Container = map[string]quota.Limits{"GPU-a": {Max: tt.max, SwapMax: tt.swap}}
		s.Grant.Pod = map[string]quota.Limits{"GPU-a": {Max: tt.podMax, SwapMax: tt.podSwap}}
		if _, err := f.Raise(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		own, err := cgroupID(s.Cgroup)
		if err != nil {
			t.Fatal(err)
		}
		if p := k.policies[own]; p.UVMBytes != tt.want || p.EnforceUVM != tt.enforced || p.Enforce != tt.whole {
			t.Errorf("%s: %+v, want %d", tt.name, p, tt.want)
		}
		for _, e := range []struct {
			kind     bpf.EventKind
			door     bpf.Door
			enforced bool
		}{
			{bpf.ManagedMemory, bpf.DoorMmap, tt.enforced},
			{bpf.ManagedMemory, 1, tt.enforced}, // device memory that has no room beside managed ranges
			{3, bpf.DoorMmap, tt.enforced},      // a 32-bit mmap, whose length the kernel does not say
			{3, 2, tt.whole},
			{1, 1, tt.whole},
		} {
			if d := f.denial(bpf.Event{Cgroup: own, Kind: e.kind, Door: e.door}); d.Container != s.ID || d.Enforced != e.enforced {
				t.Errorf("%s: %s at door %d: %+v, want enforced %v", tt.name, e.kind, e.door, d, e.enforced)
			}
		}
	}
}

// TestGateDenialOfAPod: what its pod's limit refused is the container's whose process it was.
func TestGateDenialOfAPod(t *testing.T) {
	f, _, s := gateAt(t, GateEnforce, false)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	pod, err := cgroupID(s.PodCgroup)
	if err != nil {
		t.Fatal(err)
	}
	proc := func(pid, cgroup string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(f.opts.Proc, pid), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(f.opts.Proc, pid, "cgroup"), []byte("12:devices:/x\n0::"+cgroup+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	proc("41", "/pod/main/nested")
	proc("42", "/pod/mainly")
	for _, tt := range []struct {
		pid    int
		cgroup uint64
		want   policy.ContainerID
		on     bool
	}{{41, pod, s.ID, true}, {42, pod, "", true}, {43, pod, "", true}, {41, 99, "", false}} {
		if d := f.denial(bpf.Event{Cgroup: tt.cgroup, PID: tt.pid}); d.Container != tt.want || d.Enforced != tt.on {
			t.Errorf("process %d of %d: %+v", tt.pid, tt.cgroup, d)
		}
	}
}

// TestGateOverSeveralGPUs: their sum is compared with NVML, whose answers are not of one moment, and what a free has
// not given back is found there, too.
func TestGateOverSeveralGPUs(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	second := filepath.Join(f.opts.Proc, "driver/nvidia/gpus/0000:02:00.0/information")
	if err := os.MkdirAll(filepath.Dir(second), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(second, []byte("GPU UUID: \t GPU-b\nDevice Minor: \t 4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Grant.GPUs = append(s.Grant.GPUs, quota.GPU{UUID: "GPU-b"})
	s.Grant.Container["GPU-b"] = quota.Limits{Max: 2 << 30}
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	own, err := cgroupID(s.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	if p := k.policies[own]; p.LimitBytes != 6<<30+gateMargin(6<<30) || !slices.Equal(p.Minors, []int{3, 4}) {
		t.Errorf("%+v", p)
	}
	if st := f.State(s, "GPU-b"); st.State != Degraded || !strings.Contains(st.Why, "another GPU") {
		t.Errorf("%+v", st)
	}
	u := k.usage[own]
	now := time.Duration(0)
	look := func(a, b uint64) (kill bool) {
		t.Helper()
		for gpu, bytes := range map[string]uint64{"GPU-a": a, "GPU-b": b} {
			dead, _, err := f.Sample(s.ID, gpu, now, 0, bytes, 0)
			if err != nil {
				t.Fatal(err)
			}
			kill = kill || dead
		}
		now += 100 * time.Millisecond
		return kill
	}
	// 2 GiB move to and fro, always in both answers.
	u.Used, u.Peak, u.Charged, u.Ended = 2<<30, 2<<30, 2<<30, 2<<30
	for i := range 60 {
		a, b := uint64(2<<30), uint64(2<<30)
		if i%5 == 4 {
			a, b = 0, 0
		}
		u.Charged, u.Ended, u.Credited = u.Charged+2<<30, u.Ended+2<<30, u.Credited+2<<30
		if look(a, b) || u.Used != 2<<30 {
			t.Fatalf("look %d: a legal program is accused, or its charge is wrong: %+v", i, u)
		}
	}
	// What ended unseen is given back.
	for range 30 {
		if look(1<<30, 0) {
			t.Fatal("killed")
		}
	}
	if u.Used != 1<<30 {
		t.Errorf("%d are charged for what is gone", u.Used)
	}
	// It has 1 GiB on each, and the gate was made to see one of them freed.
	u.Used, u.Charged, u.Ended, u.Credited, u.Peak = 1<<30, u.Charged+1<<30, u.Ended+1<<30, u.Credited+1<<30, 1<<30
	for range 30 {
		look(1<<30, 1<<30)
		u.Peak = u.Used
	}
	if u.Used < 2<<30 {
		t.Errorf("a free that did not happen: %+v", u)
	}
}

// TestGateOfAnInstance: a MIG instance is opened through its GPU's node.
func TestGateOfAnInstance(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	s.Grant.GPUs = []quota.GPU{{UUID: "MIG-x"}, {UUID: "MIG-y"}}
	own, err := cgroupID(s.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Raise(t.Context(), s); err == nil || k.usage[own] != nil || f.State(s, "MIG-x").State != Degraded {
		t.Errorf("of a GPU that nobody knows: %v, %+v", err, f.State(s, "MIG-x"))
	}
	s.Parents = map[string]string{"MIG-x": "GPU-a", "MIG-y": "GPU-a"}
	if _, err := f.Raise(t.Context(), s); err != nil || !slices.Equal(k.policies[own].Minors, []int{3}) {
		t.Errorf("%v, %+v", err, k.policies[own])
	}
}

// TestGateGuardsWhatComesLater: the first container that starts may load the module of managed memory, and a display
// that of render nodes.
func TestGateGuardsWhatComesLater(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	guards := func(major, minor uint32, kind bpf.Kind) bool {
		return slices.Contains(k.devices, bpf.Device{Major: major, Minor: minor, Kind: kind})
	}
	devices := filepath.Join(f.opts.Proc, "devices")
	if err := os.WriteFile(devices, []byte("Character devices:\n195 nvidia\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.Driver("570.133.20"); err != nil || guards(511, 0, bpf.KindUVM) {
		t.Fatalf("%v, %v", err, k.devices)
	}
	if err := os.WriteFile(devices, []byte("Character devices:\n195 nvidia\n508 nvidia-uvm\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Raise(t.Context(), s); err != nil || !guards(508, 0, bpf.KindUVM) || !guards(508, 1, bpf.KindClosed) {
		t.Errorf("%v: the module came before the container, and is not guarded: %v", err, k.devices)
	}
	card := filepath.Join(f.opts.Sys, "class/drm/renderD128")
	if err := os.MkdirAll(filepath.Join(card, "device"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink("/sys/bus/pci/drivers/nvidia", filepath.Join(card, "device/driver")), os.WriteFile(filepath.Join(card, "dev"), []byte("226:128\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := f.RefreshDevices(); err != nil || !guards(226, 128, bpf.KindClosed) {
		t.Errorf("%v: a render node that came later is not guarded", err)
	}
	k.devices = nil
	if err := f.RefreshDevices(); err != nil || k.devices != nil {
		t.Errorf("%v: told again though nothing has changed", err)
	}
	if err := os.Remove(devices); err != nil {
		t.Fatal(err)
	}
	if err := f.RefreshDevices(); err == nil {
		t.Error("no error although the devices cannot be listed")
	}
	if _, err := f.Raise(t.Context(), s); err == nil || f.State(s, "GPU-a").State != Degraded {
		t.Errorf("%v: raised without knowing what to guard", err)
	}
}

// TestGateStaysClosedOverARestart: what the gate was told before is in the kernel, and at no moment of the next
// gpufenced's beginning is it open.
func TestGateStaysClosedOverARestart(t *testing.T) {
	f, k, _ := gateAt(t, GateEnforce, true)
	if err := f.DenyUnmanaged(true, nil); err != nil {
		t.Fatal(err)
	}
	closed := slices.Clone(k.exempt)
	next := NewGate(f.opts)
	if err := next.DenyUnmanaged(true, nil); !errors.Is(err, ErrCannotDeny) {
		t.Errorf("before it is open: %v", err)
	}
	k.history = nil
	next.Open(t.Context())
	if err := errors.Join(next.Driver("570.133.20"), next.DenyUnmanaged(true, nil)); err != nil {
		t.Fatal(err)
	}
	for i, s := range k.history {
		if !s.CloseUnmanaged {
			t.Errorf("setting %d of %d lets everybody in: %+v", i, len(k.history), s)
		}
		if !s.Commits || !s.KillRaces {
			t.Errorf("setting %d of %d forgets that copies are watched: %+v", i, len(k.history), s)
		}
	}
	if len(k.history) == 0 || !slices.Equal(k.exempt, closed) {
		t.Errorf("%d settings, %v exempt, want %v", len(k.history), k.exempt, closed)
	}
	// Where it is not known who is exempt, nobody is shut out by a beginning.
	if err := os.Remove(filepath.Join(f.opts.Proc, "self/cgroup")); err != nil {
		t.Fatal(err)
	}
	last := NewGate(f.opts)
	if err := last.DenyUnmanaged(true, nil); err == nil {
		t.Error("no error")
	}
	if last.Open(t.Context()); k.bpf.CloseUnmanaged {
		t.Error("it is closed, and who is exempt is not known")
	}
	if err := last.DenyUnmanaged(true, nil); err == nil || errors.Is(err, ErrCannotDeny) {
		t.Errorf("the reason is not told: %v", err)
	}
}

// TestGateTooDeep: a cgroup that the kernel's programs do not find is not said to be held.
func TestGateTooDeep(t *testing.T) {
	for depth, want := range map[int]State{bpf.MaxDepth: Proven, bpf.MaxDepth + 1: Degraded} {
		f, _, s := gateAt(t, GateEnforce, false)
		s.Cgroup = filepath.Join(f.opts.CgroupRoot, strings.Repeat("d/", depth))
		if err := os.MkdirAll(s.Cgroup, 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Raise(t.Context(), s); (err == nil) != (want == Proven) || f.State(s, "GPU-a").State != want {
			t.Errorf("%d levels deep: %v, %+v", depth, err, f.State(s, "GPU-a"))
		}
	}
}

// TestGateAdoptsWhatItCannotRead: a GPU has fallen off the bus, and the account of its pod, whose containers run, stays.
func TestGateAdoptsWhatItCannotRead(t *testing.T) {
	f, k, s := gateAt(t, GateEnforce, false)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	next := NewGate(f.opts)
	next.Open(t.Context())
	if err := os.RemoveAll(filepath.Join(f.opts.Proc, "driver")); err != nil {
		t.Fatal(err)
	}
	if err := next.Resize(t.Context(), s); err == nil {
		t.Error("no error")
	}
	if err := next.Adopt(); err != nil || len(k.policies) != 2 || len(k.usage) != 2 {
		t.Errorf("%v, %v", err, k.policies)
	}
}

// TestGateFollowsItsDriver: what the gate may do changes with the driver, also around those that run.
func TestGateFollowsItsDriver(t *testing.T) {
	f, k, s := gateAt(t, GateAudit, false)
	f.opts.Managed = true
	quiet := s
	quiet.ID, quiet.Observed, quiet.Cgroup = "quiet", true, filepath.Join(s.PodCgroup, "quiet")
	if err := os.Mkdir(quiet.Cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	quiet.PodCgroup = ""
	for _, s := range []Subject{s, quiet} {
		if _, err := f.Raise(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	for _, enforced := range []bool{true, false} {
		f.opts.Word = map[bool]string{true: GateEnforce, false: GateAudit}[enforced]
		if err := f.Driver("580.95.05"); err != nil {
			t.Fatal(err)
		}
		for dir, want := range map[string]bool{s.Cgroup: enforced, s.PodCgroup: enforced, quiet.Cgroup: false} {
			id, err := cgroupID(dir)
			if err != nil {
				t.Fatal(err)
			}
			if p := k.policies[id]; p.Enforce != want || p.LimitBytes == 0 {
				t.Errorf("enforced %v: %s: %+v", enforced, dir, p)
			}
		}
	}
}

// TestGateOfAChangedLimit: until the kernel has been told, it is not said to hold.
func TestGateOfAChangedLimit(t *testing.T) {
	f, _, s := gateAt(t, GateEnforce, false)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	own, pod := s.Grant.Container, s.Grant.Pod
	for _, tt := range []struct {
		name     string
		own, pod map[string]quota.Limits
	}{
		{"less", map[string]quota.Limits{"GPU-a": {Max: 2 << 30}}, pod},
		{"more", map[string]quota.Limits{"GPU-a": {Max: 5 << 30}}, pod},
		{"another of the pod", own, map[string]quota.Limits{"GPU-a": {Max: 7 << 30}}},
	} {
		s.Grant.Container, s.Grant.Pod = tt.own, tt.pod
		if st := f.State(s, "GPU-a"); st.State != Degraded || !strings.Contains(st.Why, "not told") {
			t.Errorf("%s: %+v", tt.name, st)
		}
		if err := f.Resize(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if st := f.State(s, "GPU-a"); st.State != Proven {
			t.Errorf("%s: %+v", tt.name, st)
		}
	}
}

func TestGateSettleChanges(t *testing.T) {
	f, _, s := gateAt(t, GateEnforce, false)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	f.SetSettle(3 * time.Second)
	if h := f.holds[s.ID]; h.credit.Settle != 3*time.Second || h.sums.Settle != 3*time.Second || f.opts.Settle != 3*time.Second {
		t.Errorf("%+v", h)
	}
}

// TestGateWhereThereIsNone: the reason is a sentence, and nothing else changes.
func TestGateWhereThereIsNone(t *testing.T) {
	f := NewGate(GateOptions{Word: GateAuto, PinDir: filepath.Join(t.TempDir(), "v1"), CgroupRoot: t.TempDir()})
	f.Open(t.Context())
	s := subject("GPU-a")
	if st := f.State(s, "GPU-a"); st.State != Absent || st.Why == "" || f.Level() != quota.LevelNone {
		t.Errorf("%+v", st)
	}
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Error(err)
	}
	if err := f.DenyUnmanaged(true, nil); err == nil {
		t.Error("it says that it keeps the unmanaged out")
	}
}
