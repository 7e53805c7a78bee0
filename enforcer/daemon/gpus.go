// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// runNVML finds the GPUs, and again when all of them are gone.
func (d *Daemon) runNVML(ctx context.Context) {
	var scanned time.Duration
	for {
		if d.needNVML() {
			err := d.findGPUs(ctx)
			d.once("nvml", err)
			d.mu.Lock()
			d.nvmlErr = err
			d.notify()
			d.mu.Unlock()
		} else if d.lost() {
			d.once("nvml-lost", d.findLost())
		} else if d.mono()-scanned >= rescanEvery {
			d.once("nvml-rescan", d.rescan(ctx))
			scanned = d.mono()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryNVML):
		}
	}
}

// needNVML says whether NVML has to be asked for its devices: it was not yet, or every GPU has
// failed outright for a while (a driver that was reloaded). A call that hangs forbids it: it is
// still inside NVML.
func (d *Daemon) needNVML() bool {
	d.mu.LockToLook()
	defer d.mu.Unlock()
	if d.node.letGo {
		return false
	}
	if d.nvmlErr != nil {
		return true
	}
	for _, g := range d.gpus {
		if g.gone {
			continue
		}
		if !g.have || g.sample.Err == nil || errors.Is(g.sample.Err, gpu.ErrHung) || g.inFlight || d.mono()-g.lastKnown < lostFor {
			return false
		}
	}
	return true
}

// lost says whether a GPU is gone for a while, while others answer: it may be back under a new handle
// after a reset.
func (d *Daemon) lost() bool {
	d.mu.LockToLook()
	defer d.mu.Unlock()
	for _, g := range d.gpus {
		if g.isLost(d.mono()) {
			return true
		}
	}
	return false
}

func (g *gpuState) isLost(now time.Duration) bool {
	return g.have && !g.inFlight && g.sample.Err != nil && !errors.Is(g.sample.Err, gpu.ErrHung) && now-g.lastKnown >= lostFor
}

// findLost takes new handles of GPUs that are lost. NVML stays up: the others are in use.
func (d *Daemon) findLost() error {
	devices, err := d.lib.Devices()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, dev := range devices {
		info := dev.Info()
		if g := d.gpus[info.UUID]; g != nil && g.isLost(d.mono()) {
			g.info, g.sampler = info, gpu.NewSampler(dev)
			d.poke()
		}
	}
	return err
}

// findGPUs initialises NVML and takes its devices over. A GPU that is known keeps its state.
func (d *Daemon) findGPUs(ctx context.Context) error {
	d.node.nvml.Lock()
	defer d.node.nvml.Unlock()
	d.mu.Lock()
	again := len(d.gpus) > 0 && !d.node.closed
	letGo := d.node.letGo
	d.mu.Unlock()
	if letGo {
		return errQuiesced
	}
	if again {
		if err := d.lib.Shutdown(); err != nil {
			d.once("nvml-shutdown", err)
		}
	}
	if err := d.lib.Init(); err != nil {
		return err
	}
	devices, err := d.lib.Devices()
	if len(devices) == 0 {
		if err == nil {
			err = errors.New("NVML lists no GPU")
		}
		return errors.Join(err, d.lib.Shutdown())
	}
	var split []gpu.Info // in MIG mode: used through their instances
	devices = slices.DeleteFunc(devices, func(dev gpu.Device) bool {
		if dev.Info().MIG {
			split = append(split, dev.Info())
		}
		return dev.Info().MIG
	})
	if len(devices) == 0 {
		return errors.Join(fmt.Errorf("all %d GPUs are in MIG mode and have no instance", len(split)), err, d.lib.Shutdown())
	}
	d.once("nvml-list", err) // one broken GPU is no reason to go without the others
	driver, err := d.lib.Driver()
	if err != nil {
		driver = "unknown" // shown only
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errors.New("gpufenced is stopping")
	}
	d.driver, d.node.closed = driver, false
	d.takeDevices(ctx, devices, split)
	d.event(api.Event{Type: "gpus-found", Message: fmt.Sprintf("NVML of driver %s lists %d GPUs", driver, len(devices))})
	d.poke()
	return nil
}

// restoreResizes puts pending resizes back into the GPU's decisions.
func (d *Daemon) restoreResizes(uuid string, g *gpuState) {
	for _, p := range d.reg.Pods() {
		for _, r := range p.Resizes[uuid] {
			if r.State == policy.ResizePending {
				g.machine.RestoreResize(r)
			}
		}
	}
}

// granted says whether a GPU has a container that counts, or is still followed.
func (d *Daemon) granted(uuid string) bool {
	g := d.gpus[uuid]
	if g != nil && len(g.draining) > 0 {
		return true
	}
	for _, p := range d.reg.PodsOn(uuid) {
		for _, c := range p.Containers {
			if c.State == registry.Running || c.Holds(uuid) {
				return true
			}
		}
	}
	return false
}

// runTicks gives every sample its number, and takes their answers.
func (d *Daemon) runTicks(ctx context.Context) {
	bell := gpu.NewBell()
	defer func() { d.once("bell", bell.Close()) }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		asked := false
		select {
		case <-ctx.Done():
			return // a sample that is cut by our own end says nothing
		case <-bell.C():
			d.takeSamples()
			continue
		case <-timer.C:
		case <-d.kick:
			asked = true
		}
		d.takeSamples()
		timer.Reset(d.ticked(d.tick(bell, asked)))
	}
}

// takeSamples takes the samples that are there to their consequences, and gives up those that are not
// there in time.
func (d *Daemon) takeSamples() {
	d.mu.LockToLook()
	now := d.mono()
	asking := append([]*gpuState(nil), d.asking...)
	d.mu.Unlock()
	for _, g := range asking {
		s, there := g.sentTo.Take()
		switch {
		case g.refused != nil: // there is nothing of this question
			s = g.sentTo.Without(g.refused, g.sentAt)
		case there:
		case now-g.sentAt >= g.limit:
			s = g.sentTo.Without(fmt.Errorf("sample %s: %w: no answer within %v", g.info.UUID, gpu.ErrHung, g.limit), g.sentAt)
		default:
			continue
		}
		d.step(g, g.sentAs, s)
	}
}

// tick sends the GPUs to work that are due, after it has published the next number in the pages of
// their pods. asked says that somebody waits for an answer. It returns the time until the next
// one.
func (d *Daemon) tick(bell *gpu.Bell, asked bool) time.Duration {
	d.mu.LockToLook()
	defer d.mu.Unlock()
	now := d.mono()
	idleDue := now-d.lastIdl >= d.cfg.SampleIdle
	next := d.cfg.SampleIdle
	still := true
	var due []*gpuState
	waits := map[string]bool{} // GPUs whose pods' numbers must stand still
	for _, uuid := range d.order {
		g := d.gpus[uuid]
		period := d.cfg.SampleIdle
		busy := d.granted(uuid)
		if busy {
			period = d.period(g)
		}
		still = still && (g.still || !busy)
		next = min(next, period)
		// A tenth early is in time: timers are not exact.
		ready := busy && (asked || now-g.sentAt >= period-period/10)
		if !g.inFlight && !d.node.letGo && (ready || idleDue || !g.have) {
			due = append(due, g)
		} else if busy {
			waits[uuid] = true
		}
	}
	if idleDue {
		d.lastIdl = now
	}
	d.sample++
	d.number(still, waits, now)
	for _, g := range due {
		g.inFlight, g.sentAt, g.sentAs, g.sentTo, g.limit = true, now, d.sample, g.sampler, d.cfg.SampleDeadline
		d.asking = append(d.asking, g)
		g.refused = g.sampler.Ask(bell, g.still && !asked)
		if g.refused != nil {
			next = 0 // it is taken at once
		}
	}
	for _, g := range d.asking {
		next = min(next, max(g.sentAt+g.limit-now, 0))
	}
	// Counted from when they were sent, not from when the pages were written.
	return max(next-(d.mono()-now), time.Millisecond)
}

// beatEvery is how often heartbeats move at least: a shim takes gpufenced for away after 10 s.
const beatEvery = time.Second / 2

// number publishes the newest number in the pages of those pods whose number may move. It stands still
// where nothing happens: what a slot's peak says is then of a longer time, none of which is lost, and
// it has ended with the next number. still says that nothing happens anywhere.
func (d *Daemon) number(still bool, waits map[string]bool, now time.Duration) {
	beat := now-d.beaten >= beatEvery
	if beat {
		d.beaten = now
	}
	if still && !beat && d.allPages.runtimes == d.runtimes {
		d.stood = now
		return
	}
	pods := d.reg.Pods()
	for i, rt := range d.allPages.of(d, pods) {
		if rt == nil {
			continue
		}
		number := uint64(0)
		switch {
		case d.isStill(pods[i], rt):
			rt.numbered = now
		case d.mayNumber(pods[i], rt, waits, now):
			rt.number, rt.numbered, number = d.sample, now, d.sample
		}
		if number == 0 && !beat {
			continue
		}
		for _, c := range pods[i].Containers {
			if page := rt.containers[c.Index]; page != nil {
				d.pageError(rt, c.Index, page.Tick(number))
			}
		}
	}
}

// isStill says whether nothing has happened to a pod since its number moved last.
func (d *Daemon) isStill(p *registry.Pod, rt *podRuntime) bool {
	if rt.number == 0 {
		return false
	}
	for _, uuid := range p.GPUs {
		if g := d.gpus[uuid]; g == nil || !g.still {
			return false
		}
	}
	return true
}

// mayNumber says whether a pod's pages may show the next number. Slots keep peaks of two numbers
// only, so every number must have been read for each of the pod's GPUs before the next: it waits
// for those whose NVML call is in progress or that are not due. Not longer than NVML may lag,
// though, or a GPU that hangs would keep what NVML shows of the others from ever counting as
// excess; the slow one's peaks then have a gap, and it publishes no excess.
func (d *Daemon) mayNumber(p *registry.Pod, rt *podRuntime, waits map[string]bool, now time.Duration) bool {
	if len(waits) == 0 || now-max(rt.numbered, d.stood) >= max(d.cfg.Settle, 3*d.cfg.Sample) {
		return true
	}
	return !slices.ContainsFunc(p.GPUs, func(uuid string) bool { return waits[uuid] })
}

// fastest bounds how often a GPU is asked for a container that grows fast.
const fastest = 20 * time.Millisecond

// period is how often a GPU with a granted container is asked: faster where a container without a
// seen shim may soon be over its limit, but never more than a quarter of the time is spent in NVML,
// which takes locks that allocations need.
func (d *Daemon) period(g *gpuState) time.Duration {
	if !g.rising {
		return d.cfg.Sample
	}
	return min(d.cfg.Sample, max(d.cfg.Sample/4, min(fastest, d.cfg.Sample), 4*g.sample.Took))
}

// selectable are the GPUs in NVML's order, then those in MIG mode, which [Daemon.wholeInMIG] refuses.
func (d *Daemon) selectable() []gpu.Info { return append(d.infos(), d.split...) }

// wholeInMIG refuses a GPU that can be used through its instances only.
func (d *Daemon) wholeInMIG(i gpu.Info) error {
	var have []string
	for _, m := range d.infos() {
		if m.Parent == i.UUID {
			have = append(have, fmt.Sprintf("%s (%s)", m.UUID, m.Position()))
		}
	}
	if len(have) == 0 {
		return quota.NewError(quota.CodeNotEnforced, "GPU %s is in MIG mode and has no instance", i.UUID).
			WithHint("make one with `nvidia-smi mig -cgi`, which is seen within seconds")
	}
	return quota.NewError(quota.CodeNotEnforced, "GPU %s is in MIG mode and cannot be used as a whole", i.UUID).
		WithHint("name one of its instances: %s", strings.Join(have, ", "))
}

// infos are the GPUs in NVML's order.
func (d *Daemon) infos() []gpu.Info {
	out := make([]gpu.Info, 0, len(d.order))
	for _, uuid := range d.order {
		out = append(out, d.gpus[uuid].info)
	}
	return out
}

// usable refuses a GPU that nothing trustworthy is known of. wait says that a first sample is on
// its way.
func (d *Daemon) usable(uuid string) (wait bool, err error) {
	g := d.gpus[uuid]
	if g == nil {
		return false, quota.NewError(quota.CodeNoSuchGPU, "GPU %s is not on this node any more", uuid)
	}
	if g.gone {
		return false, quota.NewError(quota.CodeNoSuchGPU, "%s", g.goneWhy).WithHint("start the container again with a GPU that is there")
	}
	if !g.have {
		return true, quota.NewError(quota.CodeGPUUnknown, "NVML has not answered for GPU %s yet", uuid).WithHint("try again in some seconds")
	}
	if silent := d.mono() - g.lastKnown; !g.out.Known && silent >= unknownLimit {
		return false, quota.NewError(quota.CodeGPUUnknown, "nothing is known of GPU %s for %s (%.100s): no container starts on it",
			uuid, silent.Round(time.Second), g.out.Why).WithHint("look at nvidia-smi and the kernel's log")
	}
	return false, nil
}

// noGPUs is why nothing can be granted, nil if something can. The caller holds mu.
func (d *Daemon) noGPUs() error {
	if d.nvmlErr == nil {
		return nil
	}
	return quota.NewError(quota.CodeNVMLUnavailable, "NVML is not usable: %w", d.nvmlErr).
		WithHint("install the NVIDIA driver, or set nvml-library in the configuration")
}
