// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// elsewhere are commands of the pages below that are not run here, with the reason. One that no page has any more
// is a failure.
var elsewhere = map[string]string{
	"make demo     # three containers on one 16 GiB GPU, held to 4, 2 and 6 GiB; a simulated GPU where there is no real one": "it is what runs these tests",
	"make test     # every test":                 "it is what runs this test",
	"dpkg -i dist/packages/gpufence_*_amd64.deb": "make test-packages installs it, in a root of its own",
	"gpufence install --runtime containerd --restart-mode systemd     # or crio, docker, podman; --dry-run shows the change": "make test-engines runs it against real engines",
	"kubectl get pod notebook -o yaml | gpufence apply -f -":                                                                 "it needs a cluster; make test-k8s changes annotations there",
	"cp packaging/systemd/gpufence.sysusers /usr/lib/sysusers.d/gpufence.conf && systemd-sysusers":                           "it changes the machine; make test-packages installs the same files in a root of its own",
	"cp packaging/systemd/gpufenced.{socket,service} /usr/lib/systemd/system/":                                               "as above",
	"systemctl enable --now gpufenced.socket gpufenced.service":                                                              "it needs systemd as the first process",
	"journalctl -u gpufenced GPUFENCE_EVENT=kill":                                                                            "it needs systemd's journal",
	"journalctl GPUFENCE_CONTAINER=3f2a…":                                                                                    "it needs systemd's journal",
	"$EDITOR /etc/gpufence/config.toml && gpufence reload":                                                                   "an editor waits for a person; reload is tested with the configuration",
	"gpufence events --follow":                                                                                               "it does not end by itself; the API's page has it with a bound",
}

var consoleBlock = regexp.MustCompile("(?s)```console\n(.*?)```")

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

	found := map[string]bool{}
	for _, page := range []string{"README.md", "docs/numbers.md", "docs/troubleshooting.md", "docs/resizing.md", "docs/api.md", "docs/metrics.md", "docs/operation.md"} {
		t.Run(filepath.Base(page), func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("../..", page))
			if err != nil {
				t.Fatal(err)
			}
			count := 0
			for _, block := range consoleBlock.FindAllStringSubmatch(string(text), -1) {
				for line := range strings.Lines(strings.ReplaceAll(block[1], "\\\n", "")) {
					command, ok := strings.CutPrefix(strings.TrimSpace(line), "# ")
					if !ok {
						continue
					}
					count++
					if why, ok := elsewhere[command]; ok {
						found[command] = true
						t.Logf("not run: %s: %s", command, why)
						continue
					}
					if err := documented(ctx, n, dist, t.TempDir(), command); err != nil {
						t.Errorf("%s: %v", command, err)
					} else {
						t.Logf("ran: %s", command)
					}
				}
			}
			if count == 0 {
				t.Error("no command was found: is the page written otherwise now?")
			}
		})
	}
	for command := range elsewhere {
		if !found[command] {
			t.Errorf("no page has the command %q, which is said not to be run", command)
		}
	}
}

// documented runs a command as it stands, with the test's gpufenced in the place of the machine's own.
func documented(ctx context.Context, n *node.Node, dist, dir, command string) error {
	command = strings.NewReplacer("/run/gpufence/gpufenced.sock", n.Socket,
		"follow=1", "follow=0").Replace(command) // what follows does not end by itself
	bounded, cancel := context.WithTimeout(ctx, node.Patience)
	defer cancel()
	cmd := exec.CommandContext(bounded, "bash", "-c", command)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dist, "bin")+":"+os.Getenv("PATH"), "GPUFENCE_SOCKET="+n.Socket, "GPUFENCE_CONFIG="+n.ConfigPath())
	out, err := cmd.CombinedOutput()
	if strings.HasPrefix(command, "gpufence doctor") && cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 1 {
		err = nil // doctor's verdict of this machine, which has no engine configured
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if len(strings.TrimSpace(string(out))) == 0 {
		return fmt.Errorf("it printed nothing")
	}
	return nil
}
