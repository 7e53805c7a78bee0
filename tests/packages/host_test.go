// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/tests/process"
)

// agent runs the image's container host as the chart does: with the processes of the node and a root of its own.
func (n *node) agent(image string, args ...string) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Join(image, "proc"), 0o755); err != nil {
		n.t.Fatal(err)
	}
	script := `mount -t proc proc "$1/proc" && image=$1 && shift && exec chroot "$image" /usr/bin/gpufence-agent host "$@"`
	argv := append([]string{
		"--target", fmt.Sprint(n.init), "--pid", "--uts", "--ipc", "--net", "--cgroup", "unshare", "--mount", "sh", "-c", script, "sh", image,
	}, args...)
	p, err := process.Start(n.t.Context(), process.Options{Name: "the agent", Log: filepath.Join(n.t.TempDir(), "agent.log")}, "nsenter", argv...)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		pid, err := p.Child() // nsenter waits for it, and passes no signal on
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGTERM)
		}
		if err != nil {
			n.t.Errorf("the agent ended before: %v", err)
		}
		if err := p.Await(context.Background()); err != nil || !p.State().Success() {
			n.t.Errorf("the agent ended with %v, %v", p.State(), err)
		}
		if n.t.Failed() {
			n.t.Logf("the agent said: %s", p.Said())
		}
	})
}

// TestHostInstall: the chart's container host makes a node of a machine with systemd and a containerd whose folders are not
// the usual ones, and keeps it so.
func TestHostInstall(t *testing.T) {
	n := bootNode(t, "bookworm")
	n.equip()
	n.write("/etc/gpufence/config.toml", nodeConfig)
	image := rootOf(t, layoutOf(t)[hostArch])
	engine := n.show("containerd.service", "MainPID")
	begun := time.Now()
	n.agent(image, "--install=true", "--install-dir=/opt/gpufence", "--runtime=containerd", "--install-arg=--restart-mode=systemd", "--canary-file=/run/gpufence/canary.json", "--canary-interval=2s")
	var last kube.Canary
	canary := func(what string, ok func(kube.Canary) bool) {
		t.Helper()
		await(t, what, func() error {
			text, err := os.ReadFile(n.root + "/run/gpufence/canary.json")
			if err == nil {
				last = kube.Canary{}
				err = json.Unmarshal(text, &last)
			}
			if err == nil && !ok(last) {
				err = fmt.Errorf("it says %s", text)
			}
			return err
		})
	}
	canary("a canary is held, and the restarted containerd has the handler", func(c kube.Canary) bool { return c.Held && c.Engine == "" })
	t.Logf("a canary was held %.1f s after the agent's start, level %s", time.Since(begun).Seconds(), last.Level)
	if got := n.show(unit, "ActiveState") + " " + n.show("gpufenced.socket", "ActiveState") + " " + n.show(unit, "UnitFileState"); got != "active active enabled" {
		t.Errorf("service and socket are %s", got)
	}
	if got := n.show(unit, "ExecStart"); !strings.Contains(got, "path=/opt/gpufence/bin/gpufenced ") {
		t.Errorf("the service runs %s", got)
	}
	if out := n.do("stat", "-c", "%a %U:%G", "/run/gpufence/gpufenced.sock"); out != "660 root:gpufence\n" {
		t.Errorf("the socket is %s", out)
	}
	if now := n.show("containerd.service", "MainPID"); now == engine {
		t.Error("containerd was not restarted: it does not know the handler")
	}
	if out := n.do("containerd", "config", "dump"); !strings.Contains(out, "/opt/gpufence/bin/gpufence-runtime.cri") {
		t.Errorf("containerd's configuration has no handler of ours:\n%s", out)
	}

	gpufence := "/opt/gpufence/bin/gpufence"
	n.ctr("held", "/opt/gpufence/bin/gpufence-runtime", "1Gi")
	c := n.held(gpufence, "at first", n.containers(gpufence)[0])

	// Two more looks change nothing.
	engine = n.show("containerd.service", "MainPID")
	pid := n.show(unit, "MainPID")
	for range 2 {
		seen := last.Time
		canary("another canary", func(c kube.Canary) bool { return c.Time.After(seen) })
		if !last.Held {
			t.Errorf("the canary was not held: %s", last.Why)
		}
	}
	if n.show("containerd.service", "MainPID") != engine || n.show(unit, "MainPID") != pid {
		t.Error("something was restarted, and nothing had changed")
	}
	// Somebody stops it: the agent starts it.
	n.do("systemctl", "stop", "gpufenced.socket", unit)
	await(t, "it is started again", func() error { _, err := n.try("systemctl", "is-active", unit); return err })
	c = n.held(gpufence, "after a stop", c)
	pid = n.show(unit, "MainPID")
	// A newer image: the programs are put in place, gpufenced is restarted, containerd and the container are not.
	f, err := os.OpenFile(filepath.Join(image, "opt/gpufence/bin/gpufenced"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("newer"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, "the newer one runs", func() error {
		if now := n.show(unit, "MainPID"); now == pid || now == "0" {
			return os.ErrDeadlineExceeded
		}
		_, err := n.try("systemctl", "is-active", unit)
		return err
	})
	n.held(gpufence, "after an upgrade", c)
	if n.show("containerd.service", "MainPID") != engine {
		t.Error("an upgrade of gpufence restarted containerd")
	}
	n.do("ctr", "task", "kill", "-s", "SIGKILL", "held")
}
