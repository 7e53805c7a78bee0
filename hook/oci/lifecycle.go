// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// maxStateBytes bounds what the runtime may write on the hook's stdin: its state repeats the
// annotations.
const maxStateBytes = 4 << 20

// hookTime is what the hook takes at most, below the timeout that it has in config.json, so
// that the container's start fails with our sentence and not with "hook ran past timeout".
const hookTime = 9 * time.Second

// hookBestEffortTime bounds what a hook spends on a gpufenced that nothing depends on.
const hookBestEffortTime = 2 * time.Second

// HookArgs is gpufence-hook's command line: <stage> --config F --socket S --engine E --scope S.
// Engine and scope come from the wrapper, since the runtime's state has neither; Podman's precreate
// needs neither.
type HookArgs struct {
	Stage      string
	ConfigPath string
	Socket     string
	Engine     quota.Engine
	Scope      string
	BestEffort bool // a failure is reported and does not stop the container
}

// The stages that are no OCI hook's: [Precreate], and what it has fail with a sentence.
const (
	StagePrecreate = "precreate"
	StageRefuse    = "refuse"
)

// stages are the hooks that we know; prestart is what older runtimes call createRuntime.
var stages = map[string]bool{"createRuntime": true, "prestart": true, "poststop": true, StagePrecreate: true}

// ParseHookArgs reads the arguments after the program's name.
func ParseHookArgs(args []string) (HookArgs, error) {
	var h HookArgs
	usage := func(format string, a ...any) (HookArgs, error) {
		return h, quota.NewError(quota.CodeUsage, "gpufence-hook: "+format, a...).
			WithHint("gpufence-runtime writes its arguments into config.json; it is not started by hand")
	}
	if len(args) == 0 {
		return usage("the stage is missing")
	}
	h.Stage = args[0]
	if !stages[h.Stage] {
		return usage("the stage %q is none of createRuntime, prestart, poststop, precreate", h.Stage)
	}
	if h.Stage == StagePrecreate {
		// As the wrapper has it that Podman starts: with both, the container is prepared once.
		h.Engine, h.Scope = quota.EnginePodman, defaultScope
	}
	for i := 1; i < len(args); i++ {
		name, value, hasValue := strings.Cut(args[i], "=")
		if name == plan.ArgBestEffort && !hasValue {
			h.BestEffort = true
			continue
		}
		if !hasValue {
			if i+1 >= len(args) {
				return usage("the argument %q has no value, or is unknown", args[i])
			}
			i++
			value = args[i]
		}
		switch name {
		case "--config":
			h.ConfigPath = value
		case "--socket":
			h.Socket = value
		case "--engine":
			h.Engine = quota.Engine(value)
		case "--scope":
			h.Scope = value
		default:
			return usage("the argument %q is unknown", name)
		}
	}
	switch h.Engine {
	case quota.EngineCRI, quota.EngineCRIO, quota.EngineDocker, quota.EnginePodman, quota.EngineOCI:
	default:
		return usage("the engine %q is unknown", h.Engine)
	}
	if h.Scope == "" {
		return usage("--scope is missing")
	}
	return h, nil
}

// State is what a runtime tells its hooks (OCI runtime specification, "State").
type State struct {
	ID     string `json:"id"`
	Status string `json:"status"`
	PID    int    `json:"pid"`
	Bundle string `json:"bundle"`
}

// ParseState reads and checks the state. A pid is needed before the container runs; after it
// there is none.
func ParseState(text []byte, needPID bool) (State, error) {
	var s State
	bad := func(format string, a ...any) (State, error) {
		return s, quota.NewError(quota.CodeHookState, "the container's state on stdin "+format, a...)
	}
	if len(text) > maxStateBytes {
		return bad("is larger than %d MiB", maxStateBytes>>20)
	}
	if len(strings.TrimSpace(string(text))) == 0 {
		return bad("is empty")
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return bad("is not what the OCI says: %w", err)
	}
	if s.ID == "" || len(s.ID) > 1024 || strings.ContainsFunc(s.ID, func(r rune) bool { return r <= ' ' || r == '/' || r == 0x7f }) {
		return bad("has no usable id")
	}
	if needPID && s.PID <= 0 {
		return bad("has the pid %d: the first process of container %s must exist by now", s.PID, s.ID)
	}
	if s.Bundle != "" && !filepath.IsAbs(s.Bundle) {
		return bad("has the bundle %s, which is not absolute", quota.Quote(s.Bundle))
	}
	return s, nil
}

// Hook is one call of gpufence-hook.
type Hook struct {
	Args HookArgs
	// Settings reads config.toml: Socket, if Args has none, and what holds where gpufenced does not
	// answer. As a rule it does, and the file need not be read.
	Settings func() Settings
	Stdin    io.Reader
	Stderr   io.Writer
}

// Run does the stage's work and returns the exit status: not 0 where the container must not
// start. What it prints is seen only if it fails.
func (h Hook) Run(ctx context.Context) int {
	ctx, cancel := context.WithTimeout(ctx, hookTime)
	defer cancel()
	err := h.run(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(h.Stderr, oneLine(Sentence(err)))
	if h.Args.Stage == "poststop" || h.Args.BestEffort || errors.Is(err, api.ErrUnreachable) && h.Settings().failsOpen(err) {
		return 0 // gpufenced also finds out by itself: the container's cgroup is gone
	}
	return 1
}

func (h Hook) run(ctx context.Context) error {
	text, err := readAll(ctx, h.Stdin, maxStateBytes)
	if err != nil {
		return quota.NewError(quota.CodeHookState, "the container's state cannot be read from stdin: %w", err)
	}
	state, err := ParseState(text, h.Args.Stage != "poststop")
	if err != nil {
		return err
	}
	socket := h.Args.Socket
	if socket == "" {
		socket = h.Settings().Socket
	}
	mayWait := !h.Args.BestEffort && h.Args.Stage != "poststop"
	if !mayWait {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, hookBestEffortTime)
		defer cancel()
	}
	key := api.ContainerKey{Engine: h.Args.Engine, Scope: h.Args.Scope, ID: state.ID}
	client := api.NewClient(socket, 0)
	if h.Args.Stage == "poststop" {
		return client.Unregister(ctx, api.UnregisterRequest{Key: key})
	}
	register := api.RegisterRequest{Key: key, PID: state.PID, Bundle: state.Bundle}
	_, err = client.Register(ctx, register)
	if mayWait && errors.Is(err, api.ErrUnreachable) && ctx.Err() == nil {
		_, err = api.NewClient(socket, h.Settings().WaitSocket).Register(ctx, register)
	}
	return err
}

// readAll reads to the end, but no longer than the context and no more than the bound.
func readAll(ctx context.Context, r io.Reader, most int64) ([]byte, error) {
	type result struct {
		text []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		text, err := io.ReadAll(io.LimitReader(r, most+1))
		done <- result{text, err}
	}()
	select {
	case res := <-done:
		return res.text, res.err
	case <-ctx.Done():
		return nil, errors.New("nobody closed it")
	}
}
