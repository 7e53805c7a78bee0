// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestPeerBugsNameTests: each test that docs/peer-bugs.md names exists.
func TestPeerBugsNameTests(t *testing.T) {
	text, err := os.ReadFile("../../docs/peer-bugs.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("`((?:shim|tests|enforcer)/[\\w./]+): ([^`]+)`").FindAllStringSubmatch(string(text), -1)
	if len(found) < 60 {
		t.Fatalf("only %d tests are named", len(found))
	}
	for _, m := range found {
		where, name := filepath.Join("../..", m[1]), m[2]
		if strings.HasSuffix(where, ".c") {
			if source, err := os.ReadFile(where); err != nil || !strings.Contains(string(source), fmt.Sprintf("{ %q,", name)) {
				t.Errorf("%s has no test %q: %v", m[1], name, err)
			}
			continue
		}
		files, err := filepath.Glob(filepath.Join(where, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		there := false
		for _, f := range files {
			source, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			there = there || strings.Contains(string(source), "func "+name+"(t *testing.T)")
		}
		if !there {
			t.Errorf("%s has no test %s", m[1], name)
		}
	}
	// A line without a test has a reason.
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if strings.HasPrefix(line, "| ") && (len(cells) != 3 || len(strings.TrimSpace(cells[2])) < 3) {
			t.Errorf("says nothing: %s", line)
		}
	}
}

// twoGPUs is a node with a container on both of its GPUs, each with a limit of its own.
func twoGPUs(t *testing.T, env ...string) (*node.Node, *node.Container, [2]string) {
	t.Helper()
	n, err := node.New(t.Context(), node.Options{
		Dist:   filepath.Dir(filepath.Dir(simtest.Dist(t, "clients/coverage"))),
		Sim:    []string{"--gpus", "2", "--model", "t4", "--memory", "4GiB", "--context-bytes", "64MiB", "--second-context", "100"},
		Config: []string{`context = "64Mi"`},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	state, err := n.Sim.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	uuids := [2]string{state.GPUs[0].UUID, state.GPUs[1].UUID}
	for i, e := range env {
		env[i] = strings.NewReplacer("UUID0", uuids[0], "UUID1", uuids[1]).Replace(e)
	}
	c, err := n.Start(t.Context(), node.Spec{
		Name: "two", GPUs: []string{"0", "1"}, Shim: true, Env: env,
		Limits: []string{fmt.Sprintf("memory.max=%s=256Mi,%s=512Mi", uuids[0], uuids[1])},
	})
	if err != nil {
		t.Fatal(err)
	}
	return n, c, uuids
}

// TestGPUsInAnyOrder: whatever CUDA_VISIBLE_DEVICES says, and NVML first, each GPU has its own limit.
func TestGPUsInAnyOrder(t *testing.T) {
	for _, tt := range []struct {
		visible string
		limits  []uint64 // of the program's devices, in MiB
	}{
		{"", []uint64{256, 512}},
		{"1,0", []uint64{512, 256}},
		{"1", []uint64{512}},
		{"UUID1,UUID0", []uint64{512, 256}},
		{"UUID1", []uint64{512}},
	} {
		t.Run("visible="+tt.visible, func(t *testing.T) {
			t.Parallel()
			var env []string
			if tt.visible != "" {
				env = []string{"CUDA_VISIBLE_DEVICES=" + tt.visible}
			}
			_, c, _ := twoGPUs(t, env...)
			p := c.Main
			for i, want := range tt.limits {
				if i > 0 {
					var err error
					if p, err = c.Exec(t.Context(), true); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := p.Do(t.Context(), "nvml", fmt.Sprintf("context %d", i)); err != nil {
					t.Fatal(err)
				}
				info, err := p.Do(t.Context(), "meminfo")
				if err != nil || info.TotalBytes != want*mib || info.FreeBytes != (want-64)*mib {
					t.Errorf("device %d shows %d of %d MiB, %v", i, info.FreeBytes/mib, info.TotalBytes/mib, err)
				}
				filled, err := p.Ask(t.Context(), "fill 32")
				if err != nil || filled.GrantedBytes != (want-64)*mib {
					t.Errorf("device %d gave %d MiB, %v", i, filled.GrantedBytes/mib, err)
				}
				if _, err := p.Do(t.Context(), "free 0"); err != nil {
					t.Error(err)
				}
				again, err := p.Do(t.Context(), "meminfo")
				if err != nil || again.FreeBytes != info.FreeBytes {
					t.Errorf("device %d shows %d MiB free, %d before, %v", i, again.FreeBytes/mib, info.FreeBytes/mib, err)
				}
			}
		})
	}
}

// TestOneProcessAfterAnother: the next one finds everything free, and is charged for itself.
func TestOneProcessAfterAnother(t *testing.T) {
	t.Parallel()
	r := passes[1].start(t)
	for range 5 {
		if err := r.fresh(); err != nil {
			t.Fatal(err)
		}
		// What the last one held counts until gpufenced has seen its end.
		err := node.Until(t.Context(), "only its own context is charged", func() (bool, error) {
			v, _, err := r.look(0)
			return v.free == limit-contextBytes, err
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.p.Do(t.Context(), "begin cuMemAlloc_v2 dlsym"); err != nil {
			t.Fatal(err)
		}
		filled, err := r.p.Do(t.Context(), "fill")
		if err != nil || filled.GrantedBytes != limit-contextBytes {
			t.Errorf("it got %d of %d bytes, %v", filled.GrantedBytes, limit-contextBytes, err)
		}
	}
}

// TestNobodyWaitsForADriverCall: while the driver takes its time over one process's context, another
// one of the same container goes on.
func TestNobodyWaitsForADriverCall(t *testing.T) {
	t.Parallel()
	r := passes[0].start(t)
	if err := r.fresh(); err != nil {
		t.Fatal(err)
	}
	// Much longer than the others need, also where many things run beside.
	const driver = 15 * time.Second
	if err := r.node.SetSim(t.Context(), -1, fmt.Sprintf("context-time=%s", driver)); err != nil {
		t.Fatal(err)
	}
	slow, err := r.c.Exec(t.Context(), true, r.node.Dist("clients/coverage"))
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := slow.Say("context"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // so that it is in the call
	for range 3 {
		if _, err := r.p.Do(t.Context(), "begin cuMemAlloc_v2 dlsym", "view", "fill", "view", "give"); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took > driver {
		t.Errorf("the others went on after %s only", took)
	}
	if reply, err := slow.Hear(t.Context(), "context"); err != nil || !reply.OK {
		t.Errorf("the slow one: %+v, %v", reply, err)
	}
	if took := time.Since(began); took < driver {
		t.Errorf("the driver took only %s", took)
	}
}
