// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// bench is a bundle, a fake low-level runtime and a wrapper between them.
type bench struct {
	t       *testing.T
	dir     string
	bundle  string
	config  string
	log     string
	runtime string
	w       Wrapper
	stderr  bytes.Buffer
	execs   []execCall
}

type execCall struct {
	path      string
	argv, env []string
}

func newBench(t *testing.T, name, config, socket string) *bench {
	t.Helper()
	dir := t.TempDir()
	b := &bench{t: t, dir: dir, bundle: filepath.Join(dir, "bundle"), log: filepath.Join(dir, "log.json")}
	b.config = writeFile(t, filepath.Join(b.bundle, "config.json"), config)
	b.runtime = program(t, filepath.Join(dir, "bin", "runc"))
	b.w = Wrapper{
		Args: []string{filepath.Join("/usr/bin", name)},
		Env:  []string{"PATH=" + filepath.Join(dir, "bin"), "FOO=bar"},
		Settings: Settings{
			Policy: quota.DefaultPolicy(), ConfigPath: "/etc/gpufence/config.toml", Socket: socket, RunDir: filepath.Join(dir, "run"),
			Runtimes: []string{"nvidia-container-runtime", "runc"}, HookPath: program(t, filepath.Join(dir, "bin", "gpufence-hook")),
			CDISpecDirs: []string{filepath.Join(dir, "cdi")}, WaitSocket: 30 * time.Millisecond,
		},
		Stderr: &b.stderr,
		Exec: func(path string, argv, env []string) error {
			b.execs = append(b.execs, execCall{path, argv, env})
			return nil
		},
	}
	return b
}

// run calls the wrapper with the arguments; it returns true if the runtime was executed.
func (b *bench) run(args ...string) bool {
	b.t.Helper()
	b.execs = nil
	b.stderr.Reset()
	w := b.w
	w.Args = append(slices.Clone(w.Args), args...)
	if got := w.Run(b.t.Context()); got != 1 {
		b.t.Errorf("exit %d", got) // Exec came back, or never was called
	}
	switch len(b.execs) {
	case 0:
		return false
	case 1:
		want := append([]string{b.execs[0].path}, args...)
		if diff := cmp.Diff(want, b.execs[0].argv); diff != "" {
			b.t.Error(diff)
		}
		return true
	}
	b.t.Fatalf("executed %d times", len(b.execs))
	return false
}

func (b *bench) create() bool {
	b.t.Helper()
	return b.run("--root", "/run/x", "--log", b.log, "--log-format", "json", "create", "--bundle", b.bundle, "c1")
}

// logged returns the messages of a level in the log.
func (b *bench) logged(level string) []string {
	b.t.Helper()
	text, err := os.ReadFile(b.log)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		b.t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(text)) {
		var entry struct{ Level, Msg, Time string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			b.t.Fatalf("%v in %q", err, line)
		}
		if _, err := time.Parse(time.RFC3339, entry.Time); err != nil {
			b.t.Error(err)
		}
		if entry.Level == level {
			out = append(out, entry.Msg)
		}
	}
	return out
}

const gpuUUID = "GPU-11111111-2222-3333-4444-555555555555"

// podConfig is a CRI container with a GPU by UUID and the given annotations.
func podConfig(annotations ...string) string {
	all := append([]string{
		`"io.kubernetes.cri.container-type":"container"`, `"io.kubernetes.cri.sandbox-id":"sandbox1"`,
		`"io.kubernetes.cri.sandbox-namespace":"team-a"`, `"io.kubernetes.cri.sandbox-name":"notebook"`,
		`"io.kubernetes.cri.container-name":"main"`,
	}, annotations...)
	return `{"ociVersion":"1.2.0","future":1.50,
		"process":{"args":["/app"],"env":["PATH=/bin","NVIDIA_VISIBLE_DEVICES=` + gpuUUID + `"],"cwd":"/"},
		"root":{"path":"rootfs"},
		"mounts":[{"destination":"/dev/termination-log","type":"bind","source":"/host/log","options":["bind"]}],
		"linux":{"namespaces":[{"type":"pid"}],"resources":{"devices":[{"allow":false,"access":"rwm"}]}},
		"annotations":{` + strings.Join(all, ",") + `}}`
}

func answer(run string) api.PrepareResponse {
	return api.PrepareResponse{
		Grant:      quota.Grant{GPUs: []quota.GPU{{UUID: gpuUUID, TotalBytes: 16 << 30, AllocatableBytes: 15 << 30}}, Mode: quota.ModeEnforce},
		CDIDevices: []string{"example.com/gpu=0"},
		Files: []api.SharedFile{
			{Source: filepath.Join(run, "limits"), Destination: "/dev/gpufence/limits"},
			{Source: filepath.Join(run, "ledger"), Destination: "/dev/gpufence/ledger", Writable: true},
			{Source: filepath.Join(run, "preload"), Destination: "/etc/ld.so.preload"},
		},
		Notices: []string{"memory.max is below the image's wish"},
	}
}

// gpuBench is a bench whose container gets a GPU.
func gpuBench(t *testing.T, config string) (*bench, *daemon) {
	t.Helper()
	d := startDaemon(t)
	b := newBench(t, "gpufence-runtime.cri", config, d.socket)
	writeCDI(t, filepath.Join(b.dir, "cdi"))
	compile(t, filepath.Join(b.bundle, "rootfs", "app"), "-static")
	writeFile(t, filepath.Join(b.bundle, "rootfs", "etc", "ld.so.preload"), "/lib/jemalloc.so\n")
	d.answer = answer(b.w.Settings.RunDir)
	return b, d
}

func TestOtherCommandsPassUntouched(t *testing.T) {
	b := newBench(t, "gpufence-runtime.cri", "garbage", "/none")
	b.w.SettingsErr = quota.NewError(quota.CodeBadPolicy, "config.toml is wrong")
	before, err := os.Stat(b.config)
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{
		"", "features", "--version", "-v", "--help", "create --help", "spec --bundle /b", "state c1", "kill c1 KILL", "delete --force c1", "delete c1",
		"exec c1 create", "ps c1", "update --resources - c1", "start c1", "pause c1", "resume c1", "events --stats c1", "checkpoint c1", "list",
		"--root /r --log /nowhere/log --log-format json --systemd-cgroup state c1", "newcommand --bundle /b", "--newflag x state create",
	} {
		t.Run(args, func(t *testing.T) {
			b.t = t
			if !b.run(strings.Fields(args)...) {
				t.Fatal("the runtime was not executed")
			}
			if b.execs[0].path != b.runtime || b.stderr.Len() != 0 {
				t.Errorf("path %s, stderr %q", b.execs[0].path, b.stderr.String())
			}
			if diff := cmp.Diff(b.w.Env, b.execs[0].env); diff != "" {
				t.Error(diff)
			}
		})
	}
	after, err := os.Stat(b.config)
	if err != nil || !os.SameFile(before, after) || !before.ModTime().Equal(after.ModTime()) {
		t.Error("config.json was touched")
	}
}

func TestCreateFencesAPod(t *testing.T) {
	b, d := gpuBench(t, podConfig(`"gpufence.dev/memory.max":"4Gi"`, `"other.example/x":"y"`))
	if !b.create() {
		t.Fatal(b.stderr.String())
	}
	want := []api.PrepareRequest{{
		Key:           api.ContainerKey{Engine: quota.EngineCRI, Scope: "/run/x", ID: "c1"},
		Pod:           api.PodRef{ID: "sandbox1", Namespace: "team-a", Name: "notebook"},
		ContainerName: "main", Bundle: b.bundle,
		Annotations:    map[string]string{"gpufence.dev/memory.max": "4Gi"},
		Devices:        api.DeviceRequest{Selectors: []string{gpuUUID}},
		ImagePreload:   "/lib/jemalloc.so\n",
		ShimDir:        "/dev/gpufence",
		ShimAbsent:     "static",
		TerminationLog: "/host/log",
	}}
	if diff := cmp.Diff(want, d.prepared); diff != "" {
		t.Error(diff)
	}
	text := readFile(t, b.config)
	var got struct {
		Process struct{ Env []string }
		Mounts  []struct{ Destination, Source string }
		Hooks   map[string][]struct {
			Path string
			Args []string
		}
		Linux struct{ Devices []struct{ Path string } }
	}
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, `"future":1.50`) {
		t.Error("an unknown field is gone")
	}
	if !slices.Contains(got.Process.Env, "NVIDIA_VISIBLE_DEVICES=void") || slices.Contains(got.Process.Env, "NVIDIA_VISIBLE_DEVICES="+gpuUUID) {
		t.Errorf("env %v", got.Process.Env)
	}
	last := got.Mounts[len(got.Mounts)-1]
	if last.Destination != "/etc/ld.so.preload" || last.Source != filepath.Join(b.w.Settings.RunDir, "preload") {
		t.Errorf("mounts %v", got.Mounts)
	}
	if len(got.Linux.Devices) != 1 || got.Linux.Devices[0].Path != "/dev/nvidia0" {
		t.Errorf("devices %v", got.Linux.Devices)
	}
	for stage, position := range map[string]int{"createRuntime": 1, "poststop": 0} { // behind CDI's
		h := got.Hooks[stage]
		if len(h) != position+1 {
			t.Fatalf("%s: %v", stage, h)
		}
		parsed, err := ParseHookArgs(h[position].Args[1:])
		want := HookArgs{Stage: stage, ConfigPath: "/etc/gpufence/config.toml", Socket: d.socket, Engine: quota.EngineCRI, Scope: "/run/x"}
		if err != nil || parsed != want || h[position].Path != b.w.Settings.HookPath {
			t.Errorf("%s: %+v %v", stage, h[position], err)
		}
	}
	if got := b.logged("warning"); !slices.Contains(got, "gpufence: memory.max is below the image's wish") || len(b.logged("error")) != 0 {
		t.Errorf("logged %v", got)
	}
	if b.stderr.Len() != 0 {
		t.Errorf("stderr %q", b.stderr.String())
	}

	// The same bundle again: gpufenced hears the same limits, the file stays as it is.
	if !b.create() {
		t.Fatal(b.stderr.String())
	}
	if again := readFile(t, b.config); again != text {
		t.Errorf("the second pass changed:\n%s", cmp.Diff(value(t, []byte(text)), value(t, []byte(again))))
	}
}

// TestSpecificationWrittenMeanwhile: what CDI says is read while gpufenced is asked, and gpufenced
// writes a specification of its own when the driver has changed.
func TestSpecificationWrittenMeanwhile(t *testing.T) {
	for _, before := range []string{"", "/lib/old"} {
		t.Run("before "+before, func(t *testing.T) {
			b, d := gpuBench(t, podConfig(`"gpufence.dev/memory.max":"4Gi"`))
			spec := filepath.Join(b.dir, "cdi", "gpu.yaml")
			write := func(lib string) {
				writeFile(t, spec, "{cdiVersion: 1.0.0, kind: example.com/gpu, devices: [{name: \"0\", containerEdits: {env: [LIB="+lib+"]}}]}")
			}
			if err := os.Remove(spec); err != nil {
				t.Fatal(err)
			}
			if before != "" {
				write(before)
			}
			d.preparing = func() {
				time.Sleep(50 * time.Millisecond) // it has been read by now
				write("/lib/new")
			}
			if !b.create() {
				t.Fatalf("refused: %s", b.stderr.String())
			}
			if text := readFile(t, b.config); !strings.Contains(text, "LIB=/lib/new") {
				t.Errorf("not what was written last: %s", text)
			}
		})
	}
}

func TestCreateKeepsTheOldFileWhenRefused(t *testing.T) {
	limited := podConfig(`"gpufence.dev/memory.max":"4Gi"`)
	tests := []struct {
		name   string
		config string
		change func(*bench, *daemon)
		says   string
	}{
		{"refused by gpufenced", limited, func(_ *bench, d *daemon) {
			d.refuse = quota.NewError(quota.CodeUnavailable, "memory.min 4Gi is more than is free")
		}, "gpufence: E1402 memory.min 4Gi is more than is free"},
		{"gpufenced down", limited, func(b *bench, _ *daemon) { b.w.Settings.Socket = "/none/s" }, "gpufence: E1501 gpufenced does not answer on /none/s"},
		{"no limit", podConfig(), nil, "gpufence: E1401 "},
		{"no unit", podConfig(`"gpufence.dev/memory.max":"4096"`), nil, "4096Mi"},
		{"unknown key", podConfig(`"gpufence.dev/memory.mx":"4Gi"`), nil, "memory.max"},
		{"no such CDI device", limited, func(_ *bench, d *daemon) { d.answer.CDIDevices = []string{"example.com/gpu=9"} }, "gpufence: E1704 "},
		{"nothing to inject", limited, func(_ *bench, d *daemon) { d.answer.CDIDevices = nil }, "gpufence: E1701 "},
		{"mount over ours", strings.Replace(limited, `"/dev/termination-log"`, `"/dev/gpufence"`, 1), nil, "gpufence: E1708 "},
		{"HAMi", strings.Replace(limited, `"/dev/termination-log"`, `"/usr/local/vgpu/libvgpu.so"`, 1), nil, "gpufence: E1702 "},
		{"image's preload is a directory", limited, func(b *bench, _ *daemon) {
			p := filepath.Join(b.bundle, "rootfs/etc/ld.so.preload")
			if err := errors.Join(os.Remove(p), os.Mkdir(p, 0o755)); err != nil {
				b.t.Fatal(err)
			}
		}, "gpufence: E1707 "},
		{"hook missing", limited, func(b *bench, _ *daemon) { b.w.Settings.HookPath = "/none/gpufence-hook" }, "gpufence-hook is not at /none/gpufence-hook"},
		{"no pod annotations", strings.NewReplacer(`"io.kubernetes.cri.sandbox-id":"sandbox1",`, "").Replace(limited), nil, "gpufence: E1002 "},
		{"privileged", strings.Replace(limited, `"namespaces":[{"type":"pid"}]`, `"namespaces":[]`, 1), nil, "gpufence: E1703 "},
		{"truncated", limited[:len(limited)/2], nil, "ends in the middle"},
		{"wrong type", `{"process":7}`, nil, "gpufence: E1002 "},
		{"node policy is wrong", limited, func(b *bench, _ *daemon) {
			b.w.SettingsErr = quota.NewError(quota.CodeBadPolicy, "config.toml line 3: no such mode")
		}, "gpufence: E1503 config.toml line 3"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			b, d := gpuBench(t, test.config)
			if test.change != nil {
				test.change(b, d)
			}
			if b.create() {
				t.Fatal("the runtime was executed")
			}
			got := b.logged("error")
			if len(got) != 1 || !strings.Contains(got[0], test.says) {
				t.Errorf("logged %q, want %q", got, test.says)
			}
			if b.stderr.String() != strings.Join(got, "")+"\n" {
				t.Errorf("stderr %q", b.stderr.String())
			}
			if readFile(t, b.config) != test.config {
				t.Error("config.json was changed")
			}
			if entries, err := os.ReadDir(b.bundle); err != nil || len(entries) != 2 {
				t.Errorf("left behind: %v %v", entries, err)
			}
		})
	}
}

// fail-open lets start what gpufenced does not answer for, and nothing else; it is loud.
func TestFailOpen(t *testing.T) {
	limited := podConfig(`"gpufence.dev/memory.max":"4Gi"`)
	b, _ := gpuBench(t, limited)
	b.w.Settings.Socket, b.w.Settings.FailOpen, b.w.Settings.Notice = "/none/s", true, "config.toml is wrong"
	if !b.create() {
		t.Fatal(b.stderr.String())
	}
	got := b.logged("warning")
	if len(got) != 2 || got[0] != "gpufence: config.toml is wrong" || !strings.Contains(got[1], "E1501") || !strings.Contains(got[1], "started WITHOUT ANY LIMIT: fail-open = true") {
		t.Errorf("logged %q", got)
	}
	if readFile(t, b.config) != limited {
		t.Error("config.json was changed")
	}
	for name, change := range map[string]func(*bench, *daemon){
		"refused":    func(_ *bench, d *daemon) { d.refuse = quota.NewError(quota.CodeUnavailable, "no") },
		"quiesced":   func(_ *bench, d *daemon) { d.refuse = quota.NewError(quota.CodeQuiesced, "no") },
		"bad policy": func(b *bench, _ *daemon) { b.w.SettingsErr = quota.NewError(quota.CodeBadPolicy, "no") },
	} {
		b, d := gpuBench(t, limited)
		b.w.Settings.FailOpen = true
		change(b, d)
		if b.create() {
			t.Errorf("%s: started", name)
		}
	}
}

// In observe and warn mode nothing refuses and nothing waits, whatever is wrong.
func TestObserveStartsAnyway(t *testing.T) {
	limited := podConfig(`"gpufence.dev/memory.max":"4Gi"`)
	tests := []struct {
		name, config string
		change       func(*bench, *daemon)
		unchanged    bool // else only hooks may differ
		says         string
	}{
		{"gpufenced down", limited, func(b *bench, _ *daemon) { b.w.Settings.Socket, b.w.Settings.WaitSocket = "/none/s", time.Hour }, false, "E1501"},
		{"gpufenced hangs", limited, func(b *bench, d *daemon) { d.hang, b.w.Settings.WaitSocket = time.Hour, time.Hour }, false, "E1501"},
		{"refused", limited, func(_ *bench, d *daemon) { d.refuse = quota.NewError(quota.CodeUnavailable, "no") }, false, "E1402"},
		{"no limit", podConfig(), nil, false, "E1401"},
		{"unknown key", podConfig(`"gpufence.dev/memory.mx":"4Gi"`), nil, false, "E1301"},
		{"truncated", limited[:len(limited)/2], nil, true, "E1002"},
		{"HAMi", strings.Replace(limited, `"/dev/termination-log"`, `"/usr/local/vgpu/libvgpu.so"`, 1), nil, true, "E1702"},
		{"hook missing", limited, func(b *bench, _ *daemon) { b.w.Settings.HookPath = "/none/gpufence-hook" }, true, "gpufence-hook is not at"},
	}
	for _, mode := range []quota.Mode{quota.ModeObserve, quota.ModeWarn} {
		for _, test := range tests {
			t.Run(string(mode)+" "+test.name, func(t *testing.T) {
				b, d := gpuBench(t, test.config)
				b.w.Settings.Policy.Mode = mode
				if test.change != nil {
					test.change(b, d)
				}
				if !b.create() {
					t.Fatalf("not started: %s", b.stderr.String())
				}
				if got := strings.Join(b.logged("warning"), "\n"); !strings.Contains(got, test.says) {
					t.Errorf("logged %q", got)
				}
				if got := b.logged("error"); len(got) != 0 {
					t.Errorf("logged errors %q", got)
				}
				text := readFile(t, b.config)
				if test.unchanged {
					if text != test.config {
						t.Error("config.json was changed")
					}
					return
				}
				before, ok1 := value(t, []byte(test.config)).(map[string]any)
				after, ok2 := value(t, []byte(text)).(map[string]any)
				if !ok1 || !ok2 {
					t.Fatal("not objects")
				}
				if strings.Count(text, "--best-effort") != 2 {
					t.Errorf("hooks %v", after["hooks"])
				}
				delete(after, "hooks")
				if diff := cmp.Diff(before, after); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

func TestObserveByNamespace(t *testing.T) {
	for namespace, started := range map[string]bool{"team-a": true, "team-b": false} {
		b, _ := gpuBench(t, podConfig())
		b.w.Settings.Policy.Namespaces = []quota.NamespaceRule{{Pattern: namespace, Mode: quota.ModeObserve}}
		if got := b.create(); got != started {
			t.Errorf("%s is observed: started %v, %s", namespace, got, b.stderr.String())
		}
	}
}

// A container without a GPU starts without gpufenced, and gets none.
func TestCreateWithoutGPUNeverWaits(t *testing.T) {
	config := strings.Replace(podConfig(`"gpufence.dev/memory.max":"4Gi"`), gpuUUID, "all", 1)
	b := newBench(t, "gpufence-runtime.cri", config, "/none/s")
	b.w.Settings.WaitSocket = time.Hour
	if !b.create() {
		t.Fatal(b.stderr.String())
	}
	want := strings.Replace(config, gpuUUID, "void", 1)
	want = strings.Replace(want, "=all", "=void", 1)
	if diff := cmp.Diff(value(t, []byte(want)), value(t, []byte(readFile(t, b.config)))); diff != "" {
		t.Error(diff)
	}
}

func TestSandboxIsLeftAlone(t *testing.T) {
	config := `{"ociVersion":"1.2.0",   "annotations":{"io.kubernetes.cri.container-type":"sandbox","gpufence.dev/memory.max":"4Gi"},"process":{"args":["/pause"]}}`
	b := newBench(t, "gpufence-runtime.cri", config, "/none/s")
	b.w.Settings.HookPath = "/none"
	if !b.create() || readFile(t, b.config) != config {
		t.Errorf("%s\n%s", b.stderr.String(), readFile(t, b.config))
	}
}

func TestRunAndRestoreAreFencedToo(t *testing.T) {
	for _, command := range []string{"run", "restore"} {
		b, d := gpuBench(t, podConfig(`"gpufence.dev/memory.max":"4Gi"`))
		if !b.run(command, "-b", b.bundle, "c1") || len(d.prepared) != 1 || d.prepared[0].Key.Scope != "default" {
			t.Errorf("%s: %s %v", command, b.stderr.String(), d.prepared)
		}
	}
}

func TestWorkingDirectoryIsTheDefaultBundle(t *testing.T) {
	b, d := gpuBench(t, podConfig(`"gpufence.dev/memory.max":"4Gi"`))
	t.Chdir(b.bundle)
	if !b.run("create", "c1") || len(d.prepared) != 1 || d.prepared[0].Bundle != b.bundle {
		t.Errorf("%s %v", b.stderr.String(), d.prepared)
	}
}

func TestNoBundle(t *testing.T) {
	b := newBench(t, "gpufence-runtime", "{}", "/none/s")
	if b.run("create", "--bundle", filepath.Join(b.dir, "none"), "c1") || !strings.HasPrefix(b.stderr.String(), "gpufence: E1004 ") {
		t.Error(b.stderr.String())
	}
}

func TestSuffix(t *testing.T) {
	tests := map[string]quota.Engine{
		"gpufence-runtime": quota.EngineOCI, "gpufence-runtime.cri": quota.EngineCRI, "gpufence-runtime.crio": quota.EngineCRIO,
		"gpufence-runtime.docker": quota.EngineDocker, "gpufence-runtime.podman": quota.EnginePodman,
	}
	for name, want := range tests {
		if got, ok := engineOf("/a.b/" + name); !ok || got != want {
			t.Errorf("%s: %s %v", name, got, ok)
		}
	}
	for _, name := range []string{"gpufence-runtime.", "gpufence-runtime.CRI", "gpufence-runtime.cri.old", "gpufence-runtime.oci"} {
		b := newBench(t, name, "{}", "/none/s")
		if b.create() || !strings.Contains(b.stderr.String(), "gpufence: E1008 ") {
			t.Errorf("%s: %s", name, b.stderr.String())
		}
		if !b.run("state", "c1") {
			t.Errorf("%s: state does not pass", name)
		}
	}
}

func TestLogFormats(t *testing.T) {
	b := newBench(t, "gpufence-runtime", "garbage \x01", "/none/s")
	// As runc writes it, text by default.
	if b.run("--log", b.log, "create", "-b", b.bundle, "c1") {
		t.Fatal("started")
	}
	if got := readFile(t, b.log); !strings.HasPrefix(got, `time="`) || !strings.Contains(got, ` level=error msg="gpufence: E1002 `) || strings.Count(got, "\n") != 1 {
		t.Errorf("log %q", got)
	}
	// Appended, not overwritten.
	b.run("--log", b.log, "create", "-b", b.bundle, "c1")
	if got := readFile(t, b.log); strings.Count(got, "\n") != 2 {
		t.Errorf("log %q", got)
	}
	// Without a file JSON goes to stderr, once.
	b.run("--log-format=json", "create", "-b", b.bundle, "c1")
	if got := b.stderr.String(); !strings.HasPrefix(got, `{"level":"error","msg":"gpufence: E1002 `) || strings.Count(got, "\n") != 1 {
		t.Errorf("stderr %q", got)
	}
	// A log that cannot be written hides nothing.
	b.run("--log", "/none/log", "create", "-b", b.bundle, "c1")
	if got := b.stderr.String(); !strings.Contains(got, "cannot write the log") || !strings.Contains(got, "gpufence: E1002 ") {
		t.Errorf("stderr %q", got)
	}
}

// Podman reads its whole log as one JSON value.
func TestPodmanLogHoldsOnlyTheError(t *testing.T) {
	b, d := gpuBench(t, podConfig())
	b.w.Args[0] = "gpufence-runtime.podman"
	d.refuse = quota.NewError(quota.CodeUnavailable, "no")
	if b.create() {
		t.Fatal("started")
	}
	var one struct{ Msg string }
	if err := json.Unmarshal([]byte(readFile(t, b.log)), &one); err != nil || !strings.Contains(one.Msg, "E1402") {
		t.Errorf("%v: %s", err, readFile(t, b.log))
	}
	d.refuse = nil
	if err := os.Remove(b.log); err != nil {
		t.Fatal(err)
	}
	if !b.create() || !strings.Contains(b.stderr.String(), "below the image's wish") {
		t.Errorf("notices %q", b.stderr.String())
	}
	if _, err := os.Stat(b.log); !errors.Is(err, os.ErrNotExist) {
		t.Error("a notice went to the log")
	}
}

func TestNoRuntime(t *testing.T) {
	b := newBench(t, "gpufence-runtime", "{}", "/none/s")
	b.w.Settings.Runtimes = []string{"none-such"}
	for _, args := range [][]string{{"state", "c1"}, {"create", "-b", b.bundle, "c1"}} {
		if b.run(args...) || !strings.HasPrefix(b.stderr.String(), "gpufence: E1006 ") {
			t.Errorf("%v: %s", args, b.stderr.String())
		}
	}
}

func TestExecFails(t *testing.T) {
	b := newBench(t, "gpufence-runtime", "{}", "/none/s")
	b.w.Exec = func(string, []string, []string) error { return syscall.ENOEXEC }
	b.run("state", "c1")
	if got := b.stderr.String(); !strings.Contains(got, "gpufence: E1007 ") || !strings.Contains(got, b.runtime) || !strings.Contains(got, "exec format error") {
		t.Error(got)
	}
}

// nvidia-container-runtime may be configured to call us: then we call what makes containers.
func TestChain(t *testing.T) {
	b := newBench(t, "gpufence-runtime", "{}", "/none/s")
	nvidia := program(t, filepath.Join(b.dir, "bin", "nvidia-container-runtime"))
	if !b.run("state", "c1") || b.execs[0].path != nvidia {
		t.Fatalf("%+v", b.execs)
	}
	chain := chainVar + "=" + strconv.Itoa(os.Getpid())
	if !slices.Contains(b.execs[0].env, chain) {
		t.Errorf("env %v", b.execs[0].env)
	}
	b.w.Env = append(b.w.Env, chain)
	if !b.run("state", "c1") || b.execs[0].path != b.runtime || slices.Contains(b.execs[0].env, chain) {
		t.Errorf("%+v", b.execs)
	}
	// Of another process: no loop.
	b.w.Env[len(b.w.Env)-1] = chainVar + "=1"
	if !b.run("state", "c1") || b.execs[0].path != nvidia {
		t.Errorf("%+v", b.execs)
	}
}
