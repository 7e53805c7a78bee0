// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"
)

// sampler asks NVML, from a process of its own: what hangs there does not hang here.
type sampler struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan []byte
	mu    sync.Mutex
}

// device is what NVML shows at one moment.
type device struct {
	Total uint64 `json:"total"`
	Used  uint64 `json:"used"`
	Rows  []struct {
		PID   int    `json:"pid"`
		Known bool   `json:"known"`
		Bytes uint64 `json:"bytes"`
	} `json:"rows"`
}

func (s *session) newSampler(ctx context.Context) (*sampler, error) {
	// It outlives the row that opens it; close ends it.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), s.path("hardware/probe"), "--serve")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = s.environ()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("sample NVML: %w", err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("sample NVML: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("sample NVML: %w", err)
	}
	p := &sampler{cmd: cmd, stdin: stdin, lines: make(chan []byte, 1)}
	go func() {
		defer close(p.lines)
		for r := bufio.NewReader(stdout); ; {
			line, err := r.ReadBytes('\n')
			if err != nil {
				return
			}
			p.lines <- line
		}
	}()
	return p, nil
}

// nvmlTime is when NVML counts as hung.
const nvmlTime = 10 * time.Second

func (p *sampler) look(ctx context.Context) (d device, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := io.WriteString(p.stdin, "\n"); err != nil {
		return d, fmt.Errorf("sample NVML: %w", err)
	}
	select {
	case line, ok := <-p.lines:
		if !ok {
			return d, errors.New("sample NVML: the sampler has ended")
		}
		if err := json.Unmarshal(line, &d); err != nil {
			return d, fmt.Errorf("sample NVML: %w", err)
		}
		return d, nil
	case <-ctx.Done():
		return d, ctx.Err()
	case <-time.After(nvmlTime):
		return d, fmt.Errorf("sample NVML: no answer within %s", nvmlTime)
	}
}

// of is the sum of the rows of some processes; false: one's size is not told.
func (d device) of(pids []int) (sum uint64, known bool) {
	known = true
	for _, r := range d.Rows {
		if slices.Contains(pids, r.PID) {
			sum += r.Bytes
			known = known && r.Known
		}
	}
	return sum, known
}

func (p *sampler) close() error {
	err := p.stdin.Close()
	kill := time.AfterFunc(nvmlTime, func() { _ = p.cmd.Process.Kill() }) // Wait tells
	defer kill.Stop()
	for range p.lines { // to its end
	}
	return errors.Join(err, p.cmd.Wait())
}
