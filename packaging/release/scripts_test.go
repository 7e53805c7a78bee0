// SPDX-License-Identifier: Apache-2.0

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestRemovalRefuses: containers that gpufenced lists hold the package, also where none of their processes has our
// pages mounted (shim-delivery = "off"). tests/packages goes through the rest with a real dpkg.
func TestRemovalRefuses(t *testing.T) {
	bin := t.TempDir()
	table := "NAMESPACE  CONTAINER  ID    STATE    LEVEL     GPU\n" +
		"team-a     web        0123  running  reactive  0\nteam-a     old        4567  prepared none      0\nteam-a     seen       89ab  running  none      0\n"
	if err := os.WriteFile(filepath.Join(bin, "gpufence"), []byte("#!/bin/sh\n[ \"$1\" = ps ] || exit 1\ncat <<'EOF'\n"+table+"EOF\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "sh", "../nfpm/prerm.sh", "remove")
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "gpufence: not removed: ") || !strings.Contains(string(out), " processes and 1 containers with a GPU are held to a GPU memory limit") {
		t.Errorf("%v\n%s", err, out)
	}
}
