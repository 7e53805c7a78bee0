// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gpufence-hook": main})
}

// daemon writes down what it hears; a file named refuse makes it refuse.
type daemon struct {
	api.Service
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
			l, err := api.Listen(filepath.Join(env.WorkDir, "sock"), -1)
			if err != nil {
				return err
			}
			s := api.NewServer(daemon{dir: env.WorkDir}, api.ServerOptions{})
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
