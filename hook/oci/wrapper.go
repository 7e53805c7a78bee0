// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	cdispec "github.com/gpufence/gpufence/hook/cdi"
	"github.com/gpufence/gpufence/hook/plan"
)

// Settings are the parts of config.toml that wrapper and hook go by.
type Settings struct {
	Policy      quota.Policy
	ConfigPath  string // absolute; the hook reads the same file
	Socket      string
	RunDir      string
	Runtimes    []string
	HookPath    string // "": beside the wrapper
	CDISpecDirs []string
	WaitSocket  time.Duration // how long to wait for somebody to listen on Socket
	// FailOpen lets a container start without a limit where gpufenced does not answer.
	FailOpen bool
	// Notice is said with every container that is created: that config.toml is wrong, and what
	// was last in force of it holds.
	Notice string
}

// answerTime is what gpufenced has for its answer once it accepted the connection: admission
// waits up to 5 s for memory of exited processes.
const answerTime = 10 * time.Second

// bestEffortTime bounds what a start may spend on a gpufenced that it does not depend on.
const bestEffortTime = 250 * time.Millisecond

// chainVar tells a copy of the wrapper that another wrapper called it in the same process
// (exec keeps the pid), which we had called before: it must not call that one again.
const chainVar = "GPUFENCE_CHAIN"

// Wrapper is one call of gpufence-runtime.
type Wrapper struct {
	Args     []string // os.Args
	Env      []string
	Stderr   io.Writer
	Settings Settings
	// SettingsErr says that config.toml is wrong, and Settings are the defaults: no container
	// with a GPU is created; everything else works.
	SettingsErr error

	// Exec replaces the process; it returns only if that failed.
	Exec func(path string, argv, env []string) error
}

// Run does what the command line asks for. It returns the exit status if the process was not
// replaced by the low-level runtime.
func (w Wrapper) Run(ctx context.Context) int {
	if len(w.Args) == 0 {
		w.Args = []string{programPrefix}
	}
	cmd, err := ParseArgs(w.Args[1:])
	engine, known := engineOf(w.Args[0])
	log := runtimeLog{path: cmd.Log, json: cmd.LogFormat == "json", engine: engine, stderr: w.Stderr, now: time.Now}
	if err == nil && !known && cmd.Creates() {
		err = quota.NewError(quota.CodeUsage, "the wrapper was started as %s, and no engine has that suffix", filepath.Base(w.Args[0])).
			WithHint("install it again with `gpufence install`")
	}

	runtime, lookupErr := w.lookup().find()
	if lookupErr != nil {
		log.failed(Sentence(lookupErr))
		return 1
	}
	if err == nil && cmd.Creates() {
		if w.Settings.Notice != "" {
			log.notice(Sentence(fmt.Errorf("%s", w.Settings.Notice)))
		}
		err = w.create(ctx, cmd, engine, log)
	}
	if err != nil && w.Settings.failsOpen(err) {
		log.notice(Sentence(err) + " (started WITHOUT ANY LIMIT: fail-open = true)")
		err = nil
	}
	if err != nil {
		if w.mode(err) == quota.ModeEnforce {
			log.failed(Sentence(err))
			return 1
		}
		log.notice(Sentence(err) + " (started as it is: mode " + string(w.mode(err)) + ")")
	}
	argv := append([]string{runtime}, w.Args[1:]...)
	if err := w.Exec(runtime, argv, w.childEnv(runtime)); err != nil {
		log.failed(Sentence(quota.NewError(quota.CodeRuntimeExec, "cannot execute the low-level runtime %s: %w", runtime, err)))
	}
	return 1
}

// failsOpen says whether an error is no reason to hold a container up.
func (s Settings) failsOpen(err error) bool {
	return s.FailOpen && errors.Is(err, api.ErrUnreachable)
}

// modeError carries the mode that holds for the container which failed.
type modeError struct {
	error
	mode quota.Mode
}

func (e modeError) Unwrap() error { return e.error }

// mode is how a failure counts: by the container's namespace once that is known, by the whole
// node's policy before. Without a policy it counts.
func (w Wrapper) mode(err error) quota.Mode {
	if w.SettingsErr != nil {
		return quota.ModeEnforce
	}
	mode := w.Settings.Policy.Mode
	if e, ok := err.(modeError); ok { //nolint:errorlint // it is only ever the outermost
		mode = e.mode
	}
	if mode == quota.ModeObserve || mode == quota.ModeWarn {
		return mode
	}
	return quota.ModeEnforce
}

// engineOf reads the engine from the name that the wrapper was started by.
func engineOf(arg0 string) (quota.Engine, bool) {
	_, suffix, found := strings.Cut(filepath.Base(arg0), ".")
	if !found {
		return quota.EngineOCI, true
	}
	switch e := quota.Engine(suffix); e {
	case quota.EngineCRI, quota.EngineCRIO, quota.EngineDocker, quota.EnginePodman:
		return e, true
	}
	return quota.EngineOCI, false
}

func (w Wrapper) getenv(name string) string {
	for _, e := range w.Env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}

func (w Wrapper) lookup() lookup {
	l := lookup{names: w.Settings.Runtimes, path: w.getenv("PATH"), extra: []string{operatorDir}}
	// Without it we still know ourselves by name.
	if self, err := os.Stat("/proc/self/exe"); err == nil {
		l.self = self
	}
	l.onlyRuncish = w.getenv(chainVar) == strconv.Itoa(os.Getpid())
	return l
}

// childEnv is the environment as it came, unless the runtime is a wrapper that may call us.
func (w Wrapper) childEnv(runtime string) []string {
	if isTerminal(runtime) && w.getenv(chainVar) == "" {
		return w.Env
	}
	var env []string
	for _, e := range w.Env {
		if !strings.HasPrefix(e, chainVar+"=") {
			env = append(env, e)
		}
	}
	if !isTerminal(runtime) {
		env = append(env, chainVar+"="+strconv.Itoa(os.Getpid()))
	}
	return env
}

// create plans the container and rewrites its config.json.
func (w Wrapper) create(ctx context.Context, cmd Command, engine quota.Engine, log runtimeLog) error {
	cwd, err := os.Getwd()
	if err != nil {
		return quota.NewError(quota.CodeNotABundle, "the working directory is gone: %w", err)
	}
	doc, err := readDocument(cmd.ConfigPath(cwd))
	if err != nil {
		return err
	}
	c, err := readContainer(doc, engine, cmd.ID, cmd.BundleDir(cwd))
	if err != nil {
		return err
	}
	c.unhooked = cmd.Name == "restore" && w.restoresUnhooked()
	key := api.ContainerKey{Engine: engine, Scope: scopeOf(cmd), ID: cmd.ID}
	edited, notices, err := w.fence(ctx, key, c, doc, cmd.BundleDir(cwd))
	for _, n := range once(notices) {
		log.notice(Sentence(fmt.Errorf("%s", n)))
	}
	if err == nil && edited {
		err = doc.write()
	}
	if err != nil {
		return modeError{err, w.Settings.Policy.For(c.pod.Namespace).Mode}
	}
	return nil
}

// once leaves out what was said already: gpufenced finds what the plan found, too.
func once(notices []string) []string {
	var out []string
	for _, n := range notices {
		if !slices.ContainsFunc(out, func(o string) bool { return Sentence(errors.New(o)) == Sentence(errors.New(n)) }) {
			out = append(out, n)
		}
	}
	return out
}

// fence asks, prepares, plans, and edits the document, unless the container does not concern us; nothing
// on disk is touched.
func (w Wrapper) fence(ctx context.Context, key api.ContainerKey, c container, doc *document, bundle string) (edited bool, notices []string, err error) {
	c.input.HookPath = w.hookPath()
	c.input.HookArgs = []string{
		"--config", w.Settings.ConfigPath, "--socket", w.Settings.Socket,
		"--engine", string(c.input.Engine), "--scope", key.Scope,
	}
	request, err := plan.Ask(c.input, w.Settings.Policy)
	if w.SettingsErr != nil {
		if err != nil || request.Action == plan.ActionPrepare {
			return false, nil, w.SettingsErr
		}
		notices = []string{Sentence(w.SettingsErr)}
	}
	if err != nil {
		return false, nil, err
	}
	notices = append(notices, request.Notices...)
	// What is waited for gpufenced's answer is time to read in, unless something is written meanwhile,
	// such as gpufenced's own specification when it has just been started.
	text, dirs := doc.root.bytes(), w.Settings.CDISpecDirs
	early := sync.OnceValue(func() *injection { return readInjection(text, dirs) })
	if request.Action == plan.ActionPrepare && request.Mode == quota.ModeEnforce && !request.Present {
		go early()
	}
	now := func() *injection {
		if in := early(); in.read == cdispec.State(dirs) {
			return in
		}
		return readInjection(text, dirs)
	}
	var prepared plan.Prepared
	switch request.Action {
	case plan.ActionSkip:
		return false, notices, nil
	case plan.ActionAlone:
	case plan.ActionPrepare:
		var more []string
		prepared, more, err = w.prepare(ctx, &c, request, key, bundle)
		notices = append(notices, more...)
		if err != nil {
			return false, notices, err
		}
	default:
		return false, notices, quota.NewError(quota.CodeInternal, "the plan's action %q is unknown", request.Action)
	}
	if len(request.Claimed) > 0 && len(prepared.Grant.GPUs) == 0 {
		notices = append(notices, plan.Unclaimed(request.Claimed))
	}
	edits, err := plan.Plan(c.input, request, prepared)
	if err != nil {
		return false, notices, err
	}
	if len(edits.Hooks) > 0 && c.unhooked && request.Mode == quota.ModeEnforce {
		return false, notices, quota.NewError(quota.CodeRuntimeExec, "the low-level runtime runs no hooks when it restores, so that the container would not be held to its limit").
			WithHint("restore it with runc: name that first under `runtimes` in config.toml")
	}
	if len(edits.Hooks) > 0 {
		if err := checkHook(c.input.HookPath); err != nil {
			return false, notices, err
		}
	}
	p := place{shimDir: c.shimDir, runDir: w.Settings.RunDir, specs: w.Settings.CDISpecDirs, injection: now}
	if edits.DenyDevices {
		if p.majors, err = hostMajors(); err != nil {
			return false, notices, err
		}
	}
	return true, notices, render(doc.root, edits, p)
}

// prepare gets the grant. Where the mode is not enforce, gpufenced is told if it listens, and
// nothing depends on it.
func (w Wrapper) prepare(ctx context.Context, c *container, r plan.Request, key api.ContainerKey, bundle string) (plan.Prepared, []string, error) {
	enforce := r.Mode != quota.ModeObserve && r.Mode != quota.ModeWarn
	// Without gpufenced a container that only claims a GPU has none, and starts.
	mayGoOn := !enforce || len(r.Claimed) > 0 && r.NoGPU == nil
	wait, limit := w.Settings.WaitSocket, w.Settings.WaitSocket+answerTime
	switch {
	case !enforce:
		wait, limit = 0, bestEffortTime
	case mayGoOn:
		wait = 0
	}
	if err := w.readImage(c); err != nil {
		return plan.Prepared{}, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answer, err := api.NewClient(w.Settings.Socket, wait).Prepare(ctx, prepareRequest(c, r, key, bundle))
	if err != nil {
		if !enforce || mayGoOn && errors.Is(err, api.ErrUnreachable) {
			return plan.Prepared{}, []string{Sentence(err)}, nil
		}
		return plan.Prepared{}, nil, err
	}
	prepared := plan.Prepared{Grant: answer.Grant, CDIDevices: answer.CDIDevices, Env: answer.Env}
	for _, f := range answer.Files {
		prepared.Files = append(prepared.Files, plan.File{Source: f.Source, Destination: f.Destination, Writable: f.Writable, Over: f.Over})
	}
	return prepared, answer.Notices, nil
}

// readImage reads what only a container with a GPU needs, and refuses where we cannot work.
func (w Wrapper) readImage(c *container) error {
	if rootless() {
		return quota.NewError(quota.CodeRootless, "a container with a GPU needs a rootful engine: this one runs without root, or in a user namespace").
			WithHint("start it with sudo, or under the system's engine")
	}
	if c.input.Engine.Kubernetes() && c.pod.ID == "" {
		return quota.NewError(quota.CodeSpecInvalid, "config.json lacks the annotations of a pod's container, which engine %s writes", c.input.Engine).
			WithHint("call gpufence-runtime without suffix for containers outside Kubernetes")
	}
	if err := checkForeign(c.input.Env, c.input.Mounts); err != nil {
		return err
	}
	if c.rootfs == "" {
		c.input.ImageLoader = plan.LoaderUnknown
		return nil
	}
	im := image{root: c.rootfs, mounts: c.input.Mounts}
	var err error
	if c.input.ImagePreload, err = im.preload(w.Settings.RunDir); err != nil {
		return err
	}
	c.input.ImageLoader = im.loader(c.args, c.input.Env, c.cwd)
	c.narrowLib = im.narrowLib()
	return nil
}

func prepareRequest(c *container, r plan.Request, key api.ContainerKey, bundle string) api.PrepareRequest {
	ours := map[string]string{}
	for k, v := range c.input.Annotations {
		if quota.Ours(k) {
			ours[k] = v
		}
	}
	req := api.PrepareRequest{
		NarrowLib: c.narrowLib,
		Key:       key, Pod: c.pod, ContainerName: c.name, Bundle: bundle,
		Annotations:    ours,
		Env:            quota.OurEnv(c.input.Env),
		Devices:        api.DeviceRequest{Selectors: r.Selectors, Present: r.Present, Claimed: r.Claimed},
		ImagePreload:   c.input.ImagePreload,
		ShimDir:        c.shimDir,
		TerminationLog: c.terminationLog,
		Privileged:     c.input.Privileged,
	}
	if l := c.input.ImageLoader; l == plan.LoaderMusl || l == plan.LoaderStatic {
		req.ShimAbsent = string(l)
	}
	return req
}

// defaultScope is the scope of a runtime that was given no root.
const defaultScope = "default"

// scopeOf is within what ids are unique: the runtime's root, which containerd makes by namespace.
func scopeOf(cmd Command) string {
	if cmd.Root == "" {
		return defaultScope
	}
	if abs, err := filepath.Abs(cmd.Root); err == nil {
		return abs
	}
	return cmd.Root
}

// hookPath is where gpufence-hook should be: as configured, or beside us.
func (w Wrapper) hookPath() string {
	if w.Settings.HookPath != "" {
		return w.Settings.HookPath
	}
	self, err := os.Executable()
	if err != nil {
		return "gpufence-hook" // checkHook refuses it
	}
	return filepath.Join(filepath.Dir(self), "gpufence-hook")
}

// restoresUnhooked says whether the low-level runtime may make a restored container without running its hooks: crun does, of
// youki nobody has looked. What wraps another hands restore on to the one that is there.
func (w Wrapper) restoresUnhooked() bool {
	runtime, err := w.lookup().find()
	if err == nil {
		runtime, err = filepath.EvalSymlinks(runtime)
	}
	return err != nil || slices.Contains([]string{"crun", "youki"}, filepath.Base(runtime))
}

// checkHook says in our words what the runtime would say in its own later.
func checkHook(path string) error {
	info, err := os.Stat(path)
	if err != nil || !filepath.IsAbs(path) || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return quota.NewError(quota.CodeRuntimeExec, "gpufence-hook is not at %s, or is no program", path).
			WithHint("install it there, or set hook-path in config.toml")
	}
	return nil
}

// rootless says whether we lack root on the host: another user, or root of a user namespace.
func rootless() bool {
	if os.Geteuid() != 0 {
		return true
	}
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return false // a kernel without user namespaces
	}
	fields := strings.Fields(string(text))
	return len(fields) != 3 || fields[0] != "0" || fields[1] != "0" || fields[2] != "4294967295"
}

func hostMajors() ([]int64, error) {
	f, err := os.Open("/proc/devices")
	if err != nil {
		return nil, quota.NewError(quota.CodeInternal, "cannot read the kernel's device numbers: %w", err)
	}
	defer f.Close()
	return nvidiaMajors(f), nil
}
