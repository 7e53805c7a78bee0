// SPDX-License-Identifier: Apache-2.0

// Package runtimesettings reads from config.toml what a program that plans containers goes by:
// gpufence-runtime, `gpufence-hook precreate` and `gpufence run` are of one mind that way.
package runtimesettings

import (
	"path/filepath"

	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/hook/oci"
)

// Load reads the file, or what was last in force of it; "" is the usual one, which may be missing. With an
// error the settings are the defaults: containers that run must still be stopped and deleted.
func Load(path string) (oci.Settings, error) {
	loaded, err := config.LoadOrLastGood(path, "")
	cfg, notice := loaded.Config, ""
	if err != nil {
		cfg = config.Default()
	} else if loaded.FileErr != nil {
		notice = loaded.FileErr.Error() + "; what was last in force of it holds"
	}
	if path == "" {
		path = config.DefaultPath
	} else if abs, err := filepath.Abs(path); err == nil {
		path = abs // the hook runs elsewhere; without a working directory nothing is created anyway
	}
	return oci.Settings{
		Policy:      cfg.Policy,
		ConfigPath:  path,
		Socket:      cfg.Socket,
		RunDir:      cfg.RunDir,
		Runtimes:    cfg.Runtimes,
		HookPath:    cfg.HookPath,
		CDISpecDirs: cfg.CDISpecDirs,
		WaitSocket:  cfg.WaitSocket,
		FailOpen:    cfg.FailOpen,
		Notice:      notice,
	}, err
}
