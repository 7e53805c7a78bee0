// SPDX-License-Identifier: Apache-2.0

// Package driver is the simulated GPU without its sockets: what a kernel driver knows of one
// GPU, who holds how much of it, and what NVML says of that.
//
// It is pure. No method reads a clock, sleeps or does I/O: the caller passes the time, in
// nanoseconds that never go back, and calls Advance when NextEvent says so. A GPU is not safe
// for concurrent use; whoever shares one holds a lock over each call.
//
// What holds at every moment:
//   - used bytes = others + what processes hold, shared memory once, + managed pages on the
//     device, and never more than total - reserved, except that others may be set to anything;
//   - a request that fails changes nothing but evicted managed pages;
//   - nothing that a closed Client held is left after its free-lag.
package driver

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"sort"
	"time"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// What a request can fail with.
var (
	ErrNoMemory     = errors.New("out of device memory")
	ErrInvalid      = errors.New("invalid argument")
	ErrNotFound     = errors.New("no such handle")
	ErrLost         = errors.New("the GPU is lost")
	ErrNotSupported = errors.New("not told by this GPU")
	ErrBusy         = errors.New("no more contexts on this GPU")
)

const (
	// endedProcesses is how many processes that went away the state still shows.
	endedProcesses = 1024
	// endedPoints is how much of such a process's history is kept: its newest points.
	endedPoints = 4096
	// maxBytes bounds one request, so that sums cannot overflow.
	maxBytes = uint64(1) << 46
	// busyKept is how long the times at which kernels ran are remembered.
	busyKept = 15 * time.Second
)

// ProcID is a process for good: pids come back, start times do not.
type ProcID struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, from /proc/PID/stat
}

// Owner says who opened a device file.
type Owner struct {
	ProcID
	UID     int
	Cgroup  string
	Unified string // its cgroup in the v2 hierarchy, which the driver's limits go by; "" if that is the root
	Command string
}

// process is what one process holds of the GPU, over all its open files.
type process struct {
	owner       Owner
	open        int // files
	contexts    int
	lists       uint8  // bit i: wire.List(i) shows it
	held        uint64 // device bytes in use, as NVML counts them
	managed     uint64 // managed bytes on the device
	peak        uint64
	peakManaged uint64
	refused     uint64 // requests that ended in ErrNoMemory
	hist        history
	busy        []span
	startedNS   int64
	endedNS     int64 // 0 while it holds a file or bytes
	group       *group
}

func (p *process) listed() bool { return p.contexts > 0 || p.held > 0 }

// group is a cgroup's share.
type group struct {
	path string
	held uint64
	peak uint64
}

type span struct{ from, to int64 }

// GPU is one simulated GPU.
type GPU struct {
	cfg     Config
	knobs   Knobs
	now     int64
	procs   map[ProcID]*process
	ended   []*process // oldest first, the tail of which procs still holds
	groups  map[string]*group
	hist    history // of device use
	held    uint64  // by processes, and by descriptors alone
	managed uint64
	tokens  map[uint64]*memory
	pages   []*alloc // managed allocations, longest untouched first
	nctx    int
	peak    uint64
	events  events
	seq     uint64
	handle  uint64
	busy    int64 // until when the GPU has work
	// accounts are the driver's memory limits, by cgroup; touched are those that changed.
	accounts map[string]*account
	touched  map[string]bool
	spans    []span
}

// New is a GPU that nobody uses, at time now.
func New(cfg Config, knobs Knobs, now int64) *GPU {
	if cfg.ReservedBytes == 0 {
		cfg.ReservedBytes = roundUp(cfg.TotalBytes/100, wire.PageBytes)
	}
	g := &GPU{cfg: cfg, knobs: knobs, now: now, procs: map[ProcID]*process{}, groups: map[string]*group{}, tokens: map[uint64]*memory{},
		accounts: map[string]*account{}, touched: map[string]bool{}}
	g.record()
	return g
}

// Config is what the GPU was made with.
func (g *GPU) Config() Config { return g.cfg }

// Knobs are the present settings.
func (g *GPU) Knobs() Knobs { return g.knobs }

// SetKnobs replaces the settings. What has begun (late bytes, lags) ends as it began.
func (g *GPU) SetKnobs(now int64, k Knobs) {
	g.Advance(now)
	if k.MemoryLimits != g.knobs.MemoryLimits {
		g.accounts = map[string]*account{} // as after the driver was loaded anew
	}
	g.knobs = k
	g.record()
}

// capacity is what can be handed out at all.
func (g *GPU) capacity() uint64 { return g.cfg.TotalBytes - g.cfg.ReservedBytes }

func (g *GPU) used() uint64 {
	return min(g.capacity(), g.held+g.managed+g.knobs.OthersBytes)
}

func (g *GPU) record() {
	u := g.used()
	g.peak = max(g.peak, u)
	g.hist.add(Point{TimeNS: g.now, UsedBytes: u, ManagedBytes: g.managed})
}

// ---- time ---------------------------------------------------------------------------

type event struct {
	at  int64
	seq uint64
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any) {
	if ev, ok := x.(event); ok { // after pushes nothing else
		*e = append(*e, ev)
	}
}
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func (g *GPU) after(d time.Duration, do func()) {
	g.seq++
	heap.Push(&g.events, event{g.now + int64(d), g.seq, do})
}

// Advance lets everything happen that is due at now, each at its own time.
func (g *GPU) Advance(now int64) {
	for len(g.events) > 0 && g.events[0].at <= now {
		e := g.events[0]
		heap.Pop(&g.events)
		g.now = max(g.now, e.at)
		e.do()
	}
	g.now = max(g.now, now)
}

// NextEvent is when Advance has something to do, and whether it ever has.
func (g *GPU) NextEvent() (int64, bool) {
	if len(g.events) == 0 {
		return 0, false
	}
	return g.events[0].at, true
}

// ---- who holds what -----------------------------------------------------------------

// take charges n device bytes to c's process, and to its cgroup's account; managed pages make room
// if they may.
func (g *GPU) take(c *Client, n uint64) (*account, error) {
	on, err := g.charge(c.cgroup, n)
	if err != nil {
		return nil, err
	}
	if err := g.hold(c.proc, n); err != nil {
		g.add(on, -int64(n))
		return nil, err
	}
	return on, nil
}

// takeFor is take for a context itself.
func (g *GPU) takeFor(c *Client, ctx *context, n uint64) error {
	on, err := g.take(c, n)
	if err == nil {
		ctx.charges = append(ctx.charges, charge{on, n})
	}
	return err
}

func (g *GPU) hold(p *process, n uint64) error {
	room := g.capacity() - g.used()
	if g.knobs.ManagedEvict {
		for i := 0; i < len(g.pages) && room < n; i++ {
			room += g.evict(g.pages[i], n-room)
		}
	}
	if room < n {
		g.record()
		return ErrNoMemory
	}
	p.held += n
	g.held += n
	p.group.held += n
	g.note(p)
	return nil
}

func (g *GPU) give(p *process, n uint64) {
	p.held -= n
	g.held -= n
	p.group.held -= n
	g.note(p)
}

// note records p and the device after a change.
func (g *GPU) note(p *process) {
	p.peak = max(p.peak, p.held)
	p.peakManaged = max(p.peakManaged, p.managed)
	p.group.peak = max(p.group.peak, p.group.held)
	p.hist.add(Point{TimeNS: g.now, UsedBytes: p.held, ManagedBytes: p.managed, listed: p.listed()})
	g.record()
}

func (g *GPU) process(o Owner) *process {
	p := g.procs[o.ProcID]
	if p == nil {
		p = &process{owner: o, startedNS: g.now}
		g.procs[o.ProcID] = p
	}
	p.owner.Command = o.Command // another one after exec
	if p.group == nil || p.group.path != o.Cgroup && p.held == 0 {
		p.owner = o
		if g.groups[o.Cgroup] == nil {
			g.groups[o.Cgroup] = &group{path: o.Cgroup}
		}
		p.group = g.groups[o.Cgroup]
	}
	if p.endedNS != 0 {
		p.endedNS = 0
		for i, e := range g.ended {
			if e == p {
				g.ended = append(g.ended[:i], g.ended[i+1:]...)
				break
			}
		}
	}
	return p
}

// settle closes p's account once it holds neither a file nor bytes.
func (g *GPU) settle(p *process) {
	if p.open > 0 || p.held > 0 || p.managed > 0 || p.endedNS != 0 {
		return
	}
	p.endedNS = g.now
	p.hist.shrink(endedPoints)
	g.ended = append(g.ended, p)
	if len(g.ended) > endedProcesses {
		delete(g.procs, g.ended[0].owner.ProcID)
		g.ended = append(g.ended[:0], g.ended[1:]...)
	}
}

// ---- open files ---------------------------------------------------------------------

// Client is one open device file.
type Client struct {
	gpu      *GPU
	proc     *process
	contexts map[uint64]*context
	bare     *context // what was allocated outside a context
	allocs   map[uint64]*alloc
	closed   bool
	cgroup   string // that pays
}

type context struct {
	handle  uint64
	charges []charge // of its own bytes, the newest last
	bytes   uint64   // its own, without what was allocated in it
	extra   int64    // of these, by how much it is larger than it was made
	blocks  []*block
	allocs  map[uint64]*alloc
	gone    bool
}

type alloc struct {
	handle   uint64
	client   *Client
	ctx      *context
	kind     wire.Kind
	bytes    uint64 // as rounded
	resident uint64 // of managed memory
	block    *block
	slot     int
	slots    int
	shared   *reference // once it was exported, or if it was imported
	on       *account   // that pays, of what has neither block nor is shared
}

// Open is a new open file of owner.
func (g *GPU) Open(now int64, owner Owner) *Client {
	g.Advance(now)
	p := g.process(owner)
	p.open++
	c := &Client{gpu: g, proc: p, cgroup: owner.Unified, contexts: map[uint64]*context{}, allocs: map[uint64]*alloc{}}
	c.bare = &context{allocs: map[uint64]*alloc{}}
	return c
}

func (g *GPU) newHandle() uint64 {
	g.handle++
	return g.handle
}

// CreateContext makes a context and tells what it took.
func (c *Client) CreateContext(now int64, list wire.List, kind wire.ContextKind) (handle, taken uint64, err error) {
	g := c.gpu
	g.Advance(now)
	switch {
	case g.knobs.Lost:
		return 0, 0, ErrLost
	case c.closed || list > wire.ListMPS || kind > wire.ContextGreen:
		return 0, 0, ErrInvalid
	case kind == wire.ContextGreen && len(c.contexts) == 0:
		return 0, 0, ErrInvalid // it has nothing to stand on
	case g.knobs.MaxContexts > 0 && g.nctx >= g.knobs.MaxContexts:
		return 0, 0, ErrBusy
	}
	size := g.cfg.ContextBytes
	if g.knobs.ContextBytes > 0 {
		size = g.knobs.ContextBytes
	}
	if c.proc.contexts > 0 {
		size = roundUp(size*uint64(g.knobs.SecondContext)/100, wire.PageBytes)
	}
	if kind == wire.ContextGreen {
		return c.createGreen(list)
	}
	// A context that would not get through its own start is refused at once, as a whole.
	ctx := &context{handle: g.newHandle(), bytes: size + g.knobs.TransientBytes, allocs: map[uint64]*alloc{}}
	if err := g.takeFor(c, ctx, ctx.bytes); err != nil {
		c.proc.refused++
		return 0, 0, err
	}
	c.contexts[ctx.handle] = ctx
	c.proc.contexts++
	c.proc.lists |= 1 << list
	g.nctx++
	if extra := g.knobs.TransientBytes; extra > 0 {
		g.after(g.knobs.TransientTime, func() {
			if !ctx.gone {
				ctx.bytes -= extra
				ctx.giveBack(g, extra)
				g.give(c.proc, extra)
			}
		})
	}
	g.growLate(c, ctx)
	g.note(c.proc)
	return ctx.handle, ctx.bytes, nil
}

// createGreen makes a context that shares all but its queues with the one it stands on.
func (c *Client) createGreen(list wire.List) (handle, taken uint64, err error) {
	size := roundUp(c.gpu.knobs.GreenBytes, wire.PageBytes)
	ctx := &context{handle: c.gpu.newHandle(), bytes: size, allocs: map[uint64]*alloc{}}
	if err := c.gpu.takeFor(c, ctx, size); err != nil {
		c.proc.refused++
		return 0, 0, err
	}
	c.contexts[ctx.handle] = ctx
	c.proc.contexts++
	c.proc.lists |= 1 << list
	c.gpu.nctx++
	c.gpu.note(c.proc)
	return ctx.handle, size, nil
}

// ResizeContext makes a context by extra bytes larger (or smaller) than it was made: its
// stacks, its heap.
func (c *Client) ResizeContext(now int64, handle uint64, extra int64) error {
	g := c.gpu
	g.Advance(now)
	ctx := c.contexts[handle]
	switch {
	case g.knobs.Lost:
		return ErrLost
	case ctx == nil:
		return ErrNotFound
	case extra > int64(maxBytes) || extra < -int64(maxBytes):
		return ErrNoMemory
	}
	if extra > 0 {
		extra = int64(roundUp(uint64(extra), wire.PageBytes))
	} else {
		extra -= extra % int64(wire.PageBytes)
	}
	grow := max(extra-ctx.extra, -int64(ctx.bytes))
	if grow > 0 {
		if err := g.takeFor(c, ctx, uint64(grow)); err != nil {
			c.proc.refused++
			return err
		}
	} else {
		ctx.giveBack(g, uint64(-grow))
		g.give(c.proc, uint64(-grow))
	}
	ctx.bytes = uint64(int64(ctx.bytes) + grow)
	ctx.extra += grow
	return nil
}

// growLate schedules the growth of a context. A step that finds no room is left out: it is a
// module that could not be loaded.
func (g *GPU) growLate(c *Client, ctx *context) {
	total, steps := g.knobs.LateBytes, uint64(max(g.knobs.LateSteps, 1))
	if total == 0 {
		return
	}
	for i := uint64(1); i <= steps; i++ {
		n := total*i/steps - total*(i-1)/steps
		g.after(g.knobs.LateTime*time.Duration(i)/time.Duration(steps), func() {
			if ctx.gone {
				return
			}
			if g.takeFor(c, ctx, n) == nil {
				ctx.bytes += n
			} else {
				c.proc.refused++
			}
		})
	}
}

// DestroyContext frees a context and everything in it.
func (c *Client) DestroyContext(now int64, handle uint64) (given uint64, err error) {
	g := c.gpu
	g.Advance(now)
	if g.knobs.Lost {
		return 0, ErrLost
	}
	ctx := c.contexts[handle]
	if ctx == nil {
		return 0, ErrNotFound
	}
	before := c.proc.held
	for _, a := range ctx.allocs {
		c.free(a)
	}
	c.dropContext(ctx)
	ctx.giveBack(g, ctx.bytes)
	g.give(c.proc, ctx.bytes)
	return before - c.proc.held, nil
}

func (c *Client) dropContext(ctx *context) {
	ctx.gone = true
	delete(c.contexts, ctx.handle)
	c.proc.contexts--
	c.gpu.nctx--
}

// Alloc is what an allocation became.
type Alloc struct {
	Handle uint64
	Grew   uint64 // by how much the device's use grew
	Block  uint64 // the shared page, or 0
	Offset uint64 // in the shared page
	Bytes  uint64 // as rounded
}

// Allocate takes n bytes in context ctx, or in none if ctx is 0.
func (c *Client) Allocate(now int64, ctx, n uint64, kind wire.Kind) (Alloc, error) {
	g := c.gpu
	g.Advance(now)
	in := c.bare
	if ctx != 0 {
		in = c.contexts[ctx]
	}
	switch {
	case g.knobs.Lost:
		return Alloc{}, ErrLost
	case in == nil:
		return Alloc{}, ErrNotFound
	case n == 0 || c.closed || kind > wire.KindManaged || kind == wire.KindPhysical && n%wire.PageBytes != 0:
		return Alloc{}, ErrInvalid
	case n > maxBytes:
		c.proc.refused++
		return Alloc{}, ErrNoMemory
	}
	a := &alloc{handle: g.newHandle(), client: c, ctx: in, kind: kind}
	out := Alloc{Handle: a.handle}
	switch {
	case kind == wire.KindManaged:
		a.bytes = roundUp(n, wire.PageBytes)
		g.pages = append(g.pages, a)
		if !g.knobs.ManagedTouch {
			g.bring(a)
		}
		out.Grew = a.resident
	case kind == wire.KindDevice && n <= wire.SmallBytes:
		grew, err := c.small(in, a, n)
		if err != nil {
			c.proc.refused++
			return Alloc{}, err
		}
		out.Grew, out.Block, out.Offset = grew, a.block.handle, uint64(a.slot)*wire.AlignBytes
	default:
		a.bytes = roundUp(n, wire.PageBytes)
		var err error
		if a.on, err = g.take(c, a.bytes); err != nil {
			c.proc.refused++
			return Alloc{}, err
		}
		out.Grew = a.bytes
	}
	out.Bytes = a.bytes
	c.allocs[a.handle] = a
	in.allocs[a.handle] = a
	return out, nil
}

// small puts a into a shared page of the context, with a new page if none has room.
func (c *Client) small(in *context, a *alloc, n uint64) (grew uint64, err error) {
	a.bytes = roundUp(n, wire.AlignBytes)
	a.slots = int(a.bytes / wire.AlignBytes)
	for i := len(in.blocks) - 1; i >= 0; i-- {
		if slot, ok := in.blocks[i].place(a.slots); ok {
			a.block, a.slot = in.blocks[i], slot
			return 0, nil
		}
	}
	on, err := c.gpu.take(c, wire.PageBytes)
	if err != nil {
		return 0, err
	}
	a.block = &block{handle: c.gpu.newHandle(), on: on}
	a.slot, _ = a.block.place(a.slots) // an empty page holds the largest small allocation
	in.blocks = append(in.blocks, a.block)
	return wire.PageBytes, nil
}

// Free gives an allocation back: the bytes, and the shared page that went with it or 0.
func (c *Client) Free(now int64, handle uint64) (given, page uint64, err error) {
	c.gpu.Advance(now)
	if c.gpu.knobs.Lost {
		return 0, 0, ErrLost
	}
	a := c.allocs[handle]
	if a == nil {
		return 0, 0, ErrNotFound
	}
	given, page = c.free(a)
	return given, page, nil
}

func (c *Client) free(a *alloc) (given, page uint64) {
	delete(c.allocs, a.handle)
	delete(a.ctx.allocs, a.handle)
	before := c.gpu.held
	switch {
	case a.shared != nil:
		c.gpu.drop(a.shared)
		return before - c.gpu.held, 0
	case a.kind == wire.KindManaged:
		given = c.gpu.evict(a, a.resident)
		c.gpu.forget(a)
		c.gpu.note(c.proc)
	case a.block != nil:
		a.block.mark(a.slot, a.slots, false)
		if a.block.taken > 0 {
			return 0, 0
		}
		for i, b := range a.ctx.blocks {
			if b == a.block {
				a.ctx.blocks = append(a.ctx.blocks[:i], a.ctx.blocks[i+1:]...)
				break
			}
		}
		if a.block.shared != nil {
			c.gpu.drop(a.block.shared)
		} else {
			c.gpu.add(a.block.on, -int64(wire.PageBytes))
			c.gpu.give(c.proc, wire.PageBytes)
		}
		return before - c.gpu.held, a.block.handle
	default:
		given = a.bytes
		c.gpu.add(a.on, -int64(given))
		c.gpu.give(c.proc, given)
	}
	return given, 0
}

// Close is the end of the open file: with the last one of its process everything goes, after
// free-lag.
func (c *Client) Close(now int64) {
	g := c.gpu
	g.Advance(now)
	if c.closed {
		return
	}
	c.closed = true
	c.proc.open--
	if g.knobs.FreeLag == 0 {
		c.release()
		return
	}
	for _, ctx := range c.contexts {
		ctx.gone = true // it grows no more; transient bytes go with the rest
	}
	g.after(g.knobs.FreeLag, c.release)
}

func (c *Client) release() {
	g := c.gpu
	for _, ctx := range c.contexts {
		c.dropContext(ctx)
		ctx.giveBack(g, ctx.bytes)
		g.give(c.proc, ctx.bytes)
	}
	for _, a := range c.allocs {
		c.free(a)
	}
	g.note(c.proc)
	g.settle(c.proc)
}

// ---- managed memory -----------------------------------------------------------------

// bring makes as much of a resident as there is room for.
func (g *GPU) bring(a *alloc) {
	n := min(a.bytes-a.resident, g.capacity()-g.used())
	n -= n % wire.PageBytes
	a.resident += n
	g.managed += n
	a.client.proc.managed += n
	g.note(a.client.proc)
}

// evict takes up to want bytes of a off the device, in whole pages, and tells how many.
func (g *GPU) evict(a *alloc, want uint64) uint64 {
	n := min(a.resident, roundUp(want, wire.PageBytes))
	if n > 0 {
		a.resident -= n
		g.managed -= n
		a.client.proc.managed -= n
		g.note(a.client.proc)
	}
	return n
}

func (g *GPU) forget(a *alloc) {
	for i, p := range g.pages {
		if p == a {
			g.pages = append(g.pages[:i], g.pages[i+1:]...)
			return
		}
	}
}

// Migrate brings managed memory to the device, evicting other managed memory, or to the host.
// It tells how much of it is on the device then.
func (c *Client) Migrate(now int64, handle uint64, toDevice bool) (uint64, error) {
	g := c.gpu
	g.Advance(now)
	a := c.allocs[handle]
	switch {
	case g.knobs.Lost:
		return 0, ErrLost
	case a == nil:
		return 0, ErrNotFound
	case a.kind != wire.KindManaged:
		return 0, ErrInvalid
	case !toDevice:
		g.evict(a, a.resident)
		return 0, nil
	}
	g.forget(a)
	for i := 0; i < len(g.pages) && g.capacity()-g.used() < a.bytes-a.resident; i++ {
		g.evict(g.pages[i], a.bytes-a.resident-(g.capacity()-g.used()))
	}
	g.pages = append(g.pages, a)
	g.bring(a)
	return a.resident, nil
}

// ---- CUDA's and NVML's views --------------------------------------------------------

// MemInfo is what cuMemGetInfo answers: what holds now, within the limit of the driver's that c sees.
func (c *Client) MemInfo(now int64) (free, total uint64, err error) {
	g := c.gpu
	g.Advance(now)
	if g.knobs.Lost {
		return 0, 0, ErrLost
	}
	free, total = g.capacity()-g.used(), g.capacity()
	if a := g.shown(c.cgroup); a != nil && a.hard < total {
		free, total = min(free, a.hard-min(a.hard, a.used)), a.hard
	}
	return free, total, nil
}

// Memory is NVML's answer for the device, Used without Reserved.
type Memory struct{ Total, Reserved, Used, Free uint64 }

// NVMLMemory is the device as it was nvml-lag ago, as a process of that cgroup is told: within the limit
// of the driver's that it sees.
func (g *GPU) NVMLMemory(now int64, cgroup string) (Memory, error) {
	g.Advance(now)
	switch {
	case g.knobs.Lost:
		return Memory{}, ErrLost
	case g.knobs.Unknown == UnknownDevice || g.knobs.Unknown == UnknownAll:
		return Memory{}, ErrNotSupported
	}
	used := g.hist.at(g.now - int64(g.knobs.NVMLLag)).UsedBytes
	if a := g.shown(cgroup); a != nil && a.hard < g.capacity() {
		return Memory{Total: a.hard, Used: min(a.used, a.hard), Free: a.hard - min(a.used, a.hard)}, nil
	}
	return Memory{Total: g.cfg.TotalBytes, Reserved: g.cfg.ReservedBytes, Used: used, Free: g.capacity() - used}, nil
}

// NVMLProcesses is one of NVML's lists as it was nvml-lag ago, by pid.
func (g *GPU) NVMLProcesses(now int64, list wire.List) ([]wire.Proc, error) {
	g.Advance(now)
	switch {
	case g.knobs.Lost:
		return nil, ErrLost
	case list > wire.ListAll:
		return nil, ErrInvalid
	}
	then := g.now - int64(g.knobs.NVMLLag)
	var rows []wire.Proc
	g.visible(func(p *process) {
		at := p.hist.at(then)
		if !at.listed || !p.in(list) {
			return
		}
		used := at.UsedBytes
		if g.knobs.Unknown == UnknownProcess || g.knobs.Unknown == UnknownAll {
			used = wire.NotAvailable
		}
		rows = append(rows, wire.Proc{PID: uint32(p.owner.PID), Instance: uint32(g.cfg.Instance), UsedBytes: used})
	})
	sort.Slice(rows, func(i, j int) bool { return rows[i].PID < rows[j].PID })
	return rows[:min(len(rows), wire.ProcsMax)], nil
}

// visible calls f for every process that an NVML answer may still show.
func (g *GPU) visible(f func(*process)) {
	old := g.now - int64(MaxLag)
	for _, p := range g.procs {
		if p.endedNS == 0 || p.endedNS > old {
			f(p)
		}
	}
}

// in tells whether list shows p. Which lists did is remembered after its contexts are gone,
// since answers are late; memory without a context counts as compute.
func (p *process) in(list wire.List) bool {
	return list == wire.ListAll || p.lists&(1<<list) != 0 || p.lists == 0 && list == wire.ListCompute
}

// Launch runs a kernel for d after what the GPU has to do already, and tells how long that is
// from now.
func (c *Client) Launch(now int64, ctx uint64, d time.Duration) (time.Duration, error) {
	g := c.gpu
	g.Advance(now)
	switch {
	case g.knobs.Lost:
		return 0, ErrLost
	case c.contexts[ctx] == nil:
		return 0, ErrNotFound
	}
	if d < 0 {
		d = g.knobs.KernelTime
	}
	from := max(g.now, g.busy)
	g.busy = from + int64(min(d, time.Hour))
	if g.busy > from {
		c.proc.busy = addSpan(c.proc.busy, span{from, g.busy}, g.now)
		g.spans = addSpan(g.spans, span{from, g.busy}, g.now)
	}
	return time.Duration(g.busy - g.now), nil
}

// addSpan appends s, joins it to the last one if they touch, and drops what is too old.
func addSpan(all []span, s span, now int64) []span {
	if n := len(all); n > 0 && all[n-1].to == s.from {
		all[n-1].to = s.to
		return all
	}
	drop := 0
	for drop < len(all) && all[drop].to < now-int64(busyKept+MaxLag) {
		drop++
	}
	return append(all[drop:], s)
}

func percent(all []span, from, to int64) uint32 {
	var sum int64
	for _, s := range all {
		sum += max(0, min(s.to, to)-max(s.from, from))
	}
	if to <= from {
		return 0
	}
	return uint32(math.Ceil(float64(sum) / float64(to-from) * 100))
}

// NVMLUtilization is the share of the last second (nvml-lag ago) in which the GPU worked.
func (g *GPU) NVMLUtilization(now int64) (uint32, error) {
	g.Advance(now)
	if g.knobs.Lost {
		return 0, ErrLost
	}
	to := g.now - int64(g.knobs.NVMLLag)
	return percent(g.spans, to-int64(time.Second), to), nil
}

// NVMLProcessUtilization is the same by process over the last window; idle ones are left out,
// and if all are idle the answer is ErrNotFound.
func (g *GPU) NVMLProcessUtilization(now int64, window time.Duration) ([]wire.ProcUtil, error) {
	g.Advance(now)
	if g.knobs.Lost {
		return nil, ErrLost
	}
	window = min(max(window, time.Millisecond), busyKept)
	to := g.now - int64(g.knobs.NVMLLag)
	var rows []wire.ProcUtil
	g.visible(func(p *process) {
		if n := percent(p.busy, to-int64(window), to); n > 0 {
			rows = append(rows, wire.ProcUtil{PID: uint32(p.owner.PID), SMPercent: n})
		}
	})
	if len(rows) == 0 {
		return nil, ErrNotFound
	}
	sort.Slice(rows, func(i, j int) bool { return rows[i].PID < rows[j].PID })
	return rows[:min(len(rows), wire.ProcsMax)], nil
}

// ---- for people and tests -----------------------------------------------------------

// ProcessState is what a process holds and held.
type ProcessState struct {
	ProcID
	Cgroup           string `json:"cgroup"`
	Command          string `json:"command"`
	Contexts         int    `json:"contexts"`
	UsedBytes        uint64 `json:"used_bytes"`
	ManagedBytes     uint64 `json:"managed_bytes"`
	PeakBytes        uint64 `json:"peak_bytes"`
	PeakManagedBytes uint64 `json:"peak_managed_bytes"`
	Refused          uint64 `json:"refused"`  // requests that found no memory
	StartNS          int64  `json:"start_ns"` // first open, CLOCK_MONOTONIC
	EndNS            int64  `json:"end_ns"`   // when all was given back; 0: not yet
}

// CgroupState is the same over the processes that were in a cgroup when they opened the GPU.
type CgroupState struct {
	Cgroup    string `json:"cgroup"`
	UsedBytes uint64 `json:"used_bytes"`
	PeakBytes uint64 `json:"peak_bytes"`
}

// State is everything about a GPU at one moment.
type State struct {
	Minor          int               `json:"minor"`
	Number         int               `json:"number"`              // for set
	Socket         string            `json:"socket"`              // its device file
	MIG            string            `json:"mig,omitempty"`       // "0:1" of an instance
	Instances      int               `json:"instances,omitempty"` // into which it is split
	UUID           string            `json:"uuid"`
	Name           string            `json:"name"`
	TotalBytes     uint64            `json:"total_bytes"`
	ReservedBytes  uint64            `json:"reserved_bytes"`
	UsedBytes      uint64            `json:"used_bytes"` // without reserved
	FreeBytes      uint64            `json:"free_bytes"`
	ManagedBytes   uint64            `json:"managed_bytes"`
	PeakUsedBytes  uint64            `json:"peak_used_bytes"`
	ContextBytes   uint64            `json:"context_bytes"` // of a first context now
	Knobs          map[string]string `json:"knobs"`
	Processes      []ProcessState    `json:"processes"` // those that ended last, with EndNS
	Cgroups        []CgroupState     `json:"cgroups"`
	Accounts       []AccountState    `json:"accounts"` // the driver's memory limits
	CUDATotalBytes uint64            `json:"cuda_total_bytes"`
}

// State is a copy of what the GPU knows.
func (g *GPU) State(now int64) State {
	g.Advance(now)
	s := State{
		Minor: g.cfg.Minor, Number: g.cfg.Number, Socket: g.cfg.Socket(), Instances: g.cfg.Instances, UUID: g.cfg.UUIDText(), Name: g.cfg.Name,
		TotalBytes: g.cfg.TotalBytes, ReservedBytes: g.cfg.ReservedBytes, CUDATotalBytes: g.capacity(),
		UsedBytes: g.used(), FreeBytes: g.capacity() - g.used(), ManagedBytes: g.managed, PeakUsedBytes: g.peak,
		ContextBytes: g.cfg.ContextBytes, Knobs: map[string]string{},
		Processes: []ProcessState{}, Cgroups: []CgroupState{}, Accounts: g.accountStates(),
	}
	if g.cfg.Instance > 0 {
		s.MIG = fmt.Sprintf("%d:%d", g.cfg.Minor, g.cfg.Instance-1)
	}
	if g.knobs.ContextBytes > 0 {
		s.ContextBytes = g.knobs.ContextBytes
	}
	for _, k := range AllKnobs() {
		s.Knobs[k.Name] = k.Get(&g.knobs)
	}
	for _, p := range g.procs {
		s.Processes = append(s.Processes, p.state())
	}
	sort.Slice(s.Processes, func(i, j int) bool {
		a, b := s.Processes[i], s.Processes[j]
		return a.StartNS < b.StartNS || a.StartNS == b.StartNS && a.PID < b.PID
	})
	for _, c := range g.groups {
		s.Cgroups = append(s.Cgroups, CgroupState{c.path, c.held, c.peak})
	}
	sort.Slice(s.Cgroups, func(i, j int) bool { return s.Cgroups[i].Cgroup < s.Cgroups[j].Cgroup })
	return s
}

func (p *process) state() ProcessState {
	return ProcessState{
		ProcID: p.owner.ProcID, Cgroup: p.owner.Cgroup, Command: p.owner.Command, Contexts: p.contexts,
		UsedBytes: p.held, ManagedBytes: p.managed, PeakBytes: p.peak, PeakManagedBytes: p.peakManaged,
		Refused: p.refused, StartNS: p.startedNS, EndNS: p.endedNS,
	}
}

// History is what one process held over time.
type History struct {
	ProcessState
	Number int     `json:"gpu"`
	Points []Point `json:"points"`
}

// Histories are those of the processes with that pid, oldest first.
func (g *GPU) Histories(now int64, pid int) []History {
	g.Advance(now)
	var all []History
	for _, p := range g.procs {
		if p.owner.PID == pid {
			all = append(all, History{p.state(), g.cfg.Number, p.hist.copy()})
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].StartNS < all[j].StartNS })
	return all
}

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }
