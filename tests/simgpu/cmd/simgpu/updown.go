// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// startTime bounds how long simgpud may take to come up or go away.
const startTime = 10 * time.Second

func upCommand(dir *string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "up [-- SIMGPUD-FLAG...]", Short: "Start simgpud in the background and wait until it serves",
		Long: "Start simgpud, which lies beside simgpu or in PATH, in the background. Flags of simgpud\n" +
			"(simgpud --help) follow after --. Its log goes to simgpud.log in the folder.",
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		if st, err := server.NewClient(*dir).State(ctx); err == nil {
			return fmt.Errorf("start simgpud: one runs in %s already, pid %d", *dir, st.PID)
		}
		binary, err := findDaemon()
		if err != nil {
			return err
		}
		if err := os.MkdirAll(*dir, 0o755); err != nil {
			return fmt.Errorf("make socket folder: %w", err)
		}
		logPath := filepath.Join(*dir, "simgpud.log")
		logFile, err := os.Create(logPath)
		if err != nil {
			return fmt.Errorf("make log: %w", err)
		}
		defer logFile.Close() // simgpud has its own copy
		// Without cancelling: it outlives us.
		daemon := exec.CommandContext(context.WithoutCancel(ctx), binary, append([]string{"--dir", *dir}, args...)...)
		daemon.Stderr = logFile
		daemon.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := daemon.Start(); err != nil {
			return fmt.Errorf("start simgpud: %w", err)
		}
		ended := make(chan error, 1)
		go func() { ended <- daemon.Wait() }()
		err = await(ctx, func() bool {
			_, err := server.NewClient(*dir).State(ctx)
			return err == nil
		}, ended)
		if err != nil {
			text, readErr := os.ReadFile(logPath)
			return errors.Join(fmt.Errorf("start simgpud: %w: %s", err, strings.TrimSpace(string(text))), readErr)
		}
		fmt.Fprintln(cmd.OutOrStdout(), daemon.Process.Pid)
		return nil
	}
	return cmd
}

func findDaemon() (string, error) {
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), "simgpud"); isFile(beside) {
			return beside, nil
		}
	}
	binary, err := exec.LookPath("simgpud")
	if err != nil {
		return "", fmt.Errorf("find simgpud beside simgpu or in PATH: %w", err)
	}
	return binary, nil
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular()
}

var errEnded = errors.New("it ended at once")

// await polls until done says yes, ended says no, or the time is up.
func await(ctx context.Context, done func() bool, ended <-chan error) error {
	deadline := time.After(startTime)
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			if err == nil {
				return errEnded
			}
			return fmt.Errorf("%w (%w)", errEnded, err)
		case <-deadline:
			return fmt.Errorf("nothing happened in %s", startTime)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

func downCommand(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "down", Short: "Stop the simgpud that serves the folder", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			st, err := server.NewClient(*dir).State(cmd.Context())
			if err != nil {
				return err
			}
			if err := syscall.Kill(st.PID, syscall.SIGTERM); err != nil {
				return fmt.Errorf("stop simgpud, pid %d: %w", st.PID, err)
			}
			return await(cmd.Context(), func() bool {
				_, err := server.NewClient(*dir).State(cmd.Context())
				return err != nil
			}, nil)
		},
	}
}
