// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const gpu = "GPU-00000000-0000-0000-0000-000000000000"

func grant(minimum uint64) quota.Grant {
	return quota.Grant{
		GPUs: []quota.GPU{{UUID: gpu}}, Mode: quota.ModeEnforce, Require: quota.LevelReactive,
		Container: map[string]quota.Limits{gpu: {Max: 2 * minimum, Min: minimum, High: quota.Unlimited}},
	}
}

// put adds a container to a pod of its own or of another's.
func put(t *testing.T, r *Registry, id, pod, name string, state State) *Container {
	t.Helper()
	p := r.EnsurePod(quota.EngineCRI, "k8s.io", api.PodRef{ID: "pod-" + pod, Namespace: "ns", Name: pod}, "boot")
	c := &Container{
		Key: api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: id}, Name: name, State: state, Grant: grant(1 << 30),
		PreparedAt: time.Unix(int64(len(r.keys)), 0).UTC(),
	}
	if state == Running {
		c.PID, c.Start, c.Cgroup = 17, 4711, &act.Cgroup{Hierarchy: "freezer", Path: "/x/" + id, Inode: 5, BootID: "boot"}
	}
	r.Add(p, c)
	if err := r.AddGPU(p, gpu); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRoundTrip(t *testing.T) {
	s, err := OpenStore(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	r := New()
	c := put(t, r, "abc", "one", "main", Running)
	c.Kill = &Kill{ID: "k", Reason: "too much", Group: true}
	c.CountersOn(gpu).OverMax = 3
	c.Reported = map[string]ledger.SlotEvents{gpu: {Max: 4}}
	put(t, r, "def", "one", "side", Prepared)
	p := c.Pod()
	p.Limits = map[string]quota.Limits{gpu: {Max: 7, Min: 7, High: quota.Unlimited, SwapMax: 0}}
	p.Resizes = map[string][]policy.Resize{gpu: {{Level: policy.Level{Pod: p.ID()}, Old: 7, Desired: 3, State: policy.ResizePending}}}
	if err := s.Save(p); err != nil {
		t.Fatal(err)
	}
	got, damaged, err := s.Load()
	if err != nil || len(damaged) != 0 {
		t.Fatalf("load: %v, %v", damaged, err)
	}
	ignore := []cmp.Option{cmpopts.IgnoreUnexported(Container{}), cmpopts.IgnoreUnexported(ledger.Totals{})}
	if d := cmp.Diff(p, got.Pod(p.Name), ignore...); d != "" {
		t.Error(d)
	}
	back := got.Lookup(c.Key)
	if back == nil || back.Pod() != got.Pod(p.Name) || got.ByID(c.ID()) != back || back.ID() != c.ID() {
		t.Error("links are lost")
	}
	if err := s.Delete(p.Name); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(p.Name); err != nil {
		t.Errorf("a second delete: %v", err)
	}
	if got, _, err := s.Load(); err != nil || len(got.Pods()) != 0 {
		t.Errorf("after delete: %v, %v", got.Pods(), err)
	}
}

// An older copy must neither replace a newer one nor bring back what was deleted.
func TestSnapshotsKeepTheirOrder(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := New()
	c := put(t, r, "abc", "one", "main", Running)
	old, err := s.Snapshot(c.Pod())
	if err != nil {
		t.Fatal(err)
	}
	c.CountersOn(gpu).OOM = 1
	if err := s.Save(c.Pod()); err != nil {
		t.Fatal(err)
	}
	if err := old(); err != nil {
		t.Fatal(err)
	}
	got, _, err := s.Load()
	if err != nil || got.Lookup(c.Key).Counters[gpu].OOM != 1 {
		t.Errorf("a counter went back: %v", err)
	}
	late, err := s.Snapshot(c.Pod())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(c.Pod().Name); err != nil {
		t.Fatal(err)
	}
	if err := late(); err != nil {
		t.Fatal(err)
	}
	if got, _, err := s.Load(); err != nil || len(got.Pods()) != 0 {
		t.Errorf("a deleted pod is back: %v", err)
	}
	if len(s.files) != 0 {
		t.Errorf("%d deleted files are remembered", len(s.files))
	}
	// Nor does it replace the file of a pod that has the name next.
	if err := s.Save(c.Pod()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(late(), old()); err != nil {
		t.Fatal(err)
	}
	if got, _, err := s.Load(); err != nil || got.Lookup(c.Key).Counters[gpu].OOM != 1 {
		t.Errorf("a counter went back: %v", err)
	}
}

// seal makes a state file of a body, with a right checksum.
func seal(t *testing.T, p *Pod) []byte {
	t.Helper()
	text, err := encode(p)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestDamagedFiles(t *testing.T) {
	file := func(edit func(*Pod)) []byte {
		r := New()
		p := put(t, r, "abc", "bad", "main", Running).Pod()
		put(t, r, "def", "bad", "side", Ended)
		edit(p)
		return seal(t, p)
	}
	whole := file(func(*Pod) {})
	name := PodName(quota.EngineCRI, "k8s.io", "pod-bad")
	for _, tt := range []struct {
		name string
		text []byte
		say  string
	}{
		{"empty", nil, "empty or cut short"},
		{"one line", []byte("{}"), "empty or cut short"},
		{"not ours", []byte("hello\nworld\n"), "not ours"},
		{"cut", whole[:len(whole)-20], "checksum"},
		{"header only", whole[:bytes.IndexByte(whole, '\n')+1], "checksum"},
		{"changed", bytes.Replace(whole, []byte("4711"), []byte("4712"), 1), "checksum"},
		{"longer", append(bytes.Clone(whole), 'x'), "checksum"},
		{"later format", bytes.Replace(whole, []byte(`"format":1`), []byte(`"format":2`), 1), "format is 2"},
		{"other pod", file(func(p *Pod) { p.Ref.ID = "pod-other" }), "does not fit"},
		{"escaping name", file(func(p *Pod) { p.Name = "../x" }), "is of pod"},
		{"no container", file(func(p *Pod) { p.Containers = nil }), "no container"},
		{"null container", file(func(p *Pod) { p.Containers = append(p.Containers, nil) }), "empty container"},
		{"no id", file(func(p *Pod) { p.Containers[0].Key.ID = "" }), "without id"},
		{"state", file(func(p *Pod) { p.Containers[0].State = "dreaming" }), "dreaming"},
		{"running without pid", file(func(p *Pod) { p.Containers[0].PID = 0 }), "without process"},
		{"running without cgroup", file(func(p *Pod) { p.Containers[0].Cgroup = nil }), "without process or cgroup"},
		{"index twice", file(func(p *Pod) { p.Containers[1].Index = 0 }), "index 0 twice"},
		{"index out of turn", file(func(p *Pod) { p.NextIndex = 1 }), "out of turn"},
		{"unknown GPU", file(func(p *Pod) { p.GPUs = nil }), "its pod does not"},
		{"too many GPUs", file(func(p *Pod) {
			for i := range 17 {
				p.GPUs = append(p.GPUs, fmt.Sprint(i))
			}
		}), "18 GPUs"},
		{"mode", file(func(p *Pod) { p.Containers[0].Grant.Mode = "" }), "mode"},
		{"null counters", file(func(p *Pod) { p.Containers[0].Counters = map[string]*Counters{gpu: nil} }), "no counters"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			good := put(t, New(), "good", "good", "main", Running)
			if err := s.Save(good.Pod()); err != nil {
				t.Fatal(err)
			}
			path := s.path(name)
			if err := os.WriteFile(path, tt.text, 0o600); err != nil {
				t.Fatal(err)
			}
			// Something is there already under the name for what is put aside.
			if err := os.WriteFile(path+".damaged.0", []byte("earlier"), 0o600); err != nil {
				t.Fatal(err)
			}
			r, damaged, err := s.Load()
			if err != nil || len(damaged) != 1 {
				t.Fatalf("load: %+v, %v", damaged, err)
			}
			d := damaged[0]
			if d.Path != path || d.Aside != path+".damaged.1" || !strings.Contains(d.Err.Error(), tt.say) {
				t.Errorf("damaged: %+v", d)
			}
			if kept, err := os.ReadFile(d.Aside); err != nil || !bytes.Equal(kept, tt.text) {
				t.Errorf("it is not kept as it was: %v", err)
			}
			if r.Lookup(good.Key) == nil || len(r.Pods()) != 1 {
				t.Errorf("the others: %v", r.Pods())
			}
			if _, again, err := s.Load(); err != nil || len(again) != 0 {
				t.Errorf("a second load: %v, %v", again, err)
			}
		})
	}
}

func TestLoadPassesOverWhatIsNotOurs(t *testing.T) {
	dir := t.TempDir()
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	c := put(t, New(), "abc", "one", "main", Running)
	if err := s.Save(c.Pod()); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"README": "x", tempPrefix + "123": "half", "x.json.damaged.0": "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, damaged, err := s.Load()
	if err != nil || len(damaged) != 0 || len(r.Pods()) != 1 {
		t.Errorf("load: %v, %v, %v", r.Pods(), damaged, err)
	}
	if _, err := os.Stat(filepath.Join(dir, tempPrefix+"123")); err == nil {
		t.Error("a temporary file is left")
	}
	// A link, a folder, an endless file.
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link.json")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "folder.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	big := filepath.Join(dir, "big.json")
	if err := os.WriteFile(big, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(big, maxStateBytes+1); err != nil {
		t.Fatal(err)
	}
	r, damaged, err = s.Load()
	if err != nil || len(damaged) != 3 || len(r.Pods()) != 1 {
		t.Errorf("load: %v, %v, %v", r.Pods(), damaged, err)
	}
}

func TestSaveErrors(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	c := put(t, New(), "abc", "one", "main", Running)
	if err := os.Mkdir(s.path(c.Pod().Name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(c.Pod()); err == nil {
		t.Error("saved over a folder")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("a temporary file is left: %v", entries)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(c.Pod()); err == nil {
		t.Error("saved without a folder")
	}
	if _, _, err := s.Load(); err == nil {
		t.Error("loaded without a folder")
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenStore(dir); err == nil {
		t.Error("opened a file as a folder")
	}
}

func TestPodName(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range [][3]string{
		{"cri", "k8s.io", "abc"}, {"docker", "k8s.io", "abc"}, {"cri", "moby", "abc"}, {"cri", "k8s.io", "abd"},
		{"cri", "k8s.io", "../../etc"}, {"cri", "k8s.io", ""}, {"cri", "k8s.ioa", "bc"}, {"cri", "k8s.io", strings.Repeat("a", 5000)}, {"cri", "k8s.io", "ü/\x00\n"},
	} {
		n := PodName(quota.Engine(k[0]), k[1], k[2])
		if seen[n] || strings.ContainsAny(n, "/.\x00\n") || len(n) > 64 || n != PodName(quota.Engine(k[0]), k[1], k[2]) {
			t.Errorf("%q gives %q", k, n)
		}
		seen[n] = true
	}
}

func TestFind(t *testing.T) {
	r := New()
	put(t, r, "0123456789abcdef", "web", "main", Running)
	put(t, r, "fedcba9876543210", "web", "side", Running)
	put(t, r, "0123000000000000", "job", "main", Running)
	put(t, r, "aaaa", "old", "main", Ended)
	put(t, r, "bbbb", "old", "main", Ended)
	for _, tt := range []struct {
		name, want string
		code       quota.Code
	}{
		{"0123456789abcdef", "0123456789abcdef", ""},
		{"01234", "0123456789abcdef", ""},
		{"0123", "", quota.CodeAmbiguousName},
		{"web/side", "fedcba9876543210", ""},
		{"ns/web/main", "0123456789abcdef", ""},
		{"job", "0123000000000000", ""},
		{"side", "fedcba9876543210", ""},
		{"web", "", quota.CodeAmbiguousName},
		{"main", "", quota.CodeAmbiguousName},
		{"old", "bbbb", ""}, // two lives of one container: the newest
		{"aaaa", "aaaa", ""},
		{"nobody", "", quota.CodeNoSuchContainer},
		{"", "", quota.CodeNoSuchContainer},
	} {
		c, err := r.Find(tt.name)
		if quota.CodeOf(err) != tt.code || err == nil && c.Key.ID != tt.want {
			t.Errorf("%q: %v, %v", tt.name, c, err)
		}
	}
	// Who ended gives way.
	put(t, r, "cccc", "old", "main", Running)
	if c, err := r.Find("old"); err != nil || c.Key.ID != "cccc" {
		t.Errorf("old: %v, %v", c, err)
	}
}

func TestLives(t *testing.T) {
	r := New()
	a := put(t, r, "abc", "one", "main", Ended)
	b := put(t, r, "abc", "one", "main", Prepared)
	if r.Lookup(a.Key) != b || len(a.Pod().Containers) != 1 || a.ID() == b.ID() {
		t.Errorf("%v, %v: the earlier life is still there, or its index came again", a.ID(), b.ID())
	}
	if r.ByID(a.ID()) != nil || r.ByID(b.ID()) != b || r.ByID("nothing") != nil {
		t.Error("found by a wrong id")
	}
	if !r.Remove(b) || r.Pod(b.Pod().Name) != nil || len(r.Containers()) != 0 {
		t.Error("the pod outlives its last container")
	}
}

func TestMinBytes(t *testing.T) {
	r := New()
	a := put(t, r, "a", "one", "a", Running)
	b := put(t, r, "b", "one", "b", Prepared)
	p := a.Pod()
	const gib = 1 << 30
	check := func(want uint64, why string) {
		t.Helper()
		if got := p.MinBytes(gpu); got != want {
			t.Errorf("%s: %d, want %d", why, got, want)
		}
	}
	check(gib, "a prepared container that is not held does not count")
	b.Held = true
	check(2*gib, "the sum of both")
	p.Limits = map[string]quota.Limits{gpu: {Max: 5 * gib, Min: 5 * gib}}
	check(5*gib, "the pod's own is greater")
	p.Limits[gpu] = quota.Limits{Max: 5 * gib, Min: gib}
	check(2*gib, "the sum is greater")
	a.State, b.State = Ended, Ended
	check(0, "nobody counts")
	a.State = Running
	a.Grant.Container[gpu] = quota.Limits{Min: quota.Unlimited}
	b.State = Running
	check(5*gib, "no promise inside goes beyond what the pod may have")
	delete(p.Limits, gpu)
	check(quota.Unlimited, "it does not wrap around")
	if p.MinBytes("GPU-other") != 0 {
		t.Error("on a GPU that it does not have")
	}
}

func TestGPUIndex(t *testing.T) {
	r, p := New(), &Pod{}
	for i := range ledger.GPUs {
		if err := r.AddGPU(p, fmt.Sprint(i)); err != nil || p.GPUIndex(fmt.Sprint(i)) != i {
			t.Fatalf("GPU %d: index %d, %v", i, p.GPUIndex(fmt.Sprint(i)), err)
		}
	}
	if err := r.AddGPU(p, "3"); err != nil || p.GPUIndex("3") != 3 {
		t.Errorf("again: %v", err)
	}
	if err := r.AddGPU(p, "one more"); err == nil || p.GPUIndex("one more") != -1 {
		t.Error("a seventeenth GPU fits")
	}
}

// PodsOn must never show an older state: a sample judges by it.
func TestPodsOn(t *testing.T) {
	r := New()
	names := func(uuid string) (names []string) {
		for _, p := range r.PodsOn(uuid) {
			names = append(names, p.Ref.Name)
		}
		slices.Sort(names)
		return names
	}
	check := func(what string, first, second []string) {
		t.Helper()
		if got := names("GPU-1"); !slices.Equal(got, first) {
			t.Errorf("%s: on the first %q, want %q", what, got, first)
		}
		if got := names("GPU-2"); !slices.Equal(got, second) {
			t.Errorf("%s: on the second %q, want %q", what, got, second)
		}
	}
	check("empty", nil, nil)
	added := func(pod string) *Container {
		p := r.EnsurePod(quota.EngineCRI, "k8s.io", api.PodRef{ID: pod, Name: pod}, "boot")
		c := &Container{Key: api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: pod}}
		r.Add(p, c)
		return c
	}
	a, b := added("a"), added("b")
	check("without GPUs", nil, nil)
	for _, add := range []struct {
		c    *Container
		uuid string
	}{{a, "GPU-1"}, {b, "GPU-1"}, {b, "GPU-2"}} {
		if err := r.AddGPU(add.c.Pod(), add.uuid); err != nil {
			t.Fatal(err)
		}
	}
	held := r.PodsOn("GPU-1")
	check("with GPUs", []string{"a", "b"}, []string{"b"})
	if err := r.AddGPU(a.Pod(), "GPU-2"); err != nil {
		t.Fatal(err)
	}
	check("one more GPU", []string{"a", "b"}, []string{"a", "b"})
	r.Remove(b)
	check("one pod less", []string{"a"}, []string{"a"})
	if len(held) != 2 || held[0] == nil || held[1] == nil {
		t.Errorf("what was returned changes: %v", held)
	}
}

func FuzzDecode(f *testing.F) {
	r := New()
	p := r.EnsurePod(quota.EngineCRI, "s", api.PodRef{ID: "p"}, "boot")
	r.Add(p, &Container{Key: api.ContainerKey{Engine: quota.EngineCRI, ID: "a"}, State: Prepared, Grant: grant(1)})
	p.GPUs = []string{gpu}
	body, err := json.Marshal(p)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add([]byte(`{"containers":[null]}`))
	f.Add([]byte(`{"totals":null,"containers":[{"state":"running","counters":{"x":null}}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var q Pod
		if json.Unmarshal(body, &q) != nil {
			return
		}
		reg := New()
		if reg.adopt(&q) != nil {
			if len(reg.Pods()) != 0 {
				t.Error("a refused pod is there")
			}
			return
		}
		// What is taken must be usable, and survive another round.
		for _, c := range reg.Containers() {
			_, _, _ = c.ID(), c.Display(), c.CountersOn(gpu)
			_, _ = reg.Find(c.Key.ID)
		}
		q.MinBytes(gpu)
		text, err := encode(&q)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decode(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := New().adopt(again); err != nil {
			t.Errorf("refused the second time: %v", err)
		}
	})
}
