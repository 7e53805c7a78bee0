// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// place is a node on the driver of this machine, with containers that are processes in cgroups.
type place struct {
	s    *session
	n    *node.Node
	nvml *sampler
}

const (
	leastLimit = 512 * mib
	rounded    = 64 * mib
)

// open makes one; whoever gets it closes it.
func (s *session) open(ctx context.Context) (*place, error) {
	switch {
	case s.driver.missing != "":
		return nil, impossible(s.driver.missing)
	case s.driver.context == 0:
		return nil, errors.New("choose a limit: the size of a context was not seen")
	}
	// Room for some contexts, so that a limit of a GPU with large ones is one, too.
	s.driver.limit = max(leastLimit, (4*s.driver.context+rounded-1)/rounded*rounded)
	n, err := node.New(ctx, node.Options{Dist: s.opts.Dir, Found: true, Config: []string{fmt.Sprintf("context = \"%dMi\"", (s.driver.context+mib-1)/mib)}})
	if err != nil {
		return nil, err
	}
	nvml, err := s.newSampler(ctx)
	if err != nil {
		return nil, errors.Join(err, n.Close(context.WithoutCancel(ctx)))
	}
	return &place{s: s, n: n, nvml: nvml}, nil
}

func (p *place) close(ctx context.Context) error {
	return errors.Join(p.nvml.close(), p.n.Close(context.WithoutCancel(ctx)))
}

// limits is the annotation of a limit.
func limits(bytes uint64) []string { return []string{fmt.Sprintf("memory.max=%dMi", bytes/mib)} }

// container starts one with the limit of this machine.
func (p *place) container(ctx context.Context, spec node.Spec) (*node.Container, error) {
	if len(spec.Limits) == 0 {
		spec.Limits = limits(p.s.driver.limit)
	}
	spec.GPUs = []string{p.s.opts.GPU}
	return p.n.Start(ctx, spec)
}

// pids are the processes of a container.
func pids(c *node.Container) ([]int, error) {
	dirs := c.Cgroups()
	if len(dirs) == 0 {
		return nil, fmt.Errorf("list the processes of %s: it has no cgroup", c.Name)
	}
	text, err := os.ReadFile(filepath.Join(dirs[0], "cgroup.procs"))
	if err != nil {
		return nil, fmt.Errorf("list the processes of %s: %w", c.Name, err)
	}
	var out []int
	for _, w := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(w)
		if err != nil {
			return nil, fmt.Errorf("list the processes of %s: %w", c.Name, err)
		}
		out = append(out, pid)
	}
	return out, nil
}

// beside is what the device has in use that is not a container's, and what is.
func (p *place) beside(ctx context.Context, c *node.Container) (others, own uint64, err error) {
	all, err := pids(c)
	if err != nil {
		return 0, 0, err
	}
	d, err := p.nvml.look(ctx)
	if err != nil {
		return 0, 0, err
	}
	own, known := d.of(all)
	if !known {
		return 0, 0, impossible("NVML does not tell the sizes of processes here")
	}
	return d.Used - min(d.Used, own), own, nil
}

// held is what NVML shows of a container's processes. What several of them share stands in several rows, so
// it is at most what the device has in use beside what it had for others (0: not known).
func (p *place) held(ctx context.Context, c *node.Container, others uint64) (uint64, error) {
	all, err := pids(c)
	if err != nil {
		return 0, err
	}
	d, err := p.nvml.look(ctx)
	if err != nil {
		return 0, err
	}
	sum, known := d.of(all)
	if !known {
		return 0, impossible("NVML does not tell the sizes of processes here")
	}
	if rest := d.Used - min(d.Used, others); others > 0 && rest < sum {
		sum = rest
	}
	return sum, nil
}

// late is what a real driver may take by itself after its first context, which no shim can refuse: lazily
// loaded modules. The simulated one takes none here.
func (p *place) late(limit uint64) uint64 {
	if p.s.report.Simulated {
		return 0
	}
	return max(64*mib, limit/50) // gpufenced's slack: beyond it, it would kill
}

// above says that a container holds more than its limit, by more than the driver may have taken itself.
func (p *place) above(held, limit uint64, numbers map[string]any) error {
	if held > limit {
		numbers["above_bytes"] = held - limit
	}
	if held > limit+p.late(limit) {
		return fmt.Errorf("%d bytes above the limit of %d are held", held-limit, limit)
	}
	return nil
}

// same says that two programs got the same within one limit.
func (p *place) same(a, b uint64) bool { return max(a, b)-min(a, b) <= p.late(p.s.driver.limit) }

// until waits for something that NVML may show late.
func until(ctx context.Context, f func() (bool, error)) (bool, error) {
	for deadline := time.Now().Add(node.Patience); ; {
		ok, err := f()
		if ok || err != nil || time.Now().After(deadline) {
			return ok, err
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// lines are the words of a program's output, one a line.
func lines(out []byte) []string {
	var all []string
	for l := range bytes.Lines(out) {
		all = append(all, strings.TrimSpace(string(l)))
	}
	return all
}
