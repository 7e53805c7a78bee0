// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
	"github.com/gpufence/gpufence/packaging/engine/containerd"
	"github.com/gpufence/gpufence/packaging/engine/crio"
)

// askTime bounds every question to an engine's program.
const askTime = 30 * time.Second

// Find returns the engine's program: the one that runs, since a node may have several, else the
// first in PATH or where distributions hide it; "" if there is none.
func Find(name string) string {
	pids, err := filepath.Glob("/proc/[0-9]*/exe")
	if err == nil {
		for _, link := range pids {
			if exe, err := os.Readlink(link); err == nil && filepath.Base(exe) == name {
				if _, err := os.Stat(exe); err == nil {
					return exe
				}
			}
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		if abs, err := filepath.Abs(path); err == nil {
			return abs
		}
	}
	for _, dir := range []string{"/usr/sbin", "/usr/local/sbin", "/var/lib/rancher/k3s/data/current/bin", "/var/lib/rancher/rke2/bin", "/snap/microk8s/current/bin"} {
		if path := filepath.Join(dir, name); Runs(path) {
			return path
		}
	}
	return ""
}

// Runs says whether there is a program to execute.
func Runs(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0
}

var versionField = regexp.MustCompile(`^v?([0-9]+)\.[0-9]+`)

// Major asks an engine's program for its version; 0 if it does not say.
func Major(ctx context.Context, program string) int {
	out, _, err := ask(ctx, program, "--version")
	if err != nil {
		return 0
	}
	return MajorOf(string(out))
}

// MajorOf finds the major version in a word such as v1.7.35.
func MajorOf(text string) int {
	for _, field := range strings.Fields(text) {
		if m := versionField.FindStringSubmatch(field); m != nil {
			if n, err := strconv.Atoi(m[1]); err == nil {
				return n
			}
		}
	}
	return 0
}

func ask(ctx context.Context, program string, args ...string) (stdout, stderr []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	return out.Bytes(), errOut.Bytes(), err
}

// lastWords is the end of what a program complained about.
func lastWords(stdout, stderr []byte, err error) string {
	for _, text := range [][]byte{stderr, stdout} {
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		for _, line := range slices.Backward(lines) {
			if line = strings.TrimSpace(line); line != "" {
				return fmt.Sprintf("%.300s", line)
			}
		}
	}
	return err.Error()
}

func refused(program, words string) error {
	return quota.NewError(quota.CodeEngineRefused, "%s refuses the new configuration (%s)", filepath.Base(program), words).WithHint("nothing was changed: see whether it takes the present one")
}

func lost(program, handler, got string) error {
	return quota.NewError(quota.CodeEngineRefused, "%s reads the new configuration and finds %q for the runtime %q", filepath.Base(program), got, handler).
		WithHint("nothing was changed: look for another file that sets this runtime, and for files of different versions")
}

// Dump is the engine's own answer to what its configuration is.
func Dump(ctx context.Context, kind, program, config string) ([]byte, error) {
	args := []string{"--config", config, "config", "dump"}
	if kind == "crio" {
		args = []string{"--config", config, "status", "config"}
	}
	out, stderr, err := ask(ctx, program, args...)
	if err != nil {
		return nil, quota.NewError(quota.CodeEngineUnread, "%s does not say its configuration (%s)", filepath.Base(program), lastWords(nil, stderr, err)).WithHint("leave --config-source at file")
	}
	return out, nil
}

// after is what a file will hold.
func after(plan engine.Plan, path string) ([]byte, error) {
	for _, c := range plan.Changes {
		if c.Path == path {
			return c.After, nil
		}
	}
	return engine.ReadOptional(Disk{}, path)
}

// Validate shows the result of a plan to the engine's own loader, without changing anything. It
// returns a sentence where the loader could not be asked. want are runtimes and their programs.
func Validate(ctx context.Context, kind, program string, r engine.Request, plan engine.Plan, want map[string]string) (note string, err error) {
	dir, err := os.MkdirTemp("", "gpufence-check-")
	if err != nil {
		return "", quota.NewError(quota.CodeEngineUnwritable, "no temporary folder: %w", err).WithHint("set TMPDIR")
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	switch kind {
	case "containerd":
		return "", validateContainerd(ctx, dir, program, r, plan, want)
	case "docker":
		return validateDocker(ctx, dir, program, r, plan)
	case "crio":
		return "", validateCRIO(ctx, dir, program, r, plan, want)
	}
	return "", nil
}

func validateContainerd(ctx context.Context, dir, program string, r engine.Request, plan engine.Plan, want map[string]string) error {
	var imports []string
	for i, path := range plan.Sources {
		if path == r.Config {
			continue
		}
		if text, err := after(plan, path); err != nil {
			return err
		} else if text != nil && slices.ContainsFunc(plan.Changes, func(c engine.Change) bool { return c.Path == path }) {
			path = filepath.Join(dir, fmt.Sprintf("%03d.toml", i))
			if err := os.WriteFile(path, text, 0o600); err != nil {
				return unwritable(path, err)
			}
		}
		imports = append(imports, path)
	}
	text, err := after(plan, r.Config)
	if err != nil {
		return err
	}
	if text, err = containerd.Standalone(text, imports); err != nil {
		return quota.NewError(quota.CodeInternal, "make a copy of %s for the check: %w", r.Config, err)
	}
	main := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(main, text, 0o600); err != nil {
		return unwritable(main, err)
	}
	stdout, stderr, err := ask(ctx, program, "--config", main, "config", "dump")
	if err != nil {
		return refused(program, strings.ReplaceAll(lastWords(nil, stderr, err), dir, "..."))
	}
	for handler, path := range want {
		got, err := containerd.Found(stdout, handler)
		if err != nil {
			return refused(program, err.Error())
		}
		if got != path {
			return lost(program, handler, got)
		}
	}
	return nil
}

func validateDocker(ctx context.Context, dir, program string, r engine.Request, plan engine.Plan) (string, error) {
	text, err := after(plan, r.Config)
	if err != nil || text == nil {
		return "", err
	}
	path := filepath.Join(dir, "daemon.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return "", unwritable(path, err)
	}
	stdout, stderr, err := ask(ctx, program, "--validate", "--config-file", path)
	words := strings.ReplaceAll(lastWords(stdout, stderr, errors.New("")), dir, "...")
	switch {
	case err == nil:
		return "", nil
	case strings.Contains(string(stderr), "unknown flag: --validate"):
		return "dockerd before 23 cannot check a configuration: it was not shown to it", nil
	}
	return "", refused(program, words)
}

func validateCRIO(ctx context.Context, dir, program string, r engine.Request, plan engine.Plan, want map[string]string) error {
	folder := filepath.Join(dir, "crio.conf.d")
	if err := os.Mkdir(folder, 0o700); err != nil {
		return unwritable(folder, err)
	}
	main := filepath.Join(dir, "crio.conf")
	copyTo := func(to string, text []byte) error {
		if err := os.WriteFile(to, text, 0o600); err != nil {
			return unwritable(to, err)
		}
		return nil
	}
	if err := copyTo(main, nil); err != nil {
		return err
	}
	for _, path := range plan.Sources {
		text, err := after(plan, path)
		if err != nil {
			return err
		}
		to := filepath.Join(folder, filepath.Base(path))
		if path == r.Config {
			to = main
		}
		if err := copyTo(to, text); err != nil {
			return err
		}
	}
	for _, c := range plan.Changes {
		if c.After != nil {
			if err := copyTo(filepath.Join(folder, filepath.Base(c.Path)), c.After); err != nil {
				return err
			}
		}
	}
	stdout, stderr, err := ask(ctx, program, "--config", main, "--config-dir", folder, "config")
	if err != nil {
		return refused(program, strings.ReplaceAll(lastWords(nil, stderr, err), dir, "..."))
	}
	for handler, path := range want {
		got, err := crio.Found(stdout, handler)
		if err != nil {
			return refused(program, err.Error())
		}
		if got != path {
			return lost(program, handler, got)
		}
	}
	return nil
}

// Restarter makes an engine read its configuration.
type Restarter struct {
	Mode   string // none, systemd, signal
	Kind   string // containerd, crio, docker, podman
	Unit   string // "": the engine's
	Socket string // "": the engine's
}

// unit is what systemd calls the engine.
func (r Restarter) unit() string {
	if r.Unit != "" {
		return r.Unit
	}
	return r.Kind + ".service"
}

// Verb is what systemd is to do: dockerd reads its runtimes again without a restart, which would
// end containers where live-restore is off.
func (r Restarter) Verb() string {
	if r.Kind == "docker" {
		return "reload"
	}
	return "restart"
}

// Hint is the command for a person.
func (r Restarter) Hint() string { return "systemctl " + r.Verb() + " " + r.unit() }

// Restart does it.
func (r Restarter) Restart(ctx context.Context) error {
	failed := func(what string) error {
		return quota.NewError(quota.CodeEngineRestart, "%s could not be restarted (%s)", r.Kind, what).WithHint("see its journal, or install with --restart-mode none and run `%s`", r.Hint())
	}
	switch r.Mode {
	case "systemd":
		_, stderr, err := ask(ctx, "systemctl", r.Verb(), r.unit())
		if err != nil {
			return failed(lastWords(nil, stderr, err))
		}
	case "signal":
		err := hangUp(ctx, r.socket())
		if err != nil {
			return failed(err.Error())
		}
		// containerd ends on this signal and its supervisor starts it again.
		for range 60 {
			time.Sleep(500 * time.Millisecond)
			if _, err = peer(ctx, r.socket()); err == nil {
				return nil
			}
		}
		return failed(err.Error())
	}
	return nil
}

func (r Restarter) socket() string {
	if r.Socket != "" {
		return r.Socket
	}
	return map[string]string{"containerd": "/run/containerd/containerd.sock", "crio": "/run/crio/crio.sock", "docker": "/run/docker.sock"}[r.Kind]
}

// hangUp sends SIGHUP to who listens on a socket, and to nobody who took over its pid.
func hangUp(ctx context.Context, socket string) error {
	pid, err := peer(ctx, socket)
	if err != nil {
		return err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	handle := os.NewFile(uintptr(fd), "pidfd")
	defer handle.Close() // only signalled through
	if again, err := peer(ctx, socket); err != nil || again != pid {
		return fmt.Errorf("who listens on %s changed meanwhile: %w", socket, cmp.Or(err, errors.New("run this again")))
	}
	return unix.PidfdSendSignal(fd, unix.SIGHUP, nil, 0)
}

// peer is the process that listens on a socket, by the kernel's word.
func peer(ctx context.Context, socket string) (int, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return 0, err
	}
	defer c.Close() // nothing was sent
	u, ok := c.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%s is no unix socket", socket)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return int(cred.Pid), nil
}

// bundles are where containerd's shims keep what they run with, by default. What is there without a
// shim counts, too.
var bundles = []string{
	"/run/containerd/io.containerd.runtime.v2.task/*/*",
	"/run/docker/containerd/daemon/io.containerd.runtime.v2.task/*/*",
	"/run/k3s/containerd/io.containerd.runtime.v2.task/*/*",
	"/var/snap/microk8s/common/run/containerd/io.containerd.runtime.v2.task/*/*",
}

// Users lists the containers that exist with one of these programs as their runtime.
func Users(wrappers []string) ([]string, error) { return users(wrappers, bundles, "/proc") }

func users(wrappers, bundles []string, proc string) ([]string, error) {
	seen := map[string]bool{}
	var folders []string
	for _, pattern := range bundles {
		list, err := filepath.Glob(pattern)
		if err != nil {
			return nil, quota.NewError(quota.CodeInternal, "list bundles: %w", err)
		}
		folders = append(folders, list...)
	}
	lines, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "cmdline"))
	if err != nil {
		return nil, quota.NewError(quota.CodeInternal, "list processes: %w", err)
	}
	for _, path := range lines {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it ended meanwhile
		}
		args := strings.Split(string(text), "\x00")
		switch name := filepath.Base(args[0]); {
		case strings.HasPrefix(name, "containerd-shim"):
			// Whatever containerd's state folder is, a shim works in the bundle of its first container,
			// and those of the others lie beside that.
			folders = append(folders, beside(filepath.Join(filepath.Dir(path), "cwd"))...)
		case strings.HasPrefix(name, "conmon"):
			// CRI-O's and Podman's containers have a monitor each, which is told the runtime.
			if slices.ContainsFunc(wrappers, func(w string) bool { return slices.Contains(args, w) }) {
				id := "pid " + filepath.Base(filepath.Dir(path))
				for i, a := range args {
					if (a == "-c" || a == "--cid") && i+1 < len(args) {
						id = args[i+1]
					}
				}
				seen[id] = true
			}
		}
	}
	for _, dir := range folders {
		for _, name := range []string{"runtime", "options.json"} {
			text, err := os.ReadFile(dir + "/" + name)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, quota.NewError(quota.CodeEngineUnread, "%s cannot be read: %w", dir, err).WithHint("run gpufence as root")
			}
			for _, w := range wrappers {
				if name == "runtime" && strings.TrimSpace(string(text)) == w || name != "runtime" && bytes.Contains(text, []byte(strconv.Quote(w))) {
					seen[filepath.Base(dir)] = true
				}
			}
		}
	}
	var out []string
	for id := range seen {
		out = append(out, id)
	}
	slices.Sort(out)
	return out, nil
}

// beside are the folders next to a process's working one, and that itself. It is reached through the process, whose
// root may be another one than ours.
func beside(cwd string) []string {
	parent := cwd + "/.." // not cleaned: the link is to be followed first
	entries, err := os.ReadDir(parent)
	if err != nil {
		return nil // it ended meanwhile
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, parent+"/"+e.Name())
		}
	}
	return out
}

var wrapperPath = regexp.MustCompile(`["'](/[^"'\n]*/` + engine.WrapperPrefix + `[^"'/\n]*)["']`)

// WrappersIn are the programs that a configuration names.
func WrappersIn(plan engine.Plan) []string {
	var out []string
	for _, c := range plan.Changes {
		for _, m := range wrapperPath.FindAllStringSubmatch(string(c.Before), -1) {
			out = engine.Union(out, m[1])
		}
	}
	return out
}
