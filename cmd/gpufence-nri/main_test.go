// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	dir := t.TempDir()
	hook, config := filepath.Join(dir, "gpufence-hook"), filepath.Join(dir, "config.toml")
	if err := os.WriteFile(hook, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("mode = \"enforce\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"--index", "9", "--hook-path", hook}, 1, `gpufence: E1008 --index "9" is not two digits: write one such as 90`},
		{[]string{"--hook-path", filepath.Join(dir, "none")}, 1, "gpufence: E1007 gpufence-hook is not at"},
		{[]string{"more"}, 1, "unknown command"},
		{[]string{"--config", config, "--hook-path", hook, "--nri-socket", filepath.Join(dir, "nri.sock")}, 0, "containers start WITHOUT a fence where only NRI delivers it"},
	}
	for _, tt := range tests {
		ctx, cancel := context.WithCancel(t.Context())
		var stdout bytes.Buffer
		stderr := &firstLine{done: cancel}
		if got := run(ctx, tt.args, func(string) string { return "" }, &stdout, stderr); got != tt.status || !strings.Contains(stderr.String(), tt.want) {
			t.Errorf("%q: status %d, said %s", tt.args, got, stderr.String())
		}
		cancel()
		if stdout.Len() > 0 {
			t.Errorf("%q: %s", tt.args, stdout.String())
		}
	}
}

// firstLine ends the program once it has said something.
type firstLine struct {
	bytes.Buffer
	done func()
}

func (f *firstLine) Write(b []byte) (int, error) {
	defer f.done()
	return f.Buffer.Write(b)
}
