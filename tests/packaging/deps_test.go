// SPDX-License-Identifier: Apache-2.0

package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestDepsWaits: deps.sh waits for who holds apt's locks, and gives up at the end of its patience. The
// apt-get here is a stand-in, so nothing is installed.
func TestDepsWaits(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("needs root")
		}
		t.Skip("SKIPPED: deps.sh installs as root only")
	}
	for _, c := range []struct {
		name     string
		locked   string // how often the lists are in use by others
		patience string
		ok       bool
		updates  int
	}{
		{"free", "0", "60", true, 1},
		{"the lists are in use for a while", "1", "60", true, 2},
		{"they are for too long", "9", "0", false, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			// Knows the package once the lists were fetched.
			script := `#!/bin/sh
echo "$*" >>"$DIR/calls"
case "$*" in
*update*)
	n=$(grep -c update "$DIR/calls")
	[ "$n" -gt "$LOCKED" ] || { echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"; exit 100; }
	touch "$DIR/lists" ;;
*) [ -e "$DIR/lists" ] ;;
esac
`
			if err := os.WriteFile(filepath.Join(dir, "apt-get"), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "sh", "../../packaging/deps.sh", "package:gpufence-no-such-package")
			cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "DIR="+dir, "LOCKED="+c.locked, "GPUFENCE_APT_PATIENCE="+c.patience)
			out, err := cmd.CombinedOutput()
			if (err == nil) != c.ok {
				t.Errorf("%v: %s", err, out)
			}
			calls, err := os.ReadFile(filepath.Join(dir, "calls"))
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(string(calls), "update"); n != c.updates {
				t.Errorf("the lists were fetched %d times, want %d:\n%s", n, c.updates, calls)
			}
			for line := range strings.Lines(string(calls)) {
				if strings.Contains(line, " install ") && !strings.HasPrefix(line, "-o DPkg::Lock::Timeout="+c.patience+" ") {
					t.Errorf("dpkg's lock is not waited for: %s", line)
				}
			}
		})
	}
}
