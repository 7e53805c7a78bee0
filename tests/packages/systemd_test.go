// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

const unit = "gpufenced.service"

// TestSystemd: the units, as the package installs them, under a real systemd: started by the first question, restarted
// when hung or killed, reloaded, and neither a restart nor a stop disturbs a container.
func TestSystemd(t *testing.T) {
	if os.Getenv("GPUFENCE_SOAK") != "1" {
		t.Skip("SKIPPED: it waits for a watchdog and for restarts: make soak-packages (TestHostInstall starts the same units)")
	}
	n := bootNode(t, "bookworm")
	n.equip()
	n.do("dpkg", "-i", n.take(one(t, built(t, first), "*_"+runtime.GOARCH+".deb")))
	config, err := os.ReadFile(n.root + "/etc/gpufence/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	n.write("/etc/gpufence/config.toml", nodeConfig+string(config))

	// The socket is there, and nobody behind it yet.
	if got := n.show("gpufenced.socket", "ActiveState") + " " + n.show(unit, "ActiveState"); got != "active inactive" {
		t.Errorf("after the installation socket and service are %s", got)
	}
	if out := n.do("stat", "-c", "%a %U:%G", "/run/gpufence/gpufenced.sock"); out != "660 root:gpufence\n" {
		t.Errorf("the socket is %s", out)
	}
	begun := time.Now()
	n.do("gpufence", "ps")
	if got := n.show(unit, "ActiveState") + " " + n.show(unit, "SubState"); got != "active running" {
		t.Errorf("after the first question the service is %s", got)
	}
	t.Logf("the first question was answered after %.2f s; status %q", time.Since(begun).Seconds(), n.show(unit, "StatusText"))
	if got := n.show(unit, "Type") + " " + n.show(unit, "WatchdogUSec"); got != "notify 30s" {
		t.Errorf("the service is %s", got)
	}

	n.ctr("held", "/usr/bin/gpufence-runtime", "1Gi")
	c := n.held("gpufence", "at first", n.containers("gpufence")[0])

	pid := n.show(unit, "MainPID")
	again := func(when string) {
		t.Helper()
		await(t, "another gpufenced after "+when, func() error {
			now := n.show(unit, "MainPID")
			if now == pid || now == "0" || n.show(unit, "ActiveState") != "active" {
				return os.ErrDeadlineExceeded
			}
			pid = now
			return nil
		})
		c = n.held("gpufence", "after "+when, c)
	}
	n.do("systemctl", "restart", unit)
	again("a restart")
	n.do("systemctl", "kill", "-s", "SIGKILL", "--kill-who=main", unit)
	again("a kill")
	if got := n.show(unit, "NRestarts"); got != "1" {
		t.Errorf("systemd restarted it %s times, want 1", got)
	}

	// As shipped it would take 30 s.
	n.write("/etc/systemd/system/"+unit+".d/soon.conf", "[Service]\nWatchdogSec=3s\n")
	n.do("systemctl", "daemon-reload")
	n.do("systemctl", "restart", unit)
	again("a restart with another watchdog")
	time.Sleep(7 * time.Second) // it feeds the watchdog: nothing happens within two periods
	if got := n.show(unit, "MainPID"); got != pid {
		t.Errorf("a gpufenced that works was restarted: %s, was %s", got, pid)
	}
	begun = time.Now()
	n.do("systemctl", "kill", "-s", "SIGSTOP", "--kill-who=main", unit)
	again("it hung")
	t.Logf("a stopped gpufenced was replaced after %.1f s, with WatchdogSec=3s", time.Since(begun).Seconds())
	if out := n.do("journalctl", "--no-pager", "-u", unit); !strings.Contains(out, "Watchdog timeout") {
		t.Errorf("the journal does not say so:\n%s", out)
	}

	// A reload: right and wrong.
	n.write("/etc/gpufence/config.toml", nodeConfig+"kill-slack = \"128Mi\"\n"+string(config))
	n.do("systemctl", "reload", unit)
	n.write("/etc/gpufence/config.toml", nodeConfig+"kill-slak = \"128Mi\"\n"+string(config))
	if out, err := n.try("systemctl", "reload", unit); err == nil {
		t.Errorf("a wrong configuration was reloaded: %s", out)
	}
	if out := n.do("journalctl", "--no-pager", "-u", unit); !strings.Contains(out, "kill-slak is not a key") {
		t.Errorf("the journal does not say what is wrong:\n%s", out)
	}
	if got := n.show(unit, "MainPID"); got != pid {
		t.Errorf("a reload restarted it: %s, was %s", got, pid)
	}
	c = n.held("gpufence", "after the reloads", c)
	n.write("/etc/gpufence/config.toml", nodeConfig+string(config))

	// Stopped, it is started by the next question; with its socket it is not, and the container goes on.
	n.do("systemctl", "stop", unit)
	if got := n.show(unit, "ActiveState"); got != "inactive" {
		t.Errorf("stopped, it is %s", got)
	}
	n.do("gpufence", "ps")
	again("a stop and a question")
	n.do("systemctl", "stop", "gpufenced.socket", unit)
	if out, err := n.try("gpufence", "ps"); err == nil {
		t.Errorf("somebody answers: %s", out)
	}
	if n.there("/run/gpufence/gpufenced.sock") {
		t.Error("the socket is left")
	}
	if out, err := n.try("ls", "/sys/fs/cgroup/system.slice/"+unit); err == nil {
		t.Errorf("its cgroup is left: %s", out)
	}
	if out := n.do("ctr", "task", "ls"); !strings.Contains(out, "RUNNING") {
		t.Errorf("the container ended: %s", out)
	}
	n.do("systemctl", "start", "gpufenced.socket")
	n.do("gpufence", "ps")
	again("a stop of everything")

	// What containerd does not disturb, either.
	n.do("systemctl", "restart", "containerd.service")
	c = n.held("gpufence", "after containerd's restart", c)
	if out, err := n.try("dpkg", "--purge", "gpufence"); err == nil || !strings.Contains(out, "not removed") {
		t.Errorf("removed under a running container: %v %s", err, out)
	}
	n.do("ctr", "task", "kill", "-s", "SIGKILL", "held")
	await(t, "gpufenced has no container", func() error {
		if len(n.containers("gpufence")) > 0 {
			return os.ErrDeadlineExceeded
		}
		return nil
	})
	n.do("dpkg", "--purge", "gpufence")
	for _, at := range []string{"/run/gpufence", "/var/lib/gpufence", "/etc/gpufence"} {
		if n.there(at) {
			t.Errorf("%s is left over", at)
		}
	}
	left, err := filepath.Glob(n.root + "/etc/systemd/system/*.wants/gpufence*")
	if err != nil || len(left) > 0 {
		t.Errorf("left enabled: %q %v", left, err)
	}
	if out := n.do("findmnt", "--list", "--noheadings", "-o", "TARGET"); strings.Contains(out, "gpufence") {
		t.Errorf("left mounted:\n%s", out)
	}
}
