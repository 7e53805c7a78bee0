// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/metrics"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

const (
	// liveLimit is how late a tick may be before gpufenced counts as hung.
	liveLimit = 10 * time.Second
	// quiesceLimit is how long quiesce waits for an NVML call that has begun.
	quiesceLimit = 10 * time.Second
	maxReason    = 512
	switchFile   = "switch.json"
)

// node is what gpufenced knows of itself. All of it is guarded by mu but where it is said.
type node struct {
	started time.Time
	sw      api.Switch
	// letGo: NVML is, or is about to be, shut down. nvml is held over Init and Shutdown.
	letGo  bool
	closed bool // NVML was shut down
	nvml   sync.Mutex

	load   func() (config.Loaded, error) // nil: the configuration cannot be read again
	info   api.ConfigInfo
	drift  []string
	root   string // of the file system in which engines are looked for
	notify func(string)

	tickBy  atomic.Int64               // monotonic: when the next tick is due; not under mu
	health  atomic.Pointer[api.Health] // of the last tick; not under mu
	reload  sync.Mutex                 // one reload at a time, taken before mu
	metrics *metrics.Metrics           // has its own lock, taken before mu
}

// problem is an error that is reported once, and since when it stands.
type problem struct {
	text  string
	since time.Time
}

// beginNode finds the switch where it was left and keeps the configuration that is in force. The
// journal is open, nothing runs yet.
func (d *Daemon) beginNode(opts Options) {
	n := &d.node
	n.started, n.load, n.notify, n.root = d.now(), opts.Load, opts.Notify, opts.Root
	n.tickBy.Store(int64(d.mono()))
	n.health.Store(&api.Health{Live: true, Why: "NVML was not asked yet"})
	n.metrics = metrics.New(d.measurement, fmt.Sprintf("%d.%d", ledger.ABIMajor, ledger.ABIMinor))
	n.sw = d.readSwitch()
	n.letGo = n.sw.Position == api.SwitchQuiesced
	if n.sw.Position != api.SwitchRunning {
		d.event(api.Event{Type: n.sw.Position, Message: fmt.Sprintf("gpufenced starts %s, as it was left at %s: %s", n.sw.Position, n.sw.Since.Format(time.RFC3339), n.sw.Reason)})
	}
	if opts.Loaded.Path != "" {
		d.took(opts.Loaded, nil)
	}
}

// readSwitch reads the position. disabled outlives the boot, since an incident may be a boot that
// fails; quiesced does not, since a boot loads the new driver.
func (d *Daemon) readSwitch() api.Switch {
	for _, at := range []struct{ dir, position string }{{d.cfg.StateDir, api.SwitchDisabled}, {d.cfg.RunDir, api.SwitchQuiesced}} {
		text, err := os.ReadFile(filepath.Join(at.dir, switchFile))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var sw api.Switch
		if err == nil {
			err = json.Unmarshal(text, &sw)
		}
		if err != nil || sw.Position != at.position || sw.Since == nil {
			// Whoever threw the switch meant it; which words he used is lost.
			t := d.now()
			d.log.WithError(err).WithField("file", filepath.Join(at.dir, switchFile)).Error("the node's switch cannot be read, taking its position from where it lies")
			sw = api.Switch{Position: at.position, Reason: "unknown: " + switchFile + " is damaged", Since: &t}
		}
		return sw
	}
	return api.Switch{Position: api.SwitchRunning}
}

// writeSwitch puts the position on disk before it holds.
func (d *Daemon) writeSwitch(sw api.Switch) error {
	dirs := map[string]string{api.SwitchDisabled: d.cfg.StateDir, api.SwitchQuiesced: d.cfg.RunDir}
	for position, dir := range dirs {
		path := filepath.Join(dir, switchFile)
		if position != sw.Position {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove the switch's file: %w", err)
			}
			continue
		}
		text, err := json.Marshal(sw)
		if err != nil {
			return fmt.Errorf("encode the switch: %w", err)
		}
		if err := registry.WriteFile(path, append(text, '\n'), 0o600); err != nil {
			return fmt.Errorf("keep the switch: %w", err)
		}
	}
	return nil
}

// throw moves the switch. The caller holds mu.
func (d *Daemon) throw(position, reason, what string) error {
	t := d.now()
	sw := api.Switch{Position: position}
	if position != api.SwitchRunning {
		sw.Reason, sw.Since = reason, &t
		if d.node.sw.Position == position {
			sw.Since = d.node.sw.Since
		}
	}
	if err := d.writeSwitch(sw); err != nil {
		return stateError(err)
	}
	d.node.sw = sw
	kind := position
	if position == api.SwitchRunning {
		kind = "resumed"
	}
	if reason != "" {
		what += ": " + reason
	}
	d.event(api.Event{Type: kind, Message: what})
	d.once("gate", d.gateHolds(context.Background()))
	d.denyUnmanaged()
	d.tellDriver()
	for _, p := range d.reg.Pods() {
		d.publish(p)
	}
	d.judgeHealth()
	d.notifyState()
	d.notify()
	return nil
}

func checkReason(req api.SwitchRequest) (string, error) {
	reason := strings.Join(strings.Fields(req.Reason), " ")
	if len(reason) > maxReason {
		return "", quota.NewError(quota.CodeBadRequest, "the reason has %d bytes, at most %d are kept", len(reason), maxReason)
	}
	return reason, nil
}

// Quiesce implements [server.Service]: NVML is let go, so that the driver can be unloaded; starts are
// refused; what runs keeps its limits in the shim, and nobody is killed, since nothing is known.
func (d *Daemon) Quiesce(ctx context.Context, req api.SwitchRequest) (api.Switch, error) {
	reason, err := checkReason(req)
	if err != nil {
		return api.Switch{}, err
	}
	d.mu.Lock()
	if d.node.sw.Position == api.SwitchDisabled {
		d.mu.Unlock()
		return api.Switch{}, quota.NewError(quota.CodeBadRequest, "gpufence is disabled: `gpufence resume` first")
	}
	if err := d.throw(api.SwitchQuiesced, reason, "gpufence is quiesced: NVML is let go, containers with a GPU do not start"); err != nil {
		d.mu.Unlock()
		return api.Switch{}, err
	}
	d.node.letGo = true
	d.once("gate's driver", d.gate.Quiesce())
	sw := d.node.sw
	d.mu.Unlock()
	if err := d.letNVMLGo(ctx); err != nil {
		return sw, err
	}
	return sw, nil
}

// letNVMLGo waits for the calls that have begun, and shuts NVML down.
func (d *Daemon) letNVMLGo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quiesceLimit)
	defer cancel()
	for {
		d.mu.Lock()
		busy := ""
		for uuid, g := range d.gpus {
			if g.inFlight || errors.Is(g.sample.Err, gpu.ErrHung) {
				busy = uuid
			}
		}
		changed := d.changed
		d.mu.Unlock()
		if busy == "" {
			break
		}
		select {
		case <-changed:
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return quota.NewError(quota.CodeGPUUnknown, "an NVML call for GPU %s hangs, so NVML cannot be let go; starts are refused all the same", busy).
				WithHint("restart gpufenced before the driver is unloaded")
		}
	}
	d.node.nvml.Lock()
	defer d.node.nvml.Unlock()
	d.mu.Lock()
	open := d.node.letGo && !d.node.closed && len(d.gpus) > 0
	for _, g := range d.gpus {
		forget(&g.out)
		g.last.made = false
		g.sample.Err = errQuiesced
	}
	d.notify()
	d.mu.Unlock()
	if !open {
		return nil // it was never opened, is shut already, or somebody resumed
	}
	if err := d.lib.Shutdown(); err != nil {
		return quota.NewError(quota.CodeNVMLUnavailable, "NVML cannot be shut down: %w", err).WithHint("restart gpufenced before the driver is unloaded")
	}
	d.mu.Lock()
	d.node.closed = true
	d.mu.Unlock()
	return nil
}

var errQuiesced = errors.New("gpufence is quiesced")

// forget makes what a sample led to unknown, numbers as they were.
func forget(out *policy.Output) {
	out.Known, out.Why = false, errQuiesced.Error()
	for id, st := range out.Containers {
		st.Known = false
		out.Containers[id] = st
	}
}

// Resume implements [server.Service].
func (d *Daemon) Resume(_ context.Context, req api.SwitchRequest) (api.Switch, error) {
	reason, err := checkReason(req)
	if err != nil {
		return api.Switch{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.node.sw.Position == api.SwitchRunning {
		return d.node.sw, nil
	}
	if err := d.throw(api.SwitchRunning, reason, "gpufence is resumed: limits are enforced, containers start"); err != nil {
		return api.Switch{}, err
	}
	if d.node.letGo {
		d.node.letGo = false
		d.nvmlErr = errNotAsked // asks for the devices anew
	}
	d.poke()
	return d.node.sw, nil
}

// Disable implements [server.Service]: the break-glass. Starts pass, with their limits where they can
// be had and without where they would be refused; nothing is refused, slowed or killed until resume.
func (d *Daemon) Disable(_ context.Context, req api.SwitchRequest) (api.Switch, error) {
	reason, err := checkReason(req)
	if err != nil {
		return api.Switch{}, err
	}
	if reason == "" {
		return api.Switch{}, quota.NewError(quota.CodeBadRequest, "nothing says why gpufence is to be disabled").WithHint("give a reason")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.node.letGo {
		d.node.letGo = false
		d.nvmlErr = errNotAsked
	}
	if err := d.throw(api.SwitchDisabled, reason, "gpufence is disabled: no limit is enforced on this node until `gpufence resume`"); err != nil {
		return api.Switch{}, err
	}
	d.log.WithField("reason", reason).Warn("gpufence is disabled: no limit is enforced on this node")
	d.poke()
	return d.node.sw, nil
}

// disabled says whether nothing is to be enforced. The caller holds mu.
func (d *Daemon) disabled() bool { return d.node.sw.Position == api.SwitchDisabled }

// modeOf is the mode that holds for a container now. The caller holds mu.
func (d *Daemon) modeOf(c *registry.Container) quota.Mode {
	if d.disabled() {
		return quota.ModeObserve
	}
	return c.Grant.Mode
}

// mayStart refuses what enforces nothing without NVML. The caller holds mu.
func (d *Daemon) mayStart(mode quota.Mode) error {
	sw := d.node.sw
	if sw.Position != api.SwitchQuiesced || mode != quota.ModeEnforce {
		return nil
	}
	why := ""
	if sw.Reason != "" {
		why = " (" + sw.Reason + ")"
	}
	return quota.NewError(quota.CodeQuiesced, "gpufence is quiesced since %s%s: containers with a GPU do not start", sw.Since.Format(time.RFC3339), why).
		WithHint("wait, or end it with `gpufence resume`")
}

// passDisabled makes of a refusal a start without a limit, and says so. The caller holds mu.
func (d *Daemon) passDisabled(req api.PrepareRequest, pol quota.Policy, grant quota.Grant, refusal error) (quota.Grant, []string) {
	none := quota.Grant{Mode: quota.ModeObserve, Require: quota.LevelNone, OOMGroup: true, GPUs: grant.GPUs}
	if len(none.GPUs) == 0 {
		pol.Mode = quota.ModeObserve
		g, _, _, _ := d.resolve(req, pol) // only which GPUs is wanted; the refusal is known
		none.GPUs = g.GPUs
	}
	e := api.ErrorOf(refusal)
	key, pod := req.Key, req.Pod
	d.event(api.Event{Type: "start-unfenced", Code: e.Code, Container: &key, Pod: &pod, Name: cutTo(req.ContainerName, 256), Message: cutTo(
		"starts without a limit since gpufence is disabled ("+d.node.sw.Reason+"); it would be refused: "+e.Message, 2048)})
	return none, []string{"gpufence is disabled, and the container starts without a limit; it would be refused: " + e.Error()}
}

// took remembers which configuration is in force, and keeps its copy. The caller holds mu, or
// nothing runs yet.
func (d *Daemon) took(l config.Loaded, needRestart []string) {
	n := &d.node
	n.info = api.ConfigInfo{Path: l.Path, Loaded: d.now(), LastGood: filepath.Join(d.cfg.StateDir, config.LastGoodName), NeedRestart: needRestart}
	if l.FileErr != nil {
		n.info.FromLastGood, n.info.Error = true, api.ErrorOf(l.FileErr)
		d.event(api.Event{Type: "config-wrong", Code: n.info.Error.Code, Message: fmt.Sprintf(
			"%s; in force is what was kept in %s", n.info.Error.Message, n.info.LastGood)})
		d.log.WithError(l.FileErr).Error("the configuration file is wrong: what was last in force goes on")
		return
	}
	err := config.SaveLastGood(d.cfg.StateDir, l)
	if err != nil {
		n.info.LastGood = ""
	}
	d.once("config-copy", err)
}

// Reload implements [server.Service]. A wrong file is refused, and what was in force goes on.
func (d *Daemon) Reload(context.Context, api.ReloadRequest) (api.ConfigInfo, error) {
	n := &d.node
	n.reload.Lock()
	defer n.reload.Unlock()
	if n.load == nil {
		return api.ConfigInfo{}, quota.NewError(quota.CodePolicyUnread, "this gpufenced was started without a configuration file").WithHint("restart it")
	}
	d.say(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", d.mono().Microseconds()))
	l, err := n.load()
	d.mu.Lock()
	defer func() {
		d.notifyState()
		d.mu.Unlock()
	}()
	if err != nil {
		n.info.Error = api.ErrorOf(err)
		d.event(api.Event{Type: "config-wrong", Code: n.info.Error.Code, Message: n.info.Error.Message + "; what was in force goes on"})
		return api.ConfigInfo{}, err
	}
	merged, wait := config.Reloaded(d.cfg, l.Config)
	d.cfg = merged
	d.configure()
	d.shimLib, d.shim32 = shimLibrary(merged.ShimLibrary), merged.ShimLibrary32
	for _, g := range d.gpus {
		g.quota = gpu.Quota(g.info, gpu.Reserve{Bytes: merged.ReserveBytes, Share: merged.ReserveShare}, merged.ContextBytes)
	}
	d.took(l, wait)
	d.denyUnmanaged()
	msg := "the configuration " + l.Path + " is in force"
	if len(wait) > 0 {
		msg += "; until a restart of gpufenced the old values stay of " + strings.Join(wait, ", ")
	}
	d.event(api.Event{Type: "config-loaded", Message: msg})
	d.poke()
	return n.info, nil
}

// say tells the service manager, if there is one.
func (d *Daemon) say(state string) {
	if d.node.notify != nil {
		d.node.notify(state)
	}
}

// notifyState tells the service manager how things are. The caller holds mu.
func (d *Daemon) notifyState() {
	status := "STATUS=" + d.node.sw.Position
	if e := d.node.info.Error; e != nil {
		status += ", config.toml is wrong"
	}
	d.say("READY=1\n" + status)
}

// ticked is called after each tick with the time until the next, which it hands on: what it
// computes is what probes hear.
func (d *Daemon) ticked(next time.Duration) time.Duration {
	d.mu.LockToLook()
	defer d.mu.Unlock()
	d.node.tickBy.Store(int64(d.mono() + next))
	d.judgeHealth()
	return next
}

// judgeHealth works out what probes hear from now on. The caller holds mu.
func (d *Daemon) judgeHealth() {
	n := &d.node
	now := d.mono()
	h := api.Health{Live: true, Ready: true}
	switch err := d.noGPUs(); {
	case n.sw.Position == api.SwitchQuiesced:
		h.Ready, h.Why = false, errQuiesced.Error()
	case d.disabled():
		h.Why = "gpufence is disabled: starts pass without a limit"
	case err != nil:
		h.Ready, h.Why = false, api.ErrorOf(err).Error()
	default:
		usable := false
		for _, uuid := range d.order {
			g := d.gpus[uuid]
			if _, err := d.usable(uuid); err == nil {
				usable = true
			} else if h.Why == "" {
				h.Why = api.ErrorOf(err).Error()
			}
			if g.inFlight && now-g.sentAt > d.cfg.SampleDeadline+liveLimit {
				h.Live, h.Why = false, fmt.Sprintf("the sample of GPU %s does not come back, nor is it given up", uuid)
			}
		}
		h.Ready = usable
	}
	n.health.Store(&h)
}

// Health implements [server.Service], without any lock.
func (d *Daemon) Health(context.Context) (api.Health, error) {
	h := *d.node.health.Load()
	if late := d.mono() - time.Duration(d.node.tickBy.Load()); late > liveLimit {
		return api.Health{Why: fmt.Sprintf("sampling is late by %s", late.Round(time.Second))}, nil
	}
	return h, nil
}

// Live says whether sampling works; a watchdog is fed only while it does.
func (d *Daemon) Live() bool {
	h, err := d.Health(context.Background())
	return err == nil && h.Live
}

// Node implements [server.Service].
func (d *Daemon) Node(ctx context.Context) (api.Node, error) {
	version, err := d.Version(ctx)
	if err != nil {
		return api.Node{}, err
	}
	health, err := d.Health(ctx)
	if err != nil {
		return api.Node{}, err
	}
	problems := d.problems()
	last := d.journal.Last()
	d.mu.Lock()
	defer d.mu.Unlock()
	n := api.Node{
		Version: version, Started: d.node.started, Switch: d.node.sw, Mode: string(d.cfg.Policy.Mode), Level: string(quota.LevelNone),
		Fences: []api.Fence{}, Health: health, Config: d.node.info, Cgroups: d.host.Mode(), RunDir: d.cfg.RunDir,
		Problems: problems, GPUs: len(d.order), LastEvent: last, Drift: d.node.drift,
	}
	for _, c := range d.reg.Containers() {
		if c.State == registry.Running {
			n.Containers++
		}
	}
	// As a container on all of the GPUs would be held.
	all := fence.Subject{}
	for _, uuid := range d.order {
		all.Grant.GPUs = append(all.Grant.GPUs, d.gpus[uuid].quota)
	}
	if d.cfg.ShimDelivery == "off" {
		all.ShimAbsent = "off by policy"
	} else if lib, err := resolveLibrary(d.shimLib); err != nil {
		all.ShimAbsent = api.ErrorOf(err).Message
	} else if _, err := standIns(lib, ledger.ContainerDir); err != nil && d.cfg.ShimDelivery == "stub" {
		all.ShimAbsent = api.ErrorOf(err).Message
	}
	n.Fences = fence.Report(d.fences, all)
	if d.cfg.Policy.Mode == quota.ModeEnforce && n.Switch.Position == api.SwitchRunning {
		n.Level = string(fence.Level(d.fences, all))
	}
	n.Reasons = d.notReady()
	n.Ready = len(n.Reasons) == 0
	return n, nil
}

// problems are what stands of what was reported once, the oldest first.
func (d *Daemon) problems() []api.Problem {
	d.seen.mu.Lock()
	defer d.seen.mu.Unlock()
	var out []api.Problem
	for about, p := range d.saidErr {
		out = append(out, api.Problem{About: about, Error: p.text, Since: p.since})
	}
	slices.SortFunc(out, func(a, b api.Problem) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.About, b.About)) })
	return out
}

// measurement is what metrics are computed from.
func (d *Daemon) measurement() metrics.Snapshot {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.show()
	s := metrics.Snapshot{Now: d.now(), Drift: len(d.node.drift), GPUs: d.viewGPUs()}
	if d.node.info.Error != nil {
		s.Drift++
	}
	for _, c := range d.reg.Containers() {
		s.Containers = append(s.Containers, d.view(c))
	}
	return s
}

// measure counts an event.
func (d *Daemon) measure(ev *api.Event) {
	m := d.node.metrics
	if m == nil {
		return // of recovery, before there is anybody to ask
	}
	switch ev.Type {
	case "refused":
		m.Refused(ev.Code)
	case "kill":
		if first, ok := ev.Numbers["first_sample_ns"]; ok && ev.MonotonicNS != 0 {
			m.Killed(time.Duration(ev.MonotonicNS - int64(first)))
		}
	}
}
