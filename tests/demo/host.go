// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// point is what a process held of the GPU from a moment on.
type point struct {
	ns    int64 // CLOCK_MONOTONIC
	bytes uint64
}

// host is the GPU's own side of the story.
type host interface {
	// history is what the process held over its whole life, oldest first.
	history(ctx context.Context, pid int) ([]point, error)
	// used is what the process holds now.
	used(ctx context.Context, pid int) (uint64, error)
}

// peak is the most that was held up to a moment; 0: up to the end.
func peak(points []point, untilNS int64) uint64 {
	var most uint64
	for _, p := range points {
		if untilNS > 0 && p.ns > untilNS {
			break
		}
		most = max(most, p.bytes)
	}
	return most
}

// crossing is the first moment at which more than limit was held.
func crossing(points []point, limit uint64) (int64, bool) {
	for _, p := range points {
		if p.bytes > limit {
			return p.ns, true
		}
	}
	return 0, false
}

func monotonicNS() (int64, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0, fmt.Errorf("read clock: %w", err)
	}
	return t.Nano(), nil
}

// simulatedHost asks the simulated driver, which keeps every change: nothing is sampled.
type simulatedHost struct{ admin *server.Client }

func (h simulatedHost) history(ctx context.Context, pid int) ([]point, error) {
	all, err := h.admin.History(ctx, pid)
	if err != nil {
		return nil, err
	}
	if len(all) != 1 {
		return nil, fmt.Errorf("the simulated driver knows %d processes with pid %d, want 1", len(all), pid)
	}
	var out []point
	for _, p := range all[0].Points {
		out = append(out, point{p.TimeNS, p.UsedBytes})
	}
	return out, nil
}

func (h simulatedHost) used(ctx context.Context, pid int) (uint64, error) {
	points, err := h.history(ctx, pid)
	if err != nil || len(points) == 0 {
		return 0, err
	}
	return points[len(points)-1].bytes, nil
}

// realHost samples NVML through nvidia-smi, as often as that tool lets us.
type realHost struct {
	mu     sync.Mutex
	points map[int][]point
	err    error
	done   chan struct{}
	cancel context.CancelFunc
}

// realGPU is the first GPU that nvidia-smi shows, if this machine has one that works.
func realGPU(ctx context.Context) (uuid, name string, totalBytes uint64, ok bool) {
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		return "", "", 0, false
	}
	cmd := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits", "--id=0")
	out, err := cmd.Output()
	fields := strings.Split(strings.TrimSpace(string(out)), ", ")
	if err != nil || len(fields) != 3 {
		return "", "", 0, false
	}
	mib, err := strconv.ParseUint(fields[2], 10, 40)
	if err != nil {
		return "", "", 0, false
	}
	return fields[0], fields[1], mib << 20, true
}

func startRealHost(ctx context.Context, uuid string) (*realHost, error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	cmd := exec.CommandContext(ctx, "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "--id="+uuid, "--loop-ms=50")
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("sample NVML: %w", err)
	}
	h := &realHost{points: map[int][]point{}, done: make(chan struct{}), cancel: cancel}
	go func() {
		defer close(h.done)
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			h.add(lines.Text())
		}
		err := cmd.Wait()
		h.mu.Lock()
		defer h.mu.Unlock()
		if ctx.Err() == nil {
			h.err = fmt.Errorf("sample NVML: nvidia-smi ended: %w", errors.Join(err, lines.Err()))
		}
	}()
	return h, nil
}

func (h *realHost) add(line string) {
	pidText, mibText, ok := strings.Cut(line, ", ")
	pid, err := strconv.Atoi(pidText)
	mib, err2 := strconv.ParseUint(strings.TrimSpace(mibText), 10, 40)
	now, err3 := monotonicNS()
	if !ok || err != nil || err2 != nil || err3 != nil {
		return // "[Not Supported]", an empty list
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.points[pid] = append(h.points[pid], point{now, mib << 20})
}

func (h *realHost) history(_ context.Context, pid int) ([]point, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return nil, h.err
	}
	if len(h.points[pid]) == 0 {
		return nil, fmt.Errorf("NVML has shown no process with pid %d", pid)
	}
	return append([]point(nil), h.points[pid]...), nil
}

func (h *realHost) used(ctx context.Context, pid int) (uint64, error) {
	select { // two samples, so that what holds now has been seen
	case <-time.After(300 * time.Millisecond):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	points, err := h.history(ctx, pid)
	if err != nil {
		return 0, err
	}
	return points[len(points)-1].bytes, nil
}

func (h *realHost) close() {
	h.cancel()
	<-h.done
}

// cdiFolders are where a real GPU's CDI specification is looked for.
var cdiFolders = []string{"/etc/cdi", "/var/run/cdi"}

// hasCDISpec says whether a specification lies in one of the usual folders.
func hasCDISpec() bool {
	for _, dir := range cdiFolders {
		for _, pattern := range []string{"*.yaml", "*.json"} {
			if found, err := filepath.Glob(filepath.Join(dir, pattern)); err == nil && len(found) > 0 {
				return true
			}
		}
	}
	return false
}
