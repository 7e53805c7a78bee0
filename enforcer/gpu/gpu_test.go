// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

const gib = uint64(1) << 30

// fakeDevice answers what a test says.
type fakeDevice struct {
	mu     sync.Mutex
	info   Info
	memory Memory
	memErr error
	lists  map[List][]Process
	errs   map[List]error
	hang   chan struct{} // calls wait for it
	calls  int
	panics bool
}

func (d *fakeDevice) Info() Info { return d.info }

func (d *fakeDevice) Memory() (Memory, error) { return d.memory, d.memErr }

func (d *fakeDevice) Processes(l List) ([]Process, error) {
	d.mu.Lock()
	d.calls++
	hang, panics := d.hang, d.panics
	d.mu.Unlock()
	if hang != nil {
		<-hang
	}
	if panics {
		panic("slice bounds out of range")
	}
	return d.lists[l], d.errs[l]
}

func newFake() *fakeDevice {
	return &fakeDevice{
		info:   Info{UUID: "GPU-1", TotalBytes: 16 * gib},
		memory: Memory{TotalBytes: 16 * gib, UsedBytes: 2 * gib, FreeBytes: 14 * gib},
		lists:  map[List][]Process{}, errs: map[List]error{},
	}
}

func TestSampleMerges(t *testing.T) {
	d := newFake()
	d.lists[ListCompute] = []Process{{3, gib, true}, {1, 5, true}, {4, 7, true}, {4, 6, true}, {5, 9, false}, {0, 1, true}, {-1, 1, true}, {8, 1, true}}
	d.lists[ListGraphics] = []Process{{3, 2 * gib, true}, {6, 1, true}, {8, 0, false}}
	d.lists[ListMPS] = []Process{{7, 2, true}, {9, 17 * gib, true}, {10, math.MaxUint64, true}}
	s := NewSampler(d).Sample(t.Context())
	want := []Process{{1, 5, true}, {3, 2 * gib, true}, {4, 7, true}, {5, 0, false}, {6, 1, true}, {7, 2, true}, {8, 0, false}, {9, 0, false}, {10, 0, false}}
	if diff := cmp.Diff(want, s.Processes); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]int{7, 9, 10}, s.MPS); diff != "" {
		t.Error(diff)
	}
	if !s.Complete() || s.UUID != "GPU-1" || s.Memory != d.memory || s.Began == 0 || s.Took <= 0 || s.Wall.IsZero() {
		t.Errorf("%+v", s)
	}
	if s.Why() != "4 processes of unknown size" {
		t.Errorf("why %q", s.Why())
	}
}

func TestSampleOfLostGPU(t *testing.T) {
	d := newFake()
	d.memErr = ErrLost
	if s := NewSampler(d).Sample(t.Context()); s.Err != nil || !s.Complete() {
		t.Errorf("only the memory failed: %+v", s)
	}
	d.errs[ListCompute] = &CallError{Call: "x", kind: ErrLost}
	s := NewSampler(d).Sample(t.Context())
	if !errors.Is(s.Err, ErrLost) || s.Complete() || len(s.Processes) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestSampleFailures(t *testing.T) {
	d := newFake()
	d.lists[ListCompute] = []Process{{1, 5, true}}
	d.errs[ListGraphics] = errors.New("unknown error")
	d.memErr = ErrLost
	s := NewSampler(d).Sample(t.Context())
	if s.Complete() || len(s.Processes) != 1 || s.Failed[ListGraphics] == nil || len(s.Failed) != 1 || !errors.Is(s.MemoryErr, ErrLost) {
		t.Errorf("%+v", s)
	}
	for _, part := range []string{"graphics list: unknown error", "memory: GPU is lost"} {
		if !strings.Contains(s.Why(), part) {
			t.Errorf("why %q lacks %q", s.Why(), part)
		}
	}
	for name, m := range map[string]Memory{
		"no total":       {},
		"total is N/A":   {TotalBytes: math.MaxUint64},
		"used above":     {TotalBytes: gib, UsedBytes: 2 * gib},
		"free is N/A":    {TotalBytes: gib, FreeBytes: math.MaxUint64},
		"reserved above": {TotalBytes: gib, ReservedBytes: gib + 1},
	} {
		d := newFake()
		d.memory = m
		s := NewSampler(d).Sample(t.Context())
		if !errors.Is(s.MemoryErr, ErrNotAvailable) || s.Memory != (Memory{}) || !s.Complete() {
			t.Errorf("%s: %+v", name, s)
		}
	}
	d = newFake()
	d.panics = true
	if s := NewSampler(d).Sample(t.Context()); s.Err == nil || s.Complete() || s.Why() == "" {
		t.Errorf("a panic in the binding: %+v", s)
	}
}

// TestHungCall: the sample ends in time, later ones are refused and start nothing, and when the
// call comes back all is well again.
func TestHungCall(t *testing.T) {
	d := newFake()
	d.hang = make(chan struct{})
	s := NewSampler(d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	began := time.Now()
	got := s.Sample(ctx)
	if !errors.Is(got.Err, ErrHung) || got.Complete() || got.UUID != "GPU-1" {
		t.Errorf("%+v", got)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %v", took)
	}
	for range 10 {
		began := time.Now()
		if got := s.Sample(t.Context()); !errors.Is(got.Err, ErrHung) || time.Since(began) > time.Second {
			t.Errorf("%+v", got)
		}
	}
	d.mu.Lock()
	calls := d.calls
	d.mu.Unlock()
	if calls != 1 {
		t.Errorf("%d calls are in the driver", calls)
	}
	// Another GPU does not notice.
	if got := NewSampler(newFake()).Sample(t.Context()); !got.Complete() {
		t.Errorf("%+v", got)
	}
	close(d.hang)
	for deadline := time.Now().Add(20 * time.Second); ; {
		if got := s.Sample(t.Context()); got.Complete() {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("never sampled again")
		}
		time.Sleep(time.Millisecond)
	}
	if s.Device() != d {
		t.Error("another device")
	}
}

func TestQuota(t *testing.T) {
	i := Info{UUID: "GPU-1", Index: 2, Name: "Tesla T4", TotalBytes: 16 * gib, ReservedBytes: gib}
	q := Quota(i, DefaultReserve, 0)
	share := 0.03 * float64(16*gib)
	if q.AllocatableBytes != 15*gib-uint64(share) || q.UUID != "GPU-1" || q.Index != 2 || q.ContextBytes != 124<<20 || q.TotalBytes != 16*gib {
		t.Errorf("%+v", q)
	}
	i.TotalBytes, i.ReservedBytes = 4*gib, 0
	if q := Quota(i, DefaultReserve, 77); q.AllocatableBytes != 4*gib-256<<20 || q.ContextBytes != 77 {
		t.Errorf("%+v", q)
	}
	i.TotalBytes = 1 << 20
	if q := Quota(i, DefaultReserve, 0); q.AllocatableBytes != 0 {
		t.Errorf("smaller than its reserve: %+v", q)
	}
	i.TotalBytes = gib
	for _, share := range []float64{math.NaN(), -1} {
		if q := Quota(i, Reserve{Bytes: 5, Share: share}, 0); q.AllocatableBytes != gib-5 {
			t.Errorf("share %v: %+v", share, q)
		}
	}
	if q := Quota(i, Reserve{Share: 7}, 0); q.AllocatableBytes != 0 {
		t.Errorf("share 7: %+v", q)
	}
}

func TestContextBytes(t *testing.T) {
	for name, want := range map[string]uint64{
		"Tesla T4": 124, "NVIDIA A100-SXM4-40GB": 444, "NVIDIA A10": 260, "NVIDIA A10G": 260, "NVIDIA L4": 210, "NVIDIA L40S": 512,
		"NVIDIA H100 80GB HBM3": 542, "NVIDIA H200": 542, "NVIDIA GeForce RTX 4090": 462, "NVIDIA RTX 6000 Ada Generation": 512,
		"NVIDIA RTX PRO 6000 Blackwell Server Edition": 592, "NVIDIA B200": 640, "Tesla V100-SXM2-16GB": 328,
		"NVIDIA GeForce RTX 4060 Ti": 124, "": 704, "Something new": 704, "A1000": 704,
	} {
		if got := ContextBytes(name); got != want<<20 {
			t.Errorf("ContextBytes(%q) = %d MiB, want %d", name, got>>20, want)
		}
	}
	for _, c := range contexts {
		if c.bytes > unknownContextBytes {
			t.Errorf("%v is above what an unknown model takes", c.words)
		}
		for _, w := range c.words {
			if w != strings.ToUpper(w) {
				t.Errorf("%v is never matched", c.words)
			}
		}
	}
}

var nodeGPUs = []Info{
	{UUID: "GPU-aaaa", Index: 0, Minor: 1},
	{UUID: "GPU-bbbb", Index: 1, Minor: 0},
	{UUID: "GPU-cccc", Index: 2, Minor: 12},
}

func TestSelect(t *testing.T) {
	for name, c := range map[string]struct {
		selectors []string
		want      string
		unknown   string
	}{
		"nothing":          {nil, "", ""},
		"uuid":             {[]string{"GPU-bbbb"}, "1", ""},
		"uuid in capitals": {[]string{"gpu-BBBB"}, "1", ""},
		"index":            {[]string{"2", "0"}, "2 0", ""},
		"all":              {[]string{"all"}, "0 1 2", ""},
		"twice":            {[]string{"1", "GPU-bbbb", "all"}, "1 0 2", ""},
		"node":             {[]string{"/dev/nvidia0"}, "1", ""},
		"node, two digits": {[]string{"/dev/nvidia12"}, "2", ""},
		"simulated node":   {[]string{"/dev/simgpu/gpu1"}, "0", ""},
		"control nodes":    {[]string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset", "/dev/nvidia-caps/nvidia-cap1"}, "", ""},
		"none":             {[]string{"none", "void", ""}, "", ""},
		"cdi index":        {[]string{"nvidia.com/gpu=1"}, "1", ""},
		"cdi uuid":         {[]string{"gpufence.dev/simgpu=GPU-cccc"}, "2", ""},
		"cdi all":          {[]string{"nvidia.com/gpu=all"}, "0 1 2", ""},
		"unknown uuid":     {[]string{"GPU-aaaa", "GPU-dddd"}, "", "GPU-dddd"},
		"prefix":           {[]string{"GPU-aa"}, "", "GPU-aa"},
		"index too large":  {[]string{"3"}, "", "3"},
		"negative":         {[]string{"-1"}, "", "-1"},
		"two spellings":    {[]string{"01"}, "", "01"},
		"plus":             {[]string{"+1"}, "", "+1"},
		"unknown node":     {[]string{"/dev/nvidia5"}, "", "/dev/nvidia5"},
		"node of all":      {[]string{"/dev/nvidiaall"}, "", "/dev/nvidiaall"},
		"node of nothing":  {[]string{"/dev/nvidia"}, "", "/dev/nvidia"},
		"another node":     {[]string{"/dev/null"}, "", "/dev/null"},
		"node by uuid":     {[]string{"/dev/nvidiaGPU-aaaa"}, "", "/dev/nvidiaGPU-aaaa"},
		"cdi nothing":      {[]string{"nvidia.com/gpu="}, "", "nvidia.com/gpu="},
		"cdi none":         {[]string{"nvidia.com/gpu=none"}, "", "nvidia.com/gpu=none"},
		"no cdi kind":      {[]string{"gpu=0"}, "", "gpu=0"},
		"garbage":          {[]string{"\x00"}, "", "\x00"},
	} {
		got, err := Select(nodeGPUs, c.selectors)
		var e *SelectorError
		if c.unknown != "" {
			if !errors.As(err, &e) || e.Selector != c.unknown || !strings.Contains(err.Error(), "GPU-aaaa") {
				t.Errorf("%s: %v, %v", name, got, err)
			}
			continue
		}
		var indices []string
		for _, i := range got {
			indices = append(indices, string(rune('0'+i.Index)))
		}
		if err != nil || strings.Join(indices, " ") != c.want {
			t.Errorf("%s: %v, %v; want %s", name, indices, err, c.want)
		}
	}
	if _, err := Select(nil, []string{"0"}); err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("no GPU: %v", err)
	}
}

func TestSelectInstances(t *testing.T) {
	gpus := []Info{
		{UUID: "GPU-aaaa"},
		{UUID: "GPU-bbbb", Index: 1, Minor: 4, MIG: true},
		{UUID: "MIG-cccc", Index: 1, Minor: 4, Parent: "GPU-bbbb"},
		{UUID: "MIG-dddd", Index: 1, Minor: 4, Parent: "GPU-bbbb", Instance: 2},
	}
	for selector, want := range map[string]string{
		"all": "GPU-aaaa MIG-cccc MIG-dddd", "1": "GPU-bbbb", "GPU-bbbb": "GPU-bbbb", "mig-dddd": "MIG-dddd", "1:0": "MIG-cccc",
		"1:2": "MIG-dddd", "nvidia.com/gpu=1:2": "MIG-dddd", "/dev/simgpu/gpu4.mig2": "MIG-dddd", "/dev/nvidia4": "GPU-bbbb",
		"1:1": "", "0:0": "", "1:02": "", "/dev/simgpu/gpu1.mig2": "", "/dev/simgpu/gpu4.mig1": "", "/dev/nvidia1:2": "",
	} {
		got, err := Select(gpus, []string{selector})
		var uuids []string
		for _, i := range got {
			uuids = append(uuids, i.UUID)
		}
		if strings.Join(uuids, " ") != want || (err != nil) != (want == "") {
			t.Errorf("%s: %v, %v; want %q", selector, uuids, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), "1:2 (MIG-dddd)") {
			t.Errorf("%s: %v", selector, err)
		}
	}
}

func TestSelectAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		selectors := rapid.SliceOf(rapid.OneOf(rapid.String(), rapid.StringMatching(`(/dev/nvidia|nvidia.com/gpu=|GPU-)?[0-9a-z-]{0,4}`))).Draw(t, "selectors")
		got, err := Select(nodeGPUs, selectors)
		seen := map[string]bool{}
		for _, i := range got {
			if seen[i.UUID] {
				t.Fatalf("%q names %s twice", selectors, i.UUID)
			}
			seen[i.UUID] = true
		}
		if err != nil && got != nil {
			t.Fatalf("%v beside %v", got, err)
		}
	})
}
