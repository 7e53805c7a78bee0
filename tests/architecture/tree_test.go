// SPDX-License-Identifier: Apache-2.0

package architecture

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// tracked are the files that git knows, so that what a build leaves behind is not looked at.
func tracked(t *testing.T, globs ...string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", append([]string{"ls-files", "-z", "--"}, globs...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatalf("list the files of this checkout: %v", err)
		}
		t.Skipf("SKIP: not a git checkout, so its files are not known: %v", err)
	}
	return strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
}

func TestSourcesNameTheirLicence(t *testing.T) {
	files := tracked(t, "*.go", "*.c", "*.h", "*.S", "*.sh", "Makefile", "*/Makefile", ".ci/run")
	if len(files) < 10 {
		t.Fatalf("only %d sources found", len(files))
	}
	for _, name := range files {
		file, err := os.Open(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		found := false
		lines := bufio.NewScanner(file)
		for i := 0; i < 5 && lines.Scan(); i++ {
			found = found || strings.Contains(lines.Text(), "SPDX-License-Identifier: ")
		}
		file.Close()
		if !found {
			t.Errorf("%s: no SPDX-License-Identifier in its first lines", name)
		}
	}
}

// TestMainsStaySmall: a main parses, builds, runs and returns an exit code.
func TestMainsStaySmall(t *testing.T) {
	for _, name := range tracked(t, "cmd/*/main.go") {
		text, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		if lines := bytes.Count(text, []byte("\n")); lines > 90 {
			t.Errorf("%s has %d lines: a main is at most about 80", name, lines)
		}
	}
}

func TestHelpListsEveryTarget(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "help")
	cmd.Dir = "../.."
	help, err := cmd.Output()
	if err != nil {
		t.Fatalf("make help: %v", err)
	}
	for _, target := range []string{"help", "deps", "build", "demo", "test", "lint", "fuzz", "bench", "soak", "soak-ledger", "clean"} {
		if !strings.Contains(string(help), "  "+target+" ") {
			t.Errorf("make help does not list %s", target)
		}
	}
}
