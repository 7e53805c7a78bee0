// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/documented"
	"github.com/gpufence/gpufence/tests/node"
)

// TestDocs runs the commands of the pages about a node that is up, on one with a container "notebook" of which
// there is something to explain.
func TestDocs(t *testing.T) {
	dist := dist(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	n, err := node.New(ctx, node.Options{Dist: dist, Sim: []string{"--gpus", "1", "--memory", "16GiB"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	begin := func() *node.Container {
		c, err := n.Start(ctx, node.Spec{Name: "notebook", Limits: []string{"memory.max=2Gi"}})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := begin()
	if _, err := c.Main.Do(ctx, "context", "alloc 3072"); err != nil {
		t.Fatal(err)
	}
	if err := c.Main.Await(ctx); err != nil {
		t.Fatal(err)
	}
	if !c.Main.Killed() {
		t.Fatalf("what held 3 of 2 GiB ended with %s", c.Main.Status())
	}
	if err := c.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	begin()

	documented.Run(t, "tests/e2e", func(t *testing.T, page string) func(string) error {
		switch page {
		case "docs/cdi.md":
			return generated(ctx, t, n)
		case "docs/simulated-gpu.md":
			return inOneShell(ctx, t, dist)
		}
		dir := t.TempDir()
		return func(command string) error { return asWritten(ctx, n, dist, dir, command) }
	})
}

// shell runs a line of bash, which must print something, with the build's programs first in PATH.
func shell(ctx context.Context, dist, dir, line string, env ...string) error {
	bounded, cancel := context.WithTimeout(ctx, node.Patience)
	defer cancel()
	cmd := exec.CommandContext(bounded, "bash", "-c", line)
	cmd.Dir, cmd.WaitDelay = dir, time.Second
	cmd.Env = append(append(os.Environ(), "PATH="+filepath.Join(dist, "bin")+":"+os.Getenv("PATH")), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if len(strings.TrimSpace(string(out))) == 0 {
		return errors.New("it printed nothing")
	}
	return nil
}

// asWritten runs a command as it stands, with the test's gpufenced and its configuration in the place of the machine's own.
func asWritten(ctx context.Context, n *node.Node, dist, dir, command string) error {
	line := strings.NewReplacer("/run/gpufence/gpufenced.sock", n.Socket, "/etc/gpufence/config.toml", n.ConfigPath(),
		"follow=1", "follow=0").Replace(command) // what follows does not end by itself
	switch {
	case strings.HasPrefix(command, "gpufence doctor"):
		line += "; [ $? -le 1 ]" // its verdict of this machine, which has no engine configured
	case strings.HasSuffix(command, " --follow"):
		line = "timeout 1 " + line + "; [ $? = 124 ]"
	}
	return shell(ctx, dist, dir, line, "GPUFENCE_SOCKET="+n.Socket, "GPUFENCE_CONFIG="+n.ConfigPath(), "EDITOR=cat")
}

// generated runs the commands of docs/cdi.md on a driver below a folder: the simulated one, at the places of NVIDIA's.
func generated(ctx context.Context, t *testing.T, n *node.Node) func(string) error {
	root, lib := t.TempDir(), "usr/lib/x86_64-linux-gnu"
	for _, dir := range []string{"dev", lib, "out"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0"} {
		if err := unix.Mknod(filepath.Join(root, "dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
			t.Fatal(err) // it is root here, as a node needs it
		}
	}
	var state struct {
		Driver string `json:"driver_version"`
	}
	out, err := exec.CommandContext(ctx, n.Dist("bin/simgpu"), "--dir", n.Path("sim"), "state", "-o", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &state)
	}
	if err != nil || state.Driver == "" {
		t.Fatalf("the simulated driver has no version: %v: %s", err, out)
	}
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so"} {
		text, err := os.ReadFile(n.Dist("simgpu/" + name + ".1"))
		if err != nil {
			t.Fatal(err)
		}
		versioned := filepath.Join(root, lib, name+"."+state.Driver)
		if err := errors.Join(os.WriteFile(versioned, text, 0o755), os.Symlink(filepath.Base(versioned), filepath.Join(root, lib, name+".1"))); err != nil {
			t.Fatal(err)
		}
	}
	return func(command string) error {
		line := strings.NewReplacer("/run/nvidia/driver", root, "--output=/etc/cdi", "--output="+root+"/out").Replace(command)
		if !strings.Contains(line, "--driver-root") {
			line += " --driver-root " + root // where the driver is at /, it is found
		}
		// Where the file is written, its content is what there is to see.
		if _, to, ok := strings.Cut(line, "--output="); ok {
			to, _, _ = strings.Cut(to, " ")
			line += " && cat " + to
		}
		// To standard error goes what the driver of a test does not have; the devices must be there all the same.
		return shell(ctx, n.Dist(""), root, "("+line+") | grep -e 'name: \"0\"' -e '\"name\": \"0\"'", n.SimEnv()...)
	}
}

// inOneShell runs a page's commands in the folder of the repository, each after those before it, since one sets variables.
func inOneShell(ctx context.Context, t *testing.T, dist string) func(string) error {
	dir := t.TempDir()
	replace := strings.NewReplacer("/run/simgpu", dir, "$PWD/dist/", dist+"/", "dist/bin/", dist+"/bin/", " dist/simgpu", " "+dist+"/simgpu", "/etc/cdi", dir, "--pid 1234", "--pid $PPID")
	exports := ""
	t.Cleanup(func() {
		// The page's last command ends it; this is for a test that did not get so far.
		if _, err := os.Stat(filepath.Join(dir, "admin")); err == nil {
			t.Error(shell(context.WithoutCancel(ctx), dist, dir, replace.Replace("dist/bin/simgpu down --dir /run/simgpu && echo down: what the page started was left running")))
		}
	})
	return func(command string) error {
		line := replace.Replace(command)
		if strings.HasPrefix(line, "export ") {
			exports += line + "; "
			line += "; ls $SIMGPU_DIR $LD_LIBRARY_PATH"
		}
		return shell(ctx, dist, dir, exports+line+" && echo done")
	}
}
