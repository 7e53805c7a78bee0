// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// program is one that we did not write the allocator of.
type program struct {
	name   string
	module string // of Python that it needs
	file   string // in programs/
	args   []string
	env    []string
}

// programs are PyTorch's allocator in all of its back ends, and others where they are.
var programs = []program{
	{"PyTorch, its own allocator", "torch", "torch_memory.py", nil, nil},
	{"PyTorch, expandable segments", "torch", "torch_memory.py", nil, torchAllocator("expandable_segments:True")},
	{"PyTorch, cudaMallocAsync", "torch", "torch_memory.py", nil, torchAllocator("backend:cudaMallocAsync")},
	{"PyTorch, garbage collection and small splits", "torch", "torch_memory.py", nil, torchAllocator("garbage_collection_threshold:0.6,max_split_size_mb:128")},
	{"PyTorch, cuBLAS and a CUDA graph within the limit", "torch", "torch_work.py", nil, nil},
	{"NCCL, a single rank", "torch", "torch_nccl.py", nil, nil},
	{"CuPy, its pool", "cupy", "cupy_memory.py", []string{"pool"}, nil},
	{"CuPy, cudaMallocAsync", "cupy", "cupy_memory.py", []string{"async"}, nil},
	{"JAX", "jax", "jax_memory.py", nil, nil},
}

// torchAllocator is the setting under its old and its new name.
func torchAllocator(conf string) []string {
	return []string{"PYTORCH_CUDA_ALLOC_CONF=" + conf, "PYTORCH_ALLOC_CONF=" + conf}
}

const (
	programTime = 100 * time.Second
	// programRoom is what a program gets beside its context: libraries take some of it.
	programRoom = 2048 * mib
)

// answer is a line that a program writes.
type answer struct {
	Op      string `json:"op"`
	OK      bool   `json:"ok"`
	Why     string `json:"why"`
	Version string `json:"version"`
	Total   uint64 `json:"total_bytes"`
	Granted uint64 `json:"granted_bytes"`
	Again   uint64 `json:"free_bytes"` // taken once more
	Refusal string `json:"result_name"`
}

// testPrograms runs each in a container of its own. One that does not see the GPU without the shim is not
// possible here.
func (s *session) testPrograms(ctx context.Context) {
	files := map[string]bool{}
	for _, p := range programs {
		if s.opts.Quick && files[p.file] {
			continue
		}
		files[p.file] = true
		s.row(ctx, "programs", p.name, true, programTime, func(ctx context.Context, numbers map[string]any) (string, error) {
			version, err := s.sees(ctx, p)
			if err != nil {
				return "", err
			}
			pl, err := s.open(ctx)
			if err != nil {
				return "", err
			}
			detail, err := pl.runProgram(ctx, p, numbers)
			return strings.TrimSpace(version + " " + detail), errors.Join(err, pl.close(ctx))
		})
	}
}

// command is a program's command line.
func (s *session) command(p program, what string, more ...string) []string {
	return append(append([]string{s.opts.Python, s.path("hardware/programs/" + p.file), what}, p.args...), more...)
}

// sees asks the program, without the shim and without a limit, whether it can use this GPU at all.
func (s *session) sees(ctx context.Context, p program) (version string, err error) {
	if _, err := exec.LookPath(s.opts.Python); err != nil {
		return "", impossible("there is no " + s.opts.Python)
	}
	args := s.command(p, "see")
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	// Nothing holds it here: JAX would take three quarters of a GPU that others may use.
	cmd.Env = s.environ(append([]string{"XLA_PYTHON_CLIENT_PREALLOCATE=false"}, p.env...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	var a answer
	for _, line := range lines(stdout.Bytes()) {
		if json.Unmarshal([]byte(line), &a) == nil && a.Op == "see" {
			break
		}
	}
	switch {
	case a.Op == "see" && a.OK && err == nil:
		return a.Version, nil
	case a.Op == "see":
		return "", impossible(p.module + ": " + a.Why)
	}
	return "", impossible(fmt.Sprintf("%s cannot be used without the shim either (%v): %s", p.module, err, tail(stderr.String(), 200)))
}

// runProgram lets it take what it gets, looks at what it holds, and lets it go on.
func (p *place) runProgram(ctx context.Context, prog program, numbers map[string]any) (string, error) {
	limit := (p.s.driver.context + programRoom + rounded - 1) / rounded * rounded
	if p.s.report.Simulated {
		limit = p.s.driver.limit
	}
	answers := make(chan answer, 16)
	c, err := p.container(ctx, node.Spec{
		Name: "program", Shim: true, Limits: limits(limit), Env: append([]string{"PYTHONUNBUFFERED=1"}, prog.env...),
		Program: p.s.command(prog, "run", fmt.Sprint(limit)),
		Each: func(r node.Reply) {
			a := answer{Op: r.Op, OK: r.OK, Why: r.Why, Total: r.TotalBytes, Granted: r.GrantedBytes, Again: r.FreeBytes, Refusal: r.ResultName}
			select {
			case answers <- a:
			default: // nobody waits for so many
			}
		},
	})
	if err != nil {
		return "", err
	}
	hear := func(op string) (answer, error) {
		for {
			select {
			case a := <-answers:
				if !a.OK {
					return a, fmt.Errorf("%s: %s", a.Op, a.Why)
				}
				if a.Op == op {
					return a, nil
				}
			case <-c.Main.Exited():
				select { // what it said last
				case a := <-answers:
					if a.Op == op && a.OK {
						return a, nil
					}
					return a, fmt.Errorf("it ended (%s) after %s: %s", c.Main.Status(), a.Op, a.Why)
				default:
				}
				return answer{}, fmt.Errorf("it ended before %q: %s%s", op, c.Main.Status(), p.said())
			case <-ctx.Done():
				return answer{}, fmt.Errorf("wait for %q: %w%s", op, context.Cause(ctx), p.said())
			}
		}
	}
	full, err := hear("full")
	if err != nil {
		return "", err
	}
	held, err := p.held(ctx, c, 0)
	if err != nil {
		return "", err
	}
	numbers["limit_bytes"], numbers["total_bytes"], numbers["granted_bytes"], numbers["held_bytes"] = limit, full.Total, full.Granted, held
	if err := p.above(held, limit, numbers); err != nil {
		return "", err
	}
	if full.Total != limit {
		return "", fmt.Errorf("it sees %d bytes, the limit is %d", full.Total, limit)
	}
	if err := c.Main.Say("go on"); err != nil {
		return "", err
	}
	done, err := hear("done")
	if err != nil {
		return "", err
	}
	numbers["again_bytes"] = done.Again
	if err := c.Main.Await(ctx); err != nil {
		return "", err
	}
	return full.Refusal, nil
}

// said is what programs wrote for people.
func (p *place) said() string {
	text := tail(p.n.Said(), 300)
	if text == "" {
		return ""
	}
	return "; it said " + text
}
