// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
	cdispec "github.com/gpufence/gpufence/hook/cdi"
)

// Bounds of what a request may carry, far above what engines send.
const (
	maxID      = 1024
	maxPath    = 4096
	maxPreload = 64 << 10
)

// Prepare implements [server.Service].
func (d *Daemon) Prepare(ctx context.Context, req api.PrepareRequest) (api.PrepareResponse, error) {
	go d.hasten()
	resp, err := d.prepare(ctx, req)
	if err != nil {
		d.refused(req.Key, req.Pod, req.ContainerName, err)
		return api.PrepareResponse{}, err
	}
	return resp, nil
}

// hasten has what the low-level runtime waits for first waited for while the wrapper is still at work: it moves the
// container's first process between cgroups. Where that cannot be, it waits itself, as it does without us.
func (d *Daemon) hasten() {
	if err := d.moves.Hasten(); err != nil {
		d.log.WithError(err).Debug("a container's start waits for its first move between cgroups")
	}
}

// refused puts a refusal into the journal; whoever gave up by himself was not refused.
func (d *Daemon) refused(key api.ContainerKey, pod api.PodRef, name string, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	e := api.ErrorOf(err)
	ev := api.Event{Type: "refused", Code: e.Code, Name: cutTo(name, 256), Message: cutTo(e.Message, 2048)}
	if len(key.ID) <= maxID && len(key.Scope) <= maxPath && len(pod.ID) <= maxID && len(pod.Name) <= maxID && len(pod.Namespace) <= maxID && len(pod.UID) <= maxID {
		ev.Container, ev.Pod = &key, &pod
	}
	d.event(ev)
}

func cutTo(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}

// checkRequest refuses what no wrapper of ours sends.
func checkRequest(req *api.PrepareRequest) error {
	bad := func(format string, args ...any) error { return quota.NewError(quota.CodeBadRequest, format, args...) }
	if err := checkKey(req.Key); err != nil {
		return err
	}
	switch {
	case req.Pod.ID == "":
		return bad("the request names no pod")
	case len(req.Pod.ID) > maxID || len(req.Pod.Name) > maxID || len(req.Pod.Namespace) > maxID || len(req.Pod.UID) > maxID || len(req.ContainerName) > maxID:
		return bad("the names in the request are too long")
	case len(req.Bundle) > maxPath || len(req.TerminationLog) > maxPath:
		return bad("the paths in the request are too long")
	case req.TerminationLog != "" && !filepath.IsAbs(req.TerminationLog):
		return bad("the termination log %.100q is not an absolute path", req.TerminationLog)
	case len(req.ImagePreload) > maxPreload || strings.ContainsRune(req.ImagePreload, 0):
		return quota.NewError(quota.CodePreloadFile, "the image's /etc/ld.so.preload has %d bytes or is no text", len(req.ImagePreload)).
			WithHint("remove it from the image, or keep it below 64 KiB")
	case len(req.Devices.Selectors) > 1024:
		return bad("the request names %d GPUs", len(req.Devices.Selectors))
	}
	if req.ShimDir == "" {
		req.ShimDir = ledger.ContainerDir
	}
	if !filepath.IsAbs(req.ShimDir) || filepath.Clean(req.ShimDir) != req.ShimDir || len(req.ShimDir) > 256 || strings.ContainsAny(req.ShimDir, " \t\n:$\x00") {
		return bad("the folder %.100q for our files in the container is not a plain absolute path", req.ShimDir)
	}
	return nil
}

func checkKey(k api.ContainerKey) error {
	switch {
	case k.ID == "":
		return quota.NewError(quota.CodeBadRequest, "the request names no container")
	case len(k.ID) > maxID || len(k.Scope) > maxPath || strings.ContainsRune(k.ID+k.Scope, 0):
		return quota.NewError(quota.CodeBadRequest, "the container's id or scope is too long, or no text")
	case !slices.Contains(quota.Engines(), k.Engine):
		return quota.NewError(quota.CodeBadRequest, "engine %.40q is unknown", k.Engine)
	}
	return nil
}

// fingerprint is the same for the same request.
func fingerprint(req api.PrepareRequest) string {
	b, err := json.Marshal(req) // maps are written in the order of their keys
	if err != nil {
		// Cannot be, as it came as JSON; then it is like no other.
		return newID()
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// prepare tries until it is done, refused for good, or has waited long enough for NVML's first
// answer or for memory that is on its way back.
func (d *Daemon) prepare(ctx context.Context, req api.PrepareRequest) (api.PrepareResponse, error) {
	if err := checkRequest(&req); err != nil {
		return api.PrepareResponse{}, err
	}
	notices, err := d.askKubelet(ctx, &req)
	if err != nil || len(req.Devices.Claimed) > 0 {
		return api.PrepareResponse{Notices: notices}, err
	}
	deadline := time.Now().Add(waitForGPU)
	for {
		d.mu.Lock()
		resp, retry, err := d.tryPrepare(req)
		changed := d.changed
		d.mu.Unlock()
		if err == nil || !retry || !time.Now().Before(deadline) {
			return resp, err
		}
		d.poke()
		timer := time.NewTimer(time.Until(deadline))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return api.PrepareResponse{}, err // the reason is worth more than that time is up
		}
	}
}

// tryPrepare does it all under mu, or says what is missing.
func (d *Daemon) tryPrepare(req api.PrepareRequest) (resp api.PrepareResponse, retry bool, err error) {
	if d.closed {
		return resp, false, quota.NewError(quota.CodeUnreachable, "gpufenced is stopping").WithHint("start it again")
	}
	mark := fingerprint(req)
	old := d.reg.Lookup(req.Key)
	if old != nil && old.State == registry.Running {
		switch {
		case d.aliveInit(old) && old.Fingerprint == mark:
			return d.answer(old), false, nil
		case d.aliveInit(old):
			return resp, false, quota.NewError(quota.CodeBadRequest, "container %s runs already, with other settings", old.Display())
		}
		d.end(old) // its poststop never came
	}
	pol := d.cfg.Policy.For(req.Pod.Namespace)
	if err := d.mayStart(pol.Mode); err != nil {
		return resp, false, err
	}
	lenient := pol.Mode != quota.ModeEnforce

	d.releasePods() // whoever replaces a pod comes sooner than housekeeping
	var notices []string
	grant, notes, retry, err := d.resolve(req, pol)
	notices = append(notices, notes...)
	if err == nil && len(grant.GPUs) == 0 {
		// Nothing to fence: not our container.
		return api.PrepareResponse{Grant: grant, Notices: notices}, false, nil
	}
	if err == nil && req.Privileged && grant.Limited() {
		if pol.PrivilegedRefuse[req.Key.Engine] {
			err = quota.NewError(quota.CodePrivileged, "the container could switch its fences off (privileged, host pid namespace, CAP_SYS_ADMIN or CAP_BPF)").
				WithHint("run it without, or set %s = \"report\" in [privileged]", req.Key.Engine)
		} else {
			notices = append(notices, "the container could switch its fences off (privileged, host pid namespace, CAP_SYS_ADMIN or CAP_BPF)")
		}
	}
	if err == nil {
		retry, err = d.admitContainer(req, pol, grant)
	}
	switch {
	case err == nil:
	case retry && d.disabled() && errors.Is(err, errNotAsked):
		return resp, retry, err
	case d.disabled():
		var notes []string
		grant, notes = d.passDisabled(req, pol, grant, err)
		notices = append(notices, notes...)
		if len(grant.GPUs) == 0 {
			return api.PrepareResponse{Grant: grant, Notices: notices}, false, nil
		}
	case !lenient || len(grant.GPUs) == 0:
		return resp, retry, err
	default:
		e := api.ErrorOf(err)
		notices = append(notices, "would be refused: "+e.Error())
		key, pod := req.Key, req.Pod
		d.event(api.Event{Type: "would-refuse", Code: e.Code, Container: &key, Pod: &pod, Name: req.ContainerName, Message: e.Message})
	}

	if old != nil && old.State == registry.Prepared && old.Fingerprint == mark {
		held, at := old.Held, old.PreparedAt
		old.Held, old.PreparedAt = true, d.now()
		if err := d.save(old.Pod()); err != nil {
			old.Held, old.PreparedAt = held, at
			return resp, false, stateError(err)
		}
		return d.answer(old), false, nil
	}
	c, err := d.add(req, grant, mark, notices)
	if err != nil {
		return resp, false, err
	}
	return d.answer(c), false, nil
}

// resolve computes the grant. In the modes that refuse nothing, a grant without limits comes with
// the error.
func (d *Daemon) resolve(req api.PrepareRequest, pol quota.Policy) (quota.Grant, []string, bool, error) {
	subject := quota.Subject{
		Engine: req.Key.Engine, Namespace: req.Pod.Namespace, Pod: req.Pod.Name, Container: req.ContainerName,
		Annotations: req.Annotations, Env: req.Env, HasGPU: asksGPU(req.Devices.Selectors),
	}
	none := quota.Grant{Mode: pol.Mode, Require: quota.LevelNone, OOMGroup: true}
	parsed, notes, parseErr := quota.Parse(subject, pol)
	notices := texts(notes)
	if parseErr != nil && pol.Mode == quota.ModeEnforce {
		return none, notices, false, parseErr
	}
	selectors := req.Devices.Selectors
	if !asksGPU(selectors) && parseErr == nil {
		selectors = parsed.Selectors()
	}
	if !asksGPU(selectors) {
		return none, notices, false, parseErr
	}
	if err := d.noGPUs(); err != nil {
		return none, notices, errors.Is(err, errNotAsked), err
	}
	selectors, err := d.byCapabilities(selectors)
	if err != nil {
		return none, notices, quota.CodeOf(err) == quota.CodeGPUUnknown, err
	}
	infos, err := d.selectGPUs(req, pol, parsed, selectors)
	if err != nil {
		return none, notices, quota.CodeOf(err) == quota.CodeGPUUnknown, err
	}
	for _, i := range infos {
		if i.MIG {
			return none, notices, false, d.wholeInMIG(i)
		}
	}
	for _, i := range infos {
		none.GPUs = append(none.GPUs, d.gpus[i.UUID].quota)
	}
	if parseErr != nil {
		return none, notices, false, parseErr
	}
	for _, i := range infos {
		if _, err := ledger.ParseUUID(i.UUID); err != nil {
			return none, notices, false, quota.NewError(quota.CodeNoSuchGPU, "GPU %.80q has no UUID that can be used: %w", i.UUID, err)
		}
	}
	grant, notes, err := parsed.Resolve(none.GPUs, pol)
	notices = append(notices, texts(notes)...)
	if err != nil {
		return none, notices, false, err
	}
	return grant, notices, false, nil
}

func texts(notes []quota.Notice) []string {
	var out []string
	for _, n := range notes {
		out = append(out, string(n))
	}
	return out
}

// asksGPU says whether selectors may name a GPU.
func asksGPU(selectors []string) bool {
	return slices.ContainsFunc(selectors, func(s string) bool { return s != "" && s != "none" && s != "void" })
}

// selectGPUs finds what the selectors name; "any" and "any=N" are placed.
func (d *Daemon) selectGPUs(req api.PrepareRequest, pol quota.Policy, parsed quota.Request, selectors []string) ([]gpu.Info, error) {
	count := 0
	for _, s := range selectors {
		if s == "any" {
			count = 1
		} else if n, ok := strings.CutPrefix(s, "any="); ok {
			v, err := strconv.Atoi(n)
			if err != nil || v < 1 {
				return nil, quota.NewError(quota.CodeBadGPUSelector, "%.100q is not a number of GPUs", s)
			}
			count = v
		}
	}
	if count > 0 {
		if count > len(d.order) {
			return nil, quota.NewError(quota.CodeNoSuchGPU, "%d GPUs are asked for, this node has %d", count, len(d.order))
		}
		return d.place(req, pol, parsed, count)
	}
	infos, err := gpu.Select(d.selectable(), selectors)
	if err != nil {
		var sel *gpu.SelectorError
		if errors.As(err, &sel) {
			return nil, quota.NewError(quota.CodeNoSuchGPU, "there is no GPU %.100q here, this node has %s", sel.Selector, strings.Join(sel.Have, ", "))
		}
		return nil, err
	}
	return infos, nil
}

// place chooses GPUs for a container that takes any. One that is prepared again keeps its own.
func (d *Daemon) place(req api.PrepareRequest, pol quota.Policy, parsed quota.Request, count int) ([]gpu.Info, error) {
	var out []gpu.Info
	if old := d.reg.Lookup(req.Key); old != nil && old.State == registry.Prepared && old.Fingerprint == fingerprint(req) {
		for _, g := range old.Grant.GPUs {
			if gs := d.gpus[g.UUID]; gs != nil {
				out = append(out, gs.info)
			}
		}
		if len(out) == count {
			return out, nil
		}
		out = nil
	}
	pod := d.reg.Pod(registry.PodName(req.Key.Engine, req.Key.Scope, req.Pod.ID))
	var candidates []policy.PlaceCandidate
	for _, uuid := range d.order {
		g := d.gpus[uuid]
		if wait, err := d.usable(uuid); wait {
			return nil, err // it may be the best
		}
		c := policy.PlaceCandidate{UUID: uuid, AvailableBytes: d.admitInput(g, pod, 0).Available()}
		// Shares are of each GPU's own size.
		if grant, _, err := parsed.Resolve([]quota.GPU{g.quota}, pol); err == nil {
			_, unusable := d.usable(uuid)
			want := d.wants(req.Key, pod, grant, uuid)
			c.Fits = unusable == nil && d.unmanagedDenied(g, want) == nil && policy.Admit(d.admitInput(g, pod, want)) == nil
		}
		candidates = append(candidates, c)
	}
	for _, uuid := range policy.Place(candidates, count, policy.Placement(d.cfg.Placement)) {
		out = append(out, d.gpus[uuid].info)
	}
	return out, nil
}

// wants is what a pod would be promised in all on a GPU with a container of that grant.
func (d *Daemon) wants(key api.ContainerKey, pod *registry.Pod, grant quota.Grant, uuid string) uint64 {
	sum := limits(grant.Container, uuid).Min
	podLimits := limits(grant.Pod, uuid)
	if pod != nil {
		for _, c := range pod.Containers {
			if c.Key != key && c.Holds(uuid) {
				sum += min(c.ContainerLimits(uuid).Min, quota.Unlimited-sum)
				podLimits = d.podLimitsWith(pod, grant, uuid)
			}
		}
	}
	return max(podLimits.Min, min(sum, podLimits.Max))
}

// admitContainer asks whether the promises of a new container can be kept. transient says that
// waiting may help.
func (d *Daemon) admitContainer(req api.PrepareRequest, pol quota.Policy, grant quota.Grant) (transient bool, err error) {
	pod := d.reg.Pod(registry.PodName(req.Key.Engine, req.Key.Scope, req.Pod.ID))
	for _, makeRoom := range d.roomTurns(len(grant.GPUs)) {
		for _, g := range grant.GPUs {
			if wait, err := d.usable(g.UUID); err != nil {
				return wait, err
			}
			want := d.wants(req.Key, pod, grant, g.UUID)
			if err := d.unmanagedDenied(d.gpus[g.UUID], want); err != nil {
				return d.pol.UnmanagedKill, err // those that are being killed are gone soon
			}
			if transient, err := d.admit(g.UUID, pod, req.Pod.Namespace, pol, want, makeRoom); err != nil {
				return transient, err
			}
		}
	}
	return false, nil
}

// roomTurns is how often so many GPUs are asked, and whether room is made then: nobody has to go on one of them for what
// another refuses all the same.
func (d *Daemon) roomTurns(gpus int) []bool {
	if gpus > 1 && d.cfg.Admit == "kill-over-min" {
		return []bool{false, true}
	}
	return []bool{true}
}

func limits(m map[string]quota.Limits, uuid string) quota.Limits {
	if l, ok := m[uuid]; ok {
		return l
	}
	return quota.Limits{Max: quota.Unlimited, High: quota.Unlimited, SwapMax: quota.Unlimited}
}

// podLimitsWith are a pod's limits once a container with that grant has joined: what a resize made
// of them stays if the container comes with what the others came with.
func (d *Daemon) podLimitsWith(p *registry.Pod, grant quota.Grant, uuid string) quota.Limits {
	asked := limits(grant.Pod, uuid)
	if before, ok := p.Asked[uuid]; ok && before == asked {
		return p.PodLimits(uuid)
	}
	return asked
}

// asksOtherwise says whether a container comes with other pod limits than the others came with.
func (d *Daemon) asksOtherwise(p *registry.Pod, grant quota.Grant) bool {
	return slices.ContainsFunc(grant.GPUs, func(g quota.GPU) bool {
		asked, given := grant.Pod[g.UUID]
		return given && asked != p.Asked[g.UUID]
	})
}

// admit asks whether a pod may be promised want bytes in all on a GPU. Where somebody could make room for it, he has to if
// makeRoom says so, and else that is no refusal.
func (d *Daemon) admit(uuid string, pod *registry.Pod, namespace string, pol quota.Policy, want uint64, makeRoom bool) (transient bool, err error) {
	g := d.gpus[uuid]
	in := d.admitInput(g, pod, want)
	var inNamespace uint64
	for _, p := range d.reg.Pods() {
		if p != pod && p.Ref.Namespace == namespace {
			inNamespace += min(p.MinBytes(uuid), quota.Unlimited-inNamespace)
		}
	}
	if namespace != "" {
		if err := pol.CheckNamespaceTotal(namespace, g.quota, inNamespace, want); err != nil {
			return false, err
		}
	}
	if err := policy.Admit(in); err != nil {
		var no *policy.AdmitError
		if !errors.As(err, &no) {
			return false, err
		}
		wait := no.Transient
		if d.cfg.Admit == "kill-over-min" && pol.Mode == quota.ModeEnforce && no.ShortBytes > 0 && !no.Transient {
			if !makeRoom {
				return false, nil
			}
			wait = d.makeRoom(g, pod, no.ShortBytes)
		}
		return wait, quota.NewError(quota.CodeUnavailable, "GPUMemoryUnavailable: %s", no.Sentence).
			WithHint("ask for less (memory.min follows memory.max), or end something there")
	}
	return false, nil
}

// admitInput is a GPU as admission looks at it, for a pod (nil for one that is not there yet) that
// wants to be promised so much in all.
func (d *Daemon) admitInput(g *gpuState, pod *registry.Pod, want uint64) policy.AdmitInput {
	in := policy.AdmitInput{
		UUID: g.info.UUID, AllocatableBytes: g.quota.AllocatableBytes, MinBytes: want,
		UnmanagedBytes: g.out.UnmanagedSteadyBytes, UnattributedBytes: g.out.UnattributedBytes, DyingBytes: g.dyingBytes(),
		// Others may use more than they are promised, so that what could be promised is not there.
		FreeNow: true, FreeKnown: g.sample.Err == nil && g.sample.MemoryErr == nil, FreeBytes: g.sample.Memory.FreeBytes,
	}
	for _, p := range d.reg.Pods() {
		charged, dying := g.podUse(p)
		if p == pod {
			in.ChargedBytes, in.OwnDyingBytes = charged, dying
			continue
		}
		in.Others = append(in.Others, policy.Guarantee{Pod: p.ID(), MinBytes: p.MinBytes(g.info.UUID), ChargedBytes: charged, DyingBytes: dying})
	}
	return in
}

// makeRoom lets somebody go who uses more than it is promised. It says whether waiting helps. The
// caller holds mu.
func (d *Daemon) makeRoom(g *gpuState, pod *registry.Pod, short uint64) bool {
	in := policy.RoomInput{Now: d.mono(), ShortBytes: short, Guarantees: map[policy.PodID]uint64{}, Newest: g.out}
	if pod != nil {
		in.For = pod.ID()
	}
	uuid := g.info.UUID
	for _, p := range d.reg.PodsOn(uuid) {
		in.Guarantees[p.ID()] = p.MinBytes(uuid)
		for _, c := range p.Containers {
			if c.State == registry.Running && hasGPU(c, uuid) {
				in.Containers = append(in.Containers, d.containerFact(c, uuid))
			}
		}
	}
	kill, wait := g.machine.MakeRoom(in)
	if kill != nil {
		d.startKill(g, kill)
	}
	return kill != nil || wait
}

// add puts a new container into the registry, makes its pages, and saves. Everything that a
// failure leaves is taken back.
func (d *Daemon) add(req api.PrepareRequest, grant quota.Grant, mark string, notices []string) (*registry.Container, error) {
	enforce := grant.Mode == quota.ModeEnforce
	var devices []string
	if (enforce || d.disabled()) && !req.Devices.Present {
		var err error
		if devices, err = d.cdiNames(grant.GPUs); err != nil {
			return nil, err
		}
	}
	shim := enforce && d.cfg.ShimDelivery != "off"
	absent := req.ShimAbsent
	switch {
	case !enforce:
		absent = "mode " + string(grant.Mode)
	case !shim:
		absent = "off by policy"
	}
	var lib, lib32, preload string
	var stubs []api.SharedFile
	if shim {
		var err error
		if lib, err = resolveLibrary(d.shimLib); err != nil {
			return nil, err
		}
		if lib32, err = resolveCompanion(d.shim32, lib); err != nil {
			return nil, err
		}
		if d.cfg.ShimDelivery == "stub" {
			stubs, err = standIns(lib, req.ShimDir)
		} else {
			preload, err = mergePreload(req.ShimDir, req.ImagePreload)
		}
		if err != nil {
			return nil, err
		}
	}
	var next uint32
	if old := d.reg.Lookup(req.Key); old != nil {
		if old.Pod().Name == registry.PodName(req.Key.Engine, req.Key.Scope, req.Pod.ID) {
			next = old.Pod().NextIndex
		}
		d.remove(old)
	}
	p := d.reg.EnsurePod(req.Key.Engine, req.Key.Scope, req.Pod, d.bootID)
	// What the life before has left is followed under its own name.
	p.NextIndex = max(p.NextIndex, next)
	p.Ref = req.Pod
	fresh := !p.Active()
	c := &registry.Container{
		Key: req.Key, Name: req.ContainerName, State: registry.Prepared, Held: true,
		Grant: grant, Generation: 1, Fingerprint: mark, ShimAbsent: absent, TerminationLog: req.TerminationLog,
		Env: quota.OurEnv(req.Env), Spec: specMark(req.Annotations),
		PreparedAt: d.now(), Answer: api.PrepareResponse{CDIDevices: devices, Env: d.limiter.fence.Env(grant, !req.Key.Engine.Kubernetes()), Notices: notices},
	}
	d.reg.Add(p, c)
	undo := func(err error) (*registry.Container, error) {
		d.remove(c)
		return nil, err
	}
	if fresh || d.asksOtherwise(p, grant) {
		p.Spec = c.Spec
	}
	if p.Asked == nil {
		p.Asked, p.Limits = map[string]quota.Limits{}, map[string]quota.Limits{}
	}
	for _, g := range grant.GPUs {
		if err := d.reg.AddGPU(p, g.UUID); err != nil {
			return undo(quota.NewError(quota.CodePages, "the container cannot be accounted: %w", err))
		}
		asked, given := grant.Pod[g.UUID]
		if !given && !fresh {
			continue
		}
		now := d.podLimitsWith(p, grant, g.UUID)
		if fresh {
			now = limits(grant.Pod, g.UUID)
		}
		if given {
			p.Asked[g.UUID], p.Limits[g.UUID] = asked, now
		} else {
			delete(p.Asked, g.UUID)
			delete(p.Limits, g.UUID)
		}
	}
	if shim {
		files, err := d.makePages(p, c, req.ShimDir, preload, libraries(lib, lib32, req.NarrowLib), stubs)
		if err != nil {
			return undo(quota.NewError(quota.CodePages, "the container's shared pages cannot be made: %w", err).
				WithHint("see that %s is a local file system with room, and that gpufenced may mount a tmpfs", d.cfg.RunDir))
		}
		c.Answer.Files = files
	}
	if err := d.save(p); err != nil {
		return undo(stateError(err))
	}
	d.gateFollows(p) // it may have brought other limits of the pod
	d.publish(p)
	d.facts.version++
	d.event(about(c, api.Event{Type: "prepared", GPU: c.Grant.GPUs[0].UUID, Message: fmt.Sprintf("%s is granted %s", c.Display(), describe(c))}))
	d.notify()
	return c, nil
}

func stateError(err error) error {
	return quota.NewError(quota.CodeStateDamaged, "the container's state cannot be saved: %w", err).
		WithHint("see that the run directory has room and is writable")
}

// describe is a grant in words.
func describe(c *registry.Container) string {
	var parts []string
	for _, g := range c.Grant.GPUs {
		limit := min(c.ContainerLimits(g.UUID).Max, c.Pod().PodLimits(g.UUID).Max)
		text := "no limit"
		if limit != quota.Unlimited {
			text = quota.FormatBytes(limit)
		}
		parts = append(parts, text+" on "+g.UUID)
	}
	return strings.Join(parts, ", ")
}

// answer is what prepare says of a container.
func (d *Daemon) answer(c *registry.Container) api.PrepareResponse {
	resp := c.Answer
	resp.Grant = c.Grant
	resp.Grant.Pod = map[string]quota.Limits{}
	for _, g := range c.Grant.GPUs {
		if l, ok := c.Pod().Limits[g.UUID]; ok {
			resp.Grant.Pod[g.UUID] = l
		}
	}
	return resp
}

// cdiNames finds the CDI device of each GPU, in the kinds that policy names.
func (d *Daemon) cdiNames(gpus []quota.GPU) ([]string, error) {
	cache, err := d.specs.Read(d.cfg.CDISpecDirs)
	if err != nil {
		return nil, quota.NewError(quota.CodeNoCDIDevice, "the CDI specifications in %s cannot be read: %w", strings.Join(d.cfg.CDISpecDirs, ", "), err)
	}
	var out []string
	for _, g := range gpus {
		info := d.gpus[g.UUID].info
		name, why := cdispec.Find(cache, d.cfg.CDIKinds, cdispec.GPU{UUID: g.UUID, Position: info.Position(), Minor: strconv.Itoa(info.Minor)})
		if name == "" && why != "" {
			return nil, quota.NewError(quota.CodeNoCDIDevice, "the CDI specification of GPU %s cannot be used: %s", g.UUID, why).
				WithHint("write it anew with `nvidia-ctk cdi generate`, or remove it, so that gpufenced writes one")
		}
		if name == "" {
			return nil, quota.NewError(quota.CodeNoCDIDevice, "no CDI specification in %s has GPU %s as %s",
				strings.Join(d.cfg.CDISpecDirs, ", "), g.UUID, strings.Join(d.cfg.CDIKinds, " or ")).
				WithHint("write one with `gpufence cdi generate --output=/etc/cdi/gpufence.yaml`, or see in gpufenced's log why it wrote none")
		}
		out = append(out, name)
	}
	return out, nil
}

// resolveLibrary is the file behind the shim's path: a mount must not follow a link that an
// upgrade turns round under a running container.
func resolveLibrary(path string) (string, error) {
	file, err := filepath.EvalSymlinks(path)
	if err == nil {
		var fi os.FileInfo
		if fi, err = os.Stat(file); err == nil && !fi.Mode().IsRegular() {
			err = errors.New("it is not a regular file")
		}
	}
	if err != nil {
		return "", quota.NewError(quota.CodeShimMissing, "%s is not at %s: %w", filepath.Base(path), path, err).
			WithHint("install gpufence completely, or set shim-library in the configuration")
	}
	return file, nil
}

// resolveCompanion is the library for 32-bit programs, "" if there is none: as configured, or
// beside the other.
func resolveCompanion(configured, lib string) (string, error) {
	if configured != "" {
		return resolveLibrary(configured)
	}
	beside := filepath.Join(filepath.Dir(lib), "libgpufence32.so")
	if _, err := os.Stat(beside); err != nil {
		return "", nil //nolint:nilerr // 32-bit programs print a line then, and nothing else is lost
	}
	return resolveLibrary(beside)
}

// standIns are the libraries that stand in for the driver's where the pages lie in shimDir, which is
// built into them. They are installed beside the shim.
func standIns(lib, shimDir string) ([]api.SharedFile, error) {
	place, ok := map[string]string{ledger.ContainerDir: "dev", "/run/gpufence-shim": "run"}[shimDir]
	if !ok {
		return nil, quota.NewError(quota.CodeShimMissing, "no library that stands in for the driver's is built for pages in %s", shimDir).
			WithHint("set shim-delivery = \"preload\"")
	}
	var out []api.SharedFile
	for _, name := range []string{"libcuda", "libnvidia-ml"} {
		source, err := resolveLibrary(filepath.Join(filepath.Dir(lib), "gpufence-stub", place, name+".so.1"))
		if err != nil {
			return nil, err
		}
		out = append(out, api.SharedFile{Source: source, Destination: shimDir + "/real/" + name + ".so.1", Over: name + ".so"})
	}
	return out, nil
}

// library is a file that is to be found in a folder that $LIB stands for.
type library struct{ source, folder string }

// libraryName is the shim's in each of them.
const libraryName = "libgpufence.so"

// deliver says where the libraries are mounted in the container's folder, each once, and what else is
// in the folder for that: under the other spellings of $LIB it is found by a link, as a mount is
// three system calls of the runtime's.
func deliver(shimDir string, libs []library) (files []api.SharedFile, points []ledger.Point) {
	mounted := map[string]string{}
	for _, l := range libs {
		at := l.folder + "/" + libraryName
		if first := mounted[l.source]; first != "" {
			points = append(points, ledger.Point{Name: at, Link: strings.Repeat("../", strings.Count(at, "/")) + first})
			continue
		}
		mounted[l.source] = at
		files = append(files, api.SharedFile{Source: l.source, Destination: shimDir + "/" + at})
		points = append(points, ledger.Point{Name: at})
	}
	return files, points
}

// libraries puts each library under every folder that $LIB may stand for in its programs.
func libraries(lib, lib32 string, narrowLib bool) []library {
	own, narrow := libFolders(narrowLib)
	var out []library
	for _, folder := range own {
		out = append(out, library{lib, folder})
	}
	if lib32 == "" {
		return out
	}
	for _, folder := range narrow {
		out = append(out, library{lib32, folder})
	}
	return out
}

// mergePreload is /etc/ld.so.preload as the container sees it: the image's lines, then ours. Last,
// because a program that is linked with the driver finds the driver's functions in us and goes on
// to the driver from there: a wrapper of the image's behind us would be passed over.
func mergePreload(shimDir, image string) (string, error) {
	if strings.ContainsRune(image, 0) {
		return "", quota.NewError(quota.CodePreloadFile, "the image's /etc/ld.so.preload is no text")
	}
	ours := shimDir + "/$LIB/" + libraryName
	var b strings.Builder
	for line := range strings.Lines(image) {
		line = strings.TrimRight(line, "\r\n")
		var kept []string
		for _, f := range strings.FieldsFunc(line, func(r rune) bool { return r == ' ' || r == '\t' || r == ':' }) {
			if strings.HasPrefix(f, "#") {
				break // the rest is a comment, as for the loader
			}
			switch {
			case filepath.Base(f) == "libvgpu.so":
				return "", quota.NewError(quota.CodeForeignPreload, "the image preloads HAMi's %s, and two of its kind cannot share a process", f).
					WithHint("remove it from the image's /etc/ld.so.preload")
			case f != ours:
				kept = append(kept, f)
			}
		}
		if len(kept) > 0 {
			b.WriteString(strings.Join(kept, " ") + "\n")
		}
	}
	b.WriteString(ours + "\n")
	return b.String(), nil
}

// makePages makes a container's pages and lists what is to be mounted, in this order: the container's
// folder at shimDir, read-only, and over files in it the ledger, and the libraries, each by itself, so
// that an upgrade does not take them away.
func (d *Daemon) makePages(p *registry.Pod, c *registry.Container, shimDir, preload string, libs []library, stubs []api.SharedFile) ([]api.SharedFile, error) {
	rt := d.runtimeOf(p)
	if rt.pages == nil {
		pages, err := ledger.CreatePod(d.podDir(p), ledger.Options{Plain: d.plain})
		if err != nil {
			return nil, err
		}
		rt.pages = pages
	}
	c.Pages = true // from here on there may be something to remove
	var shims []api.SharedFile
	points := []ledger.Point{{Name: ledger.LedgerName}}
	if preload != "" { // otherwise stubs stand in for the driver's libraries
		files, more := deliver(shimDir, libs)
		shims, points = files, append(points, more...)
	}
	for _, f := range stubs {
		points = append(points, ledger.Point{Name: strings.TrimPrefix(f.Destination, shimDir+"/")})
	}
	page, err := rt.pages.AddContainer(c.Folder(), c.Index, points...)
	if err != nil {
		return nil, err
	}
	rt.containers[c.Index] = page
	if rt.number == 0 {
		rt.number, rt.numbered = d.sample, d.mono()
	}
	if err := errors.Join(page.Publish(d.limitsPage(p, c)), page.BeginSample(rt.number), page.Beat()); err != nil {
		return nil, err
	}
	files := []api.SharedFile{
		{Source: page.Dir(), Destination: shimDir},
		{Source: rt.pages.LedgerPath(), Destination: shimDir + "/" + ledger.LedgerName, Writable: true},
	}
	files = append(append(files, shims...), stubs...)
	if preload == "" {
		return files, nil
	}
	path := d.preloadPath(c)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	if err := registry.WriteFile(path, []byte(preload), 0o644); err != nil {
		return nil, err
	}
	return append(files, api.SharedFile{Source: path, Destination: "/etc/ld.so.preload"}), nil
}

func (d *Daemon) podDir(p *registry.Pod) string { return filepath.Join(d.cfg.RunDir, "pods", p.Name) }

func (d *Daemon) preloadPath(c *registry.Container) string {
	return filepath.Join(d.cfg.RunDir, "preload", c.Pod().Name, c.Folder())
}

func (d *Daemon) runtimeOf(p *registry.Pod) *podRuntime {
	rt := d.runtime[p.Name]
	if rt == nil {
		rt = &podRuntime{containers: map[uint32]*ledger.Container{}, owners: map[slotKey]*slotOwner{}, published: map[uint32]time.Duration{}}
		d.runtime[p.Name] = rt
		d.runtimes++
	}
	return rt
}

// checkPages is the shim fence's look at what was delivered.
func (d *Daemon) checkPages(s fence.Subject) error {
	d.mu.Lock()
	c := d.reg.ByID(s.ID)
	var files []api.SharedFile
	var folder string
	if c != nil {
		files, folder = c.Answer.Files, c.Folder()
	}
	d.mu.Unlock()
	if len(files) == 0 {
		return errors.New("nothing was delivered")
	}
	for _, f := range files {
		text, err := os.Stat(f.Source)
		if err != nil {
			return fmt.Errorf("look at what is mounted: %w", err)
		}
		switch {
		case text.IsDir() && filepath.Base(f.Source) == ledger.PodDirName: // one of the mounts that there were before the next
		case text.IsDir() && filepath.Base(f.Source) == folder:
			if err := checkFolder(f, files); err != nil {
				return err
			}
		case !text.Mode().IsRegular():
			return fmt.Errorf("look at what is mounted: %s is not a regular file", f.Source)
		}
		if f.Destination == "/etc/ld.so.preload" {
			b, err := os.ReadFile(f.Source)
			if err != nil {
				return fmt.Errorf("look at what is mounted: %w", err)
			}
			if !bytes.Contains(b, []byte("/$LIB/"+libraryName)) {
				return fmt.Errorf("look at what is mounted: %s lacks our line", f.Source)
			}
		}
	}
	return nil
}

// checkFolder looks for the limits page in the container's folder, and for what the other files are
// mounted over.
func checkFolder(folder api.SharedFile, files []api.SharedFile) error {
	names := []string{ledger.LimitsName}
	for _, f := range files {
		if name, ok := strings.CutPrefix(f.Destination, folder.Destination+"/"); ok {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if fi, err := os.Lstat(filepath.Join(folder.Source, name)); err != nil || !fi.Mode().IsRegular() {
			return fmt.Errorf("look at what is mounted: %s lacks %s", folder.Source, name)
		}
	}
	return nil
}
