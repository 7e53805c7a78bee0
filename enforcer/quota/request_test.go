// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

const (
	uuidA = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
	uuidB = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
)

func gpuA() GPU {
	return GPU{UUID: uuidA, TotalBytes: 16 * gib, AllocatableBytes: 15 * gib, ContextBytes: 320 * mib}
}

func gpuB() GPU {
	return GPU{UUID: uuidB, Index: 1, TotalBytes: 24 * gib, AllocatableBytes: 23 * gib, ContextBytes: 320 * mib}
}

// pod is a container named main with a GPU under CRI; annotations are given without domain.
func pod(annotations ...string) Subject {
	return Subject{Engine: EngineCRI, Namespace: "ns", Pod: "p", Container: "main", HasGPU: true, Annotations: ours(annotations...)}
}

func docker(annotations ...string) Subject {
	return Subject{Engine: EngineDocker, HasGPU: true, Annotations: ours(annotations...)}
}

// ours makes annotations of "key=value"; a key with a slash or a leading ! is used as it is.
func ours(pairs ...string) map[string]string {
	m := map[string]string{}
	for _, p := range pairs {
		k, v, _ := strings.Cut(p, "=")
		if raw, ok := strings.CutPrefix(k, "!"); ok {
			m[raw] = v
		} else {
			m[Domain+k] = v
		}
	}
	return m
}

func (s Subject) env(vars ...string) Subject { s.Env = vars; return s }
func (s Subject) noGPU() Subject             { s.HasGPU = false; return s }
func (s Subject) named(c string) Subject     { s.Container = c; return s }

// policy changes the default policy.
func policy(change func(p *Policy)) Policy {
	p := DefaultPolicy()
	if change != nil {
		change(&p)
	}
	return p
}

func ceiling(s string) Policy {
	return policy(func(p *Policy) { p.Ceiling = must(ParseAmount(s, true)) })
}

func byDefault(s string) Policy {
	return policy(func(p *Policy) {
		for e := range p.Default {
			p.Default[e] = must(ParseDefault(s))
		}
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func limits(limit, guarantee uint64) Limits {
	return Limits{Max: limit, High: Unlimited, Min: guarantee}
}

// slowed has a memory.high too.
func slowed(limit, guarantee, high uint64) Limits {
	return Limits{Max: limit, High: high, Min: guarantee}
}

// spills has a memory.swap.max too.
func spills(limit, guarantee, swap uint64) Limits {
	return Limits{Max: limit, High: Unlimited, Min: guarantee, SwapMax: swap}
}

func TestGrants(t *testing.T) {
	envAll := func(p *Policy) { p.Accept[EngineCRI] = Accept{Keys: true, Aliases: true, Env: true, GPU: true} }
	both := []GPU{gpuA(), gpuB()}
	tests := []struct {
		name    string
		s       Subject
		p       Policy
		gpus    []GPU // gpuA if nil
		pod     map[string]Limits
		own     map[string]Limits
		group   bool // oom.group false?
		require Level
		notices []string
	}{
		{name: "pod key", s: pod("memory.max=4Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "container key", s: pod("container.main.memory.max=3Gi"), own: map[string]Limits{uuidA: limits(3*gib, 3*gib)}},
		{name: "both levels", s: pod("memory.max=4Gi", "container.main.memory.max=3Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, own: map[string]Limits{uuidA: limits(3*gib, 3*gib)}},
		{name: "container above pod: its guarantee is the pod's", s: pod("memory.max=4Gi", "container.main.memory.max=6Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, own: map[string]Limits{uuidA: limits(6*gib, 4*gib)}},
		{name: "another container's key", s: pod("memory.max=4Gi", "container.other.memory.max=3Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "full form", s: pod("config=pod: {memory.max: 4Gi, x-note: hi}\ncontainers:\n  main: {memory.max: 3Gi, memory.oom.group: false}\n  other: {memory.min: 1Gi}\nx-team: [a]\n"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, own: map[string]Limits{uuidA: limits(3*gib, 3*gib)}, group: true},
		{name: "both forms", s: pod("config=pod: {memory.max: 4Gi}", "memory.min=1Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 1*gib)}},
		{name: "quoted and numeric scalars", s: pod("config={pod: {memory.max: \"4Gi\", memory.min: 0}}"), pod: map[string]Limits{uuidA: limits(4*gib, 0)}},
		{name: "free keys", s: pod("memory.max=4Gi", "x-anything=4096", "x-=y"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "other domains", s: pod("memory.max=4Gi", "!example.com/memory.max=5", "!memory.max=6"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "percent", s: pod("memory.max=25%"), pod: map[string]Limits{uuidA: limits(15*gib/4, 15*gib/4)}},
		{name: "percent on two GPUs", s: pod("memory.max=50%"), gpus: both, pod: map[string]Limits{uuidA: limits(15*gib/2, 15*gib/2), uuidB: limits(23*gib/2, 23*gib/2)}},
		{name: "all of the GPU: only what it can hand out is guaranteed", s: pod("memory.max=16Gi"), pod: map[string]Limits{uuidA: limits(16*gib, 15*gib)}},
		{name: "max", s: pod("memory.max=max")},
		{name: "max for the pod, a limit for the container", s: pod("memory.max=max", "container.main.memory.max=1Gi"), own: map[string]Limits{uuidA: limits(gib, gib)}},
		{name: "max and min", s: pod("memory.max=max", "memory.min=2Gi"), pod: map[string]Limits{uuidA: limits(Unlimited, 2*gib)}},
		{name: "min max", s: pod("memory.max=4Gi", "memory.min=max"), p: policy(func(p *Policy) { p.Overcommit = true }), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "overcommit", s: pod("memory.max=4Gi"), p: policy(func(p *Policy) { p.Overcommit = true }), pod: map[string]Limits{uuidA: limits(4*gib, 0)}},
		{name: "min in percent", s: pod("memory.max=4Gi", "memory.min=10%"), pod: map[string]Limits{uuidA: limits(4*gib, 15*gib/10/granule*granule)}},
		{name: "by UUID under Kubernetes", s: pod("memory.max=" + uuidA + "=4Gi," + strings.ToUpper(uuidB[:3]) + uuidB[3:] + "=8Gi"), gpus: both, pod: map[string]Limits{uuidA: limits(4*gib, 4*gib), uuidB: limits(8*gib, 8*gib)}},
		{name: "another container's GPU in the pod's list", s: pod("memory.max=" + uuidA + "=4Gi," + uuidB + "=8Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "by position", s: docker("memory.max=0=4Gi, 1=max"), gpus: both, pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "position is the container's own order", s: docker("memory.max=0=4Gi,1=8Gi"), gpus: []GPU{gpuB(), gpuA()}, pod: map[string]Limits{uuidB: limits(4*gib, 4*gib), uuidA: limits(8*gib, 8*gib)}},
		{name: "a GPU that is not listed takes the default", s: docker("memory.max=1=4Gi"), gpus: both, pod: map[string]Limits{uuidB: limits(4*gib, 4*gib)}, notices: []string{"the container has no memory.max on " + uuidA + ": its GPU memory is not limited"}},
		{name: "as a list of one", s: docker("memory.max=0=4Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "oom.group", s: pod("memory.max=4Gi", "memory.oom.group=false"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, group: true},
		{name: "oom.group of the container wins", s: pod("memory.max=4Gi", "memory.oom.group=false", "container.main.memory.oom.group=true"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "require", s: pod("memory.max=4Gi", "require=reactive"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "policy requires more than the user", s: pod("memory.max=4Gi", "require=reactive"), p: policy(func(p *Policy) { p.Require = LevelHard }), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, require: LevelHard},
		{name: "high", s: pod("memory.max=4Gi", "memory.high=3Gi"), pod: map[string]Limits{uuidA: slowed(4*gib, 4*gib, 3*gib)}},
		{name: "high in percent, of the container", s: pod("memory.max=4Gi", "container.main.memory.high=10%"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, own: map[string]Limits{uuidA: slowed(Unlimited, 0, 15*gib/10/granule*granule)}},
		{name: "high alone", s: docker("memory.high=0=1Gi,1=max"), gpus: both, pod: map[string]Limits{uuidA: slowed(Unlimited, 0, gib)}, notices: []string{"the container has no memory.max: its GPU memory is not limited"}},
		{name: "a high of 0", s: pod("memory.max=4Gi", "memory.high=0"), pod: map[string]Limits{uuidA: slowed(4*gib, 4*gib, 0)}},
		{name: "swap", s: pod("memory.max=4Gi", "memory.swap.max=1Gi"), pod: map[string]Limits{uuidA: spills(4*gib, 4*gib, gib)}},
		{name: "swap of the container alone", s: pod("memory.max=4Gi", "container.main.memory.swap.max=1Gi"), pod: map[string]Limits{uuidA: spills(4*gib, 4*gib, Unlimited)}, own: map[string]Limits{uuidA: spills(Unlimited, 0, gib)}},
		{name: "swap without end", s: pod("container.main.memory.max=4Gi", "memory.swap.max=max"), pod: map[string]Limits{uuidA: spills(Unlimited, 0, Unlimited)}, own: map[string]Limits{uuidA: spills(4*gib, 4*gib, Unlimited)}},
		{name: "values that say nothing", s: pod("memory.max=4Gi", "memory.high=max", "memory.swap.max=0"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},

		{name: "docker without a limit", s: docker(), notices: []string{"the container has no memory.max: its GPU memory is not limited"}},
		{name: "docker under a ceiling", s: docker(), p: ceiling("4Gi"), own: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, notices: []string{"the container has no memory.max: it gets the node's ceiling of 4Gi"}},
		{name: "default in bytes", s: pod(), p: byDefault("2Gi"), own: map[string]Limits{uuidA: limits(2*gib, 2*gib)}, notices: []string{"container main of pod p has no memory.max: it gets the node's default of 2Gi"}},
		{name: "default 1/N", s: pod(), p: byDefault("1/4"), own: map[string]Limits{uuidA: limits(15*gib/4, 15*gib/4)}, notices: []string{"container main of pod p has no memory.max: it gets the node's default of 25%"}},
		{name: "default unlimited in Kubernetes", s: pod(), p: byDefault("unlimited"), notices: []string{"container main of pod p has no memory.max: its GPU memory is not limited"}},
		{name: "ceiling", s: pod("memory.max=4Gi"), p: ceiling("4Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "ceiling in percent", s: pod("memory.max=4Gi"), p: ceiling("50%"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},

		{name: "env", s: docker().env("GPUFENCE_MEMORY_MAX=4Gi", "GPUFENCE_MEMORY_MIN=1Gi", "GPUFENCE_MEMORY_OOM_GROUP=false"), own: map[string]Limits{uuidA: limits(4*gib, gib)}, group: true},
		{name: "env beside an annotation", s: docker("memory.max=2Gi").env("GPUFENCE_MEMORY_MAX=4Gi"), pod: map[string]Limits{uuidA: limits(2*gib, 2*gib)}, own: map[string]Limits{uuidA: limits(4*gib, 2*gib)}},
		{name: "empty env", s: docker().env("GPUFENCE_MEMORY_MAX="), notices: []string{"the container has no memory.max: its GPU memory is not limited"}},
		{name: "the last of several", s: docker().env("GPUFENCE_MEMORY_MAX=8Gi", "GPUFENCE_MEMORY_MAX=4Gi"), own: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "env by position", s: docker().env("GPUFENCE_MEMORY_MAX=0=4Gi"), own: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "env lowers a default", s: docker().env("GPUFENCE_MEMORY_MAX=1Gi"), p: byDefault("2Gi"), own: map[string]Limits{uuidA: limits(gib, gib)}},
		{name: "env may raise", s: docker().env("GPUFENCE_MEMORY_MAX=3Gi"), p: policy(func(p *Policy) {
			p.Default[EngineDocker] = Default{Kind: DefaultDeny}
			p.Accept[EngineDocker] = Accept{Env: true, EnvMayRaise: true}
		}), own: map[string]Limits{uuidA: limits(3*gib, 3*gib)}},
		{name: "env may guarantee", s: docker().env("GPUFENCE_MEMORY_MIN=3Gi"), p: policy(func(p *Policy) { p.Accept[EngineDocker] = Accept{Env: true, EnvMayRaise: true} }), own: map[string]Limits{uuidA: limits(Unlimited, 3*gib)}, notices: []string{"the container has no memory.max: its GPU memory is not limited"}},
		{name: "env is not read in Kubernetes", s: pod("memory.max=4Gi").env("GPUFENCE_MEMORY_MAX=1Gi"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, notices: []string{"GPUFENCE_MEMORY_MAX is not read from cri by this node's policy ([accept.cri] env)"}},
		{name: "env in Kubernetes where accepted", s: pod("memory.max=4Gi").env("GPUFENCE_MEMORY_MAX=1Gi"), p: policy(envAll), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, own: map[string]Limits{uuidA: limits(gib, gib)}},
		{name: "env that is not a limit says nothing", s: pod("memory.max=4Gi").env("CUDA_DEVICE_SM_LIMIT=30", "CUDA_DEVICE_MEMORY_SHARED_CACHE=/x", "GPUFENCE_DEBUG=1"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},

		{name: "gpu-memory.limit", s: pod("!nvidia.com/container.main.gpu-memory.limit=4Gi"), own: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "gpu-memory.limit and request", s: pod("!nvidia.com/container.main.gpu-memory.limit=4Gi", "!nvidia.com/container.main.gpu-memory.request=1Gi"), own: map[string]Limits{uuidA: limits(4*gib, gib)}},
		{name: "gpu-memory.request alone is a limit", s: pod("!nvidia.com/container.main.gpu-memory.request=1Gi"), own: map[string]Limits{uuidA: limits(gib, gib)}},
		{name: "gpu-memory.limit in bytes", s: pod("!nvidia.com/container.main.gpu-memory.limit=4294967296"), own: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "gpu-memory", s: pod("!gpu-memory=2000"), own: map[string]Limits{uuidA: limits(2000*mib, 2000*mib)}},
		{name: "gpu-memory of the container it names", s: pod("!gpu-memory=2000", "!gpu-fraction-container-name=main"), own: map[string]Limits{uuidA: limits(2000*mib, 2000*mib)}},
		{name: "gpu-fraction", s: pod("!gpu-fraction=0.5", "!gpu-fraction-num-devices=1"), own: map[string]Limits{uuidA: limits(15*gib/2, 15*gib/2)}},
		{name: "aliases that agree to the MiB", s: pod("!gpu-memory=4096", "!nvidia.com/container.main.gpu-memory.limit=4294967300"), own: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "fraction against size: the lower, size", s: pod("!gpu-fraction=0.5", "!gpu-memory=2048"), own: map[string]Limits{uuidA: limits(2*gib, 2*gib)},
			notices: []string{`gpu-memory "2048" and gpu-fraction "0.5" disagree on ` + uuidA + `: the lower, 2Gi from gpu-memory, holds`}},
		{name: "fraction against size: the lower, fraction", s: pod("!gpu-fraction=0.1", "!gpu-memory=2048"), own: map[string]Limits{uuidA: limits(15*gib/10/granule*granule, 15*gib/10/granule*granule)},
			notices: []string{`gpu-memory "2048" and gpu-fraction "0.1" disagree on ` + uuidA + `: the lower, 1536Mi from gpu-fraction, holds`}},
		{name: "a native key hides aliases, wrong ones too", s: pod("memory.max=4Gi", "!gpu-memory=x"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}, notices: []string{"gpu-memory is ignored, since memory.max is set"}},
		{name: "another container's alias", s: pod("memory.max=4Gi", "!nvidia.com/container.other.gpu-memory.limit=x"), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "aliases not accepted", s: pod("!gpu-memory=2048"), p: policy(func(p *Policy) {
			p.Default[EngineCRI] = Default{Kind: DefaultUnlimited}
			p.Accept[EngineCRI] = Accept{Keys: true}
		}), notices: []string{"gpu-memory is not read from cri by this node's policy ([accept.cri] aliases)", "container main of pod p has no memory.max: its GPU memory is not limited"}},

		{name: "NVIDIA_GPU_MEMORY_LIMIT", s: docker().env("NVIDIA_GPU_MEMORY_LIMIT=2048", "NVIDIA_GPU_MEMORY_REQUEST=1024"), own: map[string]Limits{uuidA: limits(2*gib, gib)}},
		{name: "CUDA_DEVICE_MEMORY_LIMIT", s: docker().env("CUDA_DEVICE_MEMORY_LIMIT=3000m"), own: map[string]Limits{uuidA: limits(3000*mib, 3000*mib)}},
		{name: "CUDA_DEVICE_MEMORY_LIMIT_i", s: docker().env("CUDA_DEVICE_MEMORY_LIMIT=3000m", "CUDA_DEVICE_MEMORY_LIMIT_1=4G"), gpus: both, own: map[string]Limits{uuidA: limits(3000*mib, 3000*mib), uuidB: limits(4*gib, 4*gib)}},
		{name: "CUDA_DEVICE_MEMORY_LIMIT_i of a GPU that is not there", s: docker().env("CUDA_DEVICE_MEMORY_LIMIT_0=1073741824", "CUDA_DEVICE_MEMORY_LIMIT_7=1g"), own: map[string]Limits{uuidA: limits(gib, gib)}},
		{name: "CUDA_DEVICE_MEMORY_LIMIT=0 is no limit", s: docker().env("CUDA_DEVICE_MEMORY_LIMIT=0"), notices: []string{"the container has no memory.max: its GPU memory is not limited"}},
		{name: "CUDA_DEVICE_MEMORY_LIMIT_0=0 is no limit there", s: docker().env("CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DEVICE_MEMORY_LIMIT_0=0"), gpus: both, own: map[string]Limits{uuidB: limits(gib, gib)}},
		{name: "an alias outside Kubernetes as annotation", s: docker("!gpu-memory=2048"), own: map[string]Limits{uuidA: limits(2*gib, 2*gib)}},
		{name: "native env hides alias env", s: docker().env("GPUFENCE_MEMORY_MAX=1Gi", "NVIDIA_GPU_MEMORY_LIMIT=x"), own: map[string]Limits{uuidA: limits(gib, gib)}},

		{name: "the gpu key", s: docker("gpu=any", "memory.max=4Gi").noGPU(), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
		{name: "the gpu key under CRI where accepted", s: pod("gpu=2", "memory.max=4Gi").noGPU(), p: policy(envAll), pod: map[string]Limits{uuidA: limits(4*gib, 4*gib)}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.p.Mode == "" {
				tt.p = DefaultPolicy()
			}
			if tt.gpus == nil {
				tt.gpus = []GPU{gpuA()}
			}
			r, notices, err := Parse(tt.s, tt.p)
			if err != nil {
				t.Fatal(err)
			}
			g, more, err := r.Resolve(tt.gpus, tt.p)
			if err != nil {
				t.Fatal(err)
			}
			want := Grant{GPUs: tt.gpus, Pod: tt.pod, Container: tt.own, OOMGroup: !tt.group, Mode: ModeEnforce, Require: tt.require}
			if want.Pod == nil {
				want.Pod = map[string]Limits{}
			}
			if want.Container == nil {
				want.Container = map[string]Limits{}
			}
			if want.Require == "" {
				want.Require = LevelNone
				if want.Limited() {
					want.Require = LevelReactive
				}
			}
			if d := cmp.Diff(want, g); d != "" {
				t.Errorf("grant (-want +got)\n%s", d)
			}
			var got []string
			for _, n := range append(notices, more...) {
				if !slices.Contains(got, string(n)) {
					got = append(got, string(n))
				}
			}
			if d := cmp.Diff(tt.notices, got); d != "" {
				t.Errorf("notices (-want +got)\n%s", d)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	both := []GPU{gpuA(), gpuB()}
	long := strings.Repeat("x", 300)
	tests := []struct {
		s    Subject
		want string
		p    Policy
		gpus []GPU
	}{
		// Values.
		{s: pod("memory.max=4096"), want: `E1203 memory.max "4096" has no unit: write 4096Mi`},
		{s: pod("memory.max=4g"), want: `E1202 memory.max "4g" has an unknown unit: write 4Gi`},
		{s: pod("memory.max=3000m"), want: `E1202 memory.max "3000m" has an unknown unit: write 3000Mi`},
		{s: pod("memory.max="), want: `E1201 memory.max is empty: write a quantity such as 4Gi`},
		{s: pod("memory.max=0.3Gi"), want: `E1204 memory.max "0.3Gi" is not a whole number of bytes: write 307Mi`},
		{s: pod("memory.max=-4Gi"), want: `E1205 memory.max "-4Gi" is negative: write "4Gi"`},
		{s: pod("memory.max=99Ei"), want: `E1206 memory.max "99Ei" is more than 9223372036854775807 bytes: write max for no limit`},
		{s: pod("memory.max=110%"), want: `E1207 memory.max "110%" is not a percentage between 0% and 100%: write at most 100%`},
		{s: pod("memory.max=1/4"), want: `E1219 memory.max "1/4" is for node policy only: write a percentage such as 25%`},
		{s: pod("memory.max=" + strings.Repeat("9,", 4000)), want: `E1206 memory.max has a value of 8000 characters: write at most 4096`},
		{s: pod("container.main.memory.max=4096"), want: `E1203 container.main.memory.max "4096" has no unit: write 4096Mi`},
		{s: pod("container.other.memory.max=4096"), want: `E1203 container.other.memory.max "4096" has no unit: write 4096Mi`},
		{s: pod("config=pod: {memory.max: 4096}"), want: `E1203 memory.max "4096" has no unit: write 4096Mi`},
		{s: pod("config=pod: {memory.max: 0x1000}"), want: `E1202 memory.max "0x1000" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{s: docker().env("GPUFENCE_MEMORY_MAX=4096"), want: `E1203 GPUFENCE_MEMORY_MAX "4096" has no unit: write 4096Mi`},
		{s: pod("memory.oom.group=yes"), want: `E1215 memory.oom.group "yes" is neither true nor false: write true`},
		{s: pod("memory.oom.group=0"), want: `E1215 memory.oom.group "0" is neither true nor false: write false`},
		{s: pod("memory.oom.group=maybe"), want: `E1215 memory.oom.group "maybe" is neither true nor false: write true or false`},
		{s: pod("require=advisory"), want: `E1216 require "advisory" is not a level that can be required: write hard or reactive`},
		{s: docker("gpu=0"), want: `E1217 gpu "0" names no GPU: write any, a count such as 2, all, or UUIDs such as GPU-<uuid>`},
		{s: docker("gpu=02"), want: `E1217 gpu "02" names no GPU: write any, a count such as 2, all, or UUIDs such as GPU-<uuid>`},
		{s: docker("gpu=GPU-"), want: `E1217 gpu "GPU-" names no GPU: write any, a count such as 2, all, or UUIDs such as GPU-<uuid>`},
		{s: docker("gpu=GPU-1,GPU-1"), want: `E1217 gpu "GPU-1,GPU-1" names no GPU: write any, a count such as 2, all, or UUIDs such as GPU-<uuid>`},
		{s: pod("compute.weight=0"), want: `E1201 compute.weight "0" is not a weight: write a number from 1 to 10000`},
		{s: pod("compute.max=30"), want: `E1207 compute.max "30" is not a share of GPU time: write one such as 30%`},

		// Lists.
		{s: docker("memory.max=0=4Gi,8Gi"), want: `E1208 memory.max "0=4Gi,8Gi" has the item "8Gi" without a GPU: write one amount for all GPUs, or a list such as 0=4Gi,1=8Gi`},
		{s: docker("memory.max=4Gi,"), want: `E1208 memory.max "4Gi," has the item "4Gi" without a GPU: write one amount for all GPUs, or a list such as 0=4Gi,1=8Gi`},
		{s: docker("memory.max=gpu0=4Gi"), want: `E1208 memory.max "gpu0=4Gi" names the GPU "gpu0", which is neither a position nor a UUID: write a list such as 0=4Gi,1=8Gi, or GPU-<uuid>=8Gi`},
		{s: docker("memory.max=0=4Gi,00=5Gi"), want: `E1208 memory.max "0=4Gi,00=5Gi" names GPU "0" twice: name it once`},
		{s: docker("memory.max=0=4096"), want: `E1203 memory.max of GPU 0 "4096" has no unit: write 4096Mi`},
		{s: docker("memory.max=0=4Gi," + uuidA + "=5Gi"), want: `E1208 memory.max "0=4Gi,GPU-aaaaaaaa-0000-0000-0000-000000…" (50 characters) names GPU 0 twice, it is ` + uuidA + `: name it once`},
		{s: pod("memory.max=0=4Gi"), want: `E1209 memory.max "0=4Gi" names GPU 0 by position, which means nothing under Kubernetes: write one amount for all GPUs, or UUIDs such as GPU-<uuid>=4Gi`},
		{s: pod("memory.max=4Gi").env("GPUFENCE_MEMORY_MIN=0=1Gi"), p: policy(func(p *Policy) { p.Accept[EngineCRI] = Accept{Keys: true, Env: true} }),
			want: `E1209 GPUFENCE_MEMORY_MIN "0=1Gi" names GPU 0 by position, which means nothing under Kubernetes: write one amount for all GPUs, or UUIDs such as GPU-<uuid>=4Gi`},
		{s: docker("memory.max=1=4Gi"), want: `E1210 memory.max "1=4Gi" names GPU 1, which the container does not have: it has 0 (` + uuidA + `)`},
		{s: docker("memory.min=" + uuidB + "=4Gi"), want: `E1210 memory.min "` + uuidB[:40] + `…" (44 characters) names GPU ` + uuidB + `, which the container does not have: it has 0 (` + uuidA + `)`},
		{s: pod("memory.max=" + uuidB + "=4Gi"), want: `E1401 container main of pod p has a GPU and no memory.max on ` + uuidA + `, which this node's policy denies: add the pod annotation gpufence.dev/memory.max: 4Gi, and see that the engine passes gpufence.dev/* annotations on`},

		// Against the GPU and the policy.
		{s: pod("memory.max=100Mi"), want: `E1211 memory.max "100Mi" is less than one CUDA context takes on GPU ` + uuidA + `, which is 320Mi: write more than that`},
		{s: pod("memory.max=4Mi"), want: `E1211 memory.max "4Mi" is less than one CUDA context takes on GPU ` + uuidA + `, which is 320Mi: write 4Gi`},
		{s: pod("memory.max=4096Ki"), want: `E1211 memory.max "4096Ki" is less than one CUDA context takes on GPU ` + uuidA + `, which is 320Mi: write 4Gi`},
		{s: pod("memory.max=0"), want: `E1211 memory.max "0" is less than one CUDA context takes on GPU ` + uuidA + `, which is 320Mi: write more than that`},
		{s: pod("memory.max=0%"), want: `E1211 memory.max "0%" (0 there) is less than one CUDA context takes on GPU ` + uuidA + `, which is 320Mi: write more than that`},
		{s: pod(), p: byDefault("1/1024"), want: `E1211 the node's default "1/1024" (14Mi there) is less than one CUDA context takes on GPU ` + uuidA + `, which is 320Mi: write 14Gi`},
		{s: pod("memory.max=99Ti"), want: `E1212 memory.max "99Ti" is more than GPU ` + uuidA + ` has, which is 16Gi: write at most 16Gi, or max for no limit`},
		{s: pod("container.main.memory.max=17Gi"), want: `E1212 container.main.memory.max "17Gi" is more than GPU ` + uuidA + ` has, which is 16Gi: write at most 16Gi, or max for no limit`},
		{s: pod("memory.max=20Gi"), gpus: []GPU{gpuB(), gpuA()}, want: `E1212 memory.max "20Gi" is more than GPU ` + uuidA + ` has, which is 16Gi: write at most 16Gi, or max for no limit`},
		{s: pod("memory.max=max", "memory.min=99Ti"), want: `E1212 memory.min "99Ti" is more than GPU ` + uuidA + ` has, which is 16Gi: write at most 15Gi`},
		{s: pod("memory.max=8Gi"), p: ceiling("4Gi"), want: `E1213 memory.max "8Gi" is more than this node's policy allows on GPU ` + uuidA + `, which is 4Gi: write at most that, or ask whoever runs the node`},
		{s: pod("memory.max=50%"), p: ceiling("25%"), want: `E1213 memory.max "50%" (7680Mi there) is more than this node's policy allows on GPU ` + uuidA + `, which is 3840Mi: write at most that, or ask whoever runs the node`},
		{s: pod("memory.max=1Gi", "container.main.memory.max=8Gi"), p: ceiling("4Gi"), want: `E1213 container.main.memory.max "8Gi" is more than this node's policy allows on GPU ` + uuidA + `, which is 4Gi: write at most that, or ask whoever runs the node`},
		{s: pod("memory.max=max"), p: ceiling("4Gi"), want: `E1405 memory.max "max" is above the ceiling of 4Gi that this node's policy sets: write at most that`},
		{s: docker("memory.max=0=max,1=4Gi"), p: ceiling("4Gi"), gpus: both, want: `E1405 memory.max "max" is above the ceiling of 4Gi that this node's policy sets: write at most that`},
		{s: pod("memory.max=4Gi", "memory.min=5Gi"), want: `E1214 memory.min "5Gi" is more than memory.max, which is 4Gi: write at most that`},
		{s: pod("memory.max=4Gi", "container.main.memory.min=5Gi"), want: `E1214 container.main.memory.min "5Gi" is more than memory.max, which is 4Gi: write at most that`},
		{s: pod("memory.max=max", "memory.min=max"), want: `E1214 memory.min "max" follows memory.max, which is not set: set gpufence.dev/memory.max`},
		{s: pod("memory.max=max", "memory.min=15.5Gi"), want: `E1402 memory.min "15.5Gi" is more than GPU ` + uuidA + ` can guarantee, which is 15Gi of its 16Gi: write at most that`},
		{s: pod("memory.max=4Gi"), gpus: []GPU{{UUID: uuidA}}, want: `E1403 GPU ` + uuidA + ` has no known size, so that nothing can be granted on it: see gpufence inspect, or nvidia-smi, for what the driver says`},
		{s: pod(), want: `E1401 container main of pod p has a GPU and no memory.max, which this node's policy denies: add the pod annotation gpufence.dev/memory.max: 4Gi, and see that the engine passes gpufence.dev/* annotations on`},
		{s: pod("memory.min=1Gi"), want: `E1401 container main of pod p has a GPU and no memory.max, which this node's policy denies: add the pod annotation gpufence.dev/memory.max: 4Gi, and see that the engine passes gpufence.dev/* annotations on`},
		{s: docker(), p: byDefault("deny"), want: `E1401 the container has a GPU and no memory.max, which this node's policy denies: add the annotation gpufence.dev/memory.max=4Gi`},
		{s: pod(), p: Policy{Mode: ModeEnforce}, want: `E1401 container main of pod p has a GPU and no memory.max, which this node's policy denies: add the pod annotation gpufence.dev/memory.max: 4Gi, and see that the engine passes gpufence.dev/* annotations on`},

		// The environment.
		{s: docker().env("GPUFENCE_MEMORY_MAX=3Gi"), p: byDefault("2Gi"), want: `E1218 GPUFENCE_MEMORY_MAX "3Gi" is more than the node's default of 2Gi, which the environment may only lower: write the annotation gpufence.dev/memory.max, or set env-may-raise = true in [accept.docker]`},
		{s: docker().env("GPUFENCE_MEMORY_MAX=max"), p: byDefault("2Gi"), want: `E1218 GPUFENCE_MEMORY_MAX "max" is more than the node's default of 2Gi, which the environment may only lower: write the annotation gpufence.dev/memory.max, or set env-may-raise = true in [accept.docker]`},
		{s: docker().env("GPUFENCE_MEMORY_MAX=1Gi"), p: byDefault("deny"), want: `E1218 GPUFENCE_MEMORY_MAX "1Gi" is more than the node's default of deny, which the environment may only lower: write the annotation gpufence.dev/memory.max, or set env-may-raise = true in [accept.docker]`},
		{s: docker().env("NVIDIA_GPU_MEMORY_LIMIT=4096"), p: byDefault("2Gi"), want: `E1218 NVIDIA_GPU_MEMORY_LIMIT "4096" is more than the node's default of 2Gi, which the environment may only lower: write the annotation gpufence.dev/memory.max, or set env-may-raise = true in [accept.docker]`},
		{s: docker().env("GPUFENCE_MEMORY_MIN=1Gi"), want: `E1218 GPUFENCE_MEMORY_MIN "1Gi" asks for more than the node's default, which guarantees nothing: write an annotation, or set env-may-raise = true in [accept.docker]`},
		{s: docker().env("GPUFENCE_MEMORY_MX=1Gi"), want: `E1301 GPUFENCE_MEMORY_MX is not a variable of gpufence: write GPUFENCE_MEMORY_MAX`},
		{s: docker().env("GPUFENCE_MEMORY_COLOUR=1Gi"), want: `E1301 GPUFENCE_MEMORY_COLOUR is not a variable of gpufence: they are GPUFENCE_MEMORY_HIGH, GPUFENCE_MEMORY_MAX, GPUFENCE_MEMORY_MIN, GPUFENCE_MEMORY_OOM_GROUP, GPUFENCE_MEMORY_SWAP_MAX`},

		// Keys.
		{s: pod("memory.mx=4Gi"), want: `E1301 gpufence.dev/memory.mx is not a key of gpufence: write gpufence.dev/memory.max`},
		{s: pod("memory_max=4Gi"), want: `E1301 gpufence.dev/memory_max is not a key of gpufence: write gpufence.dev/memory.max`},
		{s: pod("Memory.Max=4Gi"), want: `E1301 gpufence.dev/Memory.Max is not a key of gpufence: write gpufence.dev/memory.max`},
		{s: pod("memory.low=4Gi"), want: `E1301 gpufence.dev/memory.low is not a key of gpufence: write gpufence.dev/memory.max`},
		{s: pod("colour=red"), want: `E1301 gpufence.dev/colour is not a key of gpufence: the keys are memory.max, memory.min, memory.high, memory.swap.max, memory.oom.group, compute.weight, compute.max, require, gpu`},
		{s: pod("=x"), want: `E1301 gpufence.dev/ is not a key of gpufence: the keys are memory.max, memory.min, memory.high, memory.swap.max, memory.oom.group, compute.weight, compute.max, require, gpu`},
		{s: pod(long + "=x"), want: `E1301 "gpufence.dev/` + long[:27] + `…" (313 characters) is not a key of gpufence: the keys are memory.max, memory.min, memory.high, memory.swap.max, memory.oom.group, compute.weight, compute.max, require, gpu`},
		{s: pod("container.main.memory.mx=4Gi"), want: `E1301 gpufence.dev/container.main.memory.mx is not a key of gpufence: write gpufence.dev/container.main.memory.max`},
		{s: pod("container.main=4Gi"), want: `E1301 gpufence.dev/container.main names no key of a container: write gpufence.dev/container.<name>.memory.max`},
		{s: pod("container..memory.max=4Gi"), want: `E1301 gpufence.dev/container..memory.max names no key of a container: write gpufence.dev/container.<name>.memory.max`},
		{s: pod("memory.max=4Gi", "config=pod: {memory.max: 4Gi}"), want: `E1302 memory.max is given twice, by gpufence.dev/config and by gpufence.dev/memory.max: remove one`},
		{s: pod("container.main.memory.max=4Gi", "config=containers: {main: {memory.max: 4Gi}}"), want: `E1302 container.main.memory.max is given twice, by gpufence.dev/config and by gpufence.dev/container.main.memory.max: remove one`},
		{s: pod("config=pod: {memory.max: 4Gi, memory.max: 4Gi}"), want: `E1302 gpufence.dev/config line 1 names memory.max twice: remove one`},
		{s: pod("config=pod: {memory.max: 4Gi}\npod: {}"), want: `E1302 gpufence.dev/config line 2 names pod twice: remove one`},
		{s: pod("config="), want: `E1303 gpufence.dev/config is not YAML (EOF): write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=null"), want: `E1303 gpufence.dev/config line 1 is not a mapping of keys to values: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=4Gi"), want: `E1303 gpufence.dev/config line 1 is not a mapping of keys to values: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod: 4Gi"), want: `E1303 gpufence.dev/config line 1 is not a mapping of keys to values: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod:\n  memory.max: [4Gi]"), want: `E1303 gpufence.dev/config line 2 gives memory.max no plain value: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod:\n  memory.max:"), want: `E1303 gpufence.dev/config line 2 gives memory.max no plain value: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod: &a {memory.max: 4Gi}\ncontainers: {main: *a}"), want: `E1303 gpufence.dev/config line 1 uses anchors, which are not read here: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod: {[a]: b}"), want: `E1303 gpufence.dev/config line 1 has a key that is not plain text: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod: {}\n---\npod: {}"), want: `E1303 gpufence.dev/config has more than one document: write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=containers: {\"\": {memory.max: 4Gi}}"), want: `E1303 gpufence.dev/config line 1 names a container "": write YAML such as pod: {memory.max: 4Gi}`},
		{s: pod("config=pod: {memory.mx: 4Gi}"), want: `E1301 gpufence.dev/config line 1: memory.mx is not a key of gpufence: write memory.max`},
		{s: pod("config=memory.max: 4Gi"), want: `E1301 gpufence.dev/config line 1: memory.max is neither pod nor containers: write pod: {memory.max: …}`},
		{s: pod("config=container: {main: {memory.max: 4Gi}}"), want: `E1301 gpufence.dev/config line 1: container is neither pod nor containers: write containers`},
		{s: pod("config=version: 1"), want: `E1301 gpufence.dev/config line 1: version is neither pod nor containers: write pod: {memory.max: 4Gi}`},
		{s: pod("config=" + strings.Repeat("#", maxConfigLen+1)), want: `E1206 gpufence.dev/config has 65537 characters: write at most 65536`},
		{s: pod("status.level=hard"), want: `E1304 gpufence.dev/status.level cannot be set, it is where gpufence reports: remove it`},
		{s: pod("status=hard"), want: `E1304 gpufence.dev/status cannot be set, it is where gpufence reports: remove it`},
		{s: docker().env("GPUFENCE_MEMORY_SWAP_MAX=1Gi"), want: `E1218 GPUFENCE_MEMORY_SWAP_MAX "1Gi" is more than the node's default, which lets nothing spill: write an annotation, or set env-may-raise = true in [accept.docker]`},
		{s: pod("compute.weight=100"), want: `E1305 compute.weight "100" is not enforced by this version of gpufence, which has no shares of GPU time yet: remove it`},
		{s: pod("compute.max=30%"), want: `E1305 compute.max "30%" is not enforced by this version of gpufence, which has no shares of GPU time yet: remove it`},
		{s: pod("gpu=any", "memory.max=4Gi"), want: `E1306 gpu is not accepted from cri by this node's policy: let the device plugin choose, or set gpu = true in [accept.cri]`},
		{s: docker("memory.max=4Gi"), p: policy(func(p *Policy) { p.Accept[EngineDocker] = Accept{} }), want: `E1306 memory.max is not accepted from docker by this node's policy: remove it, or set keys = true in [accept.docker]`},
		{s: pod("container.main.memory.max=4Gi").noGPU(), want: `E1307 container.main.memory.max is set, but container main of pod p has no GPU: request a GPU for it (such as nvidia.com/gpu: 1), or remove the key`},
		{s: pod("container.main.require=reactive").noGPU(), want: `E1307 container.main.require is set, but container main of pod p has no GPU: request a GPU for it (such as nvidia.com/gpu: 1), or remove the key`},
		{s: docker("memory.max=4Gi").noGPU(), want: `E1308 memory.max is set, but the container has no GPU: choose one (annotation gpufence.dev/gpu=any, NVIDIA_VISIBLE_DEVICES or --device), or remove the key`},
		{s: docker().noGPU().env("GPUFENCE_MEMORY_MAX=4Gi"), want: `E1308 GPUFENCE_MEMORY_MAX is set, but the container has no GPU: choose one (annotation gpufence.dev/gpu=any, NVIDIA_VISIBLE_DEVICES or --device), or remove the key`},
		{s: docker("container.main.memory.max=4Gi"), want: `E1309 container.main.memory.max names a container, which only Kubernetes' pods have: write gpufence.dev/memory.max`},

		// Aliases.
		{s: pod("!gpu-memory=2048", "!nvidia.com/container.main.gpu-memory.limit=4Gi"), want: `E1310 nvidia.com/container.main.gpu-memory.limit "4Gi" and gpu-memory "2048" disagree: remove one, or set gpufence.dev/memory.max, which is read instead of both`},
		{s: docker().env("NVIDIA_GPU_MEMORY_LIMIT=2048", "CUDA_DEVICE_MEMORY_LIMIT=3g"), want: `E1310 NVIDIA_GPU_MEMORY_LIMIT "2048" and CUDA_DEVICE_MEMORY_LIMIT "3g" disagree: remove one, or set gpufence.dev/memory.max, which is read instead of both`},
		{s: docker("!nvidia.com/container.x.gpu-memory.request=2Gi").env("NVIDIA_GPU_MEMORY_LIMIT=4096", "NVIDIA_GPU_MEMORY_REQUEST=1024").named("x"), want: `E1310 nvidia.com/container.x.gpu-memory.request "2Gi" and NVIDIA_GPU_MEMORY_REQUEST "1024" disagree: remove one, or set gpufence.dev/memory.max, which is read instead of both`},
		{s: pod("!nvidia.com/container.main.gpu-memory.limit=4g"), want: `E1202 nvidia.com/container.main.gpu-memory.limit "4g" has an unknown unit: write 4Gi`},
		{s: pod("!nvidia.com/container.main.gpu-memory.limit=4096"), want: `E1211 nvidia.com/container.main.gpu-memory.limit "4096" is less than 1Mi: write a quantity such as 4Gi`},
		{s: pod("!nvidia.com/container.main.gpu-memory.limit=1.5"), want: `E1204 nvidia.com/container.main.gpu-memory.limit "1.5" is not a whole number of bytes: write a quantity such as 4Gi`},
		{s: pod("!gpu-memory=4Gi"), want: `E1201 gpu-memory "4Gi" is not a whole number of MiB: write one such as 4096, without a unit`},
		{s: pod("!gpu-memory="), want: `E1201 gpu-memory "" is not a whole number of MiB: write one such as 4096, without a unit`},
		{s: pod("!gpu-memory=0"), want: `E1211 gpu-memory "0" is no memory at all: write a number of MiB such as 4096`},
		{s: pod("!gpu-memory=99999999999999"), want: `E1206 gpu-memory "99999999999999" MiB is more than 2^63-1 bytes: write a number of MiB such as 4096`},
		{s: pod("!gpu-fraction=1.5"), want: `E1207 gpu-fraction "1.5" is not a part of a GPU: write one such as 0.5`},
		{s: pod("!gpu-fraction=0"), want: `E1207 gpu-fraction "0" is not a part of a GPU: write one such as 0.5`},
		{s: pod("!gpu-fraction=half"), want: `E1207 gpu-fraction "half" is not a part of a GPU: write one such as 0.5`},
		{s: docker().env("NVIDIA_GPU_MEMORY_LIMIT=4Gi"), want: `E1201 NVIDIA_GPU_MEMORY_LIMIT "4Gi" is not a whole number of MiB: write one such as 4096, without a unit`},
		{s: docker().env("NVIDIA_GPU_MEMORY_REQUEST=x"), want: `E1201 NVIDIA_GPU_MEMORY_REQUEST "x" is not a whole number of MiB: write one such as 4096, without a unit`},
		{s: docker().env("CUDA_DEVICE_MEMORY_LIMIT=4Gi"), want: `E1201 CUDA_DEVICE_MEMORY_LIMIT "4Gi" is not a number of bytes, or one with k, m or g: write one such as 3000m`},
		{s: docker().env("CUDA_DEVICE_MEMORY_LIMIT_x=4g"), want: `E1208 CUDA_DEVICE_MEMORY_LIMIT_x does not end in the number of a GPU: write CUDA_DEVICE_MEMORY_LIMIT_0`},
		{s: docker().env("CUDA_DEVICE_MEMORY_LIMIT_0=99999999999g"), want: `E1206 CUDA_DEVICE_MEMORY_LIMIT_0 "99999999999g" is more than 2^63-1 bytes: write one such as 3000m`},
		{s: pod("!gpu-memory=2048", "!gpu-fraction-container-name=other"), want: `E1401 container main of pod p has a GPU and no memory.max, which this node's policy denies: add the pod annotation gpufence.dev/memory.max: 4Gi, and see that the engine passes gpufence.dev/* annotations on`},
	}
	seen := map[Code]bool{}
	for _, tt := range tests {
		if tt.p.Mode == "" {
			tt.p = DefaultPolicy()
		}
		if tt.gpus == nil {
			tt.gpus = []GPU{gpuA()}
		}
		r, _, err := Parse(tt.s, tt.p)
		if err == nil {
			_, _, err = r.Resolve(tt.gpus, tt.p)
		}
		if err == nil || err.Error() != tt.want {
			t.Errorf("%v %v:\n got %v\nwant %s", tt.s.Annotations, tt.s.Env, err, tt.want)
			continue
		}
		oneSentence(t, err)
		seen[CodeOf(err)] = true
		// What is wrong, and where, must be seen in the first 200 characters.
		var e *Error
		if !errors.As(err, &e) || len(e.Message)+len(e.Code) > 200 {
			t.Errorf("the message itself is longer than 200 characters: %s", err)
		}
	}
	// Every code of values and keys is met here or below.
	for _, c := range Codes() {
		if (strings.HasPrefix(string(c.Code), "E12") || strings.HasPrefix(string(c.Code), "E13")) && !seen[c.Code] && c.Code != CodeNotSettable && c.Code != CodeNoSuchName {
			t.Errorf("no case for %s", c.Code)
		}
	}
}

// A container without a GPU passes under pod keys, whatever they say about GPUs.
func TestGPULess(t *testing.T) {
	for _, s := range []Subject{
		pod().noGPU(),
		pod("memory.max=4Gi", "memory.min=1Gi", "require=reactive", "memory.oom.group=false").noGPU(),
		pod("container.other.memory.max=4Gi").noGPU(),
		pod("config=pod: {memory.max: 4Gi}").noGPU(),
		pod("memory.max=4Gi").noGPU().named(""),
		pod("!gpu-memory=x", "!nvidia.com/container.main.gpu-memory.limit=x").noGPU(),
		docker().noGPU(),
		docker().noGPU().env("NVIDIA_GPU_MEMORY_LIMIT=x", "GPUFENCE_MEMORY_MAX="),
	} {
		r, notices, err := Parse(s, DefaultPolicy())
		if err != nil || len(notices) > 0 || r.HasGPU() || r.HasContainerKey() {
			t.Errorf("%v: %v, %v, %+v", s.Annotations, err, notices, r)
		}
	}
	// But a wrong value is wrong for all of the pod's containers alike.
	if _, _, err := Parse(pod("memory.max=4096").noGPU(), DefaultPolicy()); !errors.Is(err, CodeNoUnit) {
		t.Errorf("got %v", err)
	}
}

func TestRequestAccessors(t *testing.T) {
	r, _, err := Parse(docker("gpu=2", "memory.max=4Gi").noGPU(), DefaultPolicy())
	if err != nil || !r.HasGPU() || !slices.Equal(r.Selectors(), []string{"any=2"}) || !r.Limited() || r.HasContainerKey() {
		t.Errorf("%v %+v", err, r)
	}
	accept := policy(func(p *Policy) { p.Accept[EngineCRI] = Accept{Keys: true, GPU: true} })
	r, _, err = Parse(pod("gpu=all", "container.main.gpu="+uuidA+", "+uuidB, "memory.max=max"), accept)
	if err != nil || !slices.Equal(r.Selectors(), []string{uuidA, uuidB}) || r.Limited() || !r.HasContainerKey() {
		t.Errorf("%v %+v", err, r)
	}
	if _, _, err := Parse(pod("gpu=any", "memory.max=4Gi"), accept); err != nil {
		t.Error(err)
	}
}

func TestNamespaces(t *testing.T) {
	p := policy(func(p *Policy) {
		p.Ceiling = Bytes(8 * gib)
		p.Namespaces = []NamespaceRule{
			{Pattern: "*", Mode: ModeObserve},
			{Pattern: "team-*", Ceiling: Bytes(4 * gib), Default: &Default{Kind: DefaultAmount, Amount: Share(1, 8)}, MinTotal: Share(1, 2)},
			{Pattern: "team-a*", Require: LevelReactive, Mode: ModeWarn},
			{Pattern: "team-a?", Mode: ModeEnforce},
			{Pattern: "team-ab", Ceiling: Amount{Kind: KindUnlimited}},
			{Pattern: "[", Mode: ModeWarn},
		}
	})
	tests := []struct {
		ns      string
		mode    Mode
		ceiling Amount
		def     DefaultKind
		total   Amount
	}{
		{"", ModeEnforce, Bytes(8 * gib), DefaultDeny, Amount{}},
		{"other", ModeObserve, Bytes(8 * gib), DefaultDeny, Amount{}},
		{"team-x", ModeEnforce, Bytes(4 * gib), DefaultAmount, Share(1, 2)},
		{"team-a", ModeWarn, Bytes(8 * gib), DefaultDeny, Amount{}},
		{"team-ac", ModeWarn, Bytes(8 * gib), DefaultDeny, Amount{}}, // same prefix: team-a* sorts before team-a?
		{"team-ab", ModeEnforce, Amount{Kind: KindUnlimited}, DefaultDeny, Amount{}},
	}
	for _, tt := range tests {
		got := p.For(tt.ns)
		if got.Mode != tt.mode || got.Ceiling != tt.ceiling || got.Default[EngineCRI].Kind != tt.def || got.MinTotal != tt.total {
			t.Errorf("%q: %+v", tt.ns, got)
		}
		if got.Default[EngineDocker].Kind != DefaultUnlimited {
			t.Errorf("%q changed docker's default", tt.ns)
		}
		if d := cmp.Diff(got, got.For(tt.ns)); d != "" {
			t.Errorf("%q: twice is not once\n%s", tt.ns, d)
		}
		slices.Reverse(p.Namespaces)
		if d := cmp.Diff(got, p.For(tt.ns)); d != "" {
			t.Errorf("%q: order matters\n%s", tt.ns, d)
		}
	}

	s := pod("memory.max=6Gi")
	s.Namespace = "team-x"
	r, _, err := Parse(s, p)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Resolve([]GPU{gpuA()}, p); !errors.Is(err, CodeAboveCeiling) {
		t.Errorf("the namespace's ceiling: %v", err)
	}
}

func TestNamespaceTotal(t *testing.T) {
	p := policy(func(p *Policy) { p.MinTotal = Share(2, 5) }) // 6 GiB of 15
	if err := p.CheckNamespaceTotal("ns", gpuA(), 4*gib, 2*gib); err != nil {
		t.Error(err)
	}
	err := p.CheckNamespaceTotal("ns", gpuA(), 4*gib, 2*gib+1)
	want := `E1411 memory.min 2147483.649k does not fit namespace ns on ` + uuidA + `: it may hold 6Gi there and holds 4Gi: lower memory.min (it follows memory.max) or end another pod`
	if err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
	if err := p.CheckNamespaceTotal("ns", gpuA(), 7*gib, 0); err == nil {
		t.Error("nothing fits above the total")
	}
	if err := DefaultPolicy().CheckNamespaceTotal("ns", gpuA(), Unlimited/2, Unlimited/2); err != nil {
		t.Error(err)
	}
}

func TestKeepEnv(t *testing.T) {
	both := []GPU{gpuA(), gpuB()}
	tests := []struct {
		s    Subject
		gpus []GPU
		want []string
	}{
		{s: docker("memory.max=4Gi")},
		{s: docker().env("GPUFENCE_MEMORY_MAX=4Gi"), want: []string{"GPUFENCE_MEMORY_MAX=4Gi"}},
		{s: docker().env("GPUFENCE_MEMORY_MAX=max"), want: []string{"GPUFENCE_MEMORY_MAX=max"}},
		{s: docker().env("GPUFENCE_MEMORY_MAX=25%", "GPUFENCE_MEMORY_MIN=0", "GPUFENCE_MEMORY_OOM_GROUP=false"), want: []string{"GPUFENCE_MEMORY_MAX=3840Mi", "GPUFENCE_MEMORY_MIN=0", "GPUFENCE_MEMORY_OOM_GROUP=false"}},
		{s: docker().env("NVIDIA_GPU_MEMORY_LIMIT=2048", "NVIDIA_GPU_MEMORY_REQUEST=1024"), want: []string{"GPUFENCE_MEMORY_MAX=2Gi", "GPUFENCE_MEMORY_MIN=1Gi"}},
		{s: docker().env("CUDA_DEVICE_MEMORY_LIMIT_1=3g"), gpus: both, want: []string{"GPUFENCE_MEMORY_MAX=" + uuidA + "=max," + uuidB + "=3Gi"}},
		{s: docker("!gpu-fraction=0.5").env("NVIDIA_GPU_MEMORY_LIMIT=9000"), gpus: both, want: []string{"GPUFENCE_MEMORY_MAX=" + uuidA + "=7680Mi," + uuidB + "=9000Mi"}},
	}
	for _, tt := range tests {
		if tt.gpus == nil {
			tt.gpus = []GPU{gpuA()}
		}
		p := DefaultPolicy()
		first, got := resolve(t, tt.s, p, tt.gpus)
		if d := cmp.Diff(tt.want, first.KeepEnv(got)); d != "" {
			t.Errorf("%v (-want +got)\n%s", tt.s.Env, d)
		}
		// The same spec, read again after it was edited.
		again := tt.s
		again.Env = first.KeepEnv(got)
		_, second := resolve(t, again, p, tt.gpus)
		if d := cmp.Diff(got, second); d != "" {
			t.Errorf("%v: read again\n%s", tt.s.Env, d)
		}
	}
}

func resolve(t *testing.T, s Subject, p Policy, gpus []GPU) (Request, Grant) {
	t.Helper()
	r, _, err := Parse(s, p)
	if err != nil {
		t.Fatal(err)
	}
	g, _, err := r.Resolve(gpus, p)
	if err != nil {
		t.Fatal(err)
	}
	return r, g
}

func TestOurs(t *testing.T) {
	for name, want := range map[string]bool{
		"gpufence.dev/memory.max": true, "gpufence.dev/x-y": true, "gpu-memory": true, "gpu-fraction": true, "gpu-fraction-container-name": true,
		"nvidia.com/container.a.gpu-memory.limit": true, "nvidia.com/container.a.gpu-memory.request": true,
		"nvidia.com/container.a.gpu-compute.mode": false, "cdi.k8s.io/x": false, "io.kubernetes.cri.sandbox-id": false,
	} {
		if Ours(name) != want {
			t.Errorf("Ours(%q) = %t", name, !want)
		}
		handed := slices.ContainsFunc(AnnotationPatterns(), func(p string) bool {
			ok, err := path.Match(p, name)
			return ok && err == nil
		})
		if want && !handed {
			t.Errorf("no engine would hand on %s: %v", name, AnnotationPatterns())
		}
	}
	env := []string{"PATH=/bin", "GPUFENCE_MEMORY_MAX=4Gi", "GPUFENCE_DEBUG=1", "NVIDIA_GPU_MEMORY_LIMIT=1", "NVIDIA_VISIBLE_DEVICES=all", "CUDA_DEVICE_MEMORY_LIMIT_0=1", "CUDA_DEVICE_MEMORY_SHARED_CACHE=x", "CUDA_DEVICE_SM_LIMIT=3", "bare"}
	if got := OurEnv(env); !slices.Equal(got, []string{env[1], env[3], env[5], env[6], env[7]}) {
		t.Errorf("got %v", got)
	}
	// What gpufenced is sent is enough to come to the same answer.
	full := docker("memory.max=4Gi", "!other=1").env(append(env, "GPUFENCE_MEMORY_MIN=1Gi")...)
	sent := full
	sent.Env, sent.Annotations = OurEnv(full.Env), map[string]string{}
	for k, v := range full.Annotations {
		if Ours(k) {
			sent.Annotations[k] = v
		}
	}
	_, a := resolve(t, full, DefaultPolicy(), []GPU{gpuA()})
	_, b := resolve(t, sent, DefaultPolicy(), []GPU{gpuA()})
	if d := cmp.Diff(a, b); d != "" {
		t.Error(d)
	}
}

func TestSet(t *testing.T) {
	c, err := ParseSet(map[string]string{"memory.max": "6Gi"})
	if err != nil {
		t.Fatal(err)
	}
	if n, ok, err := c.Max(gpuA(), 0, DefaultPolicy()); n != 6*gib || !ok || err != nil {
		t.Errorf("%d %t %v", n, ok, err)
	}
	c, err = ParseSet(map[string]string{Domain + "memory.max": uuidB + "=25%"})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := c.Max(gpuA(), 0, DefaultPolicy()); ok || err != nil {
		t.Errorf("a GPU that is not listed: %t %v", ok, err)
	}
	if n, ok, err := c.Max(gpuB(), 1, DefaultPolicy()); n != 23*gib/4 || !ok || err != nil {
		t.Errorf("%d %t %v", n, ok, err)
	}
	if err := c.Check([]GPU{gpuA()}); !errors.Is(err, CodeListNoSuchGPU) {
		t.Errorf("got %v", err)
	}
	if err := c.Check([]GPU{gpuA(), gpuB()}); err != nil {
		t.Error(err)
	}
	for _, tt := range []struct {
		values map[string]string
		want   string
	}{
		{nil, `E1507 nothing to set: write one such as memory.max=6Gi`},
		{map[string]string{"memory.max": "4096"}, `E1203 memory.max "4096" has no unit: write 4096Mi`},
		{map[string]string{"memory.mx": "4Gi"}, `E1301 memory.mx is not a key of gpufence: write memory.max`},
		{map[string]string{"memory.high": "4"}, `E1203 memory.high "4" has no unit: write 4Mi`},
		{map[string]string{"memory.oom.group": "1"}, `E1215 memory.oom.group "1" is neither true nor false: write true`},
		{map[string]string{"require": "hard"}, `E1311 require cannot be changed while a container runs: set one of memory.max, memory.high, memory.min, memory.swap.max, memory.oom.group, or start the container again`},
		{map[string]string{"memory.max": "4Gi", Domain + "memory.max": "4Gi"}, `E1302 memory.max is given twice: remove one`},
	} {
		if _, err := ParseSet(tt.values); err == nil || err.Error() != tt.want {
			t.Errorf("%v:\n got %v\nwant %s", tt.values, err, tt.want)
		}
	}
	for _, tt := range []struct {
		value string
		p     Policy
		gpu   GPU
		code  Code
	}{
		{"99Ti", DefaultPolicy(), gpuA(), CodeAboveGPU},
		{"1Mi", DefaultPolicy(), gpuA(), CodeBelowContext},
		{"8Gi", ceiling("4Gi"), gpuA(), CodeAboveCeiling},
		{"max", ceiling("4Gi"), gpuA(), CodeMaxUnderCeiling},
		{"4Gi", DefaultPolicy(), GPU{UUID: uuidA}, CodeGPUUnknown},
		{"0=1Gi," + uuidA + "=2Gi", DefaultPolicy(), gpuA(), CodeBadList},
	} {
		c, err := ParseSet(map[string]string{"memory.max": tt.value})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.Max(tt.gpu, 0, tt.p); !errors.Is(err, tt.code) {
			t.Errorf("%s: %v, want %s", tt.value, err, tt.code)
		}
	}
	c, err = ParseSet(map[string]string{"memory.max": "max"})
	if err != nil {
		t.Fatal(err)
	}
	if n, ok, err := c.Max(gpuA(), 0, DefaultPolicy()); n != Unlimited || !ok || err != nil {
		t.Errorf("%d %t %v", n, ok, err)
	}
}

// effective is what holds on a GPU: the lower of both levels.
func effective(g Grant, uuid string) Limits {
	l := Limits{Max: Unlimited}
	for _, m := range []map[string]Limits{g.Pod, g.Container} {
		if v, ok := m[uuid]; ok {
			l.Max, l.Min = min(l.Max, v.Max), max(l.Min, v.Min)
		}
	}
	return l
}

func TestLevels(t *testing.T) {
	order := []Level{LevelNone, LevelAdvisory, LevelReactive, LevelHard}
	for i, a := range order {
		for j, b := range order {
			if a.AtLeast(b) != (i >= j) {
				t.Errorf("%s.AtLeast(%s) = %t", a, b, a.AtLeast(b))
			}
		}
	}
}

// Whatever a user writes and policy says: what is granted is bounded by the GPU and the
// ceiling, and what is guaranteed by the limit and by what can be handed out.
func TestGrantsAreBounded(t *testing.T) {
	amount := rapid.SampledFrom([]string{"", "max", "0", "1Mi", "512Mi", "1Gi", "3Gi", "7G", "15Gi", "15.5Gi", "16Gi", "20Gi", "0%", "3%", "25%", "99.9%", "100%"})
	rapid.Check(t, func(t *rapid.T) {
		p := DefaultPolicy()
		p.Overcommit = rapid.Bool().Draw(t, "overcommit")
		if c := rapid.SampledFrom([]string{"", "4Gi", "50%", "100%", "max"}).Draw(t, "ceiling"); c != "" {
			p.Ceiling = must(ParseAmount(c, true))
		}
		d := must(ParseDefault(rapid.SampledFrom([]string{"deny", "unlimited", "2Gi", "1/3", "100%"}).Draw(t, "default")))
		engine := rapid.SampledFrom(Engines()).Draw(t, "engine")
		p.Default[engine] = d
		a := rapid.SampledFrom([]bool{true, false})
		p.Accept[engine] = Accept{Keys: true, Aliases: a.Draw(t, "aliases"), Env: a.Draw(t, "env"), EnvMayRaise: a.Draw(t, "raise")}
		s := Subject{Engine: engine, HasGPU: true, Annotations: map[string]string{}}
		put := func(name string) {
			if v := amount.Draw(t, name); v != "" {
				s.Annotations[name] = v
			}
		}
		put(Domain + KeyMemoryMax)
		put(Domain + KeyMemoryMin)
		if engine.Kubernetes() {
			s.Container = "main"
			put(Domain + "container.main." + KeyMemoryMax)
			put(Domain + "container.main." + KeyMemoryMin)
			put("nvidia.com/container.main.gpu-memory.limit")
		}
		if v := amount.Draw(t, "GPUFENCE_MEMORY_MAX"); v != "" {
			s.Env = append(s.Env, "GPUFENCE_MEMORY_MAX="+v)
		}
		if v := rapid.SampledFrom([]string{"", "512", "4096", "20000"}).Draw(t, "NVIDIA_GPU_MEMORY_LIMIT"); v != "" {
			s.Env = append(s.Env, nvidiaLimit+"="+v)
		}
		gpus := []GPU{gpuA(), gpuB()}[:rapid.IntRange(1, 2).Draw(t, "gpus")]

		r, _, err := Parse(s, p)
		if err != nil {
			return
		}
		g, _, err := r.Resolve(gpus, p)
		if err != nil {
			return
		}
		for _, gpu := range gpus {
			top := min(gpu.TotalBytes, p.ceiling(gpu))
			e := effective(g, gpu.UUID)
			for _, l := range []Limits{g.Pod[gpu.UUID], g.Container[gpu.UUID]} {
				if l == (Limits{}) {
					continue
				}
				if l.Max != Unlimited && (l.Max > top || l.Max < gpu.ContextBytes) {
					t.Fatalf("%s: limit %d, of %d", gpu.UUID, l.Max, top)
				}
				if l.Min > l.Max || l.Min > gpu.AllocatableBytes {
					t.Fatalf("%s: guarantee %d of a limit of %d and %d allocatable", gpu.UUID, l.Min, l.Max, gpu.AllocatableBytes)
				}
			}
			if p.hasCeiling() && e.Max > top {
				t.Fatalf("%s: nothing bounds it under a ceiling", gpu.UUID)
			}
			if d.Kind == DefaultDeny && e.Max == Unlimited && s.Annotations[Domain+KeyMemoryMax] != "max" && s.Annotations[Domain+"container.main."+KeyMemoryMax] != "max" && !p.Accept[engine].EnvMayRaise {
				t.Fatalf("%s: unlimited although policy denies it", gpu.UUID)
			}
			if d.Kind == DefaultAmount && len(s.Annotations) == 0 && !p.Accept[engine].EnvMayRaise && e.Max > d.Amount.On(gpu.AllocatableBytes) {
				t.Fatalf("%s: the environment raised the default to %d", gpu.UUID, e.Max)
			}
		}
	})
}

// Limits only get lower by adding a lower one.
func TestMoreLimitsNeverGiveMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := func(name string) string { return fmt.Sprintf("%dMi", rapid.IntRange(400, 15000).Draw(t, name)) }
		s := docker("memory.max=" + n("pod"))
		p := DefaultPolicy()
		grant := func(s Subject) Grant {
			r, _, err := Parse(s, p)
			if err != nil {
				t.Fatal(err)
			}
			g, _, err := r.Resolve([]GPU{gpuA()}, p)
			if err != nil {
				t.Fatal(err)
			}
			return g
		}
		before := effective(grant(s), uuidA)
		after := effective(grant(s.env("GPUFENCE_MEMORY_MAX="+n("env"))), uuidA)
		if after.Max > before.Max || after.Min > max(before.Min, after.Max) {
			t.Fatalf("%+v became %+v", before, after)
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"pod: {memory.max: 4Gi}\ncontainers: {main: {memory.max: 3Gi}}", "{", "a: &a [*a]", "pod: {? [x] : y}", "- 1", "pod:\n\t- x", "%YAML 1.2\n---\npod: {}",
		"pod: {<<: {memory.max: 4Gi}}", "!!binary pod: {}", "pod: !!map {memory.max: !!int 4}", "\xff\xfe", "pod: {memory.max: '4Gi'} # x", strings.Repeat("[", 2000),
	} {
		f.Add("memory.max", "4Gi", s, "GPUFENCE_MEMORY_MAX=4Gi")
	}
	f.Add("container.main.memory.max", "25%", "", "CUDA_DEVICE_MEMORY_LIMIT_0=3000m")
	f.Add("container.", "0=4Gi,GPU-1=8Gi", "", "NVIDIA_GPU_MEMORY_LIMIT=4096")
	f.Add("status.x", "\x00", "", "GPUFENCE_MEMORY_=")
	f.Add("gpu", "GPU-1,MIG-2", "", "=")
	f.Fuzz(func(t *testing.T, key, value, config, env string) {
		for _, e := range []Engine{EngineCRI, EngineDocker} {
			s := Subject{Engine: e, HasGPU: true, Annotations: map[string]string{Domain + key: value, kaiMemory: value, kaiFraction: value}, Env: []string{env}}
			if config != "" {
				s.Annotations[Domain+"config"] = config
			}
			if e == EngineCRI {
				s.Container = "main"
			}
			before := maps.Clone(s.Annotations)
			r, _, err := Parse(s, DefaultPolicy())
			if !maps.Equal(before, s.Annotations) {
				t.Fatal("the annotations were changed")
			}
			if err != nil {
				oneSentence(t, err)
				continue
			}
			g, _, err := r.Resolve([]GPU{gpuA(), gpuB()}, DefaultPolicy())
			if err != nil {
				oneSentence(t, err)
				continue
			}
			for _, l := range g.Container {
				if l.Max < 320*mib || l.Max != Unlimited && l.Max > 24*gib || l.Min > l.Max {
					t.Errorf("%+v", l)
				}
			}
		}
	})
}
