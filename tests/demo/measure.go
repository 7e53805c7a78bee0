// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// CreateTimes are durations of `runc create` of the same GPU container in one run, by turns:
// straight through runc, and through gpufence-runtime with its prepare, plan, hook and register.
type CreateTimes struct {
	Without, With []time.Duration
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
	annotations := map[string]string{"gpufence.dev/memory.max": "2Gi"}
	p, err := n.newPod(ctx, "measured", annotations)
	if err != nil {
		return CreateTimes{}, err
	}
	plain := &engine{runtime: "runc", root: n.engine.root, dir: n.engine.dir, env: n.engine.env}
	for range pairs {
		for _, e := range []*engine{plain, n.engine} {
			took, err := n.timeCreate(ctx, e, p)
			if err != nil {
				return CreateTimes{}, err
			}
			if e == plain {
				times.Without = append(times.Without, took)
			} else {
				times.With = append(times.With, took)
			}
		}
	}
	return times, nil
}

// timeCreate measures the create alone; what comes before and after is the same for both.
func (n *node) timeCreate(ctx context.Context, e *engine, p *pod) (time.Duration, error) {
	id, err := newID(32)
	if err != nil {
		return 0, err
	}
	w := workload{name: "main", args: []string{"/bin/busybox", "true"}, gpu: n.gpuUUID}
	if err := n.writeContainer(p, w, id); err != nil {
		return 0, err
	}
	pidFile := n.path("bundles", id, "init.pid")
	started := time.Now()
	err = e.command(ctx, nil, nil, "", "create", "--bundle", n.path("bundles", id), "--pid-file", pidFile, id)
	took := time.Since(started)
	if err != nil {
		return 0, fmt.Errorf("measure create: %w", err)
	}
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return 0, fmt.Errorf("measure create: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("measure create: read pid: %w", err)
	}
	if err := e.command(ctx, nil, nil, "", "delete", "--force", id); err != nil {
		return 0, fmt.Errorf("measure create: %w", err)
	}
	// Its first process is ours to reap, as the nearest subreaper.
	for {
		_, err := unix.Wait4(pid, nil, 0, nil)
		if err == nil {
			return took, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return 0, fmt.Errorf("reap container: %w", err)
		}
	}
}
