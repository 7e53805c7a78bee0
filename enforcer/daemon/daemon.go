// SPDX-License-Identifier: Apache-2.0

// Package daemon is gpufenced: it grants memory to containers, raises their fences, samples
// NVML, acts on what policy decides, and finds everything again after a restart.
//
// What it promises:
//   - A change is on disk before it is answered; whoever read a counter never reads a smaller one.
//   - Before a SIGKILL there is the counter, the journal's entry and the termination message, each
//     with at most 50 ms; the SIGKILL comes in any case.
//   - Unknown data refuses starts and never kills.
//   - One container's or pod's damage (ledger, state file, files that were cut) stays its own.
//
// Lock order: mu, then view's lock, then the journal's. mu is held over files on tmpfs and /proc,
// never over an NVML call, a kill, or a wait. Everything that is not said to be otherwise is
// guarded by mu.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/journal"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
	cdispec "github.com/gpufence/gpufence/hook/cdi"
)

// Times that no policy sets.
const (
	stepBefore    = 50 * time.Millisecond // each step before a kill
	killTimeout   = 5 * time.Second       // until a kill is reported as failed
	unknownLimit  = 2 * time.Minute       // of unknown data, then no new starts
	waitForGPU    = 5 * time.Second       // of prepare, for the first sample and for dying memory
	waitForProof  = 5 * time.Second       // of register, for a sample that proves the watch
	housekeeping  = time.Second           // collection of what ended, saving of counters
	retryNVML     = time.Second
	lostFor       = 5 * time.Second           // of failures, then new handles are asked for
	stopTimeout   = killTimeout + time.Second // for what is in progress when we are told to stop
	drainLimit    = time.Minute               // how long an ended container's memory is followed
	filesInterval = time.Second               // between two writes of memory.* without a reason
	rescanEvery   = 5 * time.Second           // the set of GPUs changes where MIG mode is switched
	emptyLimit    = 10 * time.Second
	cgroupEvery   = 5 // collections between two looks for the cgroup of a process that lives
)

// Options are what a daemon is made of.
type Options struct {
	Config  config.Config
	Library gpu.Library
	Host    *act.Host
	Log     *logrus.Logger
	// PlainPages keeps shared pages in plain folders instead of a tmpfs a pod, for tests.
	PlainPages bool
	// Loaded is where Config came from, for who asks; Load reads it again.
	Loaded config.Loaded
	Load   func() (config.Loaded, error)
	// Root is the node's file system, whose engines are watched; empty: they are not.
	Root string
	// Capabilities is the driver's folder of MIG capabilities; empty for [gpu.CapabilitiesDir].
	Capabilities string
	// Gate is what surrounds the gate, for tests. Policy comes from Config.
	Gate fence.GateOptions
	// Notify tells the service manager a state.
	Notify func(state string)
	// Kubelet says what it gave a container; nil where there is none.
	Kubelet PodDevices
	// FreezeGuard is the program, with its arguments but the folder, that freezes; nil for this one.
	FreezeGuard []string
}

// Daemon is gpufenced. It implements [server.Service].
type Daemon struct {
	cfg     config.Config
	lib     gpu.Library
	host    *act.Host
	moves   *act.Moves
	log     *logrus.Logger
	plain   bool
	lock    *os.File // of the run folder
	store   *registry.Store
	journal *journal.Journal
	bootID  string
	pol     policy.Config
	shimLib string
	shim32  string // "": beside the other, where there is one
	kubelet PodDevices
	// specs are CDI's, guarded by mu.
	specs   cdispec.Specs
	audited map[api.ContainerKey]string // of the newest audit, why

	watch  fence.Watch
	shim   fence.Shim
	gate   *fence.Gate
	fences []fence.Fence

	mu      lock
	reg     *registry.Registry
	runtime map[string]*podRuntime // by pod name
	// runtimes changes with the set of those, which allPages has in order.
	runtimes uint64
	allPages pagesOf
	dirty    map[string]bool      // pods whose file lags behind
	gpus     map[string]*gpuState // by UUID
	order    []string             // UUIDs in NVML's order
	split    []gpu.Info           // GPUs in MIG mode, which are used through their instances
	// anyInstance: one of the GPUs is a MIG instance.
	anyInstance  bool
	capabilities string // the driver's folder of MIG capabilities
	nvmlErr      error  // why there are no GPUs; nil once there are
	driver       string
	sample       uint64                               // number of the newest tick
	asking       []*gpuState                          // whose samples are in progress
	beaten       time.Duration                        // when every page's heartbeat moved last
	stood        time.Duration                        // of the newest tick at which no number had to move
	empty        map[policy.ContainerID]time.Duration // since when nothing lives in a container
	lastIdl      time.Duration                        // when GPUs without a container were last asked
	collected    uint64                               // how often what ended was collected
	facts        *facts
	changed      chan struct{} // closed and replaced after each step and each change of state
	kick         chan struct{} // asks for a tick now
	saidErr      map[string]problem
	closed       bool
	damaged      bool       // state of containers that may run was lost
	redo         []killTask // of kills whose signal may be missing after a restart
	// killing are the kills in progress: a container is not judged again for the same victim
	// before its signal is out.
	killing map[policy.ContainerID]registry.Kill

	guard    *act.Guard // freezes what is above memory.high
	freezing map[policy.ContainerID]*frozen

	seen      seen // what fences look at, under its own lock
	instances instances
	limiter   limiter
	node      node
	group     sync.WaitGroup
}

// podRuntime are a pod's open pages.
type podRuntime struct {
	pages      *ledger.Pod
	containers map[uint32]*ledger.Container // by index
	broken     string                       // why the ledger is not believed, "" if it is
	snapshot   *ledger.Snapshot             // newest
	owners     map[slotKey]*slotOwner
	nextScan   time.Duration // when its processes may be looked through again
	asked      asked
	published  map[uint32]time.Duration
	shown      uint64 // steps of the pod's GPUs when its files were written last
	// stageWaits is since when the next stage of the pod's changes waits for memory of processes that
	// exited, 0 if it does not.
	stageWaits time.Duration
	// number is the newest sample as the pod's pages show it, numbered when it was published.
	number   uint64
	numbered time.Duration
}

type slotKey struct {
	index      int
	generation uint32
}

// gpuState is one GPU.
type gpuState struct {
	info    gpu.Info
	quota   quota.GPU // with the upper bound of a context
	sampler *gpu.Sampler
	machine *policy.GPU

	inFlight  bool
	sentAt    time.Duration
	sentAs    uint64        // its number
	sentTo    *gpu.Sampler  // which sampler may not be any more
	limit     time.Duration // for how long its answer is waited for
	refused   error         // why it could not even be sent
	have      bool          // a sample was processed
	sample    gpu.Sample
	number    uint64
	out       policy.Output
	outAt     time.Duration // when it was computed
	lastKnown time.Duration
	saidWhy   string // reported reason of being unknown
	above     bool   // a limit and its slack are crossed
	rising    bool   // a container without a shim grows towards its limit
	// foreign are the unmanaged processes that were reported; unattributed says the same of memory
	// that no process explains, of which there is much since unexplained.
	foreign      map[procID]bool
	unattributed bool
	shimless     map[policy.ContainerID]bool // containers of which it was said
	unexplained  time.Duration
	// aboveAt is when the call for the first sample began that says above.
	aboveAt time.Duration
	// context are observations of processes that have one context and nothing else.
	context map[int]contextSeen
	// draining are containers that ended and whose memory is still listed.
	draining map[policy.ContainerID]drain
	last     lastStep
	// still: the newest sample said what the one before said, and nothing else had changed.
	still bool
	pages pagesOf // of the pods that have it
	// gone: NVML does not list it any more, and why that may be.
	gone    bool
	goneWhy string
}

// procID is a process for as long as the node is up.
type procID struct {
	pid   int
	start uint64
}

type drain struct {
	fact  policy.ContainerFact
	ended time.Duration
}

// dyingBytes is what exited processes still hold, those of a container that ended since the newest
// sample included: its promise is free already, its memory is not.
func (g *gpuState) dyingBytes() uint64 {
	sum := g.out.DyingBytes
	for id, dr := range g.draining {
		if dr.ended > g.outAt {
			sum += min(g.out.Containers[id].ChargedBytes, quota.Unlimited-sum)
		}
	}
	return sum
}

// podUse is what a pod's live processes are charged, and what its exited ones still hold.
func (g *gpuState) podUse(p *registry.Pod) (charged, dying uint64) {
	plus := func(to *uint64, b uint64) { *to += min(b, quota.Unlimited-*to) }
	for _, c := range p.Containers {
		st := g.out.Containers[c.ID()]
		live := st.ChargedBytes - min(st.ChargedBytes, st.StuckBytes)
		if dr, ended := g.draining[c.ID()]; ended && dr.ended > g.outAt {
			plus(&dying, live)
		} else {
			plus(&charged, live)
		}
		plus(&dying, st.DyingBytes)
		plus(&dying, st.StuckBytes)
	}
	return charged, dying
}

// errNotAsked says that NVML is about to be asked for the first time.
var errNotAsked = errors.New("it was not asked yet")

// New takes the run folder, reads what an earlier gpufenced left, and adopts it. It starts
// nothing; Run does.
func New(opts Options) (*Daemon, error) {
	cfg := opts.Config
	d := &Daemon{
		cfg: cfg, lib: opts.Library, host: opts.Host, log: opts.Log, plain: opts.PlainPages,
		runtime: map[string]*podRuntime{}, dirty: map[string]bool{}, gpus: map[string]*gpuState{},
		changed: make(chan struct{}), kick: make(chan struct{}, 1), saidErr: map[string]problem{},
		empty:   map[policy.ContainerID]time.Duration{},
		nvmlErr: errNotAsked, kubelet: opts.Kubelet,
	}
	d.configure()
	argv := opts.FreezeGuard
	if argv == nil {
		argv = []string{"/proc/self/exe", act.GuardCommand}
	}
	d.guard = act.NewGuard(append(slices.Clone(argv), d.frozenDir()), d.frozenDir())
	d.freezing = map[policy.ContainerID]*frozen{}
	d.facts = newFacts(d.host)
	d.facts.isExempt = func(id act.Identity, comm string) bool {
		return d.cfg.Exempted(config.Identity{Exe: id.Exe, Cgroup: id.Cgroup, Comm: comm})
	}
	d.watch = fence.Watch{Samples: (*samples)(d)}
	d.shim = fence.Shim{Shims: &d.seen, Check: d.checkPages}
	d.limiter.kick = make(chan struct{}, 1)
	d.limiter.fence = fence.NewDriver(&d.limiter.sees, &d.limiter.sees, d.host.Unified(), cfg.DmemDir)
	d.moves = d.host.Moves()
	around := opts.Gate
	around.Word, around.Strict, around.Managed, around.CgroupRoot, around.Settle = cfg.Gate, cfg.GateStrict, cfg.GateManaged == "enforce", d.host.Unified(), cfg.Settle
	around.PinDir = filepath.Join(cfg.GatePins, bpf.PinVersion)
	d.gate = fence.NewGate(around)
	d.fences = []fence.Fence{d.watch, d.shim, d.limiter.fence, d.gate, fence.MIG{Instances: &d.instances}}
	d.capabilities = cmp.Or(opts.Capabilities, gpu.CapabilitiesDir)
	d.shimLib, d.shim32 = shimLibrary(cfg.ShimLibrary), cfg.ShimLibrary32

	var err error
	if d.bootID, err = readBootID(); err != nil {
		return nil, err
	}
	for _, dir := range []string{cfg.RunDir, filepath.Join(cfg.RunDir, "pods"), filepath.Join(cfg.RunDir, "preload"), d.frozenDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make run folder: %w", err)
		}
	}
	if d.lock, err = lockFolder(cfg.RunDir); err != nil {
		return nil, err
	}
	if err := d.open(); err != nil {
		return nil, errors.Join(err, d.lock.Close())
	}
	d.beginNode(opts)
	d.denyUnmanaged()
	return d, nil
}

func (d *Daemon) open() error {
	var err error
	if d.store, err = registry.OpenStore(filepath.Join(d.cfg.RunDir, "state")); err != nil {
		return err
	}
	if d.journal, err = journal.Open(d.cfg.StateDir, journal.Options{}); err != nil {
		return err
	}
	d.thawLeft()
	if err := d.recover(); err != nil {
		return errors.Join(err, d.journal.Close())
	}
	return nil
}

// configure takes the configuration over into what decides. The caller holds mu, or is New.
func (d *Daemon) configure() {
	cfg := d.cfg
	pol := policy.DefaultConfig()
	pol.Settle, pol.StuckAfter, pol.KillInterval = cfg.Settle, cfg.StuckAfter, cfg.KillInterval
	pol.KillSlackBytes, pol.KillSlackShare = cfg.KillSlackBytes, cfg.KillSlackShare
	pol.Horizon = 5 * cfg.Sample / 2
	pol.KillMPS = cfg.KillMPS
	pol.ShimKill = cfg.ShimMissing == "kill"
	// A pod whose state was lost runs on without being known: it must not die for that.
	pol.UnmanagedKill = cfg.Unmanaged == "kill" && cfg.Policy.Mode == quota.ModeEnforce && !d.damaged
	if cfg.Throttle == "freeze" {
		pol.FreezeShare = cfg.FreezeShare
	}
	d.pol = pol
	for _, g := range d.gpus {
		g.machine.Configure(pol)
	}
	if d.facts != nil {
		d.facts.exempt++
	}
	if d.gate != nil {
		d.gate.SetSettle(cfg.Settle)
	}
}

// lockFolder makes sure that one gpufenced only works on a run folder. The lock goes with the
// process, however it ends.
func lockFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		closeErr := f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, quota.NewError(quota.CodeAlreadyRunning, "another gpufenced works on %s", dir).
				WithHint("stop it (`systemctl stop gpufenced`), or give this one another --run-dir")
		}
		return nil, errors.Join(fmt.Errorf("lock run folder: %w", err), closeErr)
	}
	return f, nil
}

// shimLibrary is where libgpufence.so lies: as configured, or beside the program.
func shimLibrary(configured string) string {
	if configured != "" {
		return configured
	}
	exe, err := os.Executable()
	if err != nil {
		return "/usr/lib/gpufence/libgpufence.so"
	}
	lib := filepath.Join(filepath.Dir(filepath.Dir(exe)), "lib")
	for _, p := range []string{filepath.Join(lib, "gpufence", "libgpufence.so"), filepath.Join(lib, "libgpufence.so")} {
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	return filepath.Join(lib, "gpufence", "libgpufence.so")
}

// libFolders are what $LIB stands for in a container: what Debian's loader and its relatives make
// of it, and everybody else's. "lib" is Fedora's 32-bit loader's, and the 64-bit one's of Arch and
// Nix; narrowLib says which it is.
func libFolders(narrowLib bool) (own, narrow []string) {
	if runtime.GOARCH == "arm64" {
		return []string{"lib64", "lib/aarch64-linux-gnu", "lib"}, nil
	}
	own, narrow = []string{"lib64", "lib/x86_64-linux-gnu"}, []string{"lib32", "lib/i386-linux-gnu"}
	if narrowLib {
		return own, append(narrow, "lib")
	}
	return append(own, "lib"), narrow
}

func readBootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// Run samples, decides and acts until the context ends; then it saves and returns. It may be
// called once.
func (d *Daemon) Run(ctx context.Context) error {
	d.mu.Lock()
	for _, t := range d.redo {
		d.launch(t)
	}
	d.mu.Unlock()
	d.group.Go(func() { d.runNVML(ctx) })
	d.group.Go(func() { d.runTicks(ctx) })
	d.group.Go(func() { d.runHousekeeping(ctx) })
	if d.node.root != "" {
		d.group.Go(func() { d.runDrift(ctx) })
	}
	d.group.Go(func() { d.runFreezer(ctx) })
	d.group.Go(func() { d.runDriver(ctx) })
	d.group.Go(func() { d.runGate(ctx) })
	<-ctx.Done()
	done := make(chan struct{})
	go func() {
		d.group.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(stopTimeout):
		d.log.Error("an NVML call hangs: stopping without it")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.saveDirty()
}

// Close lets go of everything. Containers, their pages and limits stay as they are.
func (d *Daemon) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	var errs []error
	for _, rt := range d.runtime {
		for _, c := range rt.containers {
			errs = append(errs, c.Close())
		}
		if rt.pages != nil {
			errs = append(errs, rt.pages.Close())
		}
	}
	d.facts.close()
	errs = append(errs, d.guard.Close())
	errs = append(errs, d.journal.Close(), d.lock.Close())
	return errors.Join(errs...)
}

// now is the wall clock, for people and for holds; mono is what decisions go by.
func (d *Daemon) now() time.Time      { return time.Now().UTC() }
func (d *Daemon) mono() time.Duration { return act.Monotonic() }

// notify wakes whoever waits for a change. The caller holds mu.
func (d *Daemon) notify() {
	d.lookAtInstances()
	close(d.changed)
	d.changed = make(chan struct{})
}

// poke asks for a tick now.
func (d *Daemon) poke() {
	select {
	case d.kick <- struct{}{}:
	default: // one is asked for already
	}
}

// event puts an entry into the journal and the log.
func (d *Daemon) event(ev api.Event) {
	d.measure(&ev) // before: who reads the entry finds it counted
	ev, err := d.journal.Append(ev)
	fields := logrus.Fields{"event": ev.Type, "seq": ev.Seq}
	if ev.Code != "" {
		fields["code"] = ev.Code
	}
	if ev.Container != nil {
		fields["container"] = ev.Container.ID
	}
	if ev.GPU != "" {
		fields["gpu"] = ev.GPU
	}
	d.log.WithFields(fields).Info(ev.Message)
	if err != nil {
		d.once("journal", fmt.Errorf("the journal in %s cannot be written, events go on in memory: %w", d.journal.Dir(), err))
	} else {
		d.once("journal", nil)
	}
}

// about fills in whom an event is about.
func about(c *registry.Container, ev api.Event) api.Event {
	key, pod := c.Key, c.Pod().Ref
	ev.Container, ev.Pod, ev.Name = &key, &pod, c.Name
	return ev
}

// once logs an error when it begins, when it changes and when it ends, not each time. Unlike the
// rest it may be called with or without mu, so it has a lock of its own.
func (d *Daemon) once(what string, err error) {
	d.seen.mu.Lock()
	defer d.seen.mu.Unlock()
	last, had := d.saidErr[what]
	switch {
	case err == nil && had:
		delete(d.saidErr, what)
		d.log.WithField("about", what).Info("works again")
	case err != nil && (!had || last.text != err.Error()):
		d.saidErr[what] = problem{err.Error(), d.now()}
		d.log.WithField("about", what).WithError(err).Error("something does not work")
	}
}

// unsay forgets what was said about what is gone: its name is part of it.
func (d *Daemon) unsay(name string) {
	d.seen.mu.Lock()
	defer d.seen.mu.Unlock()
	maps.DeleteFunc(d.saidErr, func(what string, _ problem) bool { return strings.Contains(what, name) })
}

// save writes a pod's file now. The caller holds mu.
func (d *Daemon) save(p *registry.Pod) error {
	if err := d.store.Save(p); err != nil {
		d.dirty[p.Name] = true
		return err
	}
	delete(d.dirty, p.Name)
	return nil
}

// saveDirty writes every file that lags behind. The caller holds mu.
func (d *Daemon) saveDirty() error {
	var errs []error
	for name := range d.dirty {
		p := d.reg.Pod(name)
		if p == nil {
			delete(d.dirty, name)
			continue
		}
		if err := d.save(p); err != nil {
			errs = append(errs, err)
		}
	}
	err := errors.Join(errs...)
	d.once("state", err)
	return err
}

// seen is what fences look at. It has its own lock, so that they may be asked anywhere.
type seen struct {
	mu      sync.Mutex
	samples map[string]fence.SampleInfo
	shims   map[policy.ContainerID]map[string]policy.Shim
}

// Shim implements [fence.Shims].
func (s *seen) Shim(id policy.ContainerID, uuid string) (policy.Shim, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st, ok := s.shims[id][uuid]
	return st, ok
}

func (s *seen) set(uuid string, info fence.SampleInfo, states map[policy.ContainerID]policy.ContainerState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.samples == nil {
		s.samples, s.shims = map[string]fence.SampleInfo{}, map[policy.ContainerID]map[string]policy.Shim{}
	}
	s.samples[uuid] = info
	for id, st := range states {
		if s.shims[id] == nil {
			s.shims[id] = map[string]policy.Shim{}
		}
		s.shims[id][uuid] = st.Shim
	}
}

func (s *seen) forget(id policy.ContainerID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.shims, id)
}

// samples is the daemon as [fence.Samples].
type samples Daemon

// Newest implements [fence.Samples].
func (s *samples) Newest(uuid string) (fence.SampleInfo, bool) {
	s.seen.mu.Lock()
	defer s.seen.mu.Unlock()
	info, ok := s.seen.samples[uuid]
	return info, ok
}

// Now implements [fence.Samples].
func (s *samples) Now() time.Duration { return act.Monotonic() }

// Refresh implements [fence.Samples].
func (s *samples) Refresh(ctx context.Context, uuid string) error {
	d := (*Daemon)(s)
	began := d.mono()
	for {
		d.mu.Lock()
		changed := d.changed
		d.mu.Unlock()
		if info, ok := s.Newest(uuid); ok && info.Began >= began {
			return nil
		}
		d.poke()
		select {
		case <-changed:
		case <-time.After(10 * time.Millisecond): // the kick may have met a sample in flight
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
