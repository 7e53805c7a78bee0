// SPDX-License-Identifier: Apache-2.0

// Package bpf is the gate in the kernel: programs that weigh what a managed container asks NVIDIA's driver
// for before the driver sees it, and what gpufenced needs to load, prove, adopt and feed them.
//
// What it promises: links and maps are pinned, so that the gate stays closed while nobody runs; whoever
// opens it again adopts what is there without a moment in which it is open. What a program is said to do
// is what a canary found it to do, never what attaching it returned. Where a kernel has no room for the gate,
// [Reason] says which part is missing, and nothing is left behind.
package bpf

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// PinVersion is the version of the maps' layout, the last element of a folder of pins. What another version has pinned
// beside it stays in force until [Gate.Supersede].
const PinVersion = "v2"

// MaxDepth is how many levels below the root of the v2 tree a managed cgroup may lie: the programs look no deeper.
const MaxDepth = 15

// DefaultPinDir is where links and maps are pinned.
const DefaultPinDir = "/sys/fs/bpf/gpufence/" + PinVersion

// Reason is why there is no gate, or none of a better level.
type Reason string

// Reasons.
const (
	ReasonArchitecture Reason = "architecture" // the gate knows x86-64 only
	ReasonNoBTF        Reason = "no-btf"       // the kernel does not describe its types
	ReasonNoBPFFS      Reason = "no-bpffs"     // nowhere to pin
	ReasonRefused      Reason = "refused"      // the kernel refuses such programs
	ReasonTooOld       Reason = "too-old"      // a hook, a helper or a kind of map is missing
	ReasonNoCgroup2    Reason = "no-cgroup2"   // containers cannot be told apart
	ReasonCanary       Reason = "canary"       // attached, but it does not hold
	ReasonNoCopies     Reason = "no-copies"    // the driver's own copies cannot be watched
	ReasonByName       Reason = "by-name"      // they are watched by name only
	ReasonFmodRet      Reason = "fmod-ret"     // bpf is not among the security modules
	ReasonMissed       Reason = "missed"       // the kernel left out runs of the programs
	ReasonHeapOpen     Reason = "heap-open"    // allocation calls of which no kernel copy can be seen are let through
	ReasonUnknownABI   Reason = "unknown-abi"  // nobody has recorded this driver's requests
	ReasonAudit        Reason = "audit"        // policy
)

// Error is a missing part.
type Error struct {
	Reason Reason
	What   string
	Err    error
}

func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("%s (%s)", e.What, e.Reason)
	}
	return fmt.Sprintf("%s (%s): %v", e.What, e.Reason, firstLine(e.Err))
}

// Unwrap gives the kernel's word.
func (e *Error) Unwrap() error { return e.Err }

// firstLine cuts a verifier's log off.
func firstLine(err error) string {
	s, _, _ := strings.Cut(err.Error(), "\n")
	return s
}

// Carrier is what the doors hang on.
type Carrier string

// Carriers, the better first.
const (
	CarrierLSM     Carrier = "lsm"      // security module programs; the kernel runs them only with bpf in lsm=
	CarrierFmodRet Carrier = "fmod_ret" // replace what the hooks return; cannot sleep, may be left out under preemption
)

// Copies is how the driver's own copies are watched.
type Copies string

// Ways to watch copies, the better first.
const (
	CopiesBTF   Copies = "btf"    // by the module's type information
	CopiesProbe Copies = "kprobe" // by name
	CopiesNone  Copies = ""
)

var doors = map[Carrier][]string{
	CarrierLSM:     {"lsm_ioctl", "lsm_compat", "lsm_open", "lsm_mmap"},
	CarrierFmodRet: {"mod_ioctl", "mod_compat", "mod_open", "mod_mmap"},
}

var copies = map[Copies][]string{
	CopiesBTF:   {"copy_in", "copy_out", "request_end"},
	CopiesProbe: {"probe_copy_in", "probe_copied_in", "probe_copy_out", "probe_request_end"},
}

// always are needed with either carrier.
var always = []string{"file_gone", "adjust_usage"}

// Probe says whether this kernel lacks what the gate cannot do without. Whether it takes the programs
// [TryLoad] and [Open] find out.
func Probe(pinDir string) error {
	if runtime.GOARCH != "amd64" {
		return &Error{Reason: ReasonArchitecture, What: "the gate knows x86-64 only, this is " + runtime.GOARCH}
	}
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		return &Error{Reason: ReasonNoBTF, What: "the kernel does not describe its types (CONFIG_DEBUG_INFO_BTF)", Err: err}
	}
	parent := cmp.Or(pinDir, DefaultPinDir)
	for {
		var st unix.Statfs_t
		err := unix.Statfs(parent, &st)
		if errors.Is(err, fs.ErrNotExist) && parent != "/" {
			parent = filepath.Dir(parent)
			continue
		}
		if err != nil || st.Type != unix.BPF_FS_MAGIC {
			return &Error{Reason: ReasonNoBPFFS, What: "no bpf filesystem at " + parent + ": mount -t bpf bpf /sys/fs/bpf", Err: err}
		}
		break
	}
	return nil
}

// TryLoad also lets the kernel verify a carrier's programs, which takes it a moment.
func TryLoad(carrier Carrier) error {
	c, err := load(slices.Concat(always, doors[carrier]), nil, nil)
	if err != nil {
		return err
	}
	c.Close()
	return nil
}

// load loads some of the programs, with maps that exist or new ones.
func load(programs []string, have map[string]*ebpf.Map, cache *btf.Cache) (*ebpf.Collection, error) {
	spec, err := loadGate()
	if err != nil {
		return nil, fmt.Errorf("read programs: %w", err)
	}
	for name := range spec.Programs {
		if !slices.Contains(programs, name) {
			delete(spec.Programs, name)
		}
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: have, Cache: cache})
	if err == nil {
		return c, nil
	}
	reason, what := ReasonTooOld, "the kernel cannot load the gate's programs"
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		var verifier *ebpf.VerifierError
		if !errors.As(err, &verifier) || len(verifier.Log) == 0 {
			reason, what = ReasonRefused, "the kernel refuses tracing and security programs"
		}
	}
	return nil, &Error{Reason: reason, What: what, Err: err}
}

// Gate is the gate, open or adopted.
type Gate struct {
	dir     string
	maps    map[string]*ebpf.Map
	links   map[string]link.Link
	progs   map[string]*ebpf.Program // attached ones, and adjust_usage
	carrier Carrier
	copies  Copies
	earlier bool // copies are watched by programs that an earlier gpufenced attached
	adopted bool
	refused error // why copies are not watched in a better way
}

// Open adopts the pinned gate, or loads and pins one on a carrier. Nothing of an earlier one is let go before
// its successor is in place.
func Open(pinDir string, carrier Carrier) (_ *Gate, err error) {
	if err := Probe(pinDir); err != nil {
		return nil, err
	}
	g := &Gate{dir: cmp.Or(pinDir, DefaultPinDir), maps: map[string]*ebpf.Map{}, links: map[string]link.Link{}, progs: map[string]*ebpf.Program{}, carrier: carrier}
	made, err := firstMissing(g.dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err == nil {
			return
		}
		err = errors.Join(err, g.Close())
		if made == "" {
			return // an earlier one's pins may hold running containers
		}
		if rerr := os.RemoveAll(made); rerr != nil {
			err = errors.Join(err, fmt.Errorf("take away what was pinned: %w", rerr))
		}
	}()
	for _, d := range []string{"maps", "links", "programs"} {
		if err := os.MkdirAll(filepath.Join(g.dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("make pin folder: %w", err)
		}
	}
	spec, err := loadGate()
	if err != nil {
		return nil, fmt.Errorf("read programs: %w", err)
	}
	have := map[string]*ebpf.Map{}
	for name, ms := range spec.Maps {
		if strings.HasPrefix(name, ".") {
			continue
		}
		m, err := ebpf.LoadPinnedMap(g.path("maps", name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			g.maps[name] = m
			if cerr := ms.Compatible(m); cerr != nil {
				return nil, fmt.Errorf("adopt map %s: it has another layout (a newer gpufence with the same pins?): %w", name, cerr)
			}
			have[name] = m
			continue
		}
		return nil, fmt.Errorf("adopt map %s: %w", name, err)
	}
	g.adopted = len(have) > 0
	want := slices.Concat(always, doors[carrier])
	c, err := load(want, have, btf.NewCache())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for name := range spec.Maps {
		if strings.HasPrefix(name, ".") || have[name] != nil {
			continue
		}
		m, err := c.Maps[name].Clone()
		if err != nil {
			return nil, fmt.Errorf("keep map %s: %w", name, err)
		}
		g.maps[name] = m
		if err := m.Pin(g.path("maps", name)); err != nil {
			return nil, fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	g.progs["adjust_usage"], err = c.Programs["adjust_usage"].Clone()
	if err != nil {
		return nil, fmt.Errorf("keep program: %w", err)
	}
	for _, name := range want {
		if name == "adjust_usage" {
			continue
		}
		if err := g.hang(name, c.Programs[name], spec.Programs[name]); err != nil {
			return nil, err
		}
	}
	// The other carrier's doors, of an earlier start with another kernel command line or an earlier version.
	for _, other := range []Carrier{CarrierLSM, CarrierFmodRet} {
		if other != carrier {
			if err := g.letGo(doors[other]); err != nil {
				return nil, err
			}
		}
	}
	// A probe is dead when the module has gone meanwhile, though its link is still there: those are attached anew.
	if g.adoptCopies(CopiesBTF) {
		g.copies, g.earlier = CopiesBTF, true
	}
	return g, nil
}

// firstMissing is the topmost folder that must be made for one to be there, "" if it is there.
func firstMissing(dir string) (missing string, err error) {
	for ; ; dir = filepath.Dir(dir) {
		_, err := os.Stat(dir)
		switch {
		case err == nil:
			return missing, nil
		case !errors.Is(err, fs.ErrNotExist):
			return "", fmt.Errorf("look for the pin folder: %w", err)
		}
		missing = dir
	}
}

func (g *Gate) path(kind, name string) string { return filepath.Join(g.dir, kind, name) }

// hang adopts the pinned link of a program if that is the same program, else attaches the new one first and
// lets the old one go then: for a moment both run, and what is asked for then is charged twice, until
// gpufenced's next look.
func (g *Gate) hang(name string, prog *ebpf.Program, spec *ebpf.ProgramSpec) error {
	old, err := link.LoadPinnedLink(g.path("links", name), nil)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("adopt link %s: %w", name, err)
	}
	if old != nil && !isProbe(spec) && g.same(name, prog) {
		var err error
		if before := g.links[name]; before != nil {
			err = before.Close() // the same link, opened twice
		}
		g.links[name] = old
		return err
	}
	l, err := attach(prog, spec)
	if err != nil {
		if old != nil {
			err = errors.Join(err, old.Close())
		}
		return &Error{Reason: refusal(err), What: "attach " + name + " to " + spec.AttachTo, Err: err}
	}
	for _, p := range []string{g.path("links", name), g.path("programs", name)} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(fmt.Errorf("replace pin: %w", err), l.Close())
		}
	}
	if err := l.Pin(g.path("links", name)); err != nil {
		return errors.Join(fmt.Errorf("pin link %s: %w", name, err), l.Close())
	}
	if err := prog.Pin(g.path("programs", name)); err != nil {
		return errors.Join(fmt.Errorf("pin program %s: %w", name, err), l.Close())
	}
	before := g.links[name]
	g.links[name] = l
	var errs []error
	if before != nil {
		errs = append(errs, before.Close())
	}
	if old != nil {
		errs = append(errs, old.Close()) // its pin is gone: this takes it down
	}
	return errors.Join(append(errs, g.keep(name))...)
}

// keep opens the program that is pinned now.
func (g *Gate) keep(name string) error {
	p, err := ebpf.LoadPinnedProgram(g.path("programs", name), nil)
	if err != nil {
		return fmt.Errorf("open pinned program %s: %w", name, err)
	}
	before := g.progs[name]
	g.progs[name] = p
	if before != nil {
		return before.Close()
	}
	return nil
}

// isProbe says whether a program hangs on a function by its name.
func isProbe(spec *ebpf.ProgramSpec) bool {
	return strings.HasPrefix(spec.SectionName, "kprobe/") || strings.HasPrefix(spec.SectionName, "kretprobe/")
}

func (g *Gate) same(name string, prog *ebpf.Program) bool {
	if err := g.keep(name); err != nil {
		return false
	}
	a, errA := g.progs[name].Info()
	b, errB := prog.Info()
	return errA == nil && errB == nil && a.Tag == b.Tag
}

func refusal(err error) Reason {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return ReasonRefused
	}
	return ReasonTooOld
}

func attach(prog *ebpf.Program, spec *ebpf.ProgramSpec) (link.Link, error) {
	switch {
	case spec.Type == ebpf.LSM:
		return link.AttachLSM(link.LSMOptions{Program: prog})
	case strings.HasPrefix(spec.SectionName, "kprobe/"):
		return link.Kprobe(spec.AttachTo, prog, nil)
	case strings.HasPrefix(spec.SectionName, "kretprobe/"):
		// Many at once can sleep in a page fault of the copy; one without room is not looked at.
		return link.Kretprobe(spec.AttachTo, prog, &link.KprobeOptions{RetprobeMaxActive: 4096})
	}
	return link.AttachTracing(link.TracingOptions{Program: prog})
}

// letGo takes programs down, and their pins.
func (g *Gate) letGo(names []string) error {
	var errs []error
	for _, name := range names {
		for _, p := range []string{g.path("links", name), g.path("programs", name)} {
			if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("unpin: %w", err))
			}
		}
		if l := g.links[name]; l != nil {
			errs = append(errs, l.Close())
			delete(g.links, name)
		}
		if p := g.progs[name]; p != nil {
			errs = append(errs, p.Close())
			delete(g.progs, name)
		}
	}
	return errors.Join(errs...)
}

// AttachCopies watches the driver's own copies of parameters, by type information where its module has it,
// else by name. The settings decide what a copy proves, so set [Settings.Commits] after this, and take it back
// before [Gate.ReleaseCopies].
func (g *Gate) AttachCopies() (Copies, error) {
	if g.copies != CopiesNone && !g.earlier {
		return g.copies, nil
	}
	spec, err := loadGate()
	if err != nil {
		return CopiesNone, fmt.Errorf("read programs: %w", err)
	}
	var errs []error
	cache := btf.NewCache()
	for _, how := range []Copies{CopiesBTF, CopiesProbe} {
		err := func() error {
			c, err := load(copies[how], g.maps, cache)
			if err != nil {
				return err
			}
			defer c.Close()
			for _, name := range copies[how] {
				if err := g.hang(name, c.Programs[name], spec.Programs[name]); err != nil {
					return err
				}
			}
			return nil
		}()
		if err == nil {
			for _, other := range []Copies{CopiesBTF, CopiesProbe} {
				if other != how {
					errs = append(errs, g.letGo(copies[other])) // of an earlier start
				}
			}
			g.copies, g.earlier, g.refused = how, false, errors.Join(errs...)
			return how, nil
		}
		if g.earlier && how == g.copies {
			g.refused = err
			return how, nil // those of the earlier gpufenced go on
		}
		errs = append(errs, fmt.Errorf("by %s: %w", how, err), g.letGo(copies[how]))
	}
	return CopiesNone, &Error{Reason: ReasonNoCopies, What: "the driver's copies cannot be watched", Err: errors.Join(errs...)}
}

func (g *Gate) adoptCopies(how Copies) bool {
	for _, name := range copies[how] {
		l, err := link.LoadPinnedLink(g.path("links", name), nil)
		if err != nil {
			return false
		}
		g.links[name] = l
		if err := g.keep(name); err != nil {
			return false
		}
	}
	return true
}

// ReleaseCopies lets the driver's module go, for an upgrade. The doors stay.
func (g *Gate) ReleaseCopies() error {
	err := g.letGo(slices.Concat(copies[CopiesBTF], copies[CopiesProbe]))
	g.copies, g.earlier = CopiesNone, false
	return err
}

// Carrier is what the doors hang on.
func (g *Gate) Carrier() Carrier { return g.carrier }

// Copies is how the driver's copies are watched.
func (g *Gate) Copies() Copies { return g.copies }

// Worse is why the copies are not watched in a better way.
func (g *Gate) Worse() error { return g.refused }

// Adopted says whether the maps of an earlier process were found.
func (g *Gate) Adopted() bool { return g.adopted }

// Close forgets the gate, which stays where it is.
func (g *Gate) Close() error {
	var errs []error
	for _, l := range g.links {
		errs = append(errs, l.Close())
	}
	for _, p := range g.progs {
		errs = append(errs, p.Close())
	}
	for _, m := range g.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Remove takes the gate down.
func (g *Gate) Remove() error {
	names := slices.Collect(maps.Keys(g.links))
	errs := []error{g.letGo(names), g.Close(), unpin(g.dir)}
	return errors.Join(errs...)
}

// Supersede takes down what other versions have pinned beside this one's folder. It comes after all that runs is managed
// here: until then, what they refuse stays refused, and for a moment longer, in which the kernel lets go of it.
func (g *Gate) Supersede() error { return unpinOthers(g.dir) }

// Unpin takes down whatever is pinned, also by a version that is not ours.
func Unpin(pinDir string) error {
	pinDir = cmp.Or(pinDir, DefaultPinDir)
	return errors.Join(unpin(pinDir), unpinOthers(pinDir))
}

func unpin(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("take the gate down: %w", err)
	}
	return nil
}

// unpinOthers takes down the folders of other versions beside one. What has another name there is somebody else's.
func unpinOthers(pinDir string) error {
	parent, mine := filepath.Split(filepath.Clean(pinDir))
	if !isVersion(mine) {
		return nil
	}
	entries, err := os.ReadDir(parent)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for gates of other versions: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if e.Name() == mine || !isVersion(e.Name()) || !e.IsDir() {
			continue
		}
		errs = append(errs, unpin(filepath.Join(parent, e.Name())))
	}
	return errors.Join(errs...)
}

// isVersion says whether a folder is named as a version is: "v2".
func isVersion(name string) bool {
	digits, v := strings.CutPrefix(name, "v")
	return v && digits != "" && strings.Trim(digits, "0123456789") == ""
}

// Misses is how often the kernel left out a run of one of the programs that decide: a tracing program is not
// run while it runs on the same CPU already. Security module programs are never left out.
func (g *Gate) Misses() (uint64, error) {
	var sum uint64
	for name, p := range g.progs {
		if name == "adjust_usage" {
			continue
		}
		st, err := p.Stats()
		if err != nil {
			return 0, fmt.Errorf("ask about program %s: %w", name, err)
		}
		sum += st.RecursionMisses
	}
	return sum, nil
}

// Kind is what the gate does about a device.
type Kind uint32

// Kinds of devices.
const (
	KindCTL    = Kind(gateKindKIND_CTL)    // nvidiactl: memory is asked for here
	KindGPU    = Kind(gateKindKIND_GPU)    // of granted containers only
	KindUVM    = Kind(gateKindKIND_UVM)    // managed memory
	KindClosed = Kind(gateKindKIND_CLOSED) // of no managed container: modeset, render nodes, uvm-tools
	kindCanary = Kind(gateKindKIND_CANARY)
)

// Device is a device node that the gate guards.
type Device struct {
	Major, Minor uint32
	Kind         Kind
}

func (d Device) key() uint32 { return d.Major<<20 | d.Minor }

func (d Device) value() uint32 {
	if d.Kind == KindGPU {
		return uint32(d.Kind) | d.Minor<<8
	}
	return uint32(d.Kind)
}

// guard adds a device. Its major number stays looked at when it goes: another's then costs the programs a lookup more.
func (g *Gate) guard(d Device) error {
	err := g.maps["majors"].Put(d.Major, uint32(1)) // first: what is not looked at is not found
	if err == nil {
		err = g.maps["devices"].Put(d.key(), d.value())
	}
	if err != nil {
		return fmt.Errorf("guard device %d:%d: %w", d.Major, d.Minor, err)
	}
	return nil
}

// SetDevices replaces the guarded devices, adding before it takes away.
func (g *Gate) SetDevices(devices []Device) error {
	m := g.maps["devices"]
	want := map[uint32]bool{}
	for _, d := range devices {
		want[d.key()] = true
		if err := g.guard(d); err != nil {
			return err
		}
	}
	var key, value uint32
	var gone []uint32
	it := m.Iterate()
	for it.Next(&key, &value) {
		if !want[key] && Kind(value&0xff) != kindCanary {
			gone = append(gone, key)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list guarded devices: %w", err)
	}
	for _, k := range gone {
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("let device %d:%d go: %w", k>>20, k&0xfffff, err)
		}
	}
	return nil
}

// Settings are those of the whole node.
type Settings struct {
	ParamsBytes     uint32 // of the driver's allocation parameters; 0: either size
	Commits         bool   // copies are watched: what was not copied out was not given
	CreditFrees     bool   // a free lowers the charge at once, until gpufenced proves otherwise
	KillRaces       bool   // SIGKILL for who changes a request after the door
	CloseHeap       bool   // refuse allocation calls of which no kernel copy can be seen
	CloseDup        bool   // refuse duplicates of another container's objects
	CloseUnmanaged  bool   // who is neither managed nor exempt opens no GPU
	EventsPerSecond uint32 // of one container; further ones are counted
}

func word(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// Configure sets them.
func (g *Gate) Configure(s Settings) error {
	v := gateSettings{ParamsBytes: s.ParamsBytes, Commits: word(s.Commits), CreditFrees: word(s.CreditFrees), KillRaces: word(s.KillRaces),
		CloseHeap: word(s.CloseHeap), CloseDup: word(s.CloseDup), Unmanaged: word(s.CloseUnmanaged), EventsPerSecond: s.EventsPerSecond}
	if err := g.maps["configuration"].Put(uint32(0), &v); err != nil {
		return fmt.Errorf("configure the gate: %w", err)
	}
	return nil
}

// Policy is what a cgroup may.
type Policy struct {
	LimitBytes uint64
	UVMBytes   uint64 // of managed ranges
	Minors     []int  // of granted GPUs
	GPU        bool   // it has any: nvidiactl and nvidia-uvm are open
	Enforce    bool   // else what would be refused is counted and told
	EnforceUVM bool
	NoCredit   bool // its frees are not believed
	canary     bool
}

// SetPolicy makes a cgroup managed, or changes what it may. Its usage begins at 0 and survives a change.
func (g *Gate) SetPolicy(cgroup uint64, p Policy) error {
	born, err := moment()
	if err != nil {
		return fmt.Errorf("make an account for cgroup %d: %w", cgroup, err)
	}
	err = g.maps["usages"].Update(cgroup, &gateUsage{Born: born}, ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("make an account for cgroup %d: %w", cgroup, err)
	}
	v := gatePolicy{Limit: p.LimitBytes, UvmLimit: p.UVMBytes}
	for _, m := range p.Minors {
		if m < 0 || m > 255 {
			return fmt.Errorf("grant GPU with minor number %d: not a GPU's", m)
		}
		v.Minors[m/64] |= 1 << (m % 64)
	}
	for flag, on := range map[gatePolicyFlags]bool{gatePolicyFlagsF_ENFORCE: p.Enforce, gatePolicyFlagsF_CANARY: p.canary,
		gatePolicyFlagsF_NO_CREDIT: p.NoCredit, gatePolicyFlagsF_GPU: p.GPU, gatePolicyFlagsF_UVM: p.EnforceUVM} {
		if on {
			v.Flags |= uint32(flag)
		}
	}
	if err := g.maps["policies"].Put(cgroup, &v); err != nil {
		return fmt.Errorf("set the limit of cgroup %d: %w", cgroup, err)
	}
	return g.begin(cgroup)
}

// moment tells an account from those that were made for the same cgroup before, also by an earlier gpufenced: maps stay until
// the machine is started again, as this clock does.
func moment() (uint64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint64(now.Nano()), nil
}

// begin ends what tasks know of where they are: policies have changed.
func (g *Gate) begin(cgroup uint64) error {
	_, _, err := g.adjust(gateAdjust{Cgroup: cgroup, Begin: 1})
	if errors.Is(err, ErrUnmanaged) {
		return nil
	}
	return err
}

// DropPolicy makes a cgroup, which has no processes any more, unmanaged.
func (g *Gate) DropPolicy(cgroup uint64) error {
	for _, name := range []string{"policies", "usages", "adjusted", "tainted"} {
		if err := g.maps[name].Delete(cgroup); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("let cgroup %d go: %w", cgroup, err)
		}
	}
	return g.begin(cgroup)
}

// Managed are the cgroups that have a policy.
func (g *Gate) Managed() ([]uint64, error) {
	var ids []uint64
	var id uint64
	var v gatePolicy
	it := g.maps["policies"].Iterate()
	for it.Next(&id, &v) {
		if v.Flags&uint32(gatePolicyFlagsF_CANARY) == 0 {
			ids = append(ids, id)
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list managed cgroups: %w", err)
	}
	slices.Sort(ids)
	return ids, nil
}

// SetExempt replaces the cgroups whose processes may open GPUs though nobody manages them.
func (g *Gate) SetExempt(cgroups []uint64) error {
	m := g.maps["exempt"]
	for _, id := range cgroups {
		if err := m.Put(id, uint32(1)); err != nil {
			return fmt.Errorf("exempt cgroup %d: %w", id, err)
		}
	}
	var id uint64
	var v uint32
	var gone []uint64
	it := m.Iterate()
	for it.Next(&id, &v) {
		if !slices.Contains(cgroups, id) {
			gone = append(gone, id)
		}
	}
	for _, id := range gone {
		if err := m.Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("end exemption of cgroup %d: %w", id, err)
		}
	}
	return it.Err()
}

// Usage is an account.
type Usage struct {
	Used                            uint64 // charged now
	Charged                         uint64 // sum of all charges, and of those that are being weighed
	Ended                           uint64 // of these, the sum of those of which nothing more comes
	Credited                        uint64 // sum of all that frees took off
	Peak                            uint64 // greatest Used since the reading before that reset it
	Denied, DeniedBytes, Races, UVM uint64
}

// ErrUnmanaged says that a cgroup has no account.
var ErrUnmanaged = errors.New("the gate does not manage this cgroup")

// Adjust adds to what a cgroup is charged, and reads its account in one go.
func (g *Gate) Adjust(cgroup uint64, bytes int64, resetPeak bool) (Usage, error) {
	u, _, err := g.adjust(gateAdjust{Cgroup: cgroup, Bytes: bytes, ResetPeak: word(resetPeak)})
	return u, err
}

// GiveBack takes off what a cgroup is charged, by an account in which frees had credited so much. Where more has been
// credited since, that may be the same memory: nothing is taken off then, and done is false.
func (g *Gate) GiveBack(cgroup, bytes, credited uint64) (done bool, err error) {
	_, done, err = g.adjust(gateAdjust{Cgroup: cgroup, Bytes: -int64(bytes), Credited: credited, UnlessCredited: 1})
	return done, err
}

func (g *Gate) adjust(a gateAdjust) (_ Usage, done bool, err error) {
	cgroup, out := a.Cgroup, gateAdjust{}
	code, err := g.progs["adjust_usage"].Run(&ebpf.RunOptions{Context: &a, ContextOut: &out})
	if err == nil && code != 0 {
		err = unix.ENOMEM // the program's only complaint
	}
	if err != nil {
		return Usage{}, false, fmt.Errorf("adjust the account of cgroup %d: %w", cgroup, err)
	}
	if out.Found == 0 {
		return Usage{}, false, ErrUnmanaged
	}
	var u gateUsage
	if err := g.maps["usages"].Lookup(cgroup, &u); err != nil {
		return Usage{}, false, fmt.Errorf("read the account of cgroup %d: %w", cgroup, err)
	}
	return Usage{Used: out.Used, Charged: out.Charged, Credited: out.Credited, Peak: out.Peak, Ended: out.Ended,
		Denied: u.Denied, DeniedBytes: u.DeniedBytes, Races: u.Races, UVM: u.Uvm}, out.Done == 1, nil
}

// EventKind is what was refused.
type EventKind uint32

// Changed is a request that was changed after the door had read it.
const Changed = EventKind(gateEventKindEV_RACE)

var eventWords = map[EventKind]string{
	EventKind(gateEventKindEV_QUOTA): "over-limit", EventKind(gateEventKindEV_CLASS): "forbidden-class", EventKind(gateEventKindEV_COMPAT): "32-bit-call",
	EventKind(gateEventKindEV_OPEN): "device-not-granted", EventKind(gateEventKindEV_MALFORMED): "malformed-request", EventKind(gateEventKindEV_UVM): "managed-memory",
	EventKind(gateEventKindEV_DUP): "foreign-object", EventKind(gateEventKindEV_FOREIGN): "foreign-file", EventKind(gateEventKindEV_RACE): "changed-request",
	EventKind(gateEventKindEV_UNMANAGED): "unmanaged", EventKind(gateEventKindEV_FULL): "too-many-files", EventKind(gateEventKindEV_HEAP): "heap-call",
	EventKind(gateEventKindEV_TAINTED): "changed-request-held",
}

// String is a stable word.
func (k EventKind) String() string {
	if w, ok := eventWords[k]; ok {
		return w
	}
	return fmt.Sprintf("kind-%d", uint32(k))
}

// Event is a refusal.
type Event struct {
	Cgroup, SizeBytes, UsedBytes, LimitBytes uint64
	PID, TID                                 int
	Kind                                     EventKind
	Class                                    uint32 // of the object; of a device, its number
	Door                                     Door
	Errno                                    int
	Comm                                     string
}

// Events calls a function for each refusal until the context ends.
func (g *Gate) Events(ctx context.Context, f func(Event)) error {
	r, err := ringbuf.NewReader(g.maps["events"])
	if err != nil {
		return fmt.Errorf("read the gate's events: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = r.Close() }) // what it ends says so
	defer stop()
	for {
		// Not every event wakes the reader.
		r.SetDeadline(time.Now().Add(100 * time.Millisecond))
		rec, err := r.Read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case errors.Is(err, ringbuf.ErrClosed):
			return ctx.Err()
		case err != nil:
			return errors.Join(fmt.Errorf("read the gate's events: %w", err), r.Close())
		}
		e, ok := parseEvent(rec.RawSample)
		if ok {
			f(e)
		}
	}
}

// Stats are counters of the whole node.
func (g *Gate) Stats() (map[string]uint64, error) {
	out := map[string]uint64{}
	for i, name := range []string{"events_lost", "commits", "rollbacks"} {
		var per []uint64
		if err := g.maps["stats"].Lookup(uint32(i), &per); err != nil {
			return nil, fmt.Errorf("read counter %s: %w", name, err)
		}
		for _, v := range per {
			out[name] += v
		}
	}
	return out, nil
}

// InLSMList says whether the kernel runs security module programs: bpf is on its list.
func InLSMList() (bool, error) {
	b, err := os.ReadFile("/sys/kernel/security/lsm")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // securityfs is not mounted: the canary finds out
	}
	if err != nil {
		return false, fmt.Errorf("read the list of security modules: %w", err)
	}
	return slices.ContainsFunc(bytes.Split(bytes.TrimSpace(b), []byte(",")), func(w []byte) bool { return string(w) == "bpf" }), nil
}
