// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// contents are files that a user looks for, and their modes. VERSION stands for that of the libraries.
var contents = map[string]string{
	"/usr/bin/gpufence": "-rwxr-xr-x", "/usr/bin/gpufence-runtime": "-rwxr-xr-x", "/usr/bin/gpufence-hook": "-rwxr-xr-x", "/usr/bin/gpufenced": "-rwxr-xr-x",
	"/usr/bin/gpufence-nri": "-rwxr-xr-x", "/usr/bin/kubectl-gpufence": "-rwxr-xr-x",
	"/usr/bin/gpufence-runtime.cri": "Lrwxrwxrwx", "/usr/bin/gpufence-runtime.crio": "Lrwxrwxrwx", "/usr/bin/gpufence-runtime.docker": "Lrwxrwxrwx",
	"/usr/bin/gpufence-runtime.podman": "Lrwxrwxrwx",
	"/usr/lib/gpufence/libgpufence.so": "Lrwxrwxrwx", "/usr/lib/gpufence/VERSION/libgpufence.so": "-rw-r--r--",
	"/usr/lib/gpufence/gpufence-stub": "Lrwxrwxrwx", "/usr/lib/gpufence/VERSION/gpufence-stub/dev/libcuda.so.1": "-rw-r--r--",
	"/usr/lib/gpufence/VERSION/gpufence-stub/run/libnvidia-ml.so.1": "-rw-r--r--",
	"/usr/lib/systemd/system/gpufenced.service":                     "-rw-r--r--", "/usr/lib/systemd/system/gpufenced.socket": "-rw-r--r--",
	"/usr/lib/systemd/system/gpufence-nri.service": "-rw-r--r--", "/usr/lib/sysusers.d/gpufence.conf": "-rw-r--r--", "/usr/lib/tmpfiles.d/gpufence.conf": "-rw-r--r--",
	"/etc/gpufence/config.toml": "-rw-r--r--", "/usr/share/man/man1/gpufence.1.gz": "-rw-r--r--", "/usr/share/man/man8/gpufenced.8.gz": "-rw-r--r--",
	"/usr/share/man/man1/gpufence-nri.1.gz":              "-rw-r--r--",
	"/usr/share/bash-completion/completions/gpufence":    "-rw-r--r--",
	"/usr/share/fish/vendor_completions.d/gpufence.fish": "-rw-r--r--",
	"/usr/share/gpufence/alerts/gpufence.yaml":           "-rw-r--r--", "/usr/share/gpufence/dashboards/gpufence.json": "-rw-r--r--",
	"/usr/share/gpufence/helm/gpufence/Chart.yaml": "-rw-r--r--", "/usr/share/gpufence/kubernetes/gpufence.yaml": "-rw-r--r--",
	"/usr/share/doc/gpufence/copyright": "-rw-r--r--", "/usr/share/doc/gpufence/THIRD-PARTY-NOTICES.gz": "-rw-r--r--", "/usr/share/doc/gpufence/sbom.cdx.json": "-rw-r--r--",
	"/usr/share/doc/gpufence/errors.md": "-rw-r--r--",
}

// holds looks for the contents of a package below a folder.
func holds(t *testing.T, root, version string, but ...string) {
	t.Helper()
	for at, want := range contents {
		at = strings.ReplaceAll(at, "VERSION", version)
		info, err := os.Lstat(root + at)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := info.Mode().String(); got != want {
			t.Errorf("%s has mode %s, want %s", at, got, want)
		}
	}
}

func TestDebInstallsUpgradesRollsBackAndPurges(t *testing.T) {
	n := startNode(t)
	old, fresh := n.take(one(t, built(t, first), "*_"+runtime.GOARCH+".deb")), n.take(one(t, built(t, second), "*.deb"))
	before := n.files()

	n.do("dpkg", "-i", old)
	holds(t, n.root, older)
	if out := n.do("dpkg", "--verify", "gpufence"); out != "" {
		t.Errorf("dpkg --verify: %s", out)
	}
	for at, now := range n.files() {
		// Root's, and nobody else may write. A link has no mode of its own.
		if _, was := before[at]; !was && at != "/etc/gshadow-" && !strings.HasPrefix(now, "L") && (!strings.Contains(now, " 0:0") || now[5] == 'w' || now[8] == 'w') {
			t.Errorf("%s: %s", at, now)
		}
	}
	// The socket and nothing else: gpufenced starts when somebody asks for it.
	var enabled []string
	links, err := filepath.Glob(n.root + "/etc/systemd/system/*.wants/*gpufence*")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		enabled = append(enabled, strings.TrimPrefix(l, n.root+"/etc/systemd/system/"))
	}
	if strings.Join(enabled, " ") != "sockets.target.wants/gpufenced.socket" {
		t.Errorf("enabled: %q", enabled)
	}
	if out := n.do("getent", "group", "gpufence"); !strings.HasPrefix(out, "gpufence:") {
		t.Errorf("group: %q", out)
	}
	runs(t, n, older)
	doctor(t, n)

	// An admin's edit stays, and what older versions left goes, but for what is in use.
	n.write("/etc/gpufence/config.toml", "mode = \"observe\"\n")
	for _, version := range []string{"v0.0.8", "v0.0.9"} {
		n.do("cp", "-a", "/usr/lib/gpufence/"+older, "/usr/lib/gpufence/"+version)
	}
	ancient := n.hold("/usr/lib/gpufence/v0.0.8/libgpufence.so")
	running := n.hold("/usr/lib/gpufence/" + older + "/libgpufence.so")

	n.do("dpkg", "-i", fresh)
	holds(t, n.root, newer)
	runs(t, n, newer)
	manifest, err := os.ReadFile(n.root + "/usr/share/gpufence/kubernetes/gpufence.yaml")
	if err != nil || strings.Count(string(manifest), "image: ") != strings.Count(string(manifest), `image: "ghcr.io/gpufence/gpufence:0.2.0"`) {
		t.Errorf("the plain manifests name another image (%v)", err)
	}
	running.untouched("the upgrade")
	ancient.untouched("the upgrade")
	if !n.there("/usr/lib/gpufence/"+older+"/libgpufence.so") || !n.there("/usr/lib/gpufence/v0.0.8/libgpufence.so") {
		t.Error("libraries that are in use are gone from their path")
	}
	if n.there("/usr/lib/gpufence/v0.0.9") || n.there("/usr/lib/gpufence/.kept") {
		t.Error("libraries that nobody uses are still there")
	}
	if text, err := os.ReadFile(n.root + "/etc/gpufence/config.toml"); err != nil || string(text) != "mode = \"observe\"\n" {
		t.Errorf("the configuration was changed: %q %v", text, err)
	}

	n.do("dpkg", "-i", old) // a rollback
	holds(t, n.root, older)
	runs(t, n, older)
	running.untouched("the rollback")
	ancient.untouched("the rollback")
	if !n.there("/usr/lib/gpufence/" + newer + "/libgpufence.so") {
		t.Error("the libraries of the version before are gone")
	}

	// Nobody takes the enforcement away from under containers.
	out, err := n.try("dpkg", "--remove", "gpufence")
	if err == nil || !strings.Contains(out, "gpufence: not removed: 2 processes") {
		t.Errorf("removed under running containers: %v\n%s", err, out)
	}
	runs(t, n, older)
	ancient.end()
	running.end()

	// With an engine that would start containers with it, somebody is told.
	n.write("/etc/docker/daemon.json", `{"runtimes":{"gpufence":{"path":"/usr/bin/gpufence-runtime.docker"}}}`)
	out = n.do("dpkg", "--remove", "gpufence")
	if !strings.Contains(out, "warning: engines are still told") || !strings.Contains(out, "/etc/docker/daemon.json") {
		t.Errorf("removed without a word about Docker:\n%s", out)
	}
	if !n.there("/etc/gpufence/config.toml") {
		t.Error("a removal took the configuration, which only purge may")
	}
	if err := os.RemoveAll(n.root + "/etc/docker"); err != nil {
		t.Fatal(err)
	}

	n.do("dpkg", "-i", fresh)
	runs(t, n, newer)
	// As gpufenced leaves it.
	n.do("sh", "-c", "mkdir -p /var/lib/gpufence /run/gpufence/pods/x && touch /var/lib/gpufence/journal && mount -t tmpfs tmpfs /run/gpufence/pods/x && touch /run/gpufence/pods/x/ledger")
	n.do("dpkg", "--purge", "gpufence")
	for _, at := range []string{"/run/gpufence", "/usr/lib/gpufence", "/etc/gpufence", "/var/lib/gpufence"} {
		if out, err := n.try("ls", "-d", at); err == nil {
			t.Errorf("%s is left over", strings.TrimSpace(out))
		}
	}
	compare(t, before, n.files(), func(at string) bool { return at == "/etc/gshadow-" }) // groupdel's own, of what was before
}

// runs looks whether every program is of a version, and works where nothing else is installed.
func runs(t *testing.T, n *node, version string) {
	t.Helper()
	for _, argv := range [][]string{{"gpufence", "version"}, {"gpufenced", "--version"}, {"gpufence-nri", "--version"}, {"kubectl-gpufence", "--version"}} {
		if out, err := n.try(argv...); err != nil || !strings.Contains(out, version) {
			t.Errorf("%q: %q %v, want %s", argv, out, err, version)
		}
	}
	target, err := os.Readlink(n.root + "/usr/lib/gpufence/libgpufence.so")
	if err != nil || target != version+"/libgpufence.so" {
		t.Errorf("libgpufence.so leads to %q (%v), want %s", target, err, version)
	}
	if out, err := n.try("env", "LD_PRELOAD=/usr/lib/gpufence/libgpufence.so", "true"); err != nil || out != "" {
		t.Errorf("a program with the library: %q %v", out, err)
	}
}

// doctor must run, and say that there is neither gpufenced nor a GPU.
func doctor(t *testing.T, n *node) {
	t.Helper()
	out, err := n.try("gpufence", "doctor")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("gpufence doctor: %v, want exit status 1", err)
	}
	for _, want := range []string{"level none", "systemctl start gpufenced"} {
		if !strings.Contains(out, want) {
			t.Errorf("gpufence doctor does not say %q:\n%s", want, out)
		}
	}
}

// TestDebOfArm64: what it holds, and that all of it is for that machine.
func TestDebOfArm64(t *testing.T) {
	need(t, "dpkg-deb")
	deb := one(t, built(t, first), "*_arm64.deb")
	if out := must(t, "dpkg-deb", "-f", deb, "Architecture", "Version", "Depends"); !strings.Contains(out, "Architecture: arm64\n") || !strings.Contains(out, "Version: 0.1.0-1\n") ||
		!strings.Contains(out, "libc6 (>= 2.") {
		t.Errorf("control fields:\n%s", out)
	}
	root := filepath.Join(t.TempDir(), "root")
	must(t, "dpkg-deb", "-x", deb, root)
	holds(t, root, older)
	if n := machines(t, root, elf.EM_AARCH64); n != 11 { // 6 programs, the shim, 4 stand-ins
		t.Errorf("%d programs and libraries, want 11", n)
	}
	qemu, err := exec.LookPath("qemu-aarch64-static")
	if err != nil {
		return // said by the ELF headers already
	}
	for program, argument := range map[string]string{"gpufence": "version", "gpufenced": "--version"} {
		out, err := command(t.Context(), "", []string{"QEMU_LD_PREFIX=/usr/aarch64-linux-gnu"}, qemu, root+"/usr/bin/"+program, argument)
		if err != nil || !strings.Contains(out, older) {
			t.Errorf("%s under emulation: %q %v", program, out, err)
		}
	}
}

// machines counts the programs and libraries below a folder, which must be for one machine.
func machines(t *testing.T, root string, want elf.Machine) int {
	t.Helper()
	count := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		magic := make([]byte, 4)
		if _, err := io.ReadFull(f, magic); err != nil || string(magic) != elf.ELFMAG {
			return nil // no ELF file
		}
		e, err := elf.NewFile(f)
		if err != nil {
			return err
		}
		if e.Machine != want {
			t.Errorf("%s is for %v, want %v", path, e.Machine, want)
		}
		count++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return count
}
