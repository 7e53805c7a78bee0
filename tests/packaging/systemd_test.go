// SPDX-License-Identifier: Apache-2.0

// Package packaging tests what is installed on a node beside the programs.
package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const units = "../../packaging/systemd"

// unit reads a unit's settings: by section and key, all values.
func unit(t *testing.T, name string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(units, name))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	section := ""
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "["):
			section = strings.Trim(line, "[]")
		default:
			k, v, ok := strings.Cut(line, "=")
			if !ok || section == "" {
				t.Fatalf("%s line %d is no setting", name, i+1)
			}
			out[section+"."+k] = append(out[section+"."+k], v)
		}
	}
	return out
}

func TestUnitsVerify(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("needs systemd-analyze")
		}
		t.Skip("SKIPPED: needs systemd-analyze, of the package systemd")
	}
	dir := t.TempDir()
	var paths []string
	for _, name := range []string{"gpufenced.socket", "gpufenced.service"} {
		text, err := os.ReadFile(filepath.Join(units, name))
		if err != nil {
			t.Fatal(err)
		}
		// The programs are not installed where this runs.
		text = []byte(strings.NewReplacer("=/usr/bin/gpufenced", "=/bin/true", "=/usr/bin/gpufence ", "=/bin/true ").Replace(string(text)))
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, text, 0o644); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, p)
	}
	out, err := exec.CommandContext(t.Context(), analyze, append([]string{"verify", "--man=no"}, paths...)...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "gpufenced") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

func TestService(t *testing.T) {
	u := unit(t, "gpufenced.service")
	for key, want := range map[string]string{
		"Service.Type": "notify", "Service.WatchdogSec": "30s", "Service.Restart": "always", "Service.RuntimeDirectoryPreserve": "yes",
		"Service.ExecStart": "/usr/bin/gpufenced", "Service.ExecReload": "/usr/bin/gpufence reload", "Unit.Requires": "gpufenced.socket", "Unit.StartLimitIntervalSec": "0",
	} {
		if got := u[key]; len(got) != 1 || got[0] != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	// Mounts that gpufenced makes must be the host's.
	for _, key := range []string{
		"ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateMounts", "PrivateNetwork", "PrivateUsers", "ProtectKernelTunables", "ProtectKernelModules",
		"ProtectKernelLogs", "ProtectControlGroups", "ProtectProc", "ProcSubset", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths", "BindPaths", "TemporaryFileSystem",
		"RootDirectory", "RootImage", "MountFlags", "DynamicUser", "ProtectHostname", "MountAPIVFS", "ExecPaths", "NoExecPaths", "PrivatePIDs", "DevicePolicy",
	} {
		if v, there := u["Service."+key]; there {
			t.Errorf("%s=%s gives the service a mount namespace or less of the host", key, v)
		}
	}
	for _, name := range []string{"gpufenced.service", "gpufenced.socket"} {
		before := strings.Fields(strings.Join(unit(t, name)["Unit.Before"], " "))
		for _, engine := range []string{"containerd", "docker", "crio", "kubelet", "k3s", "rke2-agent", "podman"} {
			if !slices.Contains(before, engine+".service") {
				t.Errorf("%s does not come before %s", name, engine)
			}
		}
	}
}

func TestSocket(t *testing.T) {
	u := unit(t, "gpufenced.socket")
	for key, want := range map[string]string{"Socket.ListenStream": "/run/gpufence/gpufenced.sock", "Socket.SocketMode": "0660", "Socket.SocketGroup": "gpufence"} {
		if got := u[key]; len(got) != 1 || got[0] != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	text, err := os.ReadFile(filepath.Join(units, "gpufence.sysusers"))
	if err != nil || !strings.Contains(string(text), "\ng gpufence -\n") {
		t.Errorf("nobody makes the group of the socket: %v", err)
	}
}
