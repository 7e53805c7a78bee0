// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	ctx    = 64 * mib
	handed = 320 * mib
)

// patience is in how many answers who lives on trust alone is killed.
const patience = trustSettles*10 + 2

// sharer is a container of 512 MiB with an owner of shared memory and an importer, as NVML lists them:
// 768 MiB, of which 448 are there.
func (w *world) sharer(name string, first int) (owner, importer *proc) {
	owner = w.shimmed(first, name, ctx+handed)
	importer = w.shimmed(first+1, name, ctx)
	importer.nvml += handed
	importer.slot.Imports = true
	return owner, importer
}

func (w *world) killed(n int, change ...func(*Input)) *Kill {
	w.t.Helper()
	for range n {
		if out := w.step(change...); out.Kill != nil {
			return out.Kill
		}
	}
	w.t.Fatalf("nobody is killed in %d steps", n)
	return nil
}

func TestSharedMemoryCountsOnce(t *testing.T) {
	w := newWorld(t, container("a", 512*mib))
	w.sharer("a", 1)
	w.used = 2*ctx + handed
	w.noKill(30)
	s := w.last.Containers["a"]
	if s.ChargedBytes != w.used || s.PeakBytes != w.used || s.SteadyBytes != w.used || s.NVMLBytes != w.used+handed || s.SharedBytes != handed || s.ExcessBytes != 0 || s.OverMax {
		t.Errorf("%+v", s)
	}
	if p := w.last.Pods["pod-a"]; p.ChargedBytes != w.used || p.SharedBytes != handed || p.OverMax {
		t.Errorf("%+v", p)
	}
	if !w.g.Settled() {
		t.Error("nothing happens, and it does not settle")
	}
	// More importers of the same.
	for pid := 3; pid < 9; pid++ {
		p := w.shimmed(pid, "a", 2*mib)
		p.nvml += handed
		p.slot.Imports = true
		w.used += 2 * mib
		w.noKill(2)
	}
	if s := w.last.Containers["a"]; s.ChargedBytes != w.used || s.SharedBytes != 7*handed || s.ExcessBytes != 0 {
		t.Errorf("%+v", s)
	}
	// What is beside them counts as ever.
	w.bare(20, "a", 256*mib)
	w.used += 256 * mib
	if k := w.killed(2); k.UsedBytes != w.used {
		t.Errorf("%+v", k)
	}
}

func TestNoCreditWithoutProof(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(w *world, owner, importer *proc)
		in   func(*Input)
	}{
		{"the device has it all in use", func(w *world, _, _ *proc) { w.used += handed }, nil},
		{"its shim says nothing of imports", func(_ *world, _, importer *proc) { importer.slot.Imports = false }, nil},
		{"the owner is another pod's", func(w *world, owner, _ *proc) {
			w.conts = append(w.conts, container("b", gib))
			owner.container, owner.slot.Pod = "b", "pod-b"
			// Enough of its own to be above the limit with what it imported.
			w.procs[2].nvml, w.procs[2].slot.DeviceBytes = 300*mib+handed, 300*mib
		}, nil},
		{"the owner has charged nothing", func(_ *world, owner, _ *proc) { owner.slot.DeviceBytes = ctx }, nil},
		{"the device's use is not known", nil, func(in *Input) { in.Sample.DeviceKnown = false }},
		{"an owner's slot without memory", func(w *world, owner, importer *proc) {
			owner.nvml = ctx
			importer.nvml += handed
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, container("a", 512*mib))
			owner, importer := w.sharer("a", 1)
			w.used = 2*ctx + handed
			if tt.edit != nil {
				tt.edit(w, owner, importer)
			}
			var change []func(*Input)
			if tt.in != nil {
				change = append(change, tt.in)
			}
			if k := w.killed(patience, change...); k.Container != "a" {
				t.Errorf("%+v", k)
			}
		})
	}
}

// TestLiarBesideSharer: who says that he shares, and does not, is killed, and takes nothing from who does.
func TestLiarBesideSharer(t *testing.T) {
	for _, dormant := range []bool{false, true} {
		t.Run(fmt.Sprintf("claimed before %v", dormant), func(t *testing.T) {
			liarMax := 512 * mib
			if dormant {
				liarMax = gib
			}
			w := newWorld(t, container("honest", 512*mib), container("liar", liarMax))
			lie := func() *proc {
				w.shimmed(11, "liar", ctx+handed)
				p := w.shimmed(12, "liar", ctx)
				p.nvml += handed
				p.slot.Imports = true
				w.used += 2*ctx + 2*handed
				return p
			}
			var hidden *proc
			if dormant {
				// Within its limit it waits for somebody to share something.
				hidden = lie()
				w.noKill(25)
			}
			w.sharer("honest", 1)
			w.used += 2*ctx + handed
			w.noKill(2)
			if dormant {
				w.noKill(10)
				hidden.nvml += 500 * mib
				w.used += 500 * mib
			} else {
				lie()
			}
			if k := w.killed(patience); k.Container != "liar" {
				t.Fatalf("%+v", k)
			}
			delete(w.procs, 11)
			delete(w.procs, 12)
			w.used = 2*ctx + handed
			w.noKill(20)
			if s := w.last.Containers["honest"]; s.ChargedBytes != 2*ctx+handed {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestOverlapOfDifferentMoments: the rows and the device's use are not of one moment.
func TestOverlapOfDifferentMoments(t *testing.T) {
	// What others take between the two calls hides a part of the proof in one answer of three.
	w := newWorld(t, container("a", 512*mib))
	w.sharer("a", 1)
	for i := range 60 {
		w.used = 2*ctx + handed
		if i%3 == 2 {
			w.used += gib
		}
		w.noKill(1)
	}
	// What they give back there seems to be a proof, and saves a liar for that answer and another one.
	w = newWorld(t, container("a", 512*mib))
	w.sharer("a", 1)
	for i := range 3 * patience {
		w.used = 2*ctx + 2*handed
		if i%3 == 1 {
			w.used -= handed
		}
		if out := w.step(); out.Kill != nil {
			if i < 2*patience {
				t.Errorf("killed at %d", i)
			}
			return
		}
	}
	t.Error("nobody is killed")
}

func TestDeviceUnknown(t *testing.T) {
	w := newWorld(t, container("a", 512*mib))
	w.sharer("a", 1)
	w.used = 2*ctx + handed
	w.noKill(5)
	unknown := func(in *Input) { in.Sample.DeviceKnown = false }
	w.noKill(100, unknown)
	w.bare(3, "a", 192*mib) // it proves no more than it did
	if k := w.killed(2, unknown); k.UsedBytes != w.used+192*mib {
		t.Errorf("%+v", k)
	}
}

// TestOwnerGoes: what its importer keeps then is the importer's.
func TestOwnerGoes(t *testing.T) {
	w := newWorld(t, container("a", 512*mib))
	owner, importer := w.sharer("a", 1)
	w.used = 2*ctx + handed
	w.noKill(5)
	// It has let go, and NVML does not know yet.
	owner.slot.DeviceBytes = ctx
	w.noKill(9)
	owner.slot.DeviceBytes = ctx + handed
	w.noKill(5)
	// It exits, and stays listed.
	owner.noFact = true
	w.noKill(5)
	if s := w.last.Containers["a"]; s.ChargedBytes != ctx+handed || s.SharedBytes != 0 {
		t.Errorf("%+v", s)
	}
	delete(w.procs, 1)
	w.used = ctx + handed
	w.noKill(15)
	if s := w.last.Containers["a"]; s.ChargedBytes != ctx+handed || s.SharedBytes != 0 || s.ExcessBytes != handed {
		t.Errorf("%+v", s)
	}
	importer.nvml += 256 * mib
	w.used += 256 * mib
	w.killed(2)
}

// TestSharedInAPod: between the containers of a pod, whose limit is the pod's.
func TestSharedInAPod(t *testing.T) {
	a, b := container("a", quota.Unlimited), container("b", 256*mib)
	a.Pod, b.Pod = "p", "p"
	a.PodLimits.Max, b.PodLimits.Max = 512*mib, 512*mib
	w := newWorld(t, a, b)
	owner, importer := w.sharer("a", 1)
	owner.slot.Pod, importer.slot.Pod = "p", "p"
	importer.container = "b"
	w.used = 2*ctx + handed
	w.noKill(20)
	if p := w.last.Pods["p"]; p.ChargedBytes != w.used || w.last.Containers["b"].ChargedBytes != ctx {
		t.Errorf("%+v", w.last)
	}
	importer.nvml, importer.slot.DeviceBytes = importer.nvml+200*mib, ctx+200*mib
	w.used += 200 * mib
	if k := w.killed(2); k.Scope != "pod" || k.UsedBytes != w.used {
		t.Errorf("%+v", k)
	}
}

func TestShareOut(t *testing.T) {
	for _, tt := range []struct {
		name   string
		proved uint64
		claims []claim
		want   []uint64
	}{
		{"nothing", 100, nil, []uint64{}},
		{"all", 100, []claim{{pod: "a", bytes: 60}, {pod: "b", bytes: 40}}, []uint64{60, 40}},
		{"equal parts", 100, []claim{{pod: "a", bytes: 60}, {pod: "b", bytes: 1000}}, []uint64{50, 50}},
		{"of pods, not processes", 100, []claim{{pod: "a", bytes: 60}, {pod: "b", bytes: 50}, {pod: "b", bytes: 50}}, []uint64{50, 25, 25}},
		{"who wants little gets it", 100, []claim{{pod: "a", bytes: 10}, {pod: "b", bytes: 1000}}, []uint64{10, 90}},
		{"who had it keeps it", 100, []claim{{pod: "a", bytes: 90, held: 90}, {pod: "b", bytes: 1000}}, []uint64{90, 10}},
		{"no more than is claimed now", 100, []claim{{pod: "a", bytes: 30, held: 90}, {pod: "b", bytes: 1000}}, []uint64{30, 70}},
		{"the new before the unproved", 100, []claim{{pod: "a", bytes: 1000, stale: 1000}, {pod: "b", bytes: 90}}, []uint64{10, 90}},
		{"what is needed before the rest", 100, []claim{{pod: "a", bytes: 20}, {pod: "b", bytes: 90, need: 90}}, []uint64{10, 90}},
		{"of the unproved, too", 100, []claim{{pod: "a", bytes: 200, stale: 200}, {pod: "b", bytes: 90, stale: 90, need: 90}}, []uint64{10, 90}},
		{"the new before what is needed of the unproved", 100, []claim{{pod: "a", bytes: 200, stale: 200, need: 200}, {pod: "b", bytes: 90}}, []uint64{10, 90}},
		{"what is new of it", 100, []claim{{pod: "a", bytes: 1000, stale: 960}, {pod: "b", bytes: 90}}, []uint64{40, 60}},
	} {
		if got := shareOut(tt.proved, tt.claims); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestShareOutProperties: whatever is claimed, no more is given than is proved, nor than is claimed, and a
// credit that the proof still covers is not lost.
func TestShareOutProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		proved := rapid.Uint64Range(0, 4000).Draw(t, "proved")
		var claims []claim
		var held uint64
		for range rapid.IntRange(0, 8).Draw(t, "claims") {
			c := claim{
				pod:   PodID(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "pod")),
				bytes: rapid.Uint64Range(0, 2000).Draw(t, "bytes"), held: rapid.Uint64Range(0, 2000).Draw(t, "held"),
				stale: rapid.Uint64Range(0, 2000).Draw(t, "stale"),
			}
			c.need = rapid.Uint64Range(0, c.bytes).Draw(t, "need")
			claims, held = append(claims, c), held+min(c.held, c.bytes)
		}
		var sum, wanted uint64
		for i, got := range shareOut(proved, claims) {
			sum, wanted = sum+got, wanted+claims[i].bytes
			if got > claims[i].bytes || held <= proved && got < min(claims[i].held, claims[i].bytes) {
				t.Fatalf("claim %d gets %d", i, got)
			}
		}
		if sum != min(proved, wanted) {
			t.Fatalf("%d are given of %d, %d are claimed", sum, proved, wanted)
		}
	})
}

// TestCreditProperties: containers whose ledgers say what they like, memory that is truly shared within
// them, and a device whose use is true. All pods together count for no less than they have; one that is
// the only one to claim counts for no less than it has, and is killed when that is too much; steps that are
// left out change nothing.
func TestCreditProperties(t *testing.T) {
	skipped := 0
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(nil)
		part := &lazy{g: NewGPU("GPU-1", DefaultConfig())}
		part.g.first, part.g.stepped = 0, true
		names := []string{"a", "b", "c"}
		liars := rapid.IntRange(1, len(names)).Draw(t, "liars")
		for _, name := range names {
			w.conts = append(w.conts, container(name, 4*gib))
			for i := range 3 {
				w.shimmed(len(w.conts)*10+i, name, ctx)
			}
		}
		over := 0
		for range rapid.IntRange(1, 30).Draw(t, "changes") {
			c := rapid.IntRange(0, len(names)-1).Draw(t, "container")
			for i := range 3 {
				p := w.procs[(c+1)*10+i]
				if p == nil {
					continue
				}
				p.nvml = rapid.Uint64Range(1, 2000).Draw(t, "nvml") * mib
				p.slot.DeviceBytes = rapid.Uint64Range(0, 2000).Draw(t, "ledger") * mib
				p.slot.Imports = c < liars && rapid.Bool().Draw(t, "imports")
			}
			truth := map[string]uint64{}
			var all uint64
			for k, name := range names {
				var sum, least uint64
				for i := range 3 {
					if p := w.procs[(k+1)*10+i]; p != nil {
						sum, least = sum+p.nvml, max(least, p.nvml)
					}
				}
				if sum == 0 {
					continue
				}
				// Somewhere between all shared and nothing.
				truth[name] = rapid.Uint64Range(least, sum).Draw(t, "truth")
				if k >= liars && rapid.Bool().Draw(t, "shares nothing") {
					truth[name] = sum
				}
				all += truth[name]
			}
			w.used = all + rapid.Uint64Range(0, 100).Draw(t, "unattributed")*mib
			for range rapid.IntRange(1, 15).Draw(t, "steps") {
				in := w.input()
				out := w.g.Step(in)
				if b := part.step(in); !reflect.DeepEqual(out, b) {
					t.Fatalf("left out, settled %v:\n%+v\n%+v", part.g.Settled(), out, b)
				}
				var counted, credit uint64
				for _, s := range out.Containers {
					counted, credit = counted+s.NVMLBytes-s.SharedBytes+s.TrustedBytes, credit+s.SharedBytes-s.TrustedBytes
				}
				if credit > Overlap(&in.Sample) {
					t.Fatalf("a credit of %d for an overlap of %d", credit, Overlap(&in.Sample))
				}
				if out.Kill != nil {
					for _, pid := range out.Kill.PIDs {
						delete(w.procs, pid)
					}
					over = 0
					break
				}
				if counted < all {
					t.Fatalf("%d are counted of %d", counted, all)
				}
				// Nobody else shares or claims: then none of it can be missed.
				if liars == 1 {
					alone := true
					for k, name := range names[1:] {
						var sum uint64
						for i := range 3 {
							if p := w.procs[(k+2)*10+i]; p != nil {
								sum += p.nvml
							}
						}
						alone = alone && truth[name] == sum
					}
					a := out.Containers["a"]
					if alone && a.NVMLBytes-a.SharedBytes+a.TrustedBytes < truth["a"] {
						t.Fatalf("%d are counted of %d", a.NVMLBytes-a.SharedBytes+a.TrustedBytes, truth["a"])
					}
					if limit := 4 * gib; alone && truth["a"] > limit+DefaultConfig().Slack(limit) {
						over++
					} else {
						over = 0
					}
					if over > patience+3*len(names) { // the others may be killed first
						t.Fatalf("%d are there for %d answers", truth["a"], over)
					}
				}
			}
		}
		skipped += part.skipped
	})
	if skipped == 0 {
		t.Error("no step was left out")
	}
}

// TestSharingSettles: with a credit, and with a claim that is not borne out, steps can be left out, and what
// changes then is seen.
func TestSharingSettles(t *testing.T) {
	w := newWorld(t, container("a", 512*mib), container("b", gib))
	w.sharer("a", 1)
	w.shimmed(11, "b", ctx+handed)
	p := w.shimmed(12, "b", ctx)
	p.nvml += 100 * mib
	p.slot.Imports = true
	w.used = 2*ctx + handed + 2*ctx + handed + 100*mib
	w.noKill(50)
	if !w.g.Settled() {
		t.Fatal("it does not settle")
	}
	for range 30 {
		w.now += 100 * time.Millisecond
		w.g.Repeat(w.now)
	}
	w.noKill(1)
	if s := w.last.Containers["a"]; s.SharedBytes < handed-64*mib || s.OverMax {
		t.Errorf("%+v", s)
	}
	w.used += handed // the proof is gone
	if k := w.killed(patience); k.Container != "a" {
		t.Errorf("%+v", k)
	}
}

// TestNeighbourHidesTheProof: what a neighbour takes between the two calls is in the device's use and not yet in
// the rows, and in several answers running if he takes and gives back all the time. Who shares within its limit
// lives, whatever his amounts and his luck, also right after a restart, counts for what it has, and is refused
// nothing.
func TestNeighbourHidesTheProof(t *testing.T) {
	for _, tt := range []struct {
		name string
		hide func(answer int) bool
	}{
		{"the first two answers", func(i int) bool { return i < 2 }},
		{"for a second after a restart", func(i int) bool { return i < 10 }},
		{"two of five", func(i int) bool { return i%5 < 2 }},
		{"a second of each four", func(i int) bool { return i%40 >= 20 && i%40 < 30 }},
	} {
		for _, hidden := range []uint64{64 * mib, 128*mib + 1, 200 * mib, 4 * gib} {
			for _, shared := range []uint64{handed, handed + 64*mib} { // 448 and 512 MiB are there
				w := newWorld(t, container("a", 512*mib))
				owner, importer := w.sharer("a", 1)
				owner.nvml, owner.slot.DeviceBytes = ctx+shared, ctx+shared
				importer.nvml = ctx + shared
				there := 2*ctx + shared
				for i := range 200 {
					w.used = there
					if tt.hide(i) {
						w.used += hidden
					}
					out := w.step()
					s := out.Containers["a"]
					if out.Kill != nil || s.ChargedBytes != there || s.OverMax || s.ExcessBytes != 0 || s.PeakBytes != there {
						t.Fatalf("%s, %d hidden of %d, answer %d: kill %v, %+v", tt.name, hidden, shared, i, out.Kill, s)
					}
				}
				// Beside it somebody goes round the shim: two answers are enough, hidden or not, and no byte is
				// said to be there that is not.
				w.bare(3, "a", 192*mib)
				there += 192 * mib
				w.used = there + hidden
				if k := w.killed(2); k.UsedBytes != there || k.Container != "a" {
					t.Errorf("%s, %d hidden of %d: %+v", tt.name, hidden, shared, k)
				}
			}
		}
	}
}

// TestTrustIsNoLimit: a claim that nothing bears out is trusted for two settles, once, and one that is borne out
// now and then for no more time than it is.
func TestTrustIsNoLimit(t *testing.T) {
	for _, tt := range []struct {
		name   string
		proved func(answer int) bool
		within int // answers; 0: it lives
	}{
		{"never", func(int) bool { return false }, 23},
		{"in one of three", func(i int) bool { return i%3 == 0 }, 63},
		{"in one of ten", func(i int) bool { return i%10 == 9 }, 27},
		{"in three of four", func(i int) bool { return i%4 != 0 }, 0},
	} {
		w := newWorld(t, container("a", 512*mib))
		w.sharer("a", 1)
		killed := 0
		for i := 0; i < 1000 && killed == 0; i++ {
			w.used = 2*ctx + 2*handed
			if tt.proved(i) {
				w.used -= handed
			}
			if out := w.step(); out.Kill != nil {
				killed = i + 1
				if out.Kill.UsedBytes != 2*ctx+2*handed {
					t.Errorf("%s: %+v", tt.name, out.Kill)
				}
			}
		}
		if killed > tt.within || tt.within > 0 && killed == 0 {
			t.Errorf("%s: killed in answer %d", tt.name, killed)
		}
	}
}

// TestRandomNeighbourNeverKills: two hours of a neighbour whose memory is there half of the time, and another
// half when the second call comes.
func TestRandomNeighbourNeverKills(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	w := newWorld(t, container("a", 512*mib), container("b", 8*gib))
	w.sharer("a", 1)
	b := w.bare(10, "b", 0)
	hidden := 0
	const answers = 2 * 3600 * 10
	for i := range answers {
		row, use := r.Uint64N(2)*gib, r.Uint64N(2)*gib
		if use > row {
			hidden++
		}
		b.nvml = ctx + row
		w.used = 2*ctx + handed + ctx + use
		if out := w.step(); out.Kill != nil {
			t.Fatalf("answer %d: %+v", i, out.Kill)
		}
	}
	t.Logf("%d of %d answers hid the proof", hidden, answers)
}
