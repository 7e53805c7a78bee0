// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/documented"
)

var otherBlock = regexp.MustCompile("(?s)```(yaml|ini|toml)\n(.*?)```")

func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs", name))
	must(t, err)
	return string(text)
}

// TestDocs runs the commands of the engines' pages, each page in its order, with the engines of the tests in the
// place of the machine's own.
func TestDocs(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: container engines are not short")
	}
	ctx := t.Context()
	s := newSite(ctx, t, "containerd", "crictl")
	documented.Run(t, "tests/engines", func(t *testing.T, page string) func(string) error {
		one, ok := map[string]engine{
			"README.md":          &containerd{set: "containerd"},
			"docs/containerd.md": &containerd{set: "containerd", cri: true},
			"docs/crio.md":       &crio{},
			"docs/docker.md":     &docker{},
			"docs/podman.md":     &podman{},
			"docs/run.md":        &bare{},
			"docs/semantics.md":  &bare{},
			"docs/nri.md":        &nri{},
		}[page]
		if !ok {
			t.Fatalf("no engine is known for %s", page)
		}
		t.Cleanup(func() { one.down(t) })
		one.up(ctx, t, s)
		return func(command string) error { return runDocumented(ctx, s, one, page, command) }
	})
}

// runDocumented runs a command as it stands, but for places: where this machine's engine would be, the test's is.
func runDocumented(ctx context.Context, s *site, e engine, page, command string) error {
	var env []string
	if page == "docs/semantics.md" { // what is typed inside a container
		command = "gpufence run --memory.max 4Gi -- " + command
	}
	words := strings.Fields(strings.NewReplacer(
		"docker.io/my/cuda-app:latest", clientImage, "my/cuda-app", clientImage, "/usr/bin/gpufence-runtime", filepath.Join(s.dist, "bin/gpufence-runtime"),
		// There is no systemd here; what it would have done is tested with gpufence install.
		"--restart-mode systemd", "--restart-mode none",
		// The simulated GPU is small.
		"memory.max=4Gi", "memory.max=1Gi", "memory.max 4Gi", "memory.max 1Gi", "MEMORY_MAX=4Gi", "MEMORY_MAX=1Gi", "=all", "=0", "python3 train.py", "/bin/true",
	).Replace(command))
	program, args := words[0], words[1:]
	switch e := e.(type) {
	case *containerd:
		switch program {
		case "gpufence":
			args = append(args, "--config", filepath.Join(e.dir, "config.toml"), "--executable-path", e.bin("containerd"))
		case "ctr":
			program, args = e.bin("ctr"), append([]string{"-a", e.sock()}, args...)
		case "crictl":
			pod := filepath.Join(e.dir, "documented.json")
			text := `{"metadata":{"name":"documented","namespace":"default","uid":"documented","attempt":0},"linux":{"security_context":{"namespace_options":{"network":2}}}}`
			if err := os.WriteFile(pod, []byte(text), 0o600); err != nil {
				return err
			}
			args[len(args)-1] = pod
			out, err := e.pods.crictl(ctx, args...)
			if err == nil {
				_, err = e.pods.crictl(ctx, "rmp", "-f", strings.TrimSpace(out))
			}
			return err
		}
	case *nri:
		// It has run since the engine was up.
		if got := slices.Concat([]string{filepath.Base(e.plugin.Args()[0])}, e.plugin.Args()[1:]); !slices.Equal(got, e.replaced(words)) {
			return fmt.Errorf("the plugin of the test is %q", got)
		}
		_, err := e.holds(ctx, "documented", sandbox{})
		err = errors.Join(err, e.pods.remove(ctx, "documented"))
		return err
	case *crio:
		args = append(args, "--config", filepath.Join(e.dir, "crio.conf"))
	case *bare:
		env = s.SimEnv()
		args = append([]string{args[0], "--config", s.ConfigPath()}, args[1:]...)
	case *docker:
		if program == "docker" {
			program, args = e.client, append([]string{"-H", e.sock(), args[0], "--network", "none"}, args[1:]...)
		} else {
			args = append(args, "--config", filepath.Join(e.dir, "daemon.json"))
		}
	case *podman:
		env = e.env()
		if program == "podman" {
			program = e.path
			global := e.global()
			global = append(global[:len(global)-2:len(global)-2], "--hooks-dir", filepath.Join(e.dir, "oci/hooks.d"))
			if !strings.Contains(command, "--runtime") {
				global = append(global, "--runtime", "runc") // where there is crun it comes first, and refuses hybrid cgroups
			}
			args = append(global, append([]string{args[0],
				"--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"}, args[1:]...)...)
		} else {
			args = append(args, "--config", filepath.Join(e.dir, "containers.conf"))
			if args[0] == "install" {
				args = append(args, "--runtime-path", filepath.Join(e.dir, "gpufence-runtime.podman"))
			}
		}
	}
	if program == "gpufence" {
		program = filepath.Join(s.dist, "bin/gpufence")
	}
	out, err := runEnv(ctx, env, program, args...)
	if err == nil && page == "docs/semantics.md" && !strings.HasPrefix(out, s.uuid+" ") {
		err = fmt.Errorf("it printed %q", out)
	}
	if p, ok := e.(*podman); ok && err == nil && strings.Contains(command, "--hooks") {
		err = p.tellHook()
	}
	return err
}

// TestExamples: the Compose file and the quadlet of the pages say what gpufence reads. Neither Compose nor quadlets can be run
// here: Debian's Docker has no Compose, its Podman no quadlets.
func TestExamples(t *testing.T) {
	blocks := func(name, kind string) string {
		for _, b := range otherBlock.FindAllStringSubmatch(page(t, name), -1) {
			if b[1] == kind {
				return b[2]
			}
		}
		t.Fatalf("%s has no block of %s", name, kind)
		return ""
	}
	checkLimit := func(annotations map[string]string) {
		t.Helper()
		r, _, err := quota.Parse(quota.Subject{Engine: quota.EngineDocker, Annotations: annotations, HasGPU: true}, quota.DefaultPolicy())
		if err != nil || !r.Limited() {
			t.Errorf("%v limits nothing: %v", annotations, err)
		}
	}
	var compose struct {
		Services map[string]struct {
			Image, Runtime string
			Environment    map[string]string
			Annotations    map[string]string
		}
	}
	must(t, yaml.UnmarshalStrict([]byte(blocks("docker.md", "yaml")), &compose))
	if len(compose.Services) != 1 {
		t.Fatalf("the Compose file has %d services", len(compose.Services))
	}
	for _, service := range compose.Services {
		if service.Runtime != handler || service.Image == "" || service.Environment["NVIDIA_VISIBLE_DEVICES"] == "" {
			t.Errorf("the service is %+v", service)
		}
		checkLimit(service.Annotations)
	}
	annotations := map[string]string{}
	unit := map[string]string{}
	for line := range strings.Lines(blocks("podman.md", "ini")) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok {
			continue
		}
		unit[key] = value
		if key == "Annotation" {
			name, v, _ := strings.Cut(value, "=")
			annotations[name] = v
		}
	}
	if unit["GlobalArgs"] != "--runtime="+handler || !strings.HasPrefix(unit["Environment"], "NVIDIA_VISIBLE_DEVICES=") || unit["Image"] == "" {
		t.Errorf("the quadlet is %v", unit)
	}
	checkLimit(annotations)
	if t.Failed() {
		t.Log(fmt.Sprint(compose, unit))
	}
}
