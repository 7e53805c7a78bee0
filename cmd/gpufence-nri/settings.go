// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/nri"
)

// settle fills in what the command line left open. A configuration that is wrong refuses containers
// with a GPU, as the wrapper does, and is no reason to be away.
func settle(set *nri.Settings, getenv func(string) string, log logrus.FieldLogger) error {
	if n, err := strconv.Atoi(set.Index); err != nil || len(set.Index) != 2 || n < 0 {
		return quota.NewError(quota.CodeUsage, "--index %.20q is not two digits", set.Index).WithHint("write one such as 90")
	}
	path := set.ConfigPath
	if path == "" {
		path = getenv("GPUFENCE_CONFIG")
	}
	loaded, err := config.LoadOrLastGood(path, "")
	cfg := loaded.Config
	if err != nil {
		log.WithError(err).Error("no container with a GPU is created")
		cfg, set.PolicyErr = config.Default(), err
	} else if loaded.FileErr != nil {
		log.WithError(loaded.FileErr).Warn("what was last in force of the configuration holds")
	}
	if set.ConfigPath = config.DefaultPath; path != "" {
		if set.ConfigPath, err = filepath.Abs(path); err != nil {
			return quota.NewError(quota.CodeUsage, "--config %.200q is relative to a folder that is gone: %w", path, err)
		}
	}
	if set.Socket == "" {
		set.Socket = cfg.Socket
	}
	if set.HookPath == "" {
		set.HookPath = cfg.HookPath
	}
	if set.HookPath == "" {
		self, err := os.Executable()
		if err != nil {
			return quota.NewError(quota.CodeRuntimeExec, "gpufence-hook cannot be found beside this program: %w", err).WithHint("name it with --hook-path")
		}
		set.HookPath = filepath.Join(filepath.Dir(self), "gpufence-hook")
	}
	if info, err := os.Stat(set.HookPath); err != nil || !filepath.IsAbs(set.HookPath) || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return quota.NewError(quota.CodeRuntimeExec, "gpufence-hook is not at %s, or is no program", set.HookPath).
			WithHint("install it there, or name it with --hook-path")
	}
	set.Policy, set.RunDir, set.CDISpecDirs, set.FailOpen = cfg.Policy, cfg.RunDir, cfg.CDISpecDirs, cfg.FailOpen
	text, err := os.ReadFile("/proc/devices")
	if err != nil {
		return quota.NewError(quota.CodeInternal, "cannot read the kernel's device numbers: %w", err)
	}
	set.Majors = nri.Majors(string(text))
	set.Exempt = trimmed(set.Exempt)
	return nil
}

func trimmed(list []string) []string {
	var out []string
	for _, s := range list {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}
