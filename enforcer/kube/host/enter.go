// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Enter runs commands in the mount namespace, and with the root, of process 1, which with hostPID is
// the node's. Nothing else of ours enters: each command is forked by a thread that ends with it.
type Enter struct {
	// Namespace is the file of the namespace; "" is that of process 1.
	Namespace string
}

// Run implements [Commander].
func (e Enter) Run(ctx context.Context, argv ...string) ([]byte, error) {
	type result struct {
		out []byte
		err error
	}
	done := make(chan result, 1)
	go func() {
		// Never unlocked: the thread is in the node's namespace, and ends with this goroutine.
		runtime.LockOSThread()
		out, err := e.run(ctx, argv)
		done <- result{out, err}
	}()
	r := <-done
	return r.out, r.err
}

func (e Enter) run(ctx context.Context, argv []string) ([]byte, error) {
	path := e.Namespace
	if path == "" {
		path = "/proc/1/ns/mnt"
	}
	ns, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("enter the node: %w (the pod needs hostPID)", err)
	}
	defer ns.Close()
	// A thread that shares its root with others may not change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, fmt.Errorf("enter the node: %w", err)
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("enter the node: %w (the container needs to be privileged)", err)
	}
	if err := os.Chdir("/"); err != nil {
		return nil, fmt.Errorf("enter the node: %w", err)
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C"}
	if config := os.Getenv("GPUFENCE_CONFIG"); config != "" {
		cmd.Env = append(cmd.Env, "GPUFENCE_CONFIG="+config)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(stderr.String())
		if len(said) > 512 {
			said = said[len(said)-512:]
		}
		var exit *exec.ExitError
		if errors.As(err, &exit) && said != "" {
			return stdout.Bytes(), fmt.Errorf("%s on the node: %s (%w)", strings.Join(argv[:min(2, len(argv))], " "), said, err)
		}
		return stdout.Bytes(), fmt.Errorf("%s on the node: %w", argv[0], err)
	}
	return stdout.Bytes(), nil
}
