// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/sirupsen/logrus"

	gpufence "github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// Name is what the plugin registers by.
const Name = "gpufence"

const (
	// answerTime is what is left of NRI's default of 2 s for a request once it came to us and back.
	answerTime = 1700 * time.Millisecond
	// claimTime bounds what a container spends on a gpufenced that it does not depend on.
	claimTime = 250 * time.Millisecond
	// reconnect is the pause between two connections.
	reconnect = 2 * time.Second
	// maxPending bounds the adjustments that wait for their validation.
	maxPending = 4096
)

// ExemptNamespaces are those of which pods have every GPU as a rule: device plugins, the GPU
// operator, monitors. Who may create pods there is trusted with the node.
var ExemptNamespaces = []string{"kube-system", "gpu-operator", "nvidia-gpu-operator", "nvidia-device-plugin", "gpufence"}

// Settings are the parts of config.toml and of the command line that the plugin goes by.
type Settings struct {
	Policy      quota.Policy
	PolicyErr   error // config.toml is wrong: no container with a GPU is created
	ConfigPath  string
	Socket      string
	RunDir      string
	HookPath    string
	CDISpecDirs []string
	FailOpen    bool
	Majors      []int64 // of NVIDIA's character devices

	NRISocket string
	Index     string // two digits: when our turn is
	// Scope is within what container ids are unique, as the wrapper has it from the runtime's root;
	// empty: the engine's usual one.
	Scope string
	// Exempt are namespaces whose pods are left alone: device plugins and monitors have every GPU.
	Exempt []string
}

// Daemon is gpufenced, as the plugin asks it.
type Daemon interface {
	Prepare(context.Context, gpufence.PrepareRequest) (gpufence.PrepareResponse, error)
	Containers(context.Context) ([]gpufence.Container, error)
	Audit(context.Context, gpufence.AuditRequest) (gpufence.AuditResponse, error)
	Unregister(context.Context, gpufence.UnregisterRequest) error
}

// Plugin handles NRI's requests. Its exported methods are what NRI's stub looks for.
type Plugin struct {
	set    Settings
	daemon Daemon
	log    logrus.FieldLogger

	mu      sync.Mutex
	engine  quota.Engine
	pending map[string]verdict // by container, until validated
}

// verdict is what was made of a container.
type verdict struct {
	adjust  *api.ContainerAdjustment
	devices []string // that it had when it was planned
	names   []string // CDI devices that somebody else was known to put in
	exempt  bool     // it was left alone
}

// New makes a plugin.
func New(set Settings, daemon Daemon, log logrus.FieldLogger) *Plugin {
	return &Plugin{set: set, daemon: daemon, log: log, engine: quota.EngineCRI, pending: map[string]verdict{}}
}

// Run connects, and connects again whenever the engine goes away, until the context ends.
func (p *Plugin) Run(ctx context.Context) error {
	last := ""
	for {
		err := p.once(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to stop
		}
		text := "the engine closed the connection"
		if err != nil {
			text = err.Error()
		}
		if text != last {
			p.log.Warnf("not connected to NRI at %s, so that containers start WITHOUT a fence where only NRI delivers it: %s", p.set.NRISocket, text)
		}
		last = text
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reconnect):
		}
	}
}

// once is one connection's life.
func (p *Plugin) once(ctx context.Context) error {
	closed := make(chan struct{})
	var once sync.Once
	s, err := stub.New(p, stub.WithPluginName(Name), stub.WithPluginIdx(p.set.Index), stub.WithSocketPath(p.set.NRISocket),
		stub.WithOnClose(func() { once.Do(func() { close(closed) }) }), stub.WithLogger(nriLog{p.log}),
		// An engine that knows failure policies fails a request that we do not answer.
		stub.WithFailurePolicy(&api.FailurePolicy{FailRequest: true, KeepConnected: true}))
	if err != nil {
		return fmt.Errorf("make NRI plugin: %w", err)
	}
	if err := s.Start(ctx); err != nil {
		return fmt.Errorf("connect to NRI: %w", err)
	}
	p.log.Infof("connected to NRI at %s as %s-%s", p.set.NRISocket, p.set.Index, Name)
	select {
	case <-closed:
	case <-ctx.Done():
		s.Stop()
	}
	return nil
}

// Configure learns which engine calls.
func (p *Plugin) Configure(_ context.Context, _, runtime, version string) (api.EventMask, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engine = quota.EngineCRI
	if strings.Contains(strings.ToLower(runtime), "cri-o") || strings.EqualFold(runtime, "crio") {
		p.engine = quota.EngineCRIO
	}
	p.log.Infof("NRI of %s %s", runtime, version)
	if !validates(p.engine, version) {
		p.log.Warnf("%s %s asks no plugin before it takes what all have done: a plugin that comes after this one is not noticed", runtime, version)
		var events api.EventMask
		return *events.Set(api.Event_CREATE_CONTAINER, api.Event_START_CONTAINER, api.Event_REMOVE_CONTAINER), nil
	}
	return 0, nil // everything that we handle
}

// firstToValidate are the versions of the engines since which plugins are asked about the whole adjustment (NRI 0.10).
// Older ones refuse the connection of a plugin that wants to be. Of CRI-O 1.34 has an older NRI, and 1.36 is known to have it.
var firstToValidate = map[quota.Engine][2]int{quota.EngineCRI: {2, 2}, quota.EngineCRIO: {1, 36}}

var majorMinor = regexp.MustCompile(`^v?(\d{1,4})\.(\d{1,4})`)

func validates(e quota.Engine, version string) bool {
	m := majorMinor.FindStringSubmatch(version)
	if m == nil {
		return true // of somebody's own making, and rather new
	}
	major, _ := strconv.Atoi(m[1]) // digits, and few
	minor, _ := strconv.Atoi(m[2])
	first := firstToValidate[e]
	return major > first[0] || major == first[0] && minor >= first[1]
}

func (p *Plugin) engineNow() quota.Engine {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.engine
}

func (p *Plugin) scope(e quota.Engine) string {
	switch {
	case p.set.Scope != "":
		return p.set.Scope
	case e == quota.EngineCRIO:
		return "/run/runc"
	}
	return "/run/containerd/runc/k8s.io"
}

func (p *Plugin) exempt(pod *api.PodSandbox) bool {
	return slices.Contains(p.set.Exempt, pod.GetNamespace())
}

// CreateContainer plans a container. An error fails its creation.
func (p *Plugin) CreateContainer(ctx context.Context, pod *api.PodSandbox, ctr *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if p.exempt(pod) {
		p.remember(ctr.GetId(), verdict{exempt: true})
		return nil, nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	v, err := p.create(ctx, pod, ctr)
	if err != nil {
		if p.set.FailOpen && errors.Is(err, gpufence.ErrUnreachable) {
			p.log.Warnf("%s (%s/%s started WITHOUT ANY LIMIT: fail-open = true)", sentence(err), pod.GetName(), ctr.GetName())
			p.remember(ctr.GetId(), verdict{exempt: true})
			return nil, nil, nil
		}
		p.log.Warnf("%s/%s/%s: %s", pod.GetNamespace(), pod.GetName(), ctr.GetName(), sentence(err))
		return nil, nil, errors.New(sentence(err))
	}
	p.remember(ctr.GetId(), v)
	return v.adjust, nil, nil
}

func sentence(err error) string {
	s := strings.Join(strings.Fields(err.Error()), " ")
	if strings.HasPrefix(s, "gpufence: ") {
		return s
	}
	return "gpufence: " + s
}

func (p *Plugin) create(ctx context.Context, pod *api.PodSandbox, ctr *api.Container) (verdict, error) {
	engine := p.engineNow()
	c := readContainer(engine, pod, ctr)
	c.input.HookPath = p.set.HookPath
	c.input.HookArgs = []string{
		"--config", p.set.ConfigPath, "--socket", p.set.Socket,
		"--engine", string(engine), "--scope", p.scope(engine),
	}
	request, err := plan.Ask(c.input, p.set.Policy)
	if p.set.PolicyErr != nil && (err != nil || request.Action == plan.ActionPrepare) {
		return verdict{}, p.set.PolicyErr
	}
	if err != nil {
		return verdict{}, err
	}
	notices := request.Notices
	defer func() {
		for _, n := range notices {
			p.log.Infof("%s/%s/%s: %s", pod.GetNamespace(), pod.GetName(), ctr.GetName(), n)
		}
	}()
	if request.Action == plan.ActionSkip {
		return verdict{exempt: true}, nil
	}
	var prepared plan.Prepared
	if request.Action == plan.ActionPrepare {
		if err := foreign(c.input); err != nil {
			return verdict{}, err
		}
		var more []string
		if prepared, more, err = p.prepare(ctx, &c, request); err != nil {
			return verdict{}, err
		}
		notices = append(notices, more...)
		if len(request.Claimed) > 0 && len(prepared.Grant.GPUs) == 0 {
			notices = append(notices, plan.Unclaimed(request.Claimed))
		}
	}
	edits, err := plan.Plan(c.input, request, prepared)
	if err != nil {
		return verdict{}, err
	}
	adjust, err := render(ctr, edits, prepared.Grant, place{shimDir: c.shimDir, runDir: filepath.Clean(p.set.RunDir), specs: p.set.CDISpecDirs, majors: p.set.Majors})
	if err != nil {
		return verdict{}, err
	}
	devices := slices.Clone(c.input.Devices)
	for _, d := range adjust.GetLinux().GetDevices() {
		devices = append(devices, nodeOf(d))
	}
	return verdict{adjust: adjust, devices: devices, names: c.input.Injected, exempt: request.Mode != quota.ModeEnforce}, nil
}

// foreign refuses another library that accounts for GPUs.
func foreign(in plan.Input) error {
	where := ""
	for _, m := range in.Mounts {
		if strings.HasPrefix(filepath.Base(m.Destination), "libvgpu.so") {
			where = "the mount at " + m.Destination
		}
	}
	for _, e := range in.Env {
		if v, ok := strings.CutPrefix(e, "LD_PRELOAD="); ok && strings.Contains(v, "libvgpu.so") {
			where = "LD_PRELOAD"
		}
	}
	if where == "" {
		return nil
	}
	return quota.NewError(quota.CodeForeignPreload, "HAMi's library is in the container (%s), and two of its kind cannot share a process", where).
		WithHint("let one of the two manage the pod")
}

// prepare gets the grant within NRI's time.
func (p *Plugin) prepare(ctx context.Context, c *container, r plan.Request) (plan.Prepared, []string, error) {
	enforce := r.Mode == quota.ModeEnforce
	mayGoOn := !enforce || len(r.Claimed) > 0 && r.NoGPU == nil
	if mayGoOn {
		var cancel context.CancelFunc
		limit := claimTime
		if enforce {
			limit = answerTime
		}
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	answer, err := p.daemon.Prepare(ctx, p.request(c, r))
	if err != nil {
		if !enforce || mayGoOn && errors.Is(err, gpufence.ErrUnreachable) {
			return plan.Prepared{}, []string{sentence(err)}, nil
		}
		return plan.Prepared{}, nil, err
	}
	prepared := plan.Prepared{Grant: answer.Grant, CDIDevices: answer.CDIDevices, Env: answer.Env}
	for _, f := range answer.Files {
		prepared.Files = append(prepared.Files, plan.File{Source: f.Source, Destination: f.Destination, Writable: f.Writable, Over: f.Over})
	}
	return prepared, answer.Notices, nil
}

func (p *Plugin) request(c *container, r plan.Request) gpufence.PrepareRequest {
	ours := map[string]string{}
	for k, v := range c.input.Annotations {
		if quota.Ours(k) {
			ours[k] = v
		}
	}
	return gpufence.PrepareRequest{
		Key: p.key(c), Pod: c.pod, ContainerName: c.input.Container,
		Annotations: ours, Env: quota.OurEnv(c.input.Env),
		Devices: gpufence.DeviceRequest{Selectors: r.Selectors, Present: r.Present, Claimed: r.Claimed},
		ShimDir: c.shimDir, TerminationLog: c.terminationLog, Privileged: c.input.Privileged,
	}
}

func (p *Plugin) key(c *container) gpufence.ContainerKey {
	return gpufence.ContainerKey{Engine: c.input.Engine, Scope: p.scope(c.input.Engine), ID: c.input.ID}
}

func (p *Plugin) remember(id string, v verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.pending) >= maxPending {
		clear(p.pending) // of containers whose creation failed; the rest is refused, and tried again
	}
	p.pending[id] = v
}

// ValidateContainerAdjustment looks at what all plugins together made of a container.
func (p *Plugin) ValidateContainerAdjustment(_ context.Context, req *api.ValidateContainerAdjustmentRequest) error {
	id := req.GetContainer().GetId()
	p.mu.Lock()
	v, ok := p.pending[id]
	delete(p.pending, id)
	p.mu.Unlock()
	var err error
	switch {
	case !ok && p.exempt(req.GetPod()):
	case !ok:
		err = quota.NewError(quota.CodeMountConflict, "the container was adjusted before gpufence's NRI plugin was there").WithHint("it is created again by itself")
	case !v.exempt:
		err = validate(v, req.GetAdjust())
	}
	if err != nil {
		p.log.Warnf("%s/%s/%s: %s", req.GetPod().GetNamespace(), req.GetPod().GetName(), req.GetContainer().GetName(), sentence(err))
		return errors.New(sentence(err))
	}
	return nil
}

// validate compares what is left of our adjustment with it, and looks for GPUs that we do not know.
func validate(v verdict, all *api.ContainerAdjustment) error {
	lost := func(what string) error {
		return quota.NewError(quota.CodeMountConflict, "another NRI plugin changed %s, which gpufence had set", what).
			WithHint("give gpufence's plugin the higher index, or let the other leave the pod alone")
	}
	env := map[string]string{}
	for _, e := range all.GetEnv() {
		env[e.GetKey()] = e.GetValue()
	}
	for _, e := range v.adjust.GetEnv() {
		if _, removed := e.IsMarkedForRemoval(); removed {
			continue
		}
		if got, ok := env[e.GetKey()]; !ok || got != e.GetValue() {
			return lost("the variable " + e.GetKey())
		}
	}
	mounts := map[string]string{}
	for _, m := range all.GetMounts() {
		mounts[m.GetDestination()] = m.GetSource()
	}
	for _, m := range v.adjust.GetMounts() {
		if _, removed := m.IsMarkedForRemoval(); removed {
			continue
		}
		if mounts[m.GetDestination()] != m.GetSource() {
			return lost("the mount at " + m.GetDestination())
		}
	}
	for _, stage := range []struct{ ours, all []*api.Hook }{
		{v.adjust.GetHooks().GetCreateRuntime(), all.GetHooks().GetCreateRuntime()},
		{v.adjust.GetHooks().GetPoststop(), all.GetHooks().GetPoststop()},
	} {
		for _, h := range stage.ours {
			if !slices.ContainsFunc(stage.all, func(o *api.Hook) bool { return o.GetPath() == h.GetPath() && slices.Equal(o.GetArgs(), h.GetArgs()) }) {
				return lost("the hook " + h.GetPath())
			}
		}
	}
	var added []string
	for _, d := range all.GetLinux().GetDevices() {
		if node := nodeOf(d); !slices.Contains(v.devices, node) {
			added = append(added, node)
		}
	}
	added = plan.GPUNodes(added)
	var names []string
	for _, d := range all.GetCDIDevices() {
		if !slices.Contains(v.names, d.GetName()) {
			names = append(names, d.GetName())
		}
	}
	if added = append(added, plan.GPUNames(names)...); len(added) > 0 {
		return unplanned(added)
	}
	return nil
}

func unplanned(gpus []string) error {
	return quota.NewError(quota.CodeMountConflict, "another NRI plugin puts the GPU %s into the container, of which gpufence did not know", strings.Join(gpus, ", ")).
		WithHint("give gpufence's plugin the higher index, or let a device plugin hand the GPU out")
}

// StartContainer lets nothing start that gpufenced should know and does not: our hook was taken away,
// or its failure was.
func (p *Plugin) StartContainer(ctx context.Context, pod *api.PodSandbox, ctr *api.Container) error {
	if p.exempt(pod) {
		return nil
	}
	c := readContainer(p.engineNow(), pod, ctr)
	request, err := plan.Ask(c.input, p.set.Policy)
	switch {
	case err != nil && len(plan.GPUNodes(c.input.Devices))+len(plan.GPUNames(c.input.Injected)) > 0:
		// It would have been refused, so that we were away when it was created, or policy has changed since: of one that
		// gpufenced knows that is no reason.
	case err != nil || request.Action != plan.ActionPrepare || request.Mode != quota.ModeEnforce || len(request.Claimed) > 0:
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	known, err := p.daemon.Containers(ctx)
	if err == nil {
		err = unregistered(p.key(&c), known)
	}
	switch {
	case err == nil:
		return nil
	case p.set.FailOpen && errors.Is(err, gpufence.ErrUnreachable):
		p.log.Warnf("%s (started WITHOUT ANY LIMIT: fail-open = true)", sentence(err))
		return nil
	}
	p.log.Warnf("%s/%s/%s: %s", pod.GetNamespace(), pod.GetName(), ctr.GetName(), sentence(err))
	return errors.New(sentence(err))
}

func unregistered(key gpufence.ContainerKey, known []gpufence.Container) error {
	for _, k := range known {
		if k.Key == key && k.State == "running" {
			return nil
		}
	}
	return quota.NewError(quota.CodeNotPrepared, "container %.20s has a GPU and was not registered before its start", key.ID).
		WithHint("see whether the engine's NRI rejects OCI hooks (reject_oci_hook_adjustment), or install the runtime wrapper")
}

// RemoveContainer gives back what was promised to a container that never started: one that we, another plugin or
// the engine refused after it was planned. The engine removes those, too.
func (p *Plugin) RemoveContainer(ctx context.Context, pod *api.PodSandbox, ctr *api.Container) error {
	p.mu.Lock()
	delete(p.pending, ctr.GetId())
	p.mu.Unlock()
	if p.exempt(pod) {
		return nil
	}
	c := readContainer(p.engineNow(), pod, ctr)
	request, err := plan.Ask(c.input, p.set.Policy)
	if err != nil || request.Action != plan.ActionPrepare {
		return nil // nothing was prepared for what is refused before that
	}
	ctx, cancel := context.WithTimeout(ctx, claimTime)
	defer cancel()
	// For one that ran it is the second time, which is no error; one that still runs stays.
	if err := p.daemon.Unregister(ctx, gpufence.UnregisterRequest{Key: p.key(&c)}); err != nil {
		p.log.Warnf("%s/%s/%s: if anything was promised to it, that stays until it expires: %s", pod.GetNamespace(), pod.GetName(), ctr.GetName(), sentence(err))
	}
	return nil
}

// nriLog is our log as NRI's.
type nriLog struct{ log logrus.FieldLogger }

func (l nriLog) Debugf(_ context.Context, format string, args ...any) { l.log.Debugf(format, args...) }
func (l nriLog) Infof(_ context.Context, format string, args ...any)  { l.log.Debugf(format, args...) }
func (l nriLog) Warnf(_ context.Context, format string, args ...any)  { l.log.Warnf(format, args...) }
func (l nriLog) Errorf(_ context.Context, format string, args ...any) { l.log.Errorf(format, args...) }
