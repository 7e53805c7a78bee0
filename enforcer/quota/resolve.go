// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Resolve computes the grant on the container's GPUs, in its own order. What it grants is
// bounded by each GPU's size and the ceiling; a guarantee is bounded by what is allocatable.
// The error is an [*Error].
func (r Request) Resolve(gpus []GPU, p Policy) (Grant, []Notice, error) {
	p = p.For(r.namespace)
	g := Grant{
		GPUs:      slices.Clone(gpus),
		Pod:       map[string]Limits{},
		Container: map[string]Limits{},
		OOMGroup:  r.oomGroup(),
		Require:   LevelNone,
		Mode:      p.Mode,
	}
	var notices []Notice
	if err := r.checkListed(gpus); err != nil {
		return Grant{}, nil, err
	}
	for i, gpu := range gpus {
		ns, err := r.resolveGPU(&g, gpu, i, p)
		if err != nil {
			return Grant{}, nil, err
		}
		for _, n := range ns {
			if !slices.Contains(notices, n) {
				notices = append(notices, n)
			}
		}
	}
	if g.Limited() {
		g.Require = p.Require
		for _, want := range []Level{r.pod.require, r.own.require} {
			if want.AtLeast(g.Require) {
				g.Require = want
			}
		}
	}
	return g, notices, nil
}

// Limited says whether the grant bounds the container on any GPU. `require` does not apply to a
// container that it does not.
func (g Grant) Limited() bool {
	for _, level := range []map[string]Limits{g.Pod, g.Container} {
		for _, l := range level {
			if l.Max != Unlimited {
				return true
			}
		}
	}
	return false
}

func (r Request) oomGroup() bool {
	for _, l := range []level{r.own, r.env, r.pod} {
		if l.oomGroup != nil {
			return *l.oomGroup
		}
	}
	return true
}

// checkListed refuses a per-GPU list that names a GPU which the container does not have. Under
// Kubernetes a pod's list may speak of other containers' GPUs.
func (r Request) checkListed(gpus []GPU) error {
	if r.engine.Kubernetes() {
		return nil
	}
	var all []listAmount
	for _, l := range []level{r.pod, r.own, r.env} {
		for _, k := range slices.Sorted(maps.Keys(l.amounts)) {
			all = append(all, l.amounts[k])
		}
	}
	for _, v := range all { // not of aliases: what they list may be more than what there is
		for _, e := range v.list {
			if e.uuid == "" && e.position < len(gpus) {
				continue
			}
			if e.uuid != "" && slices.ContainsFunc(gpus, func(g GPU) bool { return strings.EqualFold(g.UUID, e.uuid) }) {
				continue
			}
			name := e.uuid
			if name == "" {
				name = fmt.Sprint(e.position)
			}
			return NewError(CodeListNoSuchGPU, "%s %s names GPU %s, which the container does not have", v.where, Quote(v.text), cut(name)).
				WithHint("it has %s", describe(gpus))
		}
	}
	return nil
}

func describe(gpus []GPU) string {
	if len(gpus) == 0 {
		return "none"
	}
	var parts []string
	for i, g := range gpus {
		parts = append(parts, fmt.Sprintf("%d (%s)", i, g.UUID))
	}
	return strings.Join(parts, ", ")
}

// bound is one value of memory.max or memory.min on one GPU.
type bound struct {
	bytes uint64
	from  listAmount
	fixed bool // a quantity, not a share
	given bool
}

// lowest picks the lowest of several values on a GPU.
func lowest(vs []listAmount, gpu GPU, position int) (bound, error) {
	best := bound{bytes: Unlimited}
	for _, v := range vs {
		a, err := v.on(gpu, position)
		if err != nil {
			return best, err
		}
		if a.Kind == KindNone {
			continue
		}
		if b := a.On(gpu.AllocatableBytes); !best.given || b < best.bytes {
			best = bound{bytes: b, from: v, fixed: a.Kind == KindBytes, given: true}
		}
	}
	return best, nil
}

// agree compares aliases, which several systems may have set: sizes must be equal to within
// 1 MiB; between a share and a size the lower holds, with a notice.
func agree(vs []listAmount, gpu GPU, position int) ([]Notice, error) {
	var size, share *bound
	for _, v := range vs {
		a, err := v.on(gpu, position)
		if err != nil {
			return nil, err
		}
		if a.Kind == KindNone {
			continue
		}
		b := &bound{bytes: a.On(gpu.AllocatableBytes), from: v}
		if a.Kind == KindShare {
			share = b // there is one alias that is a share
			continue
		}
		if size != nil && size.bytes/mib != b.bytes/mib {
			return nil, NewError(CodeAliasConflict, "%s %s and %s %s disagree", size.from.where, Quote(size.from.text), v.where, Quote(v.text)).
				WithHint("remove one, or set %s%s, which is read instead of both", Domain, KeyMemoryMax)
		}
		if size == nil {
			size = b
		}
	}
	if size == nil || share == nil || size.bytes/mib == share.bytes/mib {
		return nil, nil
	}
	low := size
	if share.bytes < size.bytes {
		low = share
	}
	return []Notice{Notice(fmt.Sprintf("%s %s and %s %s disagree on %s: the lower, %s from %s, holds", size.from.where, Quote(size.from.text),
		share.from.where, Quote(share.from.text), gpu.UUID, FormatBytes(low.bytes), low.from.where))}, nil
}

// resolveGPU computes both levels on one GPU.
func (r Request) resolveGPU(g *Grant, gpu GPU, position int, p Policy) ([]Notice, error) {
	if gpu.TotalBytes == 0 {
		return nil, NewError(CodeGPUUnknown, "GPU %s has no known size, so that nothing can be granted on it", gpu.UUID).
			WithHint("see gpufence inspect, or nvidia-smi, for what the driver says")
	}
	notices, err := agree(r.alias.max, gpu, position)
	if err != nil {
		return nil, err
	}
	if _, err := agree(r.alias.min, gpu, position); err != nil {
		return nil, err
	}
	podMax, err := lowest(givenOf([]listAmount{r.pod.amounts[KeyMemoryMax]}), gpu, position)
	if err != nil {
		return nil, err
	}
	ownMax, err := lowest(r.containerMax(), gpu, position)
	if err != nil {
		return nil, err
	}
	if err := r.checkRaise(podMax, ownMax, gpu, position, p); err != nil {
		return nil, err
	}
	if !podMax.given && !ownMax.given {
		var n Notice
		if ownMax, n, err = r.fromDefault(gpu, p); err != nil {
			return nil, err
		}
		if n != "" {
			notices = append(notices, n)
		}
	}
	if podMax.bytes == Unlimited && ownMax.bytes == Unlimited && p.hasCeiling() {
		where := ownMax.from.where
		if where == "" {
			where = podMax.from.where
		}
		return nil, maxUnderCeiling(where, p)
	}
	for _, b := range []bound{podMax, ownMax} {
		if err := checkMax(b, gpu, p); err != nil {
			return nil, err
		}
	}

	podMin, err := lowest(givenOf([]listAmount{r.pod.amounts[KeyMemoryMin]}), gpu, position)
	if err != nil {
		return nil, err
	}
	ownMin, err := lowest(r.containerMin(), gpu, position)
	if err != nil {
		return nil, err
	}
	effective := min(podMax.bytes, ownMax.bytes)
	if err := checkMin(podMin, podMax.bytes, gpu); err != nil {
		return nil, err
	}
	if err := checkMin(ownMin, effective, gpu); err != nil {
		return nil, err
	}
	if ownMin.given && ownMin.from.env && ownMin.bytes > 0 && effective == Unlimited && !p.Accept[r.engine].EnvMayRaise {
		return nil, NewError(CodeEnvRaises, "%s %s asks for more than the node's default, which guarantees nothing", ownMin.from.where, Quote(ownMin.from.text)).
			WithHint("write an annotation, or set env-may-raise = true in [accept.%s]", r.engine)
	}
	podHigh, err := lowest(givenOf([]listAmount{r.pod.amounts[KeyMemoryHigh]}), gpu, position)
	if err != nil {
		return nil, err
	}
	ownHigh, err := lowest(r.containerHigh(), gpu, position)
	if err != nil {
		return nil, err
	}
	podSwap, err := lowest(givenOf([]listAmount{r.pod.amounts[KeyMemorySwapMax]}), gpu, position)
	if err != nil {
		return nil, err
	}
	ownSwap, err := lowest(r.containerSwap(), gpu, position)
	if err != nil {
		return nil, err
	}
	if ownSwap.given && ownSwap.from.env && ownSwap.bytes > 0 && !p.Accept[r.engine].EnvMayRaise {
		return nil, NewError(CodeEnvRaises, "%s %s is more than the node's default, which lets nothing spill", ownSwap.from.where, Quote(ownSwap.from.text)).
			WithHint("write an annotation, or set env-may-raise = true in [accept.%s]", r.engine)
	}
	if l, ok := limitsOf(podMax, podMin, podHigh, Unlimited, gpu, p); ok || podSwap.given {
		l.SwapMax = swapOf(podSwap, ownSwap)
		g.Pod[gpu.UUID] = l
	}
	if l, ok := limitsOf(ownMax, ownMin, ownHigh, podMax.bytes, gpu, p); ok || ownSwap.given {
		l.SwapMax = swapOf(ownSwap, podSwap)
		g.Container[gpu.UUID] = l
	}
	return notices, nil
}

// limitsOf makes the limits of one level, false if it says nothing. A guarantee that is not
// given follows the limit, as far as the level above and the GPU allow.
func limitsOf(limit, minimum, high bound, above uint64, gpu GPU, p Policy) (Limits, bool) {
	l := Limits{Max: limit.bytes, High: Unlimited, SwapMax: 0}
	switch {
	case minimum.given && minimum.bytes == Unlimited: // `max`: as much as the limit
		l.Min = min(limit.bytes, above, gpu.AllocatableBytes)
	case minimum.given:
		l.Min = minimum.bytes
	case limit.bytes == Unlimited || p.Overcommit:
		l.Min = 0
	default:
		l.Min = min(limit.bytes, above, gpu.AllocatableBytes)
	}
	if high.given {
		l.High = high.bytes
	}
	return l, limit.bytes != Unlimited || l.Min > 0 || l.High != Unlimited
}

// swapOf is what one level lets spill. A level that says nothing is bounded by the other one; if
// none does, nothing spills.
func swapOf(level, other bound) uint64 {
	switch {
	case level.given:
		return level.bytes
	case other.given:
		return Unlimited
	}
	return 0
}

// fromDefault is what policy gives to a container without a limit on a GPU.
func (r Request) fromDefault(gpu GPU, p Policy) (bound, Notice, error) {
	on := ""
	if r.anyMax() {
		on = " on " + gpu.UUID // elsewhere there is one
	}
	named := func(what, text string) listAmount { return listAmount{where: what, text: text} }
	switch d := p.Default[r.engine]; d.Kind {
	case DefaultUnlimited:
		if !p.hasCeiling() {
			return bound{bytes: Unlimited}, Notice(r.name + " has no memory.max" + on + ": its GPU memory is not limited"), nil
		}
		b := bound{bytes: min(p.ceiling(gpu), gpu.TotalBytes), from: named("the node's ceiling", p.Ceiling.String())}
		return b, Notice(fmt.Sprintf("%s has no memory.max%s: it gets the node's ceiling of %s", r.name, on, p.Ceiling)), nil
	case DefaultAmount:
		b := bound{bytes: min(d.Amount.On(gpu.AllocatableBytes), p.ceiling(gpu)), from: named("the node's default", d.String()), given: true}
		return b, Notice(fmt.Sprintf("%s has no memory.max%s: it gets the node's default of %s", r.name, on, d)), nil
	}
	return bound{}, "", r.noLimit(on)
}

// anyMax says whether a memory.max is given for some GPU.
func (r Request) anyMax() bool {
	return len(r.containerMax()) > 0 || r.pod.amounts[KeyMemoryMax].given()
}

// checkRaise holds the environment, which an image can write, to the node's default: it may
// only lower it. Where an annotation bounds the container, no default would hold.
func (r Request) checkRaise(pod, own bound, gpu GPU, position int, p Policy) error {
	if pod.given || !own.given || !own.from.env || p.Accept[r.engine].EnvMayRaise {
		return nil
	}
	trusted := slices.DeleteFunc(r.containerMax(), func(v listAmount) bool { return v.env })
	if t, err := lowest(trusted, gpu, position); err != nil || t.given {
		return err
	}
	raised := func(than string) error {
		return NewError(CodeEnvRaises, "%s %s is more than the node's default of %s, which the environment may only lower", own.from.where, Quote(own.from.text), than).
			WithHint("write the annotation %s%s, or set env-may-raise = true in [accept.%s]", Domain, KeyMemoryMax, r.engine)
	}
	switch d := p.Default[r.engine]; d.Kind {
	case DefaultUnlimited:
		return nil
	case DefaultAmount:
		if n := d.Amount.On(gpu.AllocatableBytes); own.bytes > n {
			return raised(FormatBytes(n))
		}
		return nil
	default:
		return raised("deny")
	}
}

// checkMax holds a memory.max against the GPU and the ceiling.
func checkMax(b bound, gpu GPU, p Policy) error {
	if b.bytes == Unlimited {
		return nil
	}
	value := Quote(b.from.text)
	if !b.fixed {
		value += " (" + FormatBytes(b.bytes) + " there)"
	}
	switch {
	case b.bytes > gpu.TotalBytes:
		return NewError(CodeAboveGPU, "%s %s is more than GPU %s has, which is %s", b.from.where, value, gpu.UUID, FormatBytes(gpu.TotalBytes)).
			WithHint("write at most %s, or max for no limit", FormatBytes(gpu.TotalBytes))
	case b.bytes > p.ceiling(gpu):
		return NewError(CodeAboveCeiling, "%s %s is more than this node's policy allows on GPU %s, which is %s", b.from.where, value, gpu.UUID, FormatBytes(p.ceiling(gpu))).
			WithHint("write at most that, or ask whoever runs the node")
	case b.bytes < gpu.ContextBytes || b.bytes == 0:
		err := NewError(CodeBelowContext, "%s %s is less than one CUDA context takes on GPU %s, which is %s", b.from.where, value, gpu.UUID, FormatBytes(gpu.ContextBytes))
		return err.WithHint("write %s", meantInstead(b.bytes, gpu))
	}
	return nil
}

// meantInstead guesses the unit that was meant by a limit that is too small.
func meantInstead(b uint64, gpu GPU) string {
	for v, i := b, 0; b > 0 && i < 3 && v <= gpu.TotalBytes/kib; i++ {
		v *= kib
		if v >= gpu.ContextBytes {
			return FormatBytes(v)
		}
	}
	return "more than that"
}

// checkMin holds a memory.min against the limit above it and the GPU.
func checkMin(b bound, limit uint64, gpu GPU) error {
	switch {
	case !b.given:
		return nil
	case b.bytes == Unlimited && limit == Unlimited:
		return NewError(CodeMinAboveMax, "%s %s follows memory.max, which is not set", b.from.where, Quote(b.from.text)).WithHint("set %s%s", Domain, KeyMemoryMax)
	case b.bytes == Unlimited:
		return nil
	case b.bytes > gpu.TotalBytes:
		return NewError(CodeAboveGPU, "%s %s is more than GPU %s has, which is %s", b.from.where, Quote(b.from.text), gpu.UUID, FormatBytes(gpu.TotalBytes)).
			WithHint("write at most %s", FormatBytes(gpu.AllocatableBytes))
	case b.bytes > limit:
		return NewError(CodeMinAboveMax, "%s %s is more than memory.max, which is %s", b.from.where, Quote(b.from.text), FormatBytes(limit)).
			WithHint("write at most that")
	case b.bytes > gpu.AllocatableBytes:
		return NewError(CodeUnavailable, "%s %s is more than GPU %s can guarantee, which is %s of its %s", b.from.where, Quote(b.from.text), gpu.UUID,
			FormatBytes(gpu.AllocatableBytes), FormatBytes(gpu.TotalBytes)).WithHint("write at most that")
	}
	return nil
}

// Change is what `gpufence set` asks for, parsed.
type Change struct {
	amounts  map[string]listAmount
	oomGroup *bool
}

// Settable are the keys that can change while a container runs, in the order of people.
func Settable() []string {
	return []string{KeyMemoryMax, KeyMemoryHigh, KeyMemoryMin, KeyMemorySwapMax, KeyOOMGroup}
}

// ParseSet reads the values of `gpufence set`. The error is an [*Error].
func ParseSet(values map[string]string) (Change, error) {
	var l level
	given := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		key := strings.TrimPrefix(name, Domain)
		k, ok := lookup(key)
		if !ok {
			return Change{}, unknownKey(cut(name), "", key)
		}
		if !slices.Contains(Settable(), key) {
			return Change{}, NewError(CodeNotSettable, "%s cannot be changed while a container runs", key).
				WithHint("set one of %s, or start the container again", strings.Join(Settable(), ", "))
		}
		if given[key] {
			return Change{}, NewError(CodeDuplicateKey, "%s is given twice", key).WithHint("remove one")
		}
		given[key] = true
		if err := l.set(k, key, values[name], false); err != nil {
			return Change{}, err
		}
	}
	if len(given) == 0 {
		return Change{}, NewError(CodeBadRequest, "nothing to set").WithHint("write one such as %s=6Gi", KeyMemoryMax)
	}
	return Change{amounts: l.amounts, oomGroup: l.oomGroup}, nil
}

// OOMGroup returns the new memory.oom.group, false if the change leaves it alone.
func (c Change) OOMGroup() (group, ok bool) {
	if c.oomGroup == nil {
		return false, false
	}
	return *c.oomGroup, true
}

// Max returns the new memory.max of one of the container's GPUs (position is its place in the
// container's own list), checked against the GPU and the policy of the container's namespace;
// false if the change leaves that GPU alone. The error is an [*Error].
func (c Change) Max(gpu GPU, position int, p Policy) (uint64, bool, error) {
	b, ok, err := c.on(KeyMemoryMax, gpu, position)
	if err != nil || !ok {
		return 0, false, err
	}
	if b.bytes == Unlimited && p.hasCeiling() {
		return 0, false, maxUnderCeiling(KeyMemoryMax, p)
	}
	if err := checkMax(b, gpu, p); err != nil {
		return 0, false, err
	}
	return b.bytes, true, nil
}

// Min returns the new memory.min of one of the container's GPUs, as [Change.Max] does, for a level
// whose memory.max is limit. `max` follows that, as far as the GPU can guarantee it.
func (c Change) Min(gpu GPU, position int, limit uint64) (uint64, bool, error) {
	b, ok, err := c.on(KeyMemoryMin, gpu, position)
	if err != nil || !ok {
		return 0, false, err
	}
	if err := checkMin(b, limit, gpu); err != nil {
		return 0, false, err
	}
	return min(b.bytes, limit, gpu.AllocatableBytes), true, nil
}

// High returns the new memory.high of one of the container's GPUs, as [Change.Max] does.
func (c Change) High(gpu GPU, position int) (uint64, bool, error) {
	b, ok, err := c.on(KeyMemoryHigh, gpu, position)
	return b.bytes, ok, err
}

// SwapMax returns the new memory.swap.max of one of the container's GPUs, as [Change.Max] does.
func (c Change) SwapMax(gpu GPU, position int) (uint64, bool, error) {
	b, ok, err := c.on(KeyMemorySwapMax, gpu, position)
	return b.bytes, ok, err
}

// on is what a key of the change says of a GPU, false if nothing.
func (c Change) on(key string, gpu GPU, position int) (bound, bool, error) {
	b, err := lowest(givenOf([]listAmount{c.amounts[key]}), gpu, position)
	if err != nil || !b.given {
		return bound{}, false, err
	}
	if gpu.TotalBytes == 0 {
		return bound{}, false, NewError(CodeGPUUnknown, "GPU %s has no known size, so that nothing can be granted on it", gpu.UUID)
	}
	return b, true, nil
}

// Check refuses a list that names a GPU which is not among the container's.
func (c Change) Check(gpus []GPU) error {
	return Request{pod: level{amounts: c.amounts}}.checkListed(gpus)
}
