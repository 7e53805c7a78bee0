// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestQuadlet: the unit of docs/podman.md, with an image that is there, through the generator of a Podman that has one.
func TestQuadlet(t *testing.T) {
	if os.Getenv("GPUFENCE_SOAK") != "1" {
		t.Skip("SKIPPED: a Debian with a Podman that has Quadlet is large: make soak-quadlet")
	}
	page, err := os.ReadFile(filepath.Join(repository, "docs/podman.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "```ini\n")
	text, _, ends := strings.Cut(text, "```")
	if !found || !ends || !strings.Contains(text, "Image=my/cuda-app\n") {
		t.Fatalf("docs/podman.md has no unit: %q", text)
	}
	n := bootNode(t, "trixie", "crun", "netavark", "podman")
	n.simulate()
	n.do("dpkg", "-i", n.take(one(t, built(t, first), "*_"+runtime.GOARCH+".deb")))
	config, err := os.ReadFile(n.root + "/etc/gpufence/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	n.write("/etc/gpufence/config.toml", nodeConfig+string(config))
	n.do("gpufence", "install", "--runtime", "podman")
	n.do("podman", "load", "-i", "/root/clients.tar")
	// The node has no controllers of cgroups.
	n.write("/etc/containers/systemd/notebook.container", strings.Replace(text, "my/cuda-app", clients, 1)+
		"Pull=never\nNetwork=none\nPidsLimit=0\nExec=/clients/client context \"fill 64\" meminfo hold\n")
	n.do("systemctl", "daemon-reload")
	t.Logf("%s\n%s", strings.TrimSpace(n.do("podman", "--version")), n.show("notebook.service", "ExecStart"))
	n.do("systemctl", "start", "notebook.service")
	await(t, "it fills its limit", func() error {
		out := n.do("journalctl", "--no-pager", "-u", "notebook.service", "-o", "cat")
		if !strings.Contains(out, `"op":"meminfo"`) {
			return fmt.Errorf("it says %s", out)
		}
		return nil
	})
	all := n.containers("gpufence")
	if len(all) != 1 || all[0].GPUs[0].Limits.Max != 4<<30 || all[0].Key.Engine != "podman" {
		t.Errorf("gpufenced has %+v", all)
	}
	await(t, "the refusal is counted", func() error {
		if all := n.containers("gpufence"); len(all) != 1 || all[0].GPUs[0].Events.Max == 0 {
			return fmt.Errorf("gpufenced has %+v", all)
		}
		return nil
	})
	n.do("systemctl", "stop", "notebook.service")
	await(t, "gpufenced has no container", func() error {
		if all := n.containers("gpufence"); len(all) > 0 {
			return fmt.Errorf("gpufenced has %+v", all)
		}
		return nil
	})
}
