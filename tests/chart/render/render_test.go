// SPDX-License-Identifier: Apache-2.0

// Package render runs helm over the chart, and compares packaging/kubernetes with what it renders, so
// that whoever has no helm can apply the same. `go test ./tests/chart/render -update` writes them.
package render

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write packaging/kubernetes")

const (
	chart = "../../../packaging/helm/gpufence"
	plain = "../../../packaging/kubernetes"
)

// helm is the pinned program: of tests/programs, or what GPUFENCE_HELM names.
func helm(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("GPUFENCE_HELM"); path != "" {
		return path
	}
	args := []string{"helm"}
	if os.Getenv("GPUFENCE_MUST") != "1" {
		args = []string{"--path", "helm"}
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "../../programs/build", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 3 {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("helm is not built; run: tests/programs/build helm")
		}
		t.Skip("SKIP: helm is not built; run: tests/programs/build helm")
	}
	if err != nil {
		t.Fatalf("build helm: %v\n%s", err, stderr.String())
	}
	return filepath.Join(strings.TrimSpace(string(out)), "helm")
}

func run(t *testing.T, args ...string) (string, string, error) {
	t.Helper()
	home := t.TempDir()
	cmd := exec.CommandContext(t.Context(), helm(t), args...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home, "KUBECONFIG=/dev/null")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	return stdout.String(), stderr.String(), err
}

func TestLint(t *testing.T) {
	for _, args := range [][]string{nil, {"--set", "mode=namespace"}, {"--set", "mode=cluster,policy.ceiling=40Gi"}} {
		out, stderr, err := run(t, append([]string{"lint", "--strict", chart}, args...)...)
		if err != nil {
			t.Errorf("helm lint %v: %v\n%s%s", args, err, out, stderr)
		}
	}
}

func TestWrongValues(t *testing.T) {
	for set, want := range map[string]string{
		"mode=everywhere":     "mode",
		"policy.ceiling=4096": "ceiling",
		"policy.celling=4Gi":  "celling",
		"host.runtime=podman": "runtime",
		"host.installDir=opt": "installDir",
	} {
		if out, stderr, err := run(t, "template", "gpufence", chart, "--set-string", set); err == nil || !strings.Contains(stderr, want) {
			t.Errorf("--set %s: %v %s%s", set, err, out[:min(len(out), 200)], stderr)
		}
	}
}

// rendered is one file of packaging/kubernetes.
var rendered = []struct {
	file, what string
	args       []string
}{
	{"gpufence.yaml", "The agent, its rights, the RuntimeClasses and the policies of mode opt-in.", nil},
	{"policies-namespace.yaml", "In place of the policies in gpufence.yaml: pods with a GPU in namespaces labelled gpufence.dev/enforce=true are fenced.",
		[]string{"--set", "mode=namespace", "--show-only", "templates/policy.yaml"}},
	{"policies-cluster.yaml", "In place of the policies in gpufence.yaml: every pod with a GPU is fenced, but in kube-system.",
		[]string{"--set", "mode=cluster", "--show-only", "templates/policy.yaml"}},
	{"policies-ceiling.yaml", "In place of the policies in gpufence.yaml: nobody may write a memory.max above 40Gi.",
		[]string{"--set", "policy.ceiling=40Gi", "--show-only", "templates/policy.yaml"}},
	{"monitoring.yaml", "For the Prometheus operator and Grafana's sidecar.",
		[]string{"--set", "podMonitor.enabled=true,prometheusRule.enabled=true,dashboard.enabled=true", "--show-only", "templates/monitoring.yaml"}},
}

func TestPlainManifests(t *testing.T) {
	for _, r := range rendered {
		t.Run(r.file, func(t *testing.T) {
			out, stderr, err := run(t, append([]string{"template", "gpufence", chart, "--namespace", "gpufence"}, r.args...)...)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, stderr)
			}
			got := "# SPDX-License-Identifier: Apache-2.0\n# " + r.what + "\n# Rendered from packaging/helm/gpufence; change that one.\n" +
				strings.ReplaceAll(out, "app.kubernetes.io/managed-by: Helm\n", "app.kubernetes.io/managed-by: kubectl\n")
			file := filepath.Join(plain, r.file)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s is not what the chart renders: go test ./tests/chart/render -update", file)
			}
		})
	}
}
