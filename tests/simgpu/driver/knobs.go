// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// ErrKnob is wrapped by every error about a knob's name or value.
var ErrKnob = errors.New("bad knob")

// Hang says which calls on a GPU never come back while it is set.
type Hang int

// What hangs.
const (
	HangNone Hang = iota
	HangNVML      // NVML's calls, as when its kernel path sleeps
	HangAll       // CUDA's too
)

// Unknown says which sizes the GPU does not tell through NVML.
type Unknown int

// What is not available.
const (
	UnknownNone    Unknown = iota
	UnknownProcess         // per-process sizes, as under WSL
	UnknownDevice          // the device's memory, as on GB10
	UnknownAll
)

// PIDView says which process ids NVML shows to a caller in another pid namespace.
type PIDView int

// The views that drivers have had.
const (
	PIDHost   PIDView = iota // host pids, whoever asks
	PIDCaller                // the caller's; processes that it cannot see are left out
)

// Knobs are the settings of one GPU that may change while it runs. The zero value is a GPU
// without delays or surprises; DefaultKnobs is what simgpud starts with.
type Knobs struct {
	NVMLLag        time.Duration // every NVML answer is a snapshot that old
	CallCost       time.Duration // an NVML memory or process query takes this long
	CallLock       bool          // and nobody allocates meanwhile
	FreeLag        time.Duration // memory of a closed file stays listed and occupied that long
	ContextBytes   uint64        // what a context takes; 0: the model's own size
	SecondContext  int           // percent of it that a process's further contexts take
	ContextTime    time.Duration // creating a context takes this long, one at a time per node
	MaxContexts    int           // contexts that the GPU carries at a time; 0: any number
	LateBytes      uint64        // a context grows by this after its creation
	LateSteps      int           // in so many equal steps
	LateTime       time.Duration // over this time
	TransientBytes uint64        // extra memory of a young context
	TransientTime  time.Duration // for how long
	OthersBytes    uint64        // device use that belongs to no process
	ManagedEvict   bool          // managed pages make room for other memory
	ManagedTouch   bool          // managed pages come to the device when it first works on them
	ImportsCharged bool          // NVML shows imported memory under its importers too
	GreenBytes     uint64        // what a green context takes
	PoolStepBytes  uint64        // a memory pool grows by this
	ModuleBytes    uint64        // what a module takes that does not say itself
	KernelTime     time.Duration // a kernel takes this long
	Hang           Hang
	Lost           bool // the GPU has fallen off the bus
	Unknown        Unknown
	PIDView        PIDView
	MemoryLimits   Backend // how the driver limits cgroups
}

// DefaultKnobs is a quiet GPU: no lag, no delays, no late growth.
func DefaultKnobs() Knobs {
	return Knobs{CallLock: true, SecondContext: 90, LateSteps: 4, LateTime: 10 * time.Second, TransientTime: 100 * time.Millisecond, ManagedEvict: true,
		ImportsCharged: true, GreenBytes: 16 << 20, PoolStepBytes: 32 << 20}
}

// Knob is one setting by its name on the command line.
type Knob struct {
	Name string // as in nvml-lag=200ms
	Help string
	set  func(*Knobs, string) error
	get  func(*Knobs) string
}

// Set parses value into k.
func (n Knob) Set(k *Knobs, value string) error {
	if err := n.set(k, value); err != nil {
		return fmt.Errorf("%w: %s=%q: %w", ErrKnob, n.Name, value, err)
	}
	return nil
}

// Get is the value as Set would take it.
func (n Knob) Get(k *Knobs) string { return n.get(k) }

// MaxLag bounds nvml-lag: what is older than this is not kept.
const MaxLag = time.Minute

// AllKnobs lists every knob in the order in which help shows them.
func AllKnobs() []Knob {
	return []Knob{
		duration("nvml-lag", "every NVML answer is a snapshot that old (at most 1m)", func(k *Knobs) *time.Duration { return &k.NVMLLag }, MaxLag),
		duration("call-cost", "an NVML memory or process query takes this long", func(k *Knobs) *time.Duration { return &k.CallCost }, time.Hour),
		boolean("call-lock", "and nobody allocates on that GPU meanwhile", func(k *Knobs) *bool { return &k.CallLock }),
		duration("free-lag", "what a process that went away held stays listed and occupied that long", func(k *Knobs) *time.Duration { return &k.FreeLag }, time.Hour),
		bytes("context-bytes", "what a context takes (0: the size of this GPU model)", func(k *Knobs) *uint64 { return &k.ContextBytes }),
		integer("second-context", "percent of it that further contexts of a process take", func(k *Knobs) *int { return &k.SecondContext }, 100),
		duration("context-time", "creating a context takes this long, one at a time", func(k *Knobs) *time.Duration { return &k.ContextTime }, time.Hour),
		integer("max-contexts", "contexts that a GPU carries at a time (0: any number)", func(k *Knobs) *int { return &k.MaxContexts }, 1<<20),
		bytes("late-bytes", "a context grows by this after its creation", func(k *Knobs) *uint64 { return &k.LateBytes }),
		integer("late-steps", "in so many steps", func(k *Knobs) *int { return &k.LateSteps }, 1024),
		duration("late-time", "over this time", func(k *Knobs) *time.Duration { return &k.LateTime }, time.Hour),
		bytes("transient-bytes", "extra memory that a young context holds", func(k *Knobs) *uint64 { return &k.TransientBytes }),
		duration("transient-time", "for this long", func(k *Knobs) *time.Duration { return &k.TransientTime }, time.Hour),
		bytes("used-by-others", "device use that belongs to no process", func(k *Knobs) *uint64 { return &k.OthersBytes }),
		boolean("managed-evict", "managed pages make room for other memory", func(k *Knobs) *bool { return &k.ManagedEvict }),
		boolean("managed-touch", "managed pages come to the device when it first works on them, not at once", func(k *Knobs) *bool { return &k.ManagedTouch }),
		boolean("imports-charged", "NVML shows imported memory under its importers too", func(k *Knobs) *bool { return &k.ImportsCharged }),
		bytes("green-bytes", "what a green context takes", func(k *Knobs) *uint64 { return &k.GreenBytes }),
		bytes("pool-step", "a memory pool grows by this (at least 2MiB)", func(k *Knobs) *uint64 { return &k.PoolStepBytes }),
		bytes("module-bytes", "what a module takes that does not say itself", func(k *Knobs) *uint64 { return &k.ModuleBytes }),
		duration("kernel-time", "a kernel takes this long", func(k *Knobs) *time.Duration { return &k.KernelTime }, time.Hour),
		choice("hang", "calls that never come back: 0, nvml (or 1), all", func(k *Knobs) *Hang { return &k.Hang },
			words[Hang]{{"0", HangNone}, {"nvml", HangNVML}, {"all", HangAll}, {"1", HangNVML}}),
		boolean("lost", "the GPU has fallen off the bus", func(k *Knobs) *bool { return &k.Lost }),
		choice("unknown", "sizes that NVML does not tell: 0, process, device, all", func(k *Knobs) *Unknown { return &k.Unknown },
			words[Unknown]{{"0", UnknownNone}, {"process", UnknownProcess}, {"device", UnknownDevice}, {"all", UnknownAll}, {"1", UnknownAll}}),
		choice("pid-view", "process ids that NVML shows in a pid namespace: host, caller", func(k *Knobs) *PIDView { return &k.PIDView },
			words[PIDView]{{"host", PIDHost}, {"caller", PIDCaller}}),
		choice("memory-limits", "how the driver limits the memory of cgroups: off, misc, dmem", func(k *Knobs) *Backend { return &k.MemoryLimits },
			words[Backend]{{"off", BackendOff}, {"misc", BackendMisc}, {"dmem", BackendDmem}}),
	}
}

// SetKnob sets one knob by name.
func SetKnob(k *Knobs, name, value string) error {
	var names []string
	for _, n := range AllKnobs() {
		if n.Name == name {
			return n.Set(k, value)
		}
		names = append(names, n.Name)
	}
	return fmt.Errorf("%w: no knob %q: write one of %s", ErrKnob, name, strings.Join(names, ", "))
}

func duration(name, help string, at func(*Knobs) *time.Duration, limit time.Duration) Knob {
	return Knob{name, help, func(k *Knobs, s string) error {
		d, err := time.ParseDuration(s)
		if s == "0" {
			d, err = 0, nil
		}
		if err != nil || d < 0 || d > limit {
			return fmt.Errorf("write a duration from 0 to %s, such as 200ms", limit)
		}
		*at(k) = d
		return nil
	}, func(k *Knobs) string { return at(k).String() }}
}

func boolean(name, help string, at func(*Knobs) *bool) Knob {
	return Knob{name, help, func(k *Knobs, s string) error {
		b, err := strconv.ParseBool(s)
		if err != nil {
			return errors.New("write 0 or 1")
		}
		*at(k) = b
		return nil
	}, func(k *Knobs) string {
		if *at(k) {
			return "1"
		}
		return "0"
	}}
}

func integer(name, help string, at func(*Knobs) *int, limit int) Knob {
	return Knob{name, help, func(k *Knobs, s string) error {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > limit {
			return fmt.Errorf("write a number from 0 to %d", limit)
		}
		*at(k) = n
		return nil
	}, func(k *Knobs) string { return strconv.Itoa(*at(k)) }}
}

func bytes(name, help string, at func(*Knobs) *uint64) Knob {
	return Knob{name, help, func(k *Knobs, s string) error {
		n, err := ParseSize(s)
		if err != nil {
			return err
		}
		*at(k) = n
		return nil
	}, func(k *Knobs) string { return strconv.FormatUint(*at(k), 10) }}
}

// words maps spellings to values; the first spelling of a value is the one that Get shows.
type words[T comparable] []struct {
	word  string
	value T
}

func choice[T comparable](name, help string, at func(*Knobs) *T, all words[T]) Knob {
	return Knob{name, help, func(k *Knobs, s string) error {
		var known []string
		for _, w := range all {
			if w.word == s {
				*at(k) = w.value
				return nil
			}
			known = append(known, w.word)
		}
		return fmt.Errorf("write one of %s", strings.Join(known, ", "))
	}, func(k *Knobs) string {
		for _, w := range all {
			if w.value == *at(k) {
				return w.word
			}
		}
		return "?"
	}}
}

var units = []struct {
	suffix string
	bytes  uint64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40},
}

// ParseSize reads 104MiB, 16Gi or a plain number of bytes.
func ParseSize(s string) (uint64, error) {
	number, unit := s, uint64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(s, u.suffix); ok {
			number, unit = rest, u.bytes
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 63)
	if err != nil || n > math.MaxInt64/unit {
		return 0, fmt.Errorf("read size %q: write a whole number of bytes or such as 104MiB, 16Gi", s)
	}
	return n * unit, nil
}
