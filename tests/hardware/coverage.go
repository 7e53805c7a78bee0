// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/gpufence/gpufence/tests/node"
)

// entry is an exported variant of a function, as shim/cuda-functions.tsv lists them.
type entry struct {
	base      string
	version   int
	perThread bool
}

func readEntries(path string) (map[string]entry, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the list of functions: %w", err)
	}
	all := map[string]entry{}
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if strings.HasPrefix(line, "#") || len(f) < 4 {
			continue
		}
		version, err := strconv.Atoi(f[2])
		if err != nil {
			return nil, fmt.Errorf("read the list of functions: %q: %w", line, err)
		}
		all[f[1]] = entry{base: f[0], version: version, perThread: strings.HasSuffix(f[1], "_ptsz") || strings.HasSuffix(f[1], "_ptds")}
	}
	return all, nil
}

const (
	byName   = "dlsym"
	byProc   = "cuGetProcAddress"
	perProc  = 12 // rows that a process goes through
	coverage = "coverage"
	// reference is how many pieces a program takes that no shim holds.
	reference = 2
)

// covering is the suite under way.
type covering struct {
	*place
	c       *node.Container
	with    *node.Process // with the shim
	without *node.Process // and none
	rows    int
}

// testCoverage takes memory by every entry point that the shim hooks, on this driver. A row that the driver
// refuses without the shim, too, is not possible here; one that only the shim breaks fails.
func (s *session) testCoverage(ctx context.Context) {
	var names []string
	var entries map[string]entry
	var r *covering
	verdict := s.row(ctx, coverage, "the client starts", true, rowTime, func(ctx context.Context, numbers map[string]any) (string, error) {
		out, err := exec.CommandContext(ctx, s.path("clients/coverage"), "list").Output()
		if err != nil {
			return "", fmt.Errorf("list the rows: %w", err)
		}
		names = lines(out)
		if entries, err = readEntries(s.path("hardware/cuda-functions.tsv")); err != nil {
			return "", err
		}
		numbers["rows"] = len(names)
		if len(names) < 100 {
			return "", fmt.Errorf("the client has %d rows", len(names))
		}
		p, err := s.open(ctx)
		if err != nil {
			return "", err
		}
		r = &covering{place: p}
		r.c, err = p.container(ctx, node.Spec{Name: coverage, Shim: true, Program: []string{"/bin/sleep", "3600"}, Env: []string{"CUDA_MODULE_LOADING=EAGER"}})
		if err != nil {
			return "", errors.Join(err, p.close(ctx))
		}
		return "", nil
	})
	if verdict != Pass {
		return
	}
	for i, name := range names {
		if s.opts.Quick && i%6 != 0 {
			continue
		}
		for _, way := range []string{byName, byProc} {
			s.row(ctx, coverage, name+" by "+way, true, rowTime, func(ctx context.Context, numbers map[string]any) (string, error) {
				return "", r.one(ctx, name, entries, way, numbers)
			})
		}
	}
	s.row(ctx, coverage, "nothing is left", true, rowTime, func(ctx context.Context, _ map[string]any) (string, error) {
		return "", errors.Join(r.end(ctx, r.without), r.close(ctx))
	})
}

// end kills a process that nobody else ends.
func (r *covering) end(ctx context.Context, p *node.Process) error {
	if p == nil {
		return nil
	}
	return errors.Join(p.Kill(), p.Await(ctx))
}

// ask is the line that finds a function.
func (e entry) ask(row, way string) string {
	if way == byName {
		return "begin " + row + " dlsym"
	}
	flags := 0
	if e.perThread {
		flags = 2
	}
	return fmt.Sprintf("begin %s proc %s %d %d", row, e.base, e.version, flags)
}

// refer does the row without the shim: what this driver does by itself.
func (r *covering) refer(ctx context.Context, row, begin string) (err error) {
	if r.without == nil || !r.without.Alive() {
		if r.without, err = r.n.Outside(ctx, "reference", r.n.Dist("clients/coverage")); err != nil {
			return err
		}
		if _, err := r.without.Do(ctx, "context"); err != nil {
			return fmt.Errorf("a program without the shim: %w", err)
		}
	}
	for _, line := range []string{"prepare " + row, begin, fmt.Sprintf("take %d", reference), "give"} {
		reply, err := r.without.Ask(ctx, line)
		if err == nil && reply.OK {
			continue
		}
		// Whatever it left behind: the next row gets a new one.
		ended := r.end(ctx, r.without)
		r.without = nil
		if ctx.Err() != nil || ended != nil {
			return errors.Join(ctx.Err(), ended)
		}
		if err != nil {
			return impossible(fmt.Sprintf("without the shim, too: %v", err))
		}
		return impossible(fmt.Sprintf("without the shim, too, %q: %s", line, strings.TrimSpace(reply.Why)))
	}
	return nil
}

// fresh gives the next rows a process of their own.
func (r *covering) fresh(ctx context.Context) error {
	if err := r.end(ctx, r.with); err != nil {
		return err
	}
	r.with = nil
	err := node.Until(ctx, "nothing is charged", func() (bool, error) {
		v, err := r.c.View(ctx)
		return err == nil && v.GPUs[0].Current == 0 && v.GPUs[0].Ledger == 0 && v.GPUs[0].Dying == 0, err
	})
	if err != nil {
		return err
	}
	if r.with, err = r.c.Exec(ctx, true, r.n.Dist("clients/coverage")); err != nil {
		return err
	}
	r.rows = 0
	return node.Until(ctx, "a context can be made", func() (bool, error) {
		reply, err := r.with.Ask(ctx, "context")
		return err == nil && reply.OK, err
	})
}

// takesContexts says that a row takes contexts, whose size is the granule then.
func takesContexts(row string) bool {
	return slices.ContainsFunc([]string{"cuCtxCreate", "cuCtxAttach", "cuCtxDestroy", "cuCtxDetach", "cuGLCtxCreate", "cuVDPAUCtxCreate", "cuDevicePrimaryCtx", "cuGreenCtx"},
		func(name string) bool { return strings.HasPrefix(row, name) })
}

// granule is below what a row can get nothing more, on a driver whose sizes are not known: generous.
func (r *covering) granule(row string) uint64 {
	switch {
	case takesContexts(row):
		return r.s.driver.context + r.s.driver.context/4
	case strings.Contains(row, "Async"), strings.Contains(row, "MemPool"), strings.Contains(row, "Graph"), strings.Contains(row, "captured"):
		return 64 * mib
	}
	return 16 * mib
}

// narrow says that a row's addresses have 32 bits: they end before a large limit does.
func narrow(row string) bool {
	name, _, _ := strings.Cut(row, "/")
	return name == "cuMemAlloc" || name == "cuMemAllocPitch" || name == "cuMemFree"
}

// one takes until refused, and gives back.
func (r *covering) one(ctx context.Context, row string, entries map[string]entry, way string, numbers map[string]any) error {
	name, _, _ := strings.Cut(row, "/")
	e, ok := entries[name]
	if !ok {
		return fmt.Errorf("%s is no function of the driver", name)
	}
	begin := e.ask(row, way)
	if err := r.refer(ctx, row, begin); err != nil {
		return err
	}
	if r.with == nil || !r.with.Alive() || r.rows >= perProc {
		if err := r.fresh(ctx); err != nil {
			return err
		}
	}
	r.rows++
	err := r.judge(ctx, row, begin, numbers)
	if err != nil {
		r.rows = perProc // a new process for the next
	}
	return err
}

func (r *covering) judge(ctx context.Context, row, begin string, numbers map[string]any) error {
	limit := r.s.driver.limit
	if _, err := r.with.Do(ctx, "prepare "+row); err != nil {
		return err
	}
	// Of the device's use, what is not of this container: others may come and go from row to row.
	idle, base, err := r.beside(ctx, r.c)
	if err != nil {
		return err
	}
	before, err := r.with.Do(ctx, "view")
	if err != nil {
		return err
	}
	if _, err := r.with.Do(ctx, begin); err != nil {
		return err
	}
	full, err := r.with.Ask(ctx, "fill")
	if err != nil {
		return err
	}
	now, err := r.held(ctx, r.c, idle)
	if err != nil {
		return err
	}
	numbers["taken_bytes"], numbers["held_bytes"] = full.GrantedBytes, now
	view, err := r.with.Do(ctx, "view")
	if err != nil {
		return err
	}
	// By what is charged, which may be more than what is held: of modules, of green contexts, of managed
	// memory, which NVML shows under no process.
	numbers["charged_bytes"] = limit - min(limit, view.FreeBytes)
	granule := r.granule(row)
	if err := r.above(now, limit, numbers); err != nil {
		return err
	}
	switch {
	case !full.OK:
		return fmt.Errorf("ended otherwise: %s", full.Why)
	case view.FreeBytes > granule && !narrow(row):
		return fmt.Errorf("refused with %d bytes free", view.FreeBytes)
	}
	if view.TotalBytes != limit || view.HeldBytes != limit {
		return fmt.Errorf("cuMemGetInfo shows %d bytes, cuDeviceTotalMem %d, the limit is %d", view.TotalBytes, view.HeldBytes, limit)
	}
	nvml, err := r.with.Do(ctx, "nvml "+r.s.opts.GPU)
	if err != nil {
		return err
	}
	if nvml.TotalBytes != limit {
		return fmt.Errorf("NVML shows %d bytes, the limit is %d", nvml.TotalBytes, limit)
	}
	if _, err := r.with.Do(ctx, "give"); err != nil {
		return err
	}
	var after uint64
	back, err := until(ctx, func() (bool, error) {
		after, err = r.held(ctx, r.c, idle)
		return after <= base+4*mib, err
	})
	if err != nil {
		return err
	}
	if !back {
		return fmt.Errorf("%d bytes are held after giving back, %d before", after, base)
	}
	var again node.Reply
	back, err = until(ctx, func() (bool, error) {
		again, err = r.with.Do(ctx, "view")
		return again.FreeBytes+4*mib >= before.FreeBytes, err
	})
	if err != nil {
		return err
	}
	if !back {
		return fmt.Errorf("%d bytes are free after giving back, %d before", again.FreeBytes, before.FreeBytes)
	}
	return ctx.Err()
}
