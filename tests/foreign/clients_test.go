// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
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

// place is a node with one fenced container.
type place struct {
	t    *testing.T
	node *node.Node
	c    *node.Container
}

func newPlace(t *testing.T, cuda string) *place {
	t.Helper()
	dist := filepath.Dir(filepath.Dir(simtest.Dist(t, "clients/client")))
	n, err := node.New(t.Context(), node.Options{
		Dist: dist, Sim: []string{"--gpus", "2", "--memory", "8GiB", "--context-bytes", "64MiB", "--cuda-version", cuda},
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

// python runs a program of ours over packages of others, in the container unless there is no shim,
// and reads what it wrote.
func (p *place) python(delivery, set, program string, out any, args ...string) error {
	p.t.Helper()
	file := filepath.Join(p.t.TempDir(), "out.json")
	script, err := filepath.Abs(filepath.Join("programs", program))
	if err != nil {
		return err
	}
	python := os.Getenv("PYTHON")
	if python == "" {
		python = "python3"
	}
	log := file + ".log"
	// A shell, so that what goes wrong is kept.
	command := append([]string{"/bin/sh", "-c", `exec "$@" >"$LOG" 2>&1`, "sh", python, script, file}, args...)
	command = append([]string{"/usr/bin/env", "PYTHONPATH=" + folder(p.t, set), "PYTHONDONTWRITEBYTECODE=1", "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING=1", "LOG=" + log}, command...)
	var process *node.Process
	switch delivery {
	case none:
		process, err = p.node.Outside(p.t.Context(), "outside", command...)
	case preload:
		process, err = p.c.Exec(p.t.Context(), true, command...)
	case stub:
		enter, e := filepath.Abs("programs/stub.sh")
		if e != nil {
			return e
		}
		command = append([]string{"unshare", "--mount", enter, p.node.Path("private-fenced"), p.node.Dist("lib/gpufence-stub/dev"), p.node.Dist("simgpu")}, command...)
		process, err = p.c.Exec(p.t.Context(), false, command...)
	}
	if err != nil {
		return err
	}
	select {
	case <-process.Exited():
	case <-time.After(2 * time.Minute):
		return fmt.Errorf("%s did not end: %w", program, process.Kill())
	}
	said, _ := os.ReadFile(log) // it may not have come so far
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%s (%s): %w\n%s", program, process.Status(), err, said)
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("read what %s wrote (%s): %w\n%s", program, process.Status(), err, said)
	}
	return nil
}

// table is what dist/clients.md is made of.
var table struct {
	sync.Mutex
	rows []string
	by   map[string]map[string]string
}

// note puts a word into the table.
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
	table.by[client][delivery] = word
}

// TestMain writes the table when all have run.
func TestMain(m *testing.M) {
	code := m.Run()
	if table.by != nil {
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

// verdict is a test's word for the table.
func verdict(t *testing.T) string {
	if t.Failed() {
		return "failed"
	}
	return "pass"
}
