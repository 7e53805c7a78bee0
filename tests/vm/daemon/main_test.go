// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == forgeWord {
		if err := forge(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "forge:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv("GPUFENCE_GUEST") == "" {
		fmt.Println("SKIP: these tests run inside the guests of make test-vm")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const mib = uint64(1) << 20

// client is tests/vm/client, which keeps the simulated GPU in step.
const client = "/mnt/client-follow"

// bench is a node in the guest.
type bench struct {
	*node.Node
	t *testing.T
}

// newBench starts gpufenced over one simulated GPU, and waits until its gate stands.
func newBench(t *testing.T, lag time.Duration, config ...string) *bench {
	t.Helper()
	b := &bench{t: t}
	n, err := node.New(t.Context(), node.Options{
		Dist:       os.Getenv("GPUFENCE_DIST"),
		PodCgroups: true, // most containers' limit is their pod's
		Sim:        []string{"--model", "t4", "--memory", "16GiB", "--context-bytes", "64MiB", "--nvml-lag", lag.String()},
		Config:     append([]string{`context = "64Mi"`}, config...),
	})
	b.check(err)
	b.Node = n
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("gpufenced said:\n%s\nthe containers said:\n%s", n.DaemonLog(), n.Said())
		}
		if err := n.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("the node is not clean: %v", err)
		}
	})
	gpus, err := n.Client.GPUs(t.Context())
	b.check(err)
	// nvidia0 is this GPU.
	b.check(os.WriteFile("/sys/module/nvidia/parameters/uuid", []byte(gpus[0].UUID), 0))
	return b
}

func (b *bench) check(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) until(what string, f func() bool) {
	b.t.Helper()
	b.check(node.Until(b.t.Context(), what, func() (bool, error) { return f(), nil }))
}

// gated waits until the gate stands around the node, or a container, at a level, and gives what it says.
func (b *bench) gated(c *node.Container, level string) (proof string) {
	b.t.Helper()
	if c == nil {
		return b.stands(level, func(ctx context.Context) ([]api.Fence, error) {
			n, err := b.Client.Node(ctx)
			return n.Fences, err
		})
	}
	return b.stands(level, func(ctx context.Context) ([]api.Fence, error) {
		v, err := c.View(ctx)
		return v.Fences, err
	})
}

// stands waits until the gate is among fences, proven and at a level.
func (b *bench) stands(level string, fences func(context.Context) ([]api.Fence, error)) (proof string) {
	b.t.Helper()
	says := "nothing"
	err := node.Until(b.t.Context(), "the gate stands", func() (bool, error) {
		all, err := fences(b.t.Context())
		for _, f := range all {
			if f.Name == "gate" {
				proof, says = f.Proof+" "+f.Why, f.State+": "+f.Proof+" "+f.Why
				return f.State == "proven" && strings.Contains(proof, "level "+level), err
			}
		}
		return false, err
	})
	if err != nil {
		b.t.Fatalf("%v; it says %s", err, says)
	}
	return proof
}

// out is where a client's steps are told.
func (b *bench) out(name string) string { return b.Path("steps-" + name) }

// program runs steps of the client.
func (b *bench) program(name string, steps ...string) []string {
	return append([]string{"/bin/sh", "-c", `out=$1; shift; exec "$0" "$@" >"$out"`, client, b.out(name)}, steps...)
}

// asks runs steps in a container to their end.
func (b *bench) asks(c *node.Container, name string, steps ...string) []step {
	b.t.Helper()
	p, err := c.Exec(b.t.Context(), false, b.program(name, steps...)...)
	b.check(err)
	b.check(p.Await(b.t.Context()))
	return b.told(name)
}

// step is what a client said of one.
type step struct {
	errno int
	line  string
}

func (b *bench) told(name string) []step {
	b.t.Helper()
	text, err := os.ReadFile(b.out(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it has not begun
	}
	b.check(err)
	var steps []step
	for line := range strings.Lines(string(text)) {
		s := step{line: strings.TrimSpace(line)}
		if f := strings.Fields(line); len(f) == 4 {
			s.errno, _ = strconv.Atoi(f[1])
		}
		steps = append(steps, s)
	}
	return steps
}

// same holds what a client said of its steps against what it must say.
func (b *bench) same(name string, want []string) {
	b.t.Helper()
	got := b.told(name)
	for i := range min(len(got), len(want)) {
		if got[i].line != want[i] {
			b.t.Fatalf("step %d: %s, want %s", i, got[i].line, want[i])
		}
	}
	if len(got) != len(want) {
		b.t.Errorf("%d steps were told of %d", len(got), len(want))
	}
}

func (b *bench) number(line, word string) uint64 {
	b.t.Helper()
	_, rest, ok := strings.Cut(line, word+" ")
	first, _, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(first, 10, 64)
	if !ok || err != nil {
		b.t.Fatalf("no number %q in %q", word, line)
	}
	return n
}

// events of a container.
func (b *bench) events(c *node.Container, types ...string) []api.Event {
	b.t.Helper()
	return b.eventsOf(c.Key.ID, types...)
}

func (b *bench) eventsOf(id string, types ...string) []api.Event {
	b.t.Helper()
	all, err := b.Events(b.t.Context(), types...)
	b.check(err)
	var out []api.Event
	for _, e := range all {
		if e.Container != nil && e.Container.ID == id {
			out = append(out, e)
		}
	}
	return out
}

// cgroup is a file of the container's cgroup.
func cgroup(c *node.Container, file string) string { return filepath.Join(c.Cgroups()[0], file) }
