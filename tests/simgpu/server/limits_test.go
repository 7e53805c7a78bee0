// SPDX-License-Identifier: Apache-2.0

package server

import (
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
)

// TestLimitsByDriverVersion: drivers before R615 have none, later ones the kernel's unless told otherwise.
func TestLimitsByDriverVersion(t *testing.T) {
	for _, tt := range []struct {
		flags []string
		want  driver.Backend
		bad   bool
	}{
		{nil, driver.BackendOff, false},
		{[]string{"--driver-version", "610.43.02"}, driver.BackendOff, false},
		{[]string{"--driver-version", "615.71.09"}, driver.BackendDmem, false},
		{[]string{"--driver-version", "615.71.09", "--memory-limits", "misc"}, driver.BackendMisc, false},
		{[]string{"--driver-version", "615.71.09", "--memory-limits", "off"}, driver.BackendOff, false},
		{[]string{"--memory-limits", "misc"}, 0, true},
	} {
		var f Flags
		set := pflag.NewFlagSet("simgpud", pflag.ContinueOnError)
		f.Register(set)
		if err := set.Parse(tt.flags); err != nil {
			t.Fatal(err)
		}
		cfg, err := f.Config()
		if tt.bad != (err != nil) || !tt.bad && cfg.Knobs.MemoryLimits != tt.want {
			t.Errorf("%v: %v, %v", tt.flags, cfg.Knobs.MemoryLimits, err)
		}
	}
}

func TestUnifiedCgroup(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "",
		"0::/\n":                            "",
		"0::/a/b\n":                         "/a/b",
		"4:memory:/x\n1:name=systemd:/y\n":  "",
		"4:memory:/x\n0::/pod/c\n1:pids:/p": "/pod/c",
	} {
		if got := parseUnified([]byte(text)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
