// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpufence/gpufence/packaging/engine"
	"github.com/gpufence/gpufence/packaging/engine/docker"
)

// TestBackupOfAnEarlierInstallation: what a wrapped runtime was is what it was before this installation, also
// where an earlier one left its backup.
func TestBackupOfAnEarlierInstallation(t *testing.T) {
	config := filepath.Join(t.TempDir(), "daemon.json")
	nvidia := func(path string) string {
		return `{"debug": true, "runtimes": {"nvidia": {"path": "` + path + `", "runtimeArgs": []}}}`
	}
	request := engine.Request{Config: config, Handler: "gpufence", Wrapper: "/usr/bin/gpufence-runtime.docker", Wrap: "nvidia"}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	carryOut := func(f func(engine.Files, engine.Request) (engine.Plan, error)) {
		t.Helper()
		plan, err := f(Disk{}, request)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Apply(plan); err != nil {
			t.Fatal(err)
		}
		if err := DropBackups(plan); err != nil {
			t.Fatal(err)
		}
	}
	write(nvidia("/old/nvidia-container-runtime"))
	carryOut(docker.Install)
	request.Default = true
	carryOut(docker.Install) // the second change of one installation keeps the first state
	request.Default = false
	// Somebody takes us out by hand, and moves NVIDIA's runtime.
	write(nvidia("/new/nvidia-container-runtime"))
	carryOut(docker.Install)
	carryOut(docker.Uninstall)
	if text, err := os.ReadFile(config); err != nil || string(text) != nvidia("/new/nvidia-container-runtime") {
		t.Errorf("%v %s", err, text)
	}
	if _, err := os.Stat(engine.BackupPath(config)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the backup stays: %v", err)
	}
}
