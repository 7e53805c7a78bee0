// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/process"
)

// patience bounds what is waited for; only what hangs takes so long, also on a machine with other work.
const patience = 120 * time.Second

// start starts a program beside the test. It writes into log.
func start(ctx context.Context, name, log string, env []string, program string, args ...string) (*process.Process, error) {
	return process.Start(ctx, process.Options{Name: name, Log: log, Env: env, TimeoutStart: patience}, program, args...)
}

// run runs a command to its end and gives its stdout; what it says on stderr is in the error.
func run(ctx context.Context, stdin, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// until waits until f says that it is so; what it says of the state is in the error.
func until(ctx context.Context, what string, f func(context.Context) (bool, string)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		ok, state := f(ctx)
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("never: %s; last: %s (%w)", what, state, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// must ends a step at the first thing that went wrong.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// skip says why the test cannot run here; where it must, that is a failure.
func skip(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("GPUFENCE_MUST=1, but "+format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

// memory is a folder that is no disk, as /run is on a real node.
func memory() string {
	for _, dir := range []string{"/run", "/dev/shm"} {
		var s unix.Statfs_t
		if err := unix.Statfs(dir, &s); err == nil && s.Type == unix.TMPFS_MAGIC && unix.Access(dir, unix.W_OK) == nil {
			return dir
		}
	}
	return os.TempDir()
}
