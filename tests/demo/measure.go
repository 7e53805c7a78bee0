// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// CreateTimes are durations of `runc create` of the same GPU container in one run, by turns:
// straight through runc, and through gpufence-runtime with its prepare, plan, hook and register.
type CreateTimes struct {
	Without, With []time.Duration
	Parts         CreateParts
}

// CreateParts are durations of what lies between the two, by the same turns.
type CreateParts struct {
	Nothing []time.Duration // a program that ends at once
	Wrapper []time.Duration // gpufence-runtime, with prepare and plan, and that program for runc
	GPU     []time.Duration // runc straight, what CDI adds for the GPU in its configuration
	Mounts  []time.Duration // and all else that gpufence-runtime adds but hooks
	AnyHook []time.Duration // and a hook that ends at once
	Hook    []time.Duration // and gpufence-hook instead, with register
}

// MeasureCreate creates and deletes the container `pairs` times each way.
func MeasureCreate(ctx context.Context, opts Options, pairs int) (times CreateTimes, err error) {
	if err := check(opts); err != nil {
		return CreateTimes{}, err
	}
	n, err := newNode(opts)
	if err != nil {
		return CreateTimes{}, err
	}
	// Engines keep bundles, and gpufenced its state, under /run: in memory, where fsync is free.
	if err := unix.Mount("tmpfs", n.dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0711"); err != nil {
		return CreateTimes{}, errors.Join(fmt.Errorf("mount a private /run: %w", err), os.Remove(n.dir))
	}
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		err = errors.Join(err, n.close(cleanup))
	}()
	if err := n.start(ctx); err != nil {
		return CreateTimes{}, err
	}
	m, err := n.newCreateMeter(ctx)
	if err != nil {
		return CreateTimes{}, err
	}
	for range pairs {
		for _, turn := range []func(context.Context, *CreateTimes) error{m.without, m.with, m.gpu, m.parts} {
			if err := turn(ctx, &times); err != nil {
				return CreateTimes{}, fmt.Errorf("measure create: %w", err)
			}
		}
	}
	return times, nil
}

// createMeter takes one turn after the other. Each has a container, and so a bundle, of its own.
type createMeter struct {
	node  *node
	pod   *pod
	plain *engine // runc
	alone *engine // gpufence-runtime, which goes on to a program that ends at once
	// nothing is that program.
	nothing string
}

func (n *node) newCreateMeter(ctx context.Context) (*createMeter, error) {
	p, err := n.newPod(ctx, "measured", map[string]string{"gpufence.dev/memory.max": "2Gi"})
	if err != nil {
		return nil, err
	}
	nothing, err := exec.LookPath("true")
	if err != nil {
		return nil, fmt.Errorf("find a program that ends at once: %w", err)
	}
	config := n.path("alone.toml")
	text := strings.Replace(n.configText(), `runtimes = ["runc"]`, "runtimes = ["+strconv.Quote(nothing)+"]", 1)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("write config: %w", err)
	}
	plain, alone := *n.engine, *n.engine
	plain.runtime, alone.env = "runc", []string{"GPUFENCE_CONFIG=" + config}
	return &createMeter{node: n, pod: p, plain: &plain, alone: &alone, nothing: nothing}, nil
}

// bundle writes a container's, and says its id.
func (m *createMeter) bundle() (string, error) {
	id, err := newID(32)
	if err != nil {
		return "", err
	}
	return id, m.node.writeContainer(m.pod, m.workload(), id)
}

func (m *createMeter) workload() workload {
	return workload{name: "main", args: []string{"/bin/busybox", "true"}, gpu: m.node.gpuUUID}
}

func (m *createMeter) without(ctx context.Context, times *CreateTimes) error {
	return m.whole(ctx, m.plain, &times.Without)
}

func (m *createMeter) with(ctx context.Context, times *CreateTimes) error {
	return m.whole(ctx, m.node.engine, &times.With)
}

func (m *createMeter) whole(ctx context.Context, e *engine, into *[]time.Duration) error {
	id, err := m.bundle()
	if err != nil {
		return err
	}
	if err := m.create(ctx, e, id, into); err != nil {
		return err
	}
	return m.drop(id)
}

// gpu has the engine inject the GPU, as one does that knows CDI.
func (m *createMeter) gpu(ctx context.Context, times *CreateTimes) error {
	id, err := m.bundle()
	if err != nil {
		return err
	}
	spec := containerSpec(m.pod, m.workload(), id, m.node.termination(id))
	cache, err := cdi.NewCache(cdi.WithSpecDirs(m.node.path("cdi")), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("read CDI specification: %w", err)
	}
	if _, err := cache.InjectDevices(&spec, "gpufence.dev/simgpu="+m.node.gpuUUID); err != nil {
		return fmt.Errorf("inject GPU: %w", err)
	}
	if err := m.writeConfig(id, spec); err != nil {
		return err
	}
	if err := m.create(ctx, m.plain, id, &times.Parts.GPU); err != nil {
		return err
	}
	return m.drop(id)
}

// parts takes gpufence-runtime alone, and runc alone with what that wrote.
func (m *createMeter) parts(ctx context.Context, times *CreateTimes) error {
	id, err := m.bundle()
	if err != nil {
		return err
	}
	nothing := *m.plain
	nothing.runtime = m.nothing
	for _, turn := range []struct {
		engine *engine
		into   *[]time.Duration
	}{{&nothing, &times.Parts.Nothing}, {m.alone, &times.Parts.Wrapper}} {
		if err := m.time(ctx, turn.engine, id, turn.into); err != nil {
			return err
		}
	}
	text, err := os.ReadFile(m.node.path("bundles", id, "config.json"))
	if err != nil {
		return err
	}
	var whole map[string]json.RawMessage
	if err := json.Unmarshal(text, &whole); err != nil {
		return fmt.Errorf("read what gpufence-runtime wrote: %w", err)
	}
	if whole["hooks"] == nil {
		return errors.New("gpufence-runtime wrote no hook")
	}
	anyHook, err := json.Marshal(specs.Hooks{CreateRuntime: []specs.Hook{{Path: m.nothing}}})
	if err != nil {
		return fmt.Errorf("write a hook that ends at once: %w", err)
	}
	for _, turn := range []struct {
		hooks json.RawMessage
		into  *[]time.Duration
	}{{nil, &times.Parts.Mounts}, {anyHook, &times.Parts.AnyHook}, {whole["hooks"], &times.Parts.Hook}} {
		config := maps.Clone(whole)
		if delete(config, "hooks"); turn.hooks != nil {
			config["hooks"] = turn.hooks
		}
		if err := m.writeConfig(id, config); err != nil {
			return err
		}
		if err := m.create(ctx, m.plain, id, turn.into); err != nil {
			return err
		}
	}
	return m.drop(id)
}

func (m *createMeter) writeConfig(id string, config any) error {
	text, err := json.MarshalIndent(config, "", " ")
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(m.node.path("bundles", id), "config.json"), text, 0o600); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

// drop makes room: bundles are in memory.
func (m *createMeter) drop(id string) error { return os.RemoveAll(m.node.path("bundles", id)) }

func (m *createMeter) pidFile(id string) string { return m.node.path("bundles", id, "init.pid") }

// time measures the command alone; what comes before and after is the same for all.
func (m *createMeter) time(ctx context.Context, e *engine, id string, into *[]time.Duration) error {
	started := time.Now()
	err := e.command(ctx, nil, nil, "", "create", "--bundle", m.node.path("bundles", id), "--pid-file", m.pidFile(id), id)
	*into = append(*into, time.Since(started))
	return err
}

// create measures a command that leaves a container, and removes it.
func (m *createMeter) create(ctx context.Context, e *engine, id string, into *[]time.Duration) error {
	if err := m.time(ctx, e, id, into); err != nil {
		return err
	}
	text, err := os.ReadFile(m.pidFile(id))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("read pid: %w", err)
	}
	if err := e.command(ctx, nil, nil, "", "delete", "--force", id); err != nil {
		return err
	}
	// Its first process is ours to reap, as the nearest subreaper.
	for {
		_, err := unix.Wait4(pid, nil, 0, nil)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("reap container: %w", err)
		}
	}
}
