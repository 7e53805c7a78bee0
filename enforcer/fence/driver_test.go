// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const gib = uint64(1) << 30

// fakeDriver is a driver with limits by folder, and a test's own ideas.
type fakeDriver struct {
	lacks bool
	held  map[string]gpu.MemoryLimits
	set   func(dir string, soft, hard uint64) error // instead of doing it
	get   func(dir string) (gpu.MemoryLimits, error)
	calls int
}

func (d *fakeDriver) HasLimits() bool { return !d.lacks }
func (d *fakeDriver) Set(_ context.Context, dir string, soft, hard uint64) error {
	d.calls++
	if d.set != nil {
		return d.set(dir, soft, hard)
	}
	d.held[dir] = gpu.MemoryLimits{SoftBytes: soft, HardBytes: hard, UsedBytes: d.held[dir].UsedBytes}
	return nil
}
func (d *fakeDriver) Get(_ context.Context, dir string) (gpu.MemoryLimits, error) {
	if d.get != nil {
		return d.get(dir)
	}
	return d.held[dir], nil
}

type oneGPU DriverGPU

func (g oneGPU) DriverGPU(string) (DriverGPU, bool) { return DriverGPU(g), true }

type listedBytes struct{ container, pod uint64 }

func (l *listedBytes) Listed(policy.ContainerID, string) (container, pod uint64, ok bool) {
	return l.container, l.pod, true
}

// limitedSubject has a limit of its own and one of its pod's; 0 for none.
func limitedSubject(own, pod uint64) Subject {
	limits := func(b uint64) quota.Limits {
		if b == 0 {
			b = quota.Unlimited
		}
		return quota.Limits{Max: b}
	}
	return Subject{
		ID: "p/0", Cgroup: "/cg/pod/c", PodCgroup: "/cg/pod",
		Grant: quota.Grant{GPUs: []quota.GPU{{UUID: "g"}}, Container: map[string]quota.Limits{"g": limits(own)}, Pod: map[string]quota.Limits{"g": limits(pod)}},
	}
}

func TestCompose(t *testing.T) {
	leaf := func(b uint64) target { return target{dir: "/cg/pod/c", hard: b} }
	unset := leaf(gpu.NoLimit)
	for _, tt := range []struct {
		name     string
		own, pod uint64
		edit     func(*Subject)
		misc     []target
		miscLack string
		dmem     []target
		dmemLack string
	}{
		{name: "none"},
		{name: "container", own: gib, misc: []target{leaf(gib)}, dmem: []target{leaf(gib)}},
		{
			name: "pod", pod: 2 * gib,
			misc: []target{unset, {dir: "/cg/pod", pod: true, hard: 2 * gib}},
			dmem: []target{{dir: "/cg/pod", pod: true, hard: 2 * gib, keepSoft: true}, leaf(2 * gib)},
		},
		{
			name: "both", own: gib, pod: 2 * gib,
			misc: []target{leaf(gib)}, miscLack: "flat",
			dmem: []target{{dir: "/cg/pod", pod: true, hard: 2 * gib, keepSoft: true}, leaf(gib)},
		},
		{
			name: "pod, another has its own", pod: 2 * gib, edit: func(s *Subject) { s.Shadowed = map[string]bool{"g": true} },
			misc: []target{unset, {dir: "/cg/pod", pod: true, hard: 2 * gib}}, miscLack: "another container",
			dmem: []target{{dir: "/cg/pod", pod: true, hard: 2 * gib, keepSoft: true}, leaf(2 * gib)},
		},
		{
			name: "pod's cgroup unknown", pod: 2 * gib, edit: func(s *Subject) { s.PodCgroup = "" },
			misc: []target{leaf(2 * gib)}, miscLack: "not known", dmem: []target{leaf(2 * gib)}, dmemLack: "not known",
		},
		{
			name: "alone", own: 3 * gib, pod: 2 * gib, edit: func(s *Subject) { s.Alone, s.PodCgroup = true, "" },
			misc: []target{leaf(2 * gib)}, dmem: []target{leaf(2 * gib)},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := limitedSubject(tt.own, tt.pod)
			if tt.edit != nil {
				tt.edit(&s)
			}
			for b, want := range map[Backend]struct {
				targets []target
				lack    string
			}{Misc: {tt.misc, tt.miscLack}, Dmem: {tt.dmem, tt.dmemLack}} {
				got, lack := compose(b, s, "g")
				if d := cmp.Diff(want.targets, got, cmp.AllowUnexported(target{})); d != "" || (want.lack == "") != (lack == "") || !strings.Contains(lack, want.lack) {
					t.Errorf("%s: %q\n%s", b, lack, d)
				}
			}
		})
	}
}

// TestDriverIsAbsent: why there is no driver fence, in the words that a refusal shows.
func TestDriverIsAbsent(t *testing.T) {
	for _, tt := range []struct {
		name string
		gpu  DriverGPU
		root string
		edit func(*Subject)
		say  string
	}{
		{"old driver", DriverGPU{Limits: &fakeDriver{lacks: true}, Version: "570.1"}, "/cg", nil, "driver 570.1 has no memory limits (they need R615)"},
		{"MIG", DriverGPU{Limits: &fakeDriver{}, MIG: true}, "/cg", nil, "MIG"},
		{"v1", DriverGPU{Limits: &fakeDriver{}}, "", nil, "cgroup v1"},
		{"v1 container", DriverGPU{Limits: &fakeDriver{}}, "/cg", func(s *Subject) { s.Cgroup = "" }, "cgroup v1"},
		{"observed", DriverGPU{Limits: &fakeDriver{}}, "/cg", func(s *Subject) { s.Observed = true }, "policy"},
		{"gone", DriverGPU{}, "/cg", nil, "does not list"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := limitedSubject(gib, 0)
			if tt.edit != nil {
				tt.edit(&s)
			}
			f := NewDriver(oneGPU(tt.gpu), &listedBytes{}, tt.root, "")
			raised, err := f.Raise(t.Context(), s)
			if err != nil || raised["g"].State != Absent || !strings.Contains(raised["g"].Why, tt.say) {
				t.Errorf("%+v, %v", raised, err)
			}
			if d, ok := tt.gpu.Limits.(*fakeDriver); ok && d.calls > 0 {
				t.Error("the driver was told of limits")
			}
			if got := Level([]Fence{f}, s); got != quota.LevelNone {
				t.Errorf("level %s", got)
			}
		})
	}
}

func newFakeDriver(t *testing.T) (*Driver, *fakeDriver, *listedBytes) {
	t.Helper()
	d, truth := &fakeDriver{held: map[string]gpu.MemoryLimits{}}, &listedBytes{}
	return NewDriver(oneGPU{Limits: d, Version: "615.1", PCI: "00000000:01:00.0"}, truth, "/cg", t.TempDir()), d, truth
}

func (f *Driver) wants(t *testing.T, s Subject, state State, say string) {
	t.Helper()
	st := f.State(s, "g")
	if st.State != state || !strings.Contains(st.Why+st.Proof, say) {
		t.Fatalf("%+v, want %s with %q", st, state, say)
	}
}

// TestDriverFailures: whatever the driver does, what cannot be read back is not proven.
func TestDriverFailures(t *testing.T) {
	s := limitedSubject(gib, 0)
	for _, tt := range []struct {
		name string
		set  func(string, uint64, uint64) error
		get  func(string) (gpu.MemoryLimits, error)
		want State
		say  string
	}{
		{"refused", func(string, uint64, uint64) error { return gpu.ErrLimitRefused }, nil, Degraded, "limit refused"},
		{"off", func(string, uint64, uint64) error { return gpu.ErrNoLimits }, nil, Absent, "does not limit this GPU"},
		{"hung", func(string, uint64, uint64) error { return gpu.ErrHung }, nil, Degraded, "hangs"},
		{"says yes and keeps more", nil, func(string) (gpu.MemoryLimits, error) { return gpu.MemoryLimits{HardBytes: 2 * gib}, nil }, Degraded, "says 2Gi"},
		{"cannot be read", nil, func(string) (gpu.MemoryLimits, error) { return gpu.MemoryLimits{}, gpu.ErrLost }, Degraded, "read back"},
		{"is gone at once", nil, func(string) (gpu.MemoryLimits, error) { return gpu.MemoryLimits{}, gpu.ErrNoLimits }, Degraded, "says"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, d, _ := newFakeDriver(t)
			d.set, d.get = tt.set, tt.get
			if _, err := f.Raise(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			f.wants(t, s, tt.want, tt.say)
			d.set, d.get = nil, nil
			if !f.Visit(t.Context(), s) { // it works again
				t.Error("nothing changed")
			}
			f.wants(t, s, Proven, "1Gi")
		})
	}
}

// TestDriverHangs: a start waits for the driver 2 seconds at most.
func TestDriverHangs(t *testing.T) {
	f, _, _ := newFakeDriver(t)
	f.gpus = oneGPU{Limits: hungDriver{}, Version: "615.1"}
	began := time.Now()
	if _, err := f.Raise(t.Context(), limitedSubject(gib, 0)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 20*driverDeadline {
		t.Errorf("it took %s", took)
	}
	f.wants(t, limitedSubject(gib, 0), Degraded, "deadline")
}

type hungDriver struct{}

func (hungDriver) HasLimits() bool { return true }
func (hungDriver) Set(ctx context.Context, _ string, _, _ uint64) error {
	<-ctx.Done()
	return ctx.Err()
}
func (hungDriver) Get(ctx context.Context, _ string) (gpu.MemoryLimits, error) {
	<-ctx.Done()
	return gpu.MemoryLimits{}, ctx.Err()
}

// TestOthersWrites: somebody else's limit is overwritten twice, then the lower of the two holds, and it
// is said.
func TestOthersWrites(t *testing.T) {
	f, d, _ := newFakeDriver(t)
	s := limitedSubject(gib, 0)
	write := func(b uint64) { d.held[s.Cgroup] = gpu.MemoryLimits{HardBytes: b} }
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for range reasserts {
		write(gib / 2)
		f.Visit(t.Context(), s)
		if d.held[s.Cgroup].HardBytes != gib {
			t.Fatal("not overwritten")
		}
		f.wants(t, s, Proven, "contested: somebody else wrote it")
	}
	write(gib / 2)
	f.Visit(t.Context(), s)
	if d.held[s.Cgroup].HardBytes != gib/2 {
		t.Error("the lower limit was not left")
	}
	f.wants(t, s, Proven, "contested: somebody else keeps it at 512Mi")

	write(4 * gib) // above the grant: not held while it stands, and set back each time
	f.Visit(t.Context(), s)
	f.wants(t, s, Degraded, "contested: somebody else keeps /cg/pod/c at 4Gi")
	if d.held[s.Cgroup].HardBytes != gib {
		t.Error("the higher limit was left")
	}
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "contested")

	f.holds[s.ID]["g"].writes = map[string]int{}
	d.get = func(dir string) (gpu.MemoryLimits, error) { // cleared: misc then says that it has none
		if m := d.held[dir]; m.HardBytes != 0 {
			return m, nil
		}
		return gpu.MemoryLimits{}, gpu.ErrNoLimits
	}
	delete(d.held, s.Cgroup)
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "contested")
	if d.held[s.Cgroup].HardBytes != gib {
		t.Error("a limit that was cleared was not set again")
	}
}

// TestDriverFollowsTheGrant: until the driver has the new limit the old proof does not count, and pages
// show no more than it allows.
func TestDriverFollowsTheGrant(t *testing.T) {
	f, d, _ := newFakeDriver(t)
	s := limitedSubject(gib, 0)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	grown := limitedSubject(2*gib, 0)
	f.wants(t, grown, Degraded, "not been told")
	if b := f.Bound(s.ID, "g", 2*gib, false); b != gib {
		t.Errorf("pages may show %d", b)
	}
	d.set = func(string, uint64, uint64) error { return errors.New("no") }
	f.Visit(t.Context(), grown)
	f.wants(t, grown, Degraded, "no")
	d.set = nil
	if err := f.Resize(t.Context(), grown); err != nil {
		t.Fatal(err)
	}
	f.wants(t, grown, Proven, "2Gi")
	if b := f.Bound(s.ID, "g", 2*gib, false); b != 2*gib {
		t.Errorf("pages may show %d", b)
	}
	free := limitedSubject(0, 0)
	f.Visit(t.Context(), free)
	f.wants(t, free, Absent, noLimit)
	if d.held[s.Cgroup].HardBytes != gpu.NoLimit {
		t.Errorf("it is held to %+v", d.held[s.Cgroup])
	}
}

// TestUncounted: what the driver does not count is no hard limit, if two visits in a row see it.
func TestUncounted(t *testing.T) {
	f, d, truth := newFakeDriver(t)
	s := limitedSubject(gib, 0)
	if _, err := f.Raise(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	truth.container = 300 << 20
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "")
	f.Visit(t.Context(), s)
	f.wants(t, s, Degraded, "counts 0 B of the 300 MiB that NVML lists")
	d.held[s.Cgroup] = gpu.MemoryLimits{HardBytes: gib, UsedBytes: 300 << 20}
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "")
}

// TestDmemFiles: which backend a GPU has, and that the kernel's file must say the same.
func TestDmemFiles(t *testing.T) {
	f, _, _ := newFakeDriver(t)
	s := limitedSubject(gib, 0)
	write := func(name, text string) {
		t.Helper()
		p := filepath.Join(f.dmem, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	g, _ := f.gpus.DriverGPU("g")
	if b := f.findBackend(g); b != Misc {
		t.Errorf("without files: %s", b)
	}
	write("dmem.capacity", "drm/0000:02:00.0/vram0 1\n")
	if b := f.findBackend(g); b != Misc {
		t.Errorf("another GPU's region: %s", b)
	}
	write("dmem.capacity", "drm/0000:02:00.0/vram0 1\nnvidia/0000:01:00.0 17179869184\n")
	if b := f.findBackend(g); b != Dmem {
		t.Errorf("with its region: %s", b)
	}
	clear(f.backends)
	write("pod/c/dmem.max", "drm/0000:02:00.0/vram0 max\nnvidia/0000:01:00.0 1073741824\n")
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "in dmem.max too")
	write("pod/c/dmem.max", "nvidia/0000:01:00.0 max\n")
	f.Visit(t.Context(), s)
	f.wants(t, s, Degraded, "dmem.max")
}

// TestNVIDIAsVariables: H11. The hook of NVIDIA's toolkit is told what we grant, in both variables, or
// nothing.
func TestNVIDIAsVariables(t *testing.T) {
	f, _, _ := newFakeDriver(t)
	env := func(s Subject, alone bool) string { return strings.Join(f.Env(s.Grant, alone), " ") }
	own := limitedSubject(gib+1, 0)
	own.Grant.Container["g"] = quota.Limits{Max: gib + 1, Min: 512 << 20}
	const want = "NVIDIA_GPU_MEMORY_LIMIT=1024 NVIDIA_GPU_MEMORY_REQUEST=512"
	if got := env(own, true); got != want {
		t.Errorf("alone: %s", got)
	}
	if got := env(own, false); got != want {
		t.Errorf("in a pod: %s", got)
	}
	if got := env(limitedSubject(0, gib), false); got != "" {
		t.Errorf("on misc it would hide the pod's limit: %s", got)
	}
	if err := os.WriteFile(filepath.Join(f.dmem, "dmem.capacity"), []byte("nvidia/0000:01:00.0 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	clear(f.backends)
	if got := env(limitedSubject(0, gib), false); got != "NVIDIA_GPU_MEMORY_LIMIT=1024 NVIDIA_GPU_MEMORY_REQUEST=0" {
		t.Errorf("on dmem: %s", got)
	}
	if got := env(limitedSubject(0, 0), true); got != "" {
		t.Errorf("without a limit: %s", got)
	}
	two := limitedSubject(gib, 0)
	two.Grant.GPUs = append(two.Grant.GPUs, quota.GPU{UUID: "h"})
	two.Grant.Container["h"] = quota.Limits{Max: 2 * gib}
	if got := env(two, true); got != "" {
		t.Errorf("two different limits: %s", got)
	}
	f.gpus = oneGPU{Limits: &fakeDriver{lacks: true}}
	if got := env(own, true); got != "" {
		t.Errorf("an old driver: %s", got)
	}
}

// TestLimitsThatGo: what no longer bounds is cleared, the pod's only when it bounds nobody.
func TestLimitsThatGo(t *testing.T) {
	f, d, _ := newFakeDriver(t)
	if err := os.WriteFile(filepath.Join(f.dmem, "dmem.capacity"), []byte("nvidia/0000:01:00.0 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	holds := func(leaf, pod uint64) {
		t.Helper()
		if d.held["/cg/pod/c"].HardBytes != leaf || d.held["/cg/pod"].HardBytes != pod {
			t.Fatalf("%+v, want %d and %d", d.held, leaf, pod)
		}
	}
	both := limitedSubject(gib, 2*gib)
	f.Visit(t.Context(), both)
	holds(gib, 2*gib)
	f.Visit(t.Context(), limitedSubject(gib, 0))
	holds(gib, gpu.NoLimit)
	f.Visit(t.Context(), both)
	holds(gib, 2*gib)
	observed := both
	observed.Observed = true
	f.Visit(t.Context(), observed) // as after gpufence disable
	f.wants(t, observed, Absent, "policy")
	holds(gpu.NoLimit, gpu.NoLimit)
	f.Visit(t.Context(), both)
	holds(gib, 2*gib)
	f.wants(t, both, Proven, "2Gi")
}

// TestOldProof: what was not asked for a while is not proven.
func TestOldProof(t *testing.T) {
	f, _, _ := newFakeDriver(t)
	s := limitedSubject(gib, 0)
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "")
	at := time.Now().Add(proofAge + time.Second)
	f.now = func() time.Time { return at }
	f.wants(t, s, Degraded, "was asked 11s ago")
	f.Visit(t.Context(), s)
	f.wants(t, s, Proven, "")
}
