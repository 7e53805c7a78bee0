// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/documented"
	"github.com/gpufence/gpufence/tests/process"
)

// TestDocs runs the commands about packages, page after page: on a clean Debian, and those of rpm on another one. What is
// not in dpkg's hands lies in a folder with links to everything that was built.
func TestDocs(t *testing.T) {
	need(t, "rpm")
	debian, rpms := documentedNode(t), documentedNode(t)
	engine := ""
	documented.Run(t, "tests/packages", func(t *testing.T, page string) func(string) error {
		folder, version := "/root/first", strings.TrimPrefix(older, "v")
		if page == "docs/upgrade.md" {
			folder, version = "/root/second", strings.TrimPrefix(newer, "v")
		}
		names := strings.NewReplacer("VERSION", version, "x86_64", rpmArch[hostArch], "amd64", hostArch, "dist/packages/", "")
		return func(command string) error {
			line := names.Replace(command)
			words := strings.Fields(line)
			switch {
			case words[0] == "rpm":
				return rpms.rpm(folder, words[1:])
			case strings.HasPrefix(command, "rm -r /etc/gpufence"): // what rpm leaves
				return rpms.shell("mkdir -p /etc/gpufence /var/lib/gpufence && " + line + " && [ ! -e /etc/gpufence ]") // as gpufenced makes them
			case words[0] == "ctr":
				if engine == "" {
					engine = startContainerd(t)
				}
				return importImage(t, engine, words[1:])
			case words[0] == "gpufence" && words[1] == "doctor":
				line += "; [ $? -le 1 ]" // its verdict: there is neither gpufenced nor a GPU
			}
			return debian.shell("cd " + folder + " && " + line)
		}
	})
	if debian.there("/etc/gpufence") || debian.there("/etc/containerd/conf.d/99-zz-gpufence.toml") {
		t.Error("after the last command something is left over")
	}
}

// documentedNode has containerd's configuration, and all that was built.
func documentedNode(t *testing.T) *node {
	t.Helper()
	n := startNode(t)
	n.write("/etc/containerd/config.toml", "version = 3\n")
	for at, which := range map[string]func() (string, error){"first": first, "second": second} {
		from := built(t, which)
		for _, dir := range []string{"/mnt/" + at, "/root/" + at} {
			if err := os.MkdirAll(n.root+dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		// In the node's own mount namespace, with which it goes.
		must(t, "nsenter", "--target", strconv.Itoa(n.init), "--mount", "mount", "--bind", "-o", "ro", from, n.root+"/mnt/"+at)
		n.do("sh", "-c", "ln -s /mnt/"+at+"/* /root/"+at)
	}
	return n
}

func (n *node) shell(line string) error {
	_, err := n.try("sh", "-c", line)
	return err
}

// rpm is this machine's, on the node's root; what the package needs is there under Debian's names.
func (n *node) rpm(folder string, args []string) error {
	argv := []string{
		"nsenter", "--target", strconv.Itoa(n.init), "--mount", "--pid", "--uts", "--ipc", "rpm", "--root", n.root, "--dbpath", "/var/lib/rpm", "--nodeps",
	}
	for _, a := range args {
		if strings.HasSuffix(a, ".rpm") {
			a = n.root + strings.Replace(folder, "/root/", "/mnt/", 1) + "/" + a
		}
		argv = append(argv, a)
	}
	out, err := command(n.t.Context(), "", nil, argv...)
	if err == nil && (strings.Contains(out, "error:") || strings.Contains(out, "scriptlet failed")) {
		err = fmt.Errorf("rpm: %s", out)
	}
	return err
}

// startContainerd starts one with nothing but a store of images, and returns its folder.
func startContainerd(t *testing.T) string {
	t.Helper()
	bin, err := command(t.Context(), repository, nil, "tests/programs/build", "--path", "containerd")
	if err != nil {
		missing(t, "containerd is not built (make test-packages builds it): %v", err)
	}
	bin = strings.TrimSpace(bin)
	dir := t.TempDir()
	config := fmt.Sprintf(`version = 3
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.erofs"]
[grpc]
  address = "%[1]s/sock"
[ttrpc]
  address = "%[1]s/sock.ttrpc"
`, dir)
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := process.Start(t.Context(), process.Options{Log: filepath.Join(dir, "log"), TimeoutStart: time.Minute}, filepath.Join(bin, "containerd"), "-c", filepath.Join(dir, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(context.Background()); err != nil || !p.State().Success() {
			t.Errorf("stop containerd: %v, %v", p.State(), err)
		}
	})
	if err := p.Ready(t.Context(), func(ctx context.Context) error {
		_, err := command(ctx, "", nil, filepath.Join(bin, "ctr"), "-a", dir+"/sock", "version")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// importImage is ctr on that containerd, which must have the image then that the chart of this version names.
func importImage(t *testing.T, engine string, args []string) error {
	t.Helper()
	bin := strings.TrimSpace(must(t, filepath.Join(repository, "tests/programs/build"), "--path", "containerd"))
	ctr := func(args ...string) (string, error) {
		return command(t.Context(), built(t, first), nil, append([]string{filepath.Join(bin, "ctr"), "-a", engine + "/sock"}, args...)...)
	}
	if _, err := ctr(args...); err != nil {
		return err
	}
	out, err := ctr("-n", "k8s.io", "images", "list", "-q")
	// Warnings of ctr stand before the list.
	if want := "ghcr.io/gpufence/gpufence:" + strings.TrimPrefix(older, "v"); err == nil && !slices.Contains(strings.Split(out, "\n"), want) {
		err = fmt.Errorf("it has the images %q, want %q", out, want)
	}
	return err
}
