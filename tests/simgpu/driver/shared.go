// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// memory is device memory that may have several holders: it was exported. It counts once in
// the device's use and lives until its last reference is dropped.
type memory struct {
	bytes   uint64
	refs    []*reference // oldest first
	charged map[*process]bool
	group   *group // that of the process that pays, or nil
	token   uint64
	on      *account // that pays in the driver's account: whoever made it, as long as it lives
}

// reference is one holder's: a process's handle, or a descriptor that stands for the memory.
type reference struct {
	memory  *memory
	proc    *process // nil: a descriptor
	charged bool     // NVML shows it under proc, whoever else has one
}

// settleShared charges whom m is to be charged to after its references changed. NVML finds it
// under the process whose reference is the oldest, and under its importers if the knob said so
// when they came; the cgroup of the first pays for it.
func (g *GPU) settleShared(m *memory) {
	want := map[*process]bool{}
	var payer *process
	for _, r := range m.refs {
		if r.proc == nil {
			continue
		}
		if payer == nil {
			payer = r.proc
			want[payer] = true
		}
		if r.charged || m.charged[r.proc] {
			want[r.proc] = true
		}
	}
	var group *group
	if payer != nil {
		group = payer.group
	}
	if group != m.group {
		if m.group != nil {
			m.group.held -= m.bytes
		}
		if group != nil {
			group.held += m.bytes
			group.peak = max(group.peak, group.held)
		}
		m.group = group
	}
	for p := range m.charged {
		if !want[p] {
			p.held -= m.bytes
			delete(m.charged, p)
			g.note(p)
			g.settle(p)
		}
	}
	for p := range want {
		if !m.charged[p] {
			p.held += m.bytes
			m.charged[p] = true
			g.note(p)
		}
	}
}

func (g *GPU) refer(m *memory, p *process, charged bool) *reference {
	r := &reference{memory: m, proc: p, charged: charged}
	m.refs = append(m.refs, r)
	return r
}

// drop lets go of a reference, and of the memory with the last one.
func (g *GPU) drop(r *reference) {
	m := r.memory
	for i, other := range m.refs {
		if other == r {
			m.refs = append(m.refs[:i], m.refs[i+1:]...)
			break
		}
	}
	if len(m.refs) == 0 {
		delete(g.tokens, m.token)
		g.held -= m.bytes
		g.add(m.on, -int64(m.bytes))
	}
	g.settleShared(m)
	g.record()
}

// Export makes the memory of an allocation, or of a shared page, known to others: its token.
func (c *Client) Export(now int64, handle uint64) (token uint64, err error) {
	g := c.gpu
	g.Advance(now)
	if g.knobs.Lost {
		return 0, ErrLost
	}
	bytes, at, on := uint64(0), (**reference)(nil), (*account)(nil)
	if a := c.allocs[handle]; a != nil {
		switch {
		case a.kind == wire.KindManaged:
			return 0, ErrInvalid
		case a.block != nil:
			bytes, at, on = wire.PageBytes, &a.block.shared, a.block.on
		default:
			bytes, at, on = a.bytes, &a.shared, a.on
		}
	} else if b := c.page(handle); b != nil {
		bytes, at, on = wire.PageBytes, &b.shared, b.on
	}
	if at == nil {
		return 0, ErrNotFound
	}
	if *at == nil {
		// It is charged to this process already.
		m := &memory{bytes: bytes, charged: map[*process]bool{c.proc: true}, group: c.proc.group, on: on}
		*at = g.refer(m, c.proc, false)
	}
	m := (*at).memory
	if m.token == 0 {
		m.token = g.newHandle()
		g.tokens[m.token] = m
	}
	return m.token, nil
}

// page is the shared page with that handle in any context of the open file.
func (c *Client) page(handle uint64) *block {
	find := func(ctx *context) *block {
		for _, b := range ctx.blocks {
			if b.handle == handle {
				return b
			}
		}
		return nil
	}
	for _, ctx := range c.contexts {
		if b := find(ctx); b != nil {
			return b
		}
	}
	return find(c.bare)
}

// Import takes part in memory that was exported, in context ctx or in none.
func (c *Client) Import(now int64, token, ctx uint64) (handle, bytes uint64, err error) {
	g := c.gpu
	g.Advance(now)
	in := c.bare
	if ctx != 0 {
		in = c.contexts[ctx]
	}
	m := g.tokens[token]
	switch {
	case g.knobs.Lost:
		return 0, 0, ErrLost
	case in == nil || m == nil:
		return 0, 0, ErrNotFound
	case c.closed:
		return 0, 0, ErrInvalid
	}
	a := &alloc{handle: g.newHandle(), client: c, ctx: in, kind: wire.KindPhysical, bytes: m.bytes}
	a.shared = g.refer(m, c.proc, g.knobs.ImportsCharged)
	g.settleShared(m)
	c.allocs[a.handle] = a
	in.allocs[a.handle] = a
	return a.handle, m.bytes, nil
}

// Keep is a reference of a descriptor's to memory that was exported. It is let go of by the
// function that it gives.
func (g *GPU) Keep(now int64, token uint64) (letGo func(now int64), err error) {
	g.Advance(now)
	m := g.tokens[token]
	if m == nil {
		return nil, ErrNotFound
	}
	r := g.refer(m, nil, false)
	return func(now int64) {
		g.Advance(now)
		g.drop(r)
	}, nil
}

// Settings are what clients ask while they run.
func (g *GPU) Settings() (poolStep, moduleBytes uint64) {
	return max(roundUp(g.knobs.PoolStepBytes, wire.PageBytes), wire.PageBytes), g.knobs.ModuleBytes
}
