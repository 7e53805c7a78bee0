// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// rpmArch is how rpm calls it.
var rpmArch = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

func TestRpmContents(t *testing.T) {
	need(t, "rpm")
	for arch, name := range rpmArch {
		file := one(t, built(t, first), "*."+name+".rpm")
		listed := strings.Fields(must(t, "rpm", "-qpl", file))
		for at := range contents {
			if at = strings.ReplaceAll(at, "VERSION", older); !slices.Contains(listed, at) {
				t.Errorf("%s: no %s", name, at)
			}
		}
		for _, others := range []string{"/usr", "/usr/bin", "/usr/lib", "/usr/lib/systemd/system", "/usr/share", "/etc"} {
			if slices.Contains(listed, others) {
				t.Errorf("%s: owns %s, which is another package's", name, others)
			}
		}
		if has := slices.Contains(listed, "/usr/lib/gpufence/"+older+"/libgpufence32.so"); has != (arch == "amd64") {
			t.Errorf("%s: the library for 32-bit programs: %v", name, has)
		}
		if out := must(t, "rpm", "-qpc", file); out != "/etc/gpufence/config.toml\n" {
			t.Errorf("%s: configuration files: %q", name, out)
		}
		if out := must(t, "rpm", "-qp", "--qf", "%{NAME} %{VERSION} %{RELEASE} %{ARCH} %{BUILDTIME} %{BUILDHOST} %{LICENSE}", file); out !=
			"gpufence 0.1.0 1 "+name+" 1700000000 gpufence Apache-2.0" {
			t.Errorf("%s: %s", name, out)
		}
		if out := must(t, "rpm", "-qpR", file); !strings.Contains(out, "libc.so.6(GLIBC_2.") {
			t.Errorf("%s: does not say which glibc it needs:\n%s", name, out)
		}
		scripts := must(t, "rpm", "-qp", "--scripts", file)
		for _, kind := range []string{"preinstall", "postinstall", "preuninstall", "postuninstall", "posttrans"} {
			if !strings.Contains(scripts, kind+" scriptlet (using /bin/sh):") {
				t.Errorf("%s: no %s script", name, kind)
			}
		}
	}
}

func TestRpmInstallsUpgradesRollsBackAndErases(t *testing.T) {
	need(t, "rpm")
	n := startNode(t)
	old, fresh := one(t, built(t, first), "*."+rpmArch[hostArch]+".rpm"), one(t, built(t, second), "*.rpm")
	// There is no systemd, so that this notes what it is asked.
	n.write("/usr/bin/systemctl", "#!/bin/sh\necho \"$*\" >>/tmp/systemctl\n")
	if err := os.Chmod(n.root+"/usr/bin/systemctl", 0o755); err != nil {
		t.Fatal(err)
	}
	before := n.files()
	// This machine's rpm, in the node's namespaces and on its root: what the package needs is there under
	// Debian's names.
	rpm := func(args ...string) (string, error) {
		argv := append([]string{
			"nsenter", "--target", strconv.Itoa(n.init), "--mount", "--pid", "--uts", "--ipc", "rpm", "--root", n.root, "--dbpath", "/var/lib/rpm", "--nodeps",
		}, args...)
		return command(t.Context(), "", nil, argv...)
	}
	step := func(args ...string) {
		t.Helper()
		if out, err := rpm(args...); err != nil || strings.Contains(out, "error:") || strings.Contains(out, "scriptlet failed") {
			t.Fatalf("rpm %q: %v\n%s", args, err, out)
		}
	}
	step("-i", old)
	holds(t, n.root, older)
	runs(t, n, older)
	asked := func(want string) {
		t.Helper()
		if text, err := os.ReadFile(n.root + "/tmp/systemctl"); err != nil || string(text) != want {
			t.Errorf("systemctl was asked %q (%v), want %q", text, err, want)
		}
	}
	asked("enable gpufenced.socket\n")
	n.write("/etc/gpufence/config.toml", "mode = \"observe\"\n")
	running := n.hold("/usr/lib/gpufence/" + older + "/libgpufence.so")

	step("-U", fresh)
	holds(t, n.root, newer)
	runs(t, n, newer)
	running.untouched("the upgrade")
	if !n.there("/usr/lib/gpufence/"+older+"/libgpufence.so") || n.there("/usr/lib/gpufence/.kept") {
		t.Error("libraries that are in use are gone from their path, or what kept them is still there")
	}

	step("-U", "--oldpackage", old)
	holds(t, n.root, older)
	runs(t, n, older)
	running.untouched("the rollback")
	if text, err := os.ReadFile(n.root + "/etc/gpufence/config.toml"); err != nil || string(text) != "mode = \"observe\"\n" {
		t.Errorf("the configuration was changed: %q %v", text, err)
	}

	out, err := rpm("-e", "gpufence")
	if err == nil || !strings.Contains(out, "gpufence: not removed: 1 processes") {
		t.Errorf("erased under running containers: %v\n%s", err, out)
	}
	runs(t, n, older)
	running.end()
	step("-e", "gpufence")
	asked("enable gpufenced.socket\ndisable gpufence-nri.service gpufenced.socket gpufenced.service\n")
	compare(t, before, n.files(), func(at string) bool {
		// rpm keeps what an admin wrote, groups, and folders that are other packages' where there is rpm.
		for _, folder := range []string{"/usr/share/fish", "/usr/share/zsh", "/usr/lib/sysusers.d"} {
			if strings.HasPrefix(at, folder) && n.folder(at) {
				return true
			}
		}
		return strings.HasPrefix(at, "/etc/gpufence") || at == "/etc/group" || at == "/etc/gshadow" || at == "/etc/gshadow-"
	})
}
