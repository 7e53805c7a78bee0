// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/mounts"
)

// TestRun: what `gpufence run` promises beside the fences, which TestEngines has: exit status, signals, stdin,
// only the granted GPUs, rights, nothing left running, nothing left on the machine.
func TestRun(t *testing.T) {
	ctx := t.Context()
	s := newSite(ctx, t)
	_, err := os.Lstat(preloadFile)
	if had := err == nil; !had {
		t.Cleanup(func() { removePreload(t) })
	}
	command := func(flags []string, words ...string) *exec.Cmd {
		args := append([]string{"--socket", s.Socket, "run", "--config", s.ConfigPath(), "--memory.max", "1Gi"}, flags...)
		cmd := exec.CommandContext(ctx, filepath.Join(s.dist, "bin/gpufence"), append(append(args, "--"), words...)...)
		cmd.Env = append(os.Environ(), s.SimEnv()...)
		cmd.WaitDelay = time.Second
		return cmd
	}
	shell := func(script string) *exec.Cmd { return command(nil, "/bin/sh", "-c", script) }
	output := func(t *testing.T, cmd *exec.Cmd) string {
		t.Helper()
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %s", err, stderr.String())
		}
		return strings.TrimSpace(string(out))
	}

	t.Run("exit status", func(t *testing.T) {
		var ended *exec.ExitError
		if err := shell("exit 7").Run(); !errors.As(err, &ended) || ended.ExitCode() != 7 {
			t.Errorf("exit 7: %v", err)
		}
		if err := shell("kill -KILL $$").Run(); !errors.As(err, &ended) || ended.ExitCode() != 137 {
			t.Errorf("kill -KILL: %v", err)
		}
	})
	t.Run("signals", func(t *testing.T) {
		cmd := shell(`trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done`)
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		if _, err := out.Read(make([]byte, 16)); err != nil {
			t.Fatal(err)
		}
		must(t, cmd.Process.Signal(syscall.SIGTERM))
		var ended *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &ended) || ended.ExitCode() != 5 {
			t.Errorf("after SIGTERM: %v", err)
		}
	})
	t.Run("stdin, folder and environment", func(t *testing.T) {
		cmd := shell(`cat; pwd; echo "$WORD"`)
		cmd.Stdin, cmd.Dir = strings.NewReader("from outside\n"), s.disk
		cmd.Env = append(cmd.Env, "WORD=kept")
		if got, want := output(t, cmd), "from outside\n"+s.disk+"\nkept"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
	t.Run("shim and limit", func(t *testing.T) {
		if got := output(t, shell("cat /etc/ld.so.preload; ls /dev/gpufence; test -c /dev/null && test -d /dev/shm && echo whole")); !strings.Contains(got, "libgpufence.so") || !strings.Contains(got, "memory.max") || !strings.HasSuffix(got, "whole") {
			t.Errorf("the command sees %q", got)
		}
	})
	t.Run("rights", func(t *testing.T) {
		got := output(t, shell("grep CapEff /proc/self/status; umount /etc/ld.so.preload 2>&1 || echo kept"))
		mask, err := strconv.ParseUint(strings.Fields(got)[1], 16, 64)
		if err != nil || mask&(1<<21) != 0 || mask&(1<<39) != 0 || !strings.HasSuffix(got, "kept") {
			t.Errorf("%s %v", got, err)
		}
		if got := output(t, command([]string{"--user", "nobody"}, "/bin/sh", "-c", "id -u; grep CapEff /proc/self/status")); got != "65534\nCapEff:\t0000000000000000" {
			t.Errorf("as nobody: %q", got)
		}
		if out, err := command([]string{"--user", "no-such-user"}, "/bin/true").CombinedOutput(); err == nil || !strings.Contains(string(out), "there is no such user") {
			t.Errorf("%v: %s", err, out)
		}
	})
	t.Run("only granted GPUs", func(t *testing.T) {
		if got := output(t, command([]string{"--gpu", s.uuid}, "/bin/sh", "-c", "ls /dev/simgpu")); !strings.Contains(got, "gpu0") {
			t.Errorf("it has %q", got)
		}
		if out, err := command([]string{"--gpu", "7"}, "/bin/true").CombinedOutput(); err == nil || !strings.Contains(string(out), "gpufence: E") {
			t.Errorf("seven GPUs: %v: %s", err, out)
		}
	})
	t.Run("nothing goes on", func(t *testing.T) {
		pid, err := strconv.Atoi(output(t, shell("sleep 300 >/dev/null 2>&1 </dev/null & echo $!")))
		must(t, err)
		must(t, until(ctx, "what the command left has ended", func() (bool, error) {
			text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
				return true, nil
			}
			return strings.Contains(string(text), ") Z "), err
		}))
	})
	t.Run("nothing is left", func(t *testing.T) {
		for _, path := range []string{"/dev/gpufence", "/dev/simgpu", "/mnt/rootfs", "/mnt/config.json"} {
			if _, err := os.Lstat(path); err == nil {
				t.Errorf("%s is there", path)
			}
		}
		must(t, until(ctx, "gpufenced has no container and no page", func() (bool, error) {
			all, err := s.running(ctx)
			pages, err2 := mounts.Below(s.Path("run"))
			return len(all) == 0 && len(pages) == 0, errors.Join(err, err2)
		}))
	})
}
