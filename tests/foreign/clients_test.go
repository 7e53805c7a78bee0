// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

const mib = uint64(1) << 20

// Deliveries of the shim.
const (
	none    = "no shim"
	preload = "preload"
	stub    = "stub"
)

var deliveries = []string{none, preload, stub}

// limit is the fenced container's.
const limit = 1024 * mib

// hanging is what no client takes, on however busy a machine: each takes seconds.
const hanging = 10 * time.Minute

// place is a node with one fenced container.
type place struct {
	t    *testing.T
	node *node.Node
	c    *node.Container
}

func newPlace(t *testing.T, cuda string, sim ...string) *place {
	t.Helper()
	dist := filepath.Dir(filepath.Dir(simtest.Dist(t, "clients/client")))
	n, err := node.New(t.Context(), node.Options{
		Dist: dist, Sim: append([]string{"--gpus", "2", "--memory", "8GiB", "--context-bytes", "64MiB", "--cuda-version", cuda}, sim...),
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
	c, err := n.Start(t.Context(), node.Spec{
		Name: "fenced", Limits: []string{fmt.Sprintf("memory.max=%dMi", limit/mib)}, Shim: true, Program: []string{"/bin/sleep", "600"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &place{t: t, node: n, c: c}
}

// python runs a program of ours over packages of others (sets of requirements/, with spaces between), in the container unless there is no shim,
// and reads what it wrote.
func (p *place) python(delivery, set, program string, out any, args ...string) error {
	p.t.Helper()
	file := filepath.Join(p.t.TempDir(), "out.json")
	script, err := filepath.Abs(filepath.Join("programs", program))
	if err != nil {
		return err
	}
	var places []string
	for name := range strings.SplitSeq(set, " ") {
		places = append(places, folder(p.t, name))
	}
	said, err := p.run(delivery, append([]string{
		"/usr/bin/env", "PYTHONPATH=" + strings.Join(places, ":"), "PYTHONDONTWRITEBYTECODE=1", "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING=1",
		interpreter(p.t), script, file,
	}, args...)...)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", program, err, said)
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("read what %s wrote: %w\n%s", program, err, said)
	}
	return nil
}

// interpreter is the Python that the packages were brought for.
func interpreter(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder(t, ""), ".python"))
	if err != nil {
		t.Fatalf("find the Python of the packages: %v: run make test-clients", err)
	}
	return strings.TrimSpace(string(text))
}

// run runs a program, in the container unless there is no shim, and gives what it said.
func (p *place) run(delivery string, command ...string) ([]byte, error) {
	p.t.Helper()
	log := filepath.Join(p.t.TempDir(), "log")
	// A shell, so that what goes wrong is kept.
	command = append([]string{"/usr/bin/env", "LOG=" + log, "/bin/sh", "-c", `exec "$@" >"$LOG" 2>&1`, "sh"}, command...)
	var process *node.Process
	var err error
	switch delivery {
	case none:
		process, err = p.node.Outside(p.t.Context(), "outside", command...)
	case preload:
		process, err = p.c.Exec(p.t.Context(), true, command...)
	case stub:
		enter, e := filepath.Abs("programs/stub.sh")
		if e != nil {
			return nil, e
		}
		command = append([]string{"unshare", "--mount", enter, p.node.Path("private-fenced"), p.node.Dist("lib/gpufence-stub/dev"), p.node.Dist("simgpu")}, command...)
		process, err = p.c.Exec(p.t.Context(), false, command...)
	}
	if err != nil {
		return nil, err
	}
	select {
	case <-process.Exited():
	case <-time.After(hanging):
		return nil, fmt.Errorf("%v did not end within %v: %w", command, hanging, process.Kill())
	}
	said, err := os.ReadFile(log)
	if err != nil {
		return nil, fmt.Errorf("%v (%s): %w", command, process.Status(), err)
	}
	if status := process.Status(); status != "exit status 0" {
		return said, fmt.Errorf("%v: %s\n%s", command, status, said)
	}
	return said, nil
}

// table is what dist/clients.md is made of.
var table struct {
	sync.Mutex
	rows []string
	by   map[string]map[string]string
}

// note puts a word into the table; of several for one place, that of a failure stays.
func note(client, delivery, word string) {
	table.Lock()
	defer table.Unlock()
	if table.by == nil {
		table.by = map[string]map[string]string{}
	}
	if table.by[client] == nil {
		table.by[client] = map[string]string{}
		table.rows = append(table.rows, client)
	}
	if table.by[client][delivery] != failed {
		table.by[client][delivery] = word
	}
}

// TestMain writes the table when all have run. A part of the tests (-run) leaves the table as it was.
func TestMain(m *testing.M) {
	code := m.Run()
	if table.by != nil && flag.Lookup("test.run").Value.String() == "" {
		slices.Sort(table.rows) // tests run side by side
		text := "# Clients that we did not write, on the simulated GPU\n\nWritten by `make test-clients`.\n\n| client | " + strings.Join(deliveries, " | ") + " |\n| --- | --- | --- | --- |\n"
		for _, r := range table.rows {
			text += "| " + r
			for _, d := range deliveries {
				word := table.by[r][d]
				if word == "" {
					word = "not run"
				}
				text += " | " + word
			}
			text += " |\n"
		}
		dist := os.Getenv("GPUFENCE_DIST")
		if dist == "" {
			dist = "../../dist"
		}
		if err := os.WriteFile(filepath.Join(dist, "clients.md"), []byte(text), 0o644); err != nil { //nolint:gosec // for everyone to read
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const failed = "failed"

// verdict is a test's word for the table.
func verdict(t *testing.T) string {
	if t.Failed() {
		return failed
	}
	return "pass"
}
