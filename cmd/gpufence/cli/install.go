// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
	"github.com/gpufence/gpufence/packaging/engine/containerd"
	"github.com/gpufence/gpufence/packaging/engine/crio"
	"github.com/gpufence/gpufence/packaging/engine/docker"
	"github.com/gpufence/gpufence/packaging/engine/host"
	"github.com/gpufence/gpufence/packaging/engine/podman"
)

// engineKind is what install knows of an engine.
type engineKind struct {
	config    string
	daemon    string // its program
	suffix    string // of gpufence-runtime's name
	install   func(engine.Files, engine.Request) (engine.Plan, error)
	uninstall func(engine.Files, engine.Request) (engine.Plan, error)
}

const (
	kindContainerd = "containerd"
	kindCRIO       = "crio"
	kindDocker     = "docker"
	kindPodman     = "podman"
)

var engineKinds = map[string]engineKind{
	kindContainerd: {containerd.DefaultConfig, "containerd", "cri", containerd.Install, containerd.Uninstall},
	kindCRIO:       {crio.DefaultConfig, "crio", "crio", crio.Install, crio.Uninstall},
	kindDocker:     {docker.DefaultConfig, "dockerd", "docker", docker.Install, docker.Uninstall},
	kindPodman:     {podman.DefaultConfig, "podman", "podman", podman.Install, podman.Uninstall},
}

// installFlags are the flags of both commands; nvidia-ctk's names where it has them.
type installFlags struct {
	kind, config, dropIn, source    string
	handler, wrapper, wrap          string
	setDefault, cdi, dryRun, hooks  bool
	restart, unit, engineSocket     string
	program, version, check, prefix string
	force, drain                    bool
	drainTimeout                    time.Duration
}

func (a *app) install() *cobra.Command {
	var f installFlags
	cmd := &cobra.Command{
		Use:   "install --runtime containerd|crio|docker|podman",
		Short: "make a container engine know gpufence-runtime",
		Long: "install tells a container engine of gpufence-runtime, under the name gpufence. It changes as little of\n" +
			"the engine's configuration as it can, keeps a copy of what it changes, shows the result to the engine's\n" +
			"own loader before it is put in place, and does nothing where everything is as it should be.",
		Example: "  gpufence install --runtime containerd --dry-run\n" +
			"  gpufence install --runtime containerd --restart-mode systemd\n" +
			"  gpufence install --runtime docker --wrap nvidia",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.runInstall(cmd.Context(), f) },
	}
	f.add(cmd)
	p := cmd.Flags()
	p.BoolVar(&f.setDefault, "set-as-default", false, "make it the engine's default runtime")
	p.BoolVar(&f.cdi, "cdi.enabled", false, "switch the engine's own CDI support on")
	p.BoolVar(&f.hooks, "hooks", false, "podman: a hook, too, that fences containers which have an annotation of ours and another runtime")
	p.StringVar(&f.wrap, "wrap", "", "put gpufence-runtime also in front of a runtime that is there, such as nvidia, so that no manifest changes")
	p.StringVar(&f.source, "config-source", "file", "where the engine's configuration is read from: file, or command (`containerd config dump`)")
	p.StringVar(&f.prefix, "install-dir", "", "put the programs there first, such as /opt/gpufence where /usr is read-only")
	return cmd
}

func (a *app) uninstall() *cobra.Command {
	var f installFlags
	cmd := &cobra.Command{
		Use:   "uninstall --runtime containerd|crio|docker|podman",
		Short: "make a container engine forget gpufence-runtime",
		Long: "uninstall takes out of a container engine's configuration what install put in, and leaves the rest as it\n" +
			"is. It refuses while containers use the runtime. The programs stay: the package, or you, remove them.",
		Example:           "  gpufence uninstall --runtime containerd --drain --restart-mode systemd",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.runUninstall(cmd.Context(), f) },
	}
	f.add(cmd)
	p := cmd.Flags()
	p.BoolVar(&f.drain, "drain", false, "wait until no container uses the runtime")
	p.DurationVar(&f.drainTimeout, "drain-timeout", 0, "how long --drain waits (default: for ever)")
	p.BoolVar(&f.force, "force", false, "go on although containers use the runtime")
	p.StringVar(&f.prefix, "install-dir", "", "where install put the programs")
	return cmd
}

func (f *installFlags) add(cmd *cobra.Command) {
	p := cmd.Flags()
	p.StringVar(&f.kind, "runtime", "", "the container engine: containerd, crio, docker, podman")
	p.StringVar(&f.config, "config", "", "the engine's main file (default: where it is on this node)")
	p.StringVar(&f.dropIn, "drop-in-config", "", "our file (default: "+containerd.DropInName+" or so in the engine's folder)")
	p.StringVar(&f.handler, "runtime-name", engine.DefaultHandler, "the runtime's name, which a RuntimeClass or --runtime names")
	p.StringVar(&f.wrapper, "runtime-path", "", "gpufence-runtime with the engine's suffix (default: beside gpufence)")
	p.BoolVar(&f.dryRun, "dry-run", false, "print what would change, as a patch, and change nothing")
	p.StringVar(&f.restart, "restart-mode", "none", "how the engine reads its configuration again: none, systemd, signal")
	p.StringVar(&f.unit, "restart-unit", "", "systemd's unit of the engine")
	p.StringVar(&f.engineSocket, "engine-socket", "", "the engine's socket, for --restart-mode signal")
	p.StringVar(&f.program, "executable-path", "", "the engine's program (default: the one that runs, or in PATH)")
	p.StringVar(&f.version, "engine-version", "", "the engine's version where it cannot be asked")
	p.StringVar(&f.check, "validate", "auto", "show the result to the engine's loader: auto (where there is one), always, never")
	for name, words := range map[string][]string{
		"runtime": {kindContainerd, kindCRIO, kindDocker, kindPodman}, "restart-mode": {"none", "systemd", "signal"}, "validate": {"auto", "always", "never"},
	} {
		if err := cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the flag was added above
		}
	}
}

// job is one installation or its opposite, with everything found out.
type job struct {
	installFlags
	engineKind
	request  engine.Request
	programs host.Programs
}

func oneOf(flag, value string, words ...string) error {
	if slices.Contains(words, value) {
		return nil
	}
	return usagef("--%s takes %s, not %q", flag, strings.Join(words, ", "), value)
}

func (f installFlags) job(ctx context.Context) (*job, error) {
	kind, ok := engineKinds[f.kind]
	if !ok {
		return nil, oneOf("runtime", f.kind, kindContainerd, kindCRIO, kindDocker, kindPodman)
	}
	if err := errors.Join(oneOf("restart-mode", f.restart, "none", "systemd", "signal"), oneOf("validate", f.check, "auto", "always", "never"),
		oneOf("config-source", cmp.Or(f.source, "file"), "file", "command")); err != nil {
		return nil, err
	}
	if f.dropIn != "" && f.kind == kindDocker {
		return nil, usagef("dockerd reads no second file: --drop-in-config is for the other engines")
	}
	exe, err := os.Executable()
	if err == nil {
		exe, err = filepath.EvalSymlinks(exe)
	}
	if err != nil {
		return nil, quota.NewError(quota.CodeEnginePrograms, "the folder of gpufence's programs cannot be found: %w", err).WithHint("is /proc mounted?")
	}
	j := &job{installFlags: f, engineKind: kind}
	j.programs = host.Programs{From: filepath.Dir(exe), Prefix: f.prefix, Version: api.BuildVersion, Suffix: kind.suffix}
	if j.program == "" {
		j.program = host.Find(kind.daemon)
	} else if !host.Runs(j.program) {
		return nil, usagef("--executable-path %q is no program that can be run", j.program)
	}
	j.request = engine.Request{
		Config: cmp.Or(f.config, kind.defaultConfig()), DropIn: f.dropIn, Handler: f.handler, Wrapper: cmp.Or(f.wrapper, j.programs.Wrapper()),
		Default: f.setDefault, CDI: f.cdi, Wrap: f.wrap,
	}
	switch {
	case f.hooks && f.kind != kindPodman:
		return nil, usagef("--hooks is for podman: %s has no hook that sees a container's configuration", f.kind)
	case f.hooks:
		j.request.Hook = filepath.Join(filepath.Dir(j.request.Wrapper), "gpufence-hook")
	}
	if f.prefix != "" && !filepath.IsAbs(f.prefix) {
		return nil, usagef("--install-dir %q is not absolute", f.prefix)
	}
	switch {
	case f.version != "":
		if j.request.Major = host.MajorOf(f.version); j.request.Major == 0 {
			return nil, usagef("--engine-version %q is no version such as 1.7.27", f.version)
		}
	case j.program != "" && f.kind == kindContainerd:
		j.request.Major = host.Major(ctx, j.program)
	}
	if f.source == "command" {
		if j.program == "" {
			return nil, usagef("--config-source command needs the engine's program, which was not found: give --executable-path")
		}
		dump, err := host.Dump(ctx, f.kind, j.program, j.request.Config)
		if err != nil {
			return nil, err
		}
		if err := toml.Unmarshal(dump, &j.request.Source); err != nil {
			return nil, quota.NewError(quota.CodeEngineUnread, "what %s says of its configuration is not TOML: %w", f.kind, err).WithHint("leave --config-source at file")
		}
	}
	return j, j.request.Check()
}

// defaultConfig is the engine's usual file, or, where there is none, that of a distribution.
func (k engineKind) defaultConfig() string {
	if k.suffix != "cri" {
		return k.config
	}
	if _, err := os.Stat(k.config); errors.Is(err, fs.ErrNotExist) {
		for _, path := range containerd.Generated() {
			if _, err := os.Stat(path); err == nil {
				return path
			}
		}
	}
	return k.config
}

// validate shows a plan to the engine's loader, as --validate has it.
func (a *app) validate(ctx context.Context, j *job, plan engine.Plan, want map[string]string) error {
	if j.check == "never" || !plan.Differs() || j.kind == kindPodman {
		return nil
	}
	if j.program == "" {
		if j.check == "always" {
			return quota.NewError(quota.CodeEngineRefused, "there is no %s here to check the new configuration", j.daemon).WithHint("give --executable-path, or --validate auto")
		}
		a.note("there is no %s here to check the new configuration", j.daemon)
		return nil
	}
	note, err := host.Validate(ctx, j.kind, j.program, j.request, plan, want)
	if note != "" {
		a.note("%s", note)
	}
	return err
}

func (a *app) note(format string, args ...any) {
	fmt.Fprintf(a.stderr, "gpufence: note: "+format+"\n", args...)
}

func (a *app) runInstall(ctx context.Context, f installFlags) error {
	j, err := f.job(ctx)
	if err != nil {
		return err
	}
	plan, err := j.install(host.Disk{}, j.request)
	for _, n := range plan.Notes {
		a.note("%s", n)
	}
	if plan.Snippet != "" {
		fmt.Fprint(a.stdout, plan.Snippet)
	}
	if err != nil {
		return err
	}
	if (f.wrap != "" || f.setDefault) && (f.kind == kindContainerd || f.kind == kindCRIO) && plan.Differs() {
		a.note("pods that are to use every GPU, or are privileged, come through gpufence now, too (device plugin, DCGM, kube-proxy), and start without a limit only " +
			"where the node's policy lets them: give their namespaces mode = \"observe\"")
	}
	want := map[string]string{j.request.Handler: j.request.Wrapper}
	if j.wrap != "" {
		want[j.wrap] = j.request.Wrapper
	}
	if err := a.validate(ctx, j, plan, want); err != nil {
		return err
	}
	if f.dryRun {
		a.printPlan(plan)
		return nil
	}
	if f.wrapper == "" {
		did, err := j.programs.Place()
		for _, path := range did {
			fmt.Fprintf(a.stdout, "installed %s\n", path)
		}
		if err != nil {
			return err
		}
	}
	if err := host.Executable(j.request.Wrapper); err != nil {
		return err
	}
	if hook := j.request.Hook; hook != "" && !host.Runs(hook) {
		return quota.NewError(quota.CodeEnginePrograms, "the hook's program %s is not there, or cannot be run", hook).WithHint("put gpufence-hook beside gpufence-runtime")
	}
	return a.carryOut(ctx, j, plan)
}

func (a *app) printPlan(plan engine.Plan) {
	if !plan.Differs() {
		fmt.Fprintln(a.stderr, "gpufence: nothing would change")
	}
	for _, c := range plan.Changes {
		host.Diff(a.stdout, c)
	}
}

// carryOut writes, restarts where something changed, and takes back what the engine did not come
// back with.
func (a *app) carryOut(ctx context.Context, j *job, plan engine.Plan) error {
	restarter := host.Restarter{Mode: j.restart, Kind: j.kind, Unit: j.unit, Socket: j.engineSocket}
	if !plan.Differs() {
		fmt.Fprintln(a.stdout, "nothing to change")
		return nil
	}
	undo, err := host.Apply(plan)
	if err != nil {
		return err
	}
	for _, c := range plan.Changes {
		switch {
		case !c.Differs():
		case c.After == nil:
			fmt.Fprintf(a.stdout, "removed %s\n", c.Path)
		default:
			fmt.Fprintf(a.stdout, "wrote %s\n", c.Path)
		}
	}
	switch {
	case j.kind == kindPodman:
	case j.restart == "none":
		fmt.Fprintf(a.stdout, "%s reads it when it starts again: %s\n", j.kind, restarter.Hint())
	default:
		if err := restarter.Restart(ctx); err != nil {
			if back := undo(); back != nil {
				return errors.Join(err, back)
			}
			if again := restarter.Restart(ctx); again != nil {
				a.note("with its former configuration it did not come back either")
			}
			return err
		}
		fmt.Fprintf(a.stdout, "%s reads it now\n", j.kind)
	}
	return nil
}

func (a *app) runUninstall(ctx context.Context, f installFlags) error {
	j, err := f.job(ctx)
	if err != nil {
		return err
	}
	plan, err := j.uninstall(host.Disk{}, j.request)
	if err != nil {
		return err
	}
	for _, n := range plan.Notes {
		a.note("%s", n)
	}
	if err := a.validate(ctx, j, plan, nil); err != nil {
		return err
	}
	if f.dryRun {
		a.printPlan(plan)
		return nil
	}
	if plan.Differs() && !f.force {
		if err := a.unused(ctx, j, plan); err != nil {
			return err
		}
	}
	if err := a.carryOut(ctx, j, plan); err != nil {
		return err
	}
	return host.DropBackups(plan)
}

// unused refuses while containers have the runtime, or waits with --drain.
func (a *app) unused(ctx context.Context, j *job, plan engine.Plan) error {
	wrappers := engine.Union(host.WrappersIn(plan), j.request.Wrapper)
	var deadline <-chan time.Time
	if j.drainTimeout > 0 {
		t := time.NewTimer(j.drainTimeout)
		defer t.Stop()
		deadline = t.C
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for said := false; ; {
		users, err := host.Users(wrappers)
		if err != nil || len(users) == 0 {
			return err
		}
		inUse := quota.NewError(quota.CodeEngineInUse, "%d containers use the runtime, %.64s first", len(users), users[0]).WithHint("end them, wait with --drain, or go on with --force")
		if !j.drain {
			return inUse
		}
		if !said {
			a.note("waiting for %d containers, %.64s first", len(users), users[0])
			said = true
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline:
			return inUse
		case <-tick.C:
		}
	}
}
