// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/bpf"
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
}

func (f *fakeGate) Configure(s bpf.Settings) error    { f.bpf = s; return nil }
func (f *fakeGate) SetDevices(d []bpf.Device) error   { f.devices = d; return nil }
func (f *fakeGate) SetExempt(c []uint64) error        { f.exempt = c; return nil }
func (f *fakeGate) DropPolicy(c uint64) error         { delete(f.policies, c); delete(f.usage, c); return nil }
func (f *fakeGate) AttachCopies() (bpf.Copies, error) { f.copies = bpf.CopiesBTF; return f.copies, nil }
func (f *fakeGate) ReleaseCopies() error              { f.copies = bpf.CopiesNone; return nil }
func (f *fakeGate) Carrier() bpf.Carrier              { return f.carrier }
func (f *fakeGate) Copies() bpf.Copies                { return f.copies }
func (f *fakeGate) Misses() (uint64, error)           { return f.misses, nil }
func (f *fakeGate) Events(ctx context.Context, _ func(bpf.Event)) error {
	<-ctx.Done()
	return ctx.Err()
}
func (f *fakeGate) Close() error { return nil }
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
	f.kernel, f.absent = k, ""
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
	s.Observed = true
	if err := f.Resize(t.Context(), s); err != nil || k.policies[own].Enforce {
		t.Errorf("observed, it refuses: %v", err)
	}
	if err := f.Lower(t.Context(), s); err != nil || len(k.policies) != 0 {
		t.Errorf("%v, %v", err, k.policies)
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
	f, k, _ := gateAt(t, GateEnforce, false)
	if err := f.DenyUnmanaged(true, []string{"exe:/usr/bin/x"}); err != nil || !k.bpf.CloseUnmanaged || len(k.exempt) != 1 {
		t.Errorf("%v, %+v, %v", err, k.bpf, k.exempt)
	}
	if err := f.DenyUnmanaged(false, nil); err != nil || k.bpf.CloseUnmanaged || len(k.exempt) != 0 {
		t.Errorf("%v, %+v", err, k.bpf)
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
