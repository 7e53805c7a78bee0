// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

type fakeSamples struct {
	now     time.Duration
	samples map[string]SampleInfo
	refresh func(gpu string) error
}

func (f *fakeSamples) Newest(gpu string) (SampleInfo, bool) { s, ok := f.samples[gpu]; return s, ok }
func (f *fakeSamples) Now() time.Duration                   { return f.now }
func (f *fakeSamples) Refresh(ctx context.Context, gpu string) error {
	if f.refresh == nil {
		return ctx.Err()
	}
	return f.refresh(gpu)
}

type fakeShims map[string]policy.Shim

func (f fakeShims) Shim(id policy.ContainerID, gpu string) (policy.Shim, bool) {
	s, ok := f[string(id)+" "+gpu]
	return s, ok
}

func subject(gpus ...string) Subject {
	s := Subject{ID: "p/0"}
	for _, g := range gpus {
		s.Grant.GPUs = append(s.Grant.GPUs, quota.GPU{UUID: g})
	}
	return s
}

func TestWatchState(t *testing.T) {
	for _, tt := range []struct {
		name string
		info *SampleInfo
		want State
		say  string
	}{
		{"no sample", nil, Absent, "not asked"},
		{"good", &SampleInfo{Began: 9 * time.Second, Complete: true, Processes: 3}, Proven, ""},
		{"just young enough", &SampleInfo{Began: 8 * time.Second, Complete: true}, Proven, ""},
		{"too old", &SampleInfo{Began: 8*time.Second - 1, Complete: true}, Degraded, "2s old"},
		{"a list is missing", &SampleInfo{Began: 10 * time.Second, Why: "list mps: not supported"}, Degraded, "list mps"},
		{"hung, without words", &SampleInfo{Began: 10 * time.Second}, Degraded, "did not answer"},
		{"unknown size", &SampleInfo{Began: 10 * time.Second, Complete: true, Unknown: []int{7, 8}}, Degraded, "process 7, 8"},
		{"many unknown sizes", &SampleInfo{Began: 10 * time.Second, Complete: true, Unknown: []int{1, 2, 3, 4, 5, 6}}, Degraded, "5, ..."},
	} {
		t.Run(tt.name, func(t *testing.T) {
			src := &fakeSamples{now: 10 * time.Second, samples: map[string]SampleInfo{}}
			if tt.info != nil {
				src.samples["A"] = *tt.info
			}
			got := Watch{src}.State(Subject{}, "A")
			if got.State != tt.want || !strings.Contains(got.Why, tt.say) {
				t.Errorf("got %+v", got)
			}
			if (got.State == Proven) != (got.Proof != "") {
				t.Errorf("a proof exists where nothing is proven, or the reverse: %+v", got)
			}
		})
	}
}

func TestWatchRaiseWaitsForProof(t *testing.T) {
	src := &fakeSamples{now: 10 * time.Second, samples: map[string]SampleInfo{"A": {Began: time.Second, Complete: true}}}
	asked := 0
	src.refresh = func(gpu string) error {
		asked++
		if asked == 3 {
			src.samples[gpu] = SampleInfo{Began: src.now, Complete: true}
		}
		return nil
	}
	got, err := Watch{src}.Raise(context.Background(), subject("A"))
	if err != nil || got["A"].State != Proven || asked != 3 {
		t.Errorf("got %+v, %v after %d samples", got, err, asked)
	}
	src.samples["A"] = SampleInfo{Why: "hangs"}
	src.refresh = func(string) error { return context.DeadlineExceeded }
	got, err = Watch{src}.Raise(context.Background(), subject("A"))
	if err != nil || got["A"].State != Degraded || got["A"].Why != "hangs" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestShimState(t *testing.T) {
	shims := fakeShims{
		"p/0 seen":   {State: "seen"},
		"p/0 absent": {State: "absent", Why: "no slot", PIDs: []int{5}},
		"p/0 young":  {State: "delivered", PIDs: []int{6}},
	}
	f := Shim{Shims: shims, Check: func(Subject) error { return nil }}
	for _, tt := range []struct {
		gpu, absent string
		want        Status
	}{
		{"other", "", Status{State: Delivered}},
		{"other", "static", Status{State: Absent, Why: "static"}},
		{"absent", "static", Status{State: Absent, Why: "static", PIDs: []int{5}}},
		{"seen", "", Status{State: Seen}},
		{"seen", "static", Status{State: Seen}},
		{"absent", "", Status{State: Absent, Why: "no slot", PIDs: []int{5}}},
		{"young", "", Status{State: Delivered, PIDs: []int{6}}},
	} {
		s := subject(tt.gpu)
		s.ShimAbsent = tt.absent
		if d := cmp.Diff(tt.want, f.State(s, tt.gpu)); d != "" {
			t.Errorf("%s %q: %s", tt.gpu, tt.absent, d)
		}
	}
	f.Check = func(Subject) error { return errors.New("file is gone") }
	if _, err := f.Raise(context.Background(), subject("other")); err == nil || !strings.Contains(err.Error(), "file is gone") {
		t.Errorf("raise gives %v", err)
	}
	s := subject("other")
	s.ShimAbsent = "musl"
	if _, err := f.Raise(context.Background(), s); err != nil {
		t.Errorf("what is not delivered is not checked: %v", err)
	}
}

func TestLevel(t *testing.T) {
	src := &fakeSamples{now: time.Second, samples: map[string]SampleInfo{"good": {Began: time.Second, Complete: true}, "bad": {Why: "hangs"}}}
	shims := fakeShims{"p/0 blind": {State: "absent", Why: "static"}}
	fences := []Fence{Watch{src}, Shim{Shims: shims}}
	for _, tt := range []struct {
		gpus []string
		want quota.Level
	}{
		{nil, quota.LevelNone},
		{[]string{"good"}, quota.LevelReactive},
		{[]string{"bad"}, quota.LevelAdvisory},
		{[]string{"good", "bad"}, quota.LevelAdvisory},
		{[]string{"good", "blind"}, quota.LevelNone},
	} {
		if got := Level(fences, subject(tt.gpus...)); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.gpus, got, tt.want)
		}
	}
}

func TestReaches(t *testing.T) {
	for _, tt := range []struct {
		have, want quota.Level
		ok         bool
	}{
		{quota.LevelNone, "", true},
		{quota.LevelNone, quota.LevelNone, true},
		{quota.LevelAdvisory, quota.LevelReactive, false},
		{quota.LevelReactive, quota.LevelReactive, true},
		{quota.LevelHard, quota.LevelReactive, true},
		{quota.LevelReactive, quota.LevelHard, false},
		{quota.LevelHard, "steel", false},
	} {
		if got := Reaches(tt.have, tt.want); got != tt.ok {
			t.Errorf("%s for %s: %v", tt.have, tt.want, got)
		}
	}
}

func TestReport(t *testing.T) {
	src := &fakeSamples{now: time.Second, samples: map[string]SampleInfo{"a": {Began: time.Second, Complete: true}, "b": {Why: "hangs"}}}
	shims := fakeShims{"p/0 a": {State: "seen"}, "p/0 b": {State: "absent", Why: "no slot", PIDs: []int{9, 4}}}
	got := Report([]Fence{Watch{src}, Shim{Shims: shims}}, subject("a", "b"))
	want := []api.Fence{
		{Name: "watch", State: "degraded", Why: "hangs on b"},
		{Name: "shim", State: "absent", Why: "no slot on b", PIDs: []int{4, 9}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got := Report([]Fence{Watch{src}}, subject()); got[0].State != "absent" {
		t.Errorf("without a GPU: %+v", got)
	}
}
