// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"debug/elf"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/sirupsen/logrus"

	"github.com/gpufence/gpufence/enforcer/kube/cri"
	"github.com/gpufence/gpufence/enforcer/kube/host"
)

const hostArch = runtime.GOARCH

// layoutOf unpacks the image and returns its images by architecture.
func layoutOf(t *testing.T) map[string]v1.Image {
	t.Helper()
	dir := t.TempDir()
	must(t, "tar", "-C", dir, "-xf", one(t, built(t, first), "gpufence-image-*.tar"))
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	top, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(top.Manifests) != 1 || top.Manifests[0].Annotations["io.containerd.image.name"] != "ghcr.io/gpufence/gpufence:0.1.0" {
		t.Fatalf("the layout names %+v", top.Manifests)
	}
	inner, err := index.ImageIndex(top.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	list, err := inner.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]v1.Image{}
	for _, m := range list.Manifests {
		if out[m.Platform.Architecture], err = inner.Image(m.Digest); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func rootOf(t *testing.T, image v1.Image) string {
	t.Helper()
	root := t.TempDir()
	file := filepath.Join(t.TempDir(), "root.tar")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(f, mutate.Extract(image)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	must(t, "tar", "-C", root, "-xf", file)
	return root
}

// commands notes what the container host would run on the node.
type commands struct{ calls []string }

func (c *commands) Run(_ context.Context, argv ...string) ([]byte, error) {
	c.calls = append(c.calls, strings.Join(argv, " "))
	if slices.Contains(argv, "doctor") {
		return []byte(`{"node":{"started":"2026-01-01T00:00:00Z"}}`), nil
	}
	if slices.Contains(argv, "canary") {
		return []byte(`{"held":true,"started":"2026-01-01T00:00:00Z"}`), nil
	}
	return nil, nil
}

// TestImage: its agent runs with nothing else there, and its container host makes a node of an empty one.
func TestImage(t *testing.T) {
	if os.Geteuid() != 0 {
		missing(t, "this is not root")
	}
	images := layoutOf(t)
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	for arch, image := range images {
		config, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if config.Architecture != arch || !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/gpufence-agent"}) {
			t.Errorf("%s: %+v", arch, config)
		}
		root := rootOf(t, image)
		if arch == "amd64" {
			if err := os.Remove(filepath.Join(root, "opt/gpufence/lib/gpufence", older, "libgpufence32.so")); err != nil {
				t.Error(err)
			}
		}
		if n := machines(t, root, machine[arch]); n != 11 { // 5 programs, the agent, the shim, 4 stand-ins
			t.Errorf("%s: %d programs and libraries, want 11", arch, n)
		}
	}
	if len(images) != 2 {
		t.Fatalf("%d images, want 2", len(images))
	}

	root := rootOf(t, images[hostArch])
	for program, argument := range map[string]string{"/usr/bin/gpufence-agent": "--version", "/opt/gpufence/bin/gpufence": "version"} {
		if out := must(t, "chroot", root, program, argument); !strings.Contains(out, older) {
			t.Errorf("%s: %q", program, out)
		}
	}

	node := t.TempDir()
	for _, dir := range []string{"run/gpufence", "etc/systemd/system"} {
		if err := os.MkdirAll(filepath.Join(node, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ran := &commands{}
	log := logrus.New()
	log.SetOutput(io.Discard)
	h, err := host.New(host.Options{
		Install: true, Image: filepath.Join(root, "opt/gpufence"), Root: node, InstallDir: "/opt/gpufence", Runtime: "containerd", ResultFile: "/run/gpufence/canary.json",
		Commander: ran, Engine: cri.Node{Root: node, Kind: "containerd"}, Handler: "gpufence", Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.Run(ctx)
	}()
	result := filepath.Join(node, "run/gpufence/canary.json")
	for {
		if _, err := os.Stat(result); err == nil {
			break
		}
		select {
		case <-t.Context().Done():
			t.Fatal("the container host did not get to its canary")
		default:
		}
	}
	cancel()
	<-done
	for _, at := range []string{
		"opt/gpufence/bin/gpufence", "opt/gpufence/bin/gpufence-runtime", "opt/gpufence/bin/gpufence-runtime.cri", "opt/gpufence/bin/gpufence-hook", "opt/gpufence/bin/gpufenced",
		"opt/gpufence/lib/gpufence/libgpufence.so", "opt/gpufence/lib/gpufence/gpufence-stub/dev/libcuda.so.1",
		"etc/systemd/system/gpufenced.service", "etc/systemd/system/gpufenced.socket", "etc/systemd/system/gpufence-group.service",
		"etc/systemd/system/gpufenced.socket.d/gpufence-group.conf",
	} {
		if _, err := os.Stat(filepath.Join(node, at)); err != nil {
			t.Error(err)
		}
	}
	// The node's own gpufenced, at the place where the container host puts it.
	if out := must(t, filepath.Join(node, "opt/gpufence/bin/gpufenced"), "--version"); !strings.Contains(out, older) {
		t.Errorf("gpufenced on the node: %q", out)
	}
	unit, err := os.ReadFile(filepath.Join(node, "etc/systemd/system/gpufenced.service"))
	if err != nil || !strings.Contains(string(unit), "ExecStart=/opt/gpufence/bin/gpufenced\n") {
		t.Errorf("the node's unit starts another gpufenced (%v):\n%s", err, unit)
	}
	if !slices.Contains(ran.calls, "/opt/gpufence/bin/gpufence install --runtime containerd") {
		t.Errorf("commands on the node: %q", ran.calls)
	}
}

// TestTarRunsWhereverItIs: from its own folder, without installing anything.
func TestTarRunsWhereverItIs(t *testing.T) {
	dir := t.TempDir()
	must(t, "tar", "-C", dir, "-xzf", one(t, built(t, first), "*-linux-"+hostArch+".tar.gz"))
	root := one(t, dir, "gpufence-0.1.0-linux-"+hostArch)
	if out := must(t, filepath.Join(root, "bin/gpufence"), "version"); !strings.Contains(out, older) {
		t.Errorf("gpufence: %q", out)
	}
	for _, at := range []string{"lib/gpufence/libgpufence.so", "lib/systemd/system/gpufenced.service", "etc/gpufence/config.toml", "share/man/man1/gpufence.1.gz", "README.md"} {
		if _, err := os.Stat(filepath.Join(root, at)); err != nil {
			t.Error(err)
		}
	}
}

func TestChart(t *testing.T) {
	dir := t.TempDir()
	must(t, "tar", "-C", dir, "-xzf", one(t, built(t, first), "gpufence-0.1.0.tgz"))
	text, err := os.ReadFile(filepath.Join(dir, "gpufence/Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"\nversion: \"0.1.0\"\n", "\nappVersion: \"0.1.0\"\n"} {
		if !strings.Contains(string(text), line) {
			t.Errorf("Chart.yaml has no %q:\n%s", line, text)
		}
	}
}

func TestSBOM(t *testing.T) {
	text, err := os.ReadFile(one(t, built(t, first), "gpufence-0.1.0-linux-amd64.cdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	var bom struct {
		BomFormat, SpecVersion, SerialNumber string
		Components                           []struct {
			Name, Version, Purl string
			Licenses            []struct {
				License    struct{ ID string }
				Expression string
			}
			Hashes []struct{ Alg, Content string }
		}
		Dependencies []struct {
			Ref       string
			DependsOn []string
		}
	}
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	if bom.BomFormat != "CycloneDX" || !strings.HasPrefix(bom.SerialNumber, "urn:uuid:") {
		t.Errorf("%s %s %s", bom.BomFormat, bom.SpecVersion, bom.SerialNumber)
	}
	modules := map[string]bool{}
	for _, c := range bom.Components {
		modules[c.Name] = true
		if len(c.Licenses) == 0 || c.Licenses[0].License.ID == "" && c.Licenses[0].Expression == "" {
			t.Errorf("%s %s has no licence", c.Name, c.Version)
		}
		if c.Name != "std" && (len(c.Hashes) != 1 || len(c.Hashes[0].Content) != 64) {
			t.Errorf("%s %s has no checksum", c.Name, c.Version)
		}
	}
	for _, name := range []string{"std", "gpufenced", "libgpufence.so", "github.com/NVIDIA/go-nvml", "github.com/spf13/cobra"} {
		if !modules[name] {
			t.Errorf("%s is not listed", name)
		}
	}
	if modules["k8s.io/client-go"] {
		t.Error("a module of the agent, which is not in the package, is listed")
	}
}
