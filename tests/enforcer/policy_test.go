// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/node"
)

// outside runs the test client in no container, with a context and 512 MiB, until the test ends.
func (b *bench) outside(name string, program ...string) *node.Process {
	b.t.Helper()
	p, err := b.Outside(b.t.Context(), name, program...)
	b.check(err)
	b.t.Cleanup(func() {
		if p.Alive() {
			if err := p.Kill(); err != nil {
				b.t.Error(err)
			}
		}
	})
	b.do(p, "context", "alloc 512")
	return p
}

// TestUnmanagedIsKilled: with unmanaged = "kill" a process that did not come through gpufence dies
// for using a GPU, and nobody else does: neither one that is exempt, by its program or by its name, nor
// a container.
func TestUnmanagedIsKilled(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		dir := t.TempDir()
		program, name := filepath.Join(dir, "exempt"), filepath.Join(dir, "sparedname")
		b := newBench(t, lag, withConfig(`unmanaged = "kill"`, `unmanaged-exempt = ["exe:`+program+`", "comm:spared*"]`))
		client, err := os.ReadFile(b.Dist("clients/client"))
		b.check(err)
		for _, to := range []string{program, name} {
			b.check(os.WriteFile(to, client, 0o755))
		}
		c := b.run(node.Spec{Name: "c", Limits: []string{"memory.max=1Gi"}, Shim: true})
		spared := []*node.Process{b.outside("by program", program), b.outside("by name", name)}
		stranger := b.outside("stranger")
		b.check(stranger.Await(t.Context()))
		if !stranger.Killed() {
			t.Fatalf("the stranger ended with %s", stranger.Status())
		}
		b.later()
		for _, p := range append(spared, c.Main) {
			if !p.Alive() {
				t.Errorf("killed, too: %s", p.Status())
			}
		}
		var victims []int
		for _, e := range b.events("kill-decided") {
			victims = append(victims, int(e.Numbers["used_bytes"]>>20))
			if e.Container != nil || e.Code != string(quota.CodeUnmanaged) || !strings.Contains(e.Message, "did not come through gpufence") {
				t.Errorf("decided: %+v", e)
			}
		}
		if len(victims) != 1 {
			t.Errorf("decided %d times: %v MiB", len(victims), victims)
		}
	})
}

// TestUnmanagedIsDenied: with unmanaged = "deny" no guarantee is granted beside it, nobody is killed, and
// gpufenced says from its start on that this needs the gate, which there is none of here.
func TestUnmanagedIsDenied(t *testing.T) {
	t.Parallel()
	b := newBench(t, 0, withConfig(`unmanaged = "deny"`))
	n, err := b.Client.Node(t.Context())
	b.check(err)
	said := ""
	for _, p := range n.Problems {
		if p.About == "unmanaged" {
			said = p.Error
		}
	}
	contains(t, said, "E1505", "gate")
	stranger := b.outside("stranger")
	b.until("it is told", func() bool { return len(b.events("unmanaged")) == 1 })
	_, err = b.Client.Prepare(t.Context(), b.Request(node.Spec{Name: "c", Limits: []string{"memory.max=1Gi"}}))
	if quota.Code(api.ErrorOf(err).Code) != quota.CodeUnmanaged {
		t.Errorf("beside it: %v", err)
	}
	b.nobodyKilled()
	if !stranger.Alive() {
		t.Error("it was killed")
	}
	b.check(stranger.Kill())
	b.until("it starts once it is gone", func() bool {
		_, err := b.Client.Prepare(t.Context(), b.Request(node.Spec{Name: "c", Limits: []string{"memory.max=1Gi"}}))
		return err == nil
	})
	b.check(b.Client.Unregister(t.Context(), api.UnregisterRequest{Key: b.Request(node.Spec{Name: "c"}).Key}))
}

// TestShimMissingIsKilled: with shim-missing = "kill" a container's process that does not load the shim
// dies although it keeps to the limit, and one that does lives.
func TestShimMissingIsKilled(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag, withConfig(`shim-missing = "kill"`))
		good := b.run(node.Spec{Name: "good", Limits: []string{"memory.max=1Gi"}, Shim: true})
		b.do(good.Main, "alloc 128")
		bad := b.run(node.Spec{Name: "bad", Limits: []string{"memory.max=1Gi"}})
		b.check(bad.Main.Await(t.Context()))
		if !bad.Main.Killed() {
			t.Fatalf("it ended with %s", bad.Main.Status())
		}
		b.until("it is in the journal", func() bool { return len(b.events("kill")) == 1 })
		if e := b.events("kill")[0]; e.Container == nil || e.Container.ID != bad.Key.ID || !strings.Contains(e.Message, "shim") {
			t.Errorf("kill: %+v", e)
		}
		b.later()
		if !good.Main.Alive() || len(b.events("kill-decided")) != 1 {
			t.Errorf("the other: %s, %d decisions", good.Main.Status(), len(b.events("kill-decided")))
		}
	})
}

// TestRefusals: what policy refuses is refused, with its code, in a namespace that is enforced; where
// a namespace observes or warns it starts, and warn says what would have been.
func TestRefusals(t *testing.T) {
	t.Parallel()
	b := newBench(t, 0, withSim("--mig", "2"), withConfig(`[ceiling]`, `max = "2Gi"`, `[privileged]`, `cri = "refuse"`, `docker = "report"`,
		`[namespace."watched"]`, `mode = "observe"`, `[namespace."warned"]`, `mode = "warn"`, `[namespace."safe"]`, `require = "hard"`))
	st, err := b.Sim.State(t.Context())
	b.check(err)
	instance := []string{st.GPUs[1].UUID}
	for _, test := range []struct {
		name       string
		limits     []string
		privileged bool
		code       quota.Code
	}{
		{"ceiling", []string{"memory.max=3Gi"}, false, quota.CodeAboveCeiling},
		{"privileged", []string{"memory.max=1Gi"}, true, quota.CodePrivileged},
	} {
		for _, namespace := range []string{"default", "watched", "warned"} {
			req := b.Request(node.Spec{Name: test.name + "-" + namespace, Namespace: namespace, Limits: test.limits, GPUs: instance})
			req.Privileged = test.privileged
			resp, err := b.Client.Prepare(t.Context(), req)
			switch {
			case namespace == "default" && (err == nil || quota.Code(api.ErrorOf(err).Code) != test.code):
				t.Errorf("%s in %s: %v, want %s", test.name, namespace, err, test.code)
			case namespace != "default" && (err != nil || len(resp.Files) != 0):
				t.Errorf("%s in %s: %v, %v", test.name, namespace, err, resp.Files)
			}
		}
		told := 0
		for _, e := range b.events("would-refuse") {
			if e.Code == string(test.code) && e.Pod != nil && e.Pod.Namespace == "warned" {
				told++
			}
		}
		if told != 1 {
			t.Errorf("%s: would have been refused %d times", test.name, told)
		}
	}

	// A namespace that requires a hard fence: an instance below the limit's size has one no more.
	_, err = b.Start(t.Context(), node.Spec{Name: "part", Namespace: "safe", Limits: []string{"memory.max=1Gi"}, GPUs: instance})
	if err == nil || quota.Code(api.ErrorOf(err).Code) != quota.CodeLevelNotReached {
		t.Errorf("a part of an instance: %v", err)
	}
	contains(t, err.Error(), "requires level hard", "mig: memory.max 1Gi is below the instance's ")
}

// TestRequireHard: the whole of a MIG instance is hard, from the annotation as from the namespace.
func TestRequireHard(t *testing.T) {
	t.Parallel()
	b := newBench(t, 0, withSim("--mig", "2"))
	st, err := b.Sim.State(t.Context())
	b.check(err)
	c, err := b.Start(t.Context(), node.Spec{Name: "whole", Limits: []string{"memory.max=8Gi", "memory.min=1Gi", "require=hard"}, GPUs: []string{st.GPUs[1].UUID}})
	b.check(err)
	if c.Registered.Level != quota.LevelHard {
		t.Errorf("level %s: %+v", c.Registered.Level, c.Registered.Fences)
	}
}
