// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gpufence-hook": main})
}

// daemon writes down what it hears; a file named refuse makes it refuse.
type daemon struct {
	server.Service
	dir string
}

func (d daemon) hear(name string, request any) error {
	text, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(d.dir, name), append(text, '\n'), 0o644); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(d.dir, "refuse")); err == nil {
		return quota.NewError(quota.CodeLevelNotReached, "require is hard, and this node reaches reactive")
	}
	return nil
}

// Prepare grants nothing: what the plan adds of its own is enough to see that it was made.
func (d daemon) Prepare(_ context.Context, r api.PrepareRequest) (api.PrepareResponse, error) {
	return api.PrepareResponse{}, d.hear("prepared", r)
}

func (d daemon) Register(_ context.Context, r api.RegisterRequest) (api.RegisterResponse, error) {
	return api.RegisterResponse{Level: quota.LevelReactive, Notices: []string{"a remark"}}, d.hear("registered", r)
}

func (d daemon) Unregister(_ context.Context, r api.UnregisterRequest) error {
	return d.hear("unregistered", r)
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			// Files of a script know no variables.
			for _, name := range []string{"config.toml", "observe.toml"} {
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
			l, err := server.Listen(filepath.Join(env.WorkDir, "sock"), -1)
			if err != nil {
				return err
			}
			s := server.New(daemon{dir: env.WorkDir}, server.Options{})
			done := make(chan error, 1)
			go func() { done <- s.Serve(l) }()
			env.Defer(func() {
				if err := errors.Join(s.Shutdown(context.Background()), <-done); err != nil {
					t.Error(err)
				}
			})
			return nil
		},
	})
}
