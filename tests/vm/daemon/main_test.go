// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

func TestMain(m *testing.M) {
	if os.Getenv("GPUFENCE_GUEST") == "" {
		fmt.Println("SKIP: these tests run inside the guests of make test-vm")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// bench is a node in the guest.
type bench struct {
	*node.Node
	t *testing.T
}

// newBench starts gpufenced over one simulated GPU.
func newBench(t *testing.T, lag time.Duration, config ...string) *bench {
	t.Helper()
	b := &bench{t: t}
	n, err := node.New(t.Context(), node.Options{
		Dist:   os.Getenv("GPUFENCE_DIST"),
		Sim:    []string{"--model", "t4", "--memory", "16GiB", "--context-bytes", "64MiB", "--nvml-lag", lag.String()},
		Config: append([]string{`context = "64Mi"`}, config...),
	})
	b.check(err)
	b.Node = n
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("gpufenced said:\n%s", n.DaemonLog())
		}
		if err := n.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("the node is not clean: %v", err)
		}
	})
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

// cgroup is a file of the container's cgroup.
func cgroup(c *node.Container, file string) string { return filepath.Join(c.Cgroups()[0], file) }
