// SPDX-License-Identifier: Apache-2.0

package config

import (
	"io"
	"os"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// maxFileBytes bounds config.toml; a whole cluster's namespaces fit into a part of it.
const maxFileBytes = 1 << 20

// Default is the configuration of a node without a file.
func Default() Config {
	return Config{
		Policy:         quota.DefaultPolicy(),
		Socket:         "/run/gpufence/gpufenced.sock",
		RunDir:         "/run/gpufence",
		StateDir:       "/var/lib/gpufence",
		Runtimes:       []string{"nvidia-container-runtime", "runc", "crun"},
		ShimDelivery:   "preload",
		CDISpecDirs:    []string{"/etc/cdi", "/var/run/cdi"},
		CDIKinds:       []string{"nvidia.com/gpu", "gpufence.dev/gpu", "gpufence.dev/simgpu"},
		Sample:         100 * time.Millisecond,
		SampleIdle:     time.Second,
		SampleDeadline: 2 * time.Second,
		Settle:         time.Second,
		StuckAfter:     10 * time.Second,
		KillSlackBytes: 64 << 20,
		KillSlackShare: 0.02,
		KillInterval:   20 * time.Millisecond,
		ReserveBytes:   256 << 20,
		ReserveShare:   0.03,
		ModuleBytes:    2 << 20,
		PrepareHold:    time.Minute,
		PagesHold:      time.Hour,
		ResizeDeadline: 30 * time.Second,
		EndedKeep:      10 * time.Minute,
		WaitSocket:     5 * time.Second,
		Unmanaged:      "warn",
		UnmanagedExempt: []Exempt{
			{ExemptExe, "/usr/bin/nv-hostengine"}, {ExemptExe, "/usr/bin/dcgm-exporter"}, {ExemptExe, "/usr/bin/nvidia-persistenced"},
			{ExemptExe, "/usr/bin/nvidia-device-plugin"}, {ExemptExe, "/usr/lib/xorg/Xorg"}, {ExemptExe, "/usr/libexec/Xorg"},
			{ExemptExe, "/usr/bin/Xwayland"}, {ExemptExe, "/usr/bin/gnome-shell"},
		},
		ShimMissing: "report",
		Admit:       "free",
		Placement:   "spread",
		Throttle:    "shim",
		Gate:        "auto",
		GateManaged: "audit",
		GatePins:    "/sys/fs/bpf/gpufence",
		FreezeSlice: 50 * time.Millisecond,
		FreezeShare: 0.5,
	}
}

// Load reads a configuration file. An empty path means [DefaultPath], which may be missing; a
// file that somebody named must be there. The error is a [*quota.Error].
func Load(path string) (Config, error) {
	l, err := LoadFile(path)
	return l.Config, err
}

func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only: closing has nothing to tell
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, quota.NewError(quota.CodePolicyUnread, "cannot read the configuration %s: it is not a regular file", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFileBytes {
		return nil, quota.NewError(quota.CodePolicyUnread, "cannot read the configuration %s: it is larger than %d MiB", path, maxFileBytes>>20)
	}
	return text, nil
}
