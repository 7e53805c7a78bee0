// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"gpufence-runtime":        main,
		"gpufence-runtime.cri":    main,
		"gpufence-runtime.docker": main,
	})
}

// fakeRunc stands in for runc: it writes down how it was called, with which descriptors and
// which config.json, says so on stdout, and exits with a status of its own. It is no link to
// this program, in which the wrapper would recognise itself.
const fakeRunc = `#!/bin/sh
{
	echo "args: $0 $*"
	for fd in 3 4 5; do
		if target=$(readlink /proc/$$/fd/$fd) && [ "${target#"$WORK"}" != "$target" ] && [ "$target" != "$RECORD" ] && [ "$target" != "$0" ]; then
			echo "fd $fd: $target"
		fi
	done
} >"$RECORD"
cp "$BUNDLE/config.json" "$RECORD.json"
echo from the runtime
exit 7
`

// daemon answers prepare as the file answer.json of the script says.
type daemon struct {
	server.Service
	dir string

	mu    sync.Mutex
	heard []any
}

func (d *daemon) hear(request any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.heard = append(d.heard, request)
}

func (d *daemon) Prepare(_ context.Context, r api.PrepareRequest) (api.PrepareResponse, error) {
	d.hear(r)
	var resp api.PrepareResponse
	text, err := os.ReadFile(filepath.Join(d.dir, "answer.json"))
	if err != nil {
		return resp, quota.NewError(quota.CodeUnavailable, "memory.min 4Gi is more than is free on GPU-1").WithHint("wait, or ask for less")
	}
	return resp, json.Unmarshal(text, &resp)
}

func TestScripts(t *testing.T) {
	var daemons sync.Map
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			env.Setenv("RECORD", filepath.Join(env.WorkDir, "record"))
			env.Setenv("BUNDLE", filepath.Join(env.WorkDir, "bundle"))
			env.Setenv("GPUFENCE_CONFIG", filepath.Join(env.WorkDir, "config.toml"))
			bin := filepath.Join(env.WorkDir, "bin")
			if err := os.Mkdir(bin, 0o755); err != nil {
				return err
			}
			for _, name := range []string{"fake-runc", "runc"} {
				if err := os.WriteFile(filepath.Join(bin, name), []byte(fakeRunc), 0o755); err != nil {
					return err
				}
			}
			env.Setenv("PATH", bin+":"+env.Getenv("PATH"))
			d := &daemon{dir: env.WorkDir}
			l, err := server.Listen(filepath.Join(env.WorkDir, "sock"), -1)
			if err != nil {
				return err
			}
			s := server.New(d, server.Options{})
			done := make(chan error, 1)
			go func() { done <- s.Serve(l) }()
			env.Defer(func() {
				if err := errors.Join(s.Shutdown(context.Background()), <-done); err != nil {
					t.Error(err)
				}
			})
			daemons.Store(env.WorkDir, d)
			// Files of a script know no variables.
			for _, name := range []string{"config.toml", "answer.json"} {
				path := filepath.Join(env.WorkDir, name)
				text, err := os.ReadFile(path)
				if errors.Is(err, os.ErrNotExist) {
					continue
				}
				if err != nil {
					return err
				}
				if err := os.WriteFile(path, []byte(strings.ReplaceAll(string(text), "$WORK", env.WorkDir)), 0o644); err != nil {
					return err
				}
			}
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			// heard FILE writes down what gpufenced was asked, one JSON value a line.
			"heard": func(ts *testscript.TestScript, _ bool, args []string) {
				v, ok := daemons.Load(ts.Getenv("WORK"))
				if !ok {
					ts.Fatalf("no daemon")
				}
				d, ok := v.(*daemon)
				if !ok {
					ts.Fatalf("no daemon")
				}
				d.mu.Lock()
				defer d.mu.Unlock()
				var out strings.Builder
				for _, h := range d.heard {
					line, err := json.Marshal(h)
					ts.Check(err)
					fmt.Fprintln(&out, string(line))
				}
				ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(out.String()), 0o644))
			},
		},
	})
}
