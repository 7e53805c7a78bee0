// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEnginesAreWatched(t *testing.T) {
	b := newBench(t)
	d := b.start()
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	look := func(want int) {
		t.Helper()
		if err := d.lookAtEngines(root); err != nil {
			t.Error(err)
		}
		n, err := d.Node(ctxb())
		if err != nil || len(n.Drift) != want {
			t.Errorf("drift %q, want %d", n.Drift, want)
		}
		if got := d.measurement().Drift; got != want {
			t.Errorf("the metric says %d, want %d", got, want)
		}
	}
	look(0)
	write("etc/docker/daemon.json", `{}`)
	look(0) // never was right: that is for doctor to say
	write("usr/bin/gpufence-runtime.docker", "")
	write("etc/docker/daemon.json", `{"runtimes":{"gpufence":{"path":"/usr/bin/gpufence-runtime.docker"}}}`)
	look(0)
	// A configuration manager writes its own over it.
	write("etc/docker/daemon.json", `{"runtimes":{}}`)
	look(1)
	look(1)
	if evs := b.events("config-drift"); len(evs) != 1 || !strings.Contains(evs[0].Message, "docker: the handler gpufence is gone from /etc/docker/daemon.json") {
		t.Errorf("events %+v", evs)
	}
	// Also after a restart.
	b.drop()
	d = b.start()
	look(1)
	write("etc/docker/daemon.json", `{"runtimes":{"fence":{"path":"/usr/bin/gpufence-runtime.docker"}}}`)
	look(0)
	if evs := b.events("config-drift-gone"); len(evs) != 1 {
		t.Errorf("events %+v", evs)
	}
	// A memory that is damaged is said once, and written anew.
	if err := os.WriteFile(filepath.Join(b.cfg.StateDir, enginesFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.lookAtEngines(root); err == nil {
		t.Error("a damaged memory was not said")
	}
	look(0)
}
