// SPDX-License-Identifier: Apache-2.0

// Package architecture tests what no compiler checks: who may import whom.
package architecture

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/gpufence/gpufence/"

type goPackage struct {
	ImportPath   string
	Imports      []string
	Deps         []string
	CgoFiles     []string
	TestImports  []string
	XTestImports []string
}

// list returns the packages of a pattern, built for what the shipped programs are built for.
func list(t *testing.T, patterns ...string) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-deps=false", "-json"}, patterns...)...)
	cmd.Dir = "../.."
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v\n%s", patterns, err, stderr.String())
	}
	var packages []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return packages
		}
		if err != nil {
			t.Fatalf("decode go list: %v", err)
		}
		packages = append(packages, p)
	}
}

// mayImport is the table of the design: a package (or a folder of packages) and what of ours it
// may import. Packages may also import within their own row.
var mayImport = []struct {
	row     string
	allowed []string
}{
	{"hook/plan", []string{"enforcer/quota"}},
	{"hook/cdi", []string{"hook/plan", "enforcer/quota", "enforcer/api"}},
	{"hook/nri", []string{"hook/plan", "enforcer/quota", "enforcer/api"}},
	{"hook/oci", []string{"hook/plan", "hook/cdi", "enforcer/quota", "enforcer/api"}},
	{"enforcer/quota", nil},
	{"enforcer/ledger", []string{"enforcer/quota"}},
	{"enforcer/gpu", []string{"enforcer/quota", "enforcer/monotonic"}},
	{"enforcer/fence", []string{"enforcer/ledger", "enforcer/gpu", "enforcer/policy", "enforcer/quota", "enforcer/api", "bpf"}},
	{"enforcer/policy", []string{"enforcer/quota"}},
	{"enforcer/act", []string{"enforcer/monotonic"}},
	{"enforcer/monotonic", nil},
	{"enforcer/api", []string{"enforcer/quota"}},
	{"enforcer/doctor", nil},
	{"enforcer/kube", []string{"enforcer/api", "enforcer/quota"}},
	{"enforcer/metrics", []string{"enforcer/api", "enforcer/quota"}},
	{"packaging/engine", []string{"enforcer/quota"}}, // how engines are told of us; quota for the codes and what annotations are ours
	{"shim", nil},
}

func within(path, row string) bool { return path == row || strings.HasPrefix(path, row+"/") }

func TestImportsFollowTheDesign(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range list(t, "./...") {
		from := strings.TrimPrefix(p.ImportPath, module)
		for _, rule := range mayImport {
			if !within(from, rule.row) {
				continue
			}
			seen[rule.row] = true
			for _, imported := range p.Imports {
				to, ours := strings.CutPrefix(imported, module)
				if !ours || within(to, rule.row) || slices.ContainsFunc(rule.allowed, func(a string) bool { return within(to, a) }) {
					continue
				}
				t.Errorf("%s imports %s; %s may import only %v of ours", from, to, rule.row, rule.allowed)
			}
		}
	}
	for _, rule := range mayImport {
		if !seen[rule.row] && rule.row != "shim" {
			t.Errorf("no package in %s: take its rule out, or the folder moved", rule.row)
		}
	}
}

// TestStaticProgramsStayLight: the programs that run for every container, and on nodes whose
// driver is not loaded yet, link neither NVML nor anything else that needs cgo.
func TestStaticProgramsStayLight(t *testing.T) {
	for _, program := range []string{"gpufence", "gpufence-runtime", "gpufence-hook", "gpufence-nri"} {
		packages := list(t, "./cmd/"+program)
		if len(packages) != 1 {
			t.Fatalf("go list ./cmd/%s: %d packages, want 1", program, len(packages))
		}
		for _, dep := range packages[0].Deps {
			if strings.HasPrefix(dep, module+"enforcer/gpu") || strings.Contains(dep, "NVIDIA/go-nvml") || strings.Contains(dep, "nvidia-container-toolkit") ||
				strings.Contains(dep, "prometheus/client_golang") ||
				program != "gpufence-nri" && strings.Contains(dep, "google.golang.org/grpc") { // NRI's transport has it
				t.Errorf("%s links %s", program, dep)
			}
		}
	}
}

// TestStartsOfContainersStayLight: gpufence-runtime and gpufence-hook are started anew for every
// container, and each package that is linked costs its start, used or not.
func TestStartsOfContainersStayLight(t *testing.T) {
	heavy := []string{"net/http", "crypto/tls", "crypto/x509", "k8s.io", "google.golang.org", "github.com/prometheus", "github.com/spf13", "github.com/sirupsen"}
	linked := func(program string) []string {
		packages := list(t, "./cmd/"+program)
		if len(packages) != 1 {
			t.Fatalf("go list ./cmd/%s: %d packages, want 1", program, len(packages))
		}
		return slices.DeleteFunc(packages[0].Deps, func(dep string) bool {
			return !slices.ContainsFunc(heavy, func(h string) bool { return within(dep, h) })
		})
	}
	for _, program := range []string{"gpufence-runtime", "gpufence-hook"} {
		for _, dep := range linked(program) {
			t.Errorf("%s links %s", program, dep)
		}
	}
	if len(linked("gpufenced")) == 0 {
		t.Error("gpufenced links none of them: this test looks for the wrong names")
	}
}

// TestOnlyTheAgentKnowsKubernetes: a client of the API server in gpufenced would be memory and attack
// surface on every node, Kubernetes or not; and kubectl-gpufence has only kubectl's rights.
func TestOnlyTheAgentKnowsKubernetes(t *testing.T) {
	links := func(program string) bool {
		packages := list(t, "./cmd/"+program)
		return len(packages) == 1 && slices.ContainsFunc(packages[0].Deps, func(d string) bool { return strings.HasPrefix(d, "k8s.io/client-go") })
	}
	for _, program := range []string{"gpufence", "gpufence-runtime", "gpufence-hook", "gpufenced", "kubectl-gpufence"} {
		if links(program) {
			t.Errorf("%s links k8s.io/client-go", program)
		}
	}
	if !links("gpufence-agent") {
		t.Error("gpufence-agent does not link k8s.io/client-go: this test looks for the wrong name")
	}
}
