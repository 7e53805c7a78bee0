// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestAsk(t *testing.T) {
	sh := func(script string) []string { return []string{"/bin/sh", "-c", script} }
	got, err := ask(t.Context(), time.Minute, sh(`echo '{"Over":12,"Under":25}'`), nil)
	if want := (canaryAnswer{Over: 12, Under: 25}); err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	if _, err := ask(t.Context(), time.Minute, sh("echo no canary >&2; exit 3"), nil); err == nil || !strings.Contains(err.Error(), "no canary") {
		t.Errorf("a canary that fails: %v", err)
	}
	if _, err := ask(t.Context(), time.Minute, sh("echo ok"), nil); err == nil {
		t.Error("an answer that is none was understood")
	}
	var exit *exec.ExitError
	_, err = ask(t.Context(), time.Minute, sh("kill -SEGV $$"), nil)
	if !errors.As(err, &exit) || !exit.Sys().(syscall.WaitStatus).Signaled() {
		t.Errorf("a canary that a signal ends: %v", err)
	}
}

// A canary that is killed since it is silent must not look like one that the kernel would not run.
func TestAskDoesNotHang(t *testing.T) {
	for name, script := range map[string]string{"itself": "exec sleep 600", "its child": "sleep 5 & wait"} {
		begun := time.Now()
		_, err := ask(t.Context(), 50*time.Millisecond, []string{"/bin/sh", "-c", script}, &syscall.SysProcAttr{Setpgid: true})
		var exit *exec.ExitError
		if !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &exit) {
			t.Errorf("%s: %v", name, err)
		}
		t.Logf("%s: given up after %s", name, time.Since(begun).Round(time.Millisecond))
	}
}
