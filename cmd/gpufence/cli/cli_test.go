// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"gpufence": func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			os.Exit(Run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
		},
	})
}

// TestScripts runs the real command lines against a gpufenced that is not one: $SOCKET answers
// as the protocol says, $BROKEN answers what no gpufenced would.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			dir, err := os.MkdirTemp("", "gpufence-cli-") // short: a socket's path has 108 bytes
			if err != nil {
				return err
			}
			env.Defer(func() { os.RemoveAll(dir) })
			socket, broken := filepath.Join(dir, "s"), filepath.Join(dir, "b")
			l, err := server.Listen(socket, -1)
			if err != nil {
				return err
			}
			srv := server.New(&fakeDaemon{}, server.Options{ReadGID: -1, Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Write([]byte("gpufence_build_info 1\n"))
			})})
			go srv.Serve(l)
			env.Defer(func() { srv.Shutdown(context.Background()) })
			if l, err = net.Listen("unix", broken); err != nil {
				return err
			}
			garbage := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Write([]byte("<html>\x1b[2Jnot ours</html>"))
			})}
			go garbage.Serve(l)
			env.Defer(func() { garbage.Close() })
			env.Setenv("SOCKET", socket)
			env.Setenv("BROKEN", broken)
			env.Setenv("NOBODY", filepath.Join(dir, "nobody"))
			env.Setenv("GPUFENCE_SOCKET", socket)
			env.Setenv("TZ", "UTC")
			return nil
		},
	})
}

const (
	gib     = uint64(1) << 30
	gpuUUID = "GPU-5a1e0000-0000-4000-8000-000000000001"
)

// fakeDaemon answers from a fixed story: polite runs, bypass was killed, neighbour is hostile
// to terminals.
type fakeDaemon struct {
	mu      sync.Mutex
	pending bool
	sw      api.Switch
}

func (d *fakeDaemon) containers() []api.Container {
	started := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	ended := started.Add(time.Minute)
	limits := func(bytes uint64) quota.Limits { return quota.Limits{Max: bytes, High: quota.Unlimited, Min: bytes} }
	none := quota.Limits{Max: quota.Unlimited, High: quota.Unlimited}
	polite := api.Container{
		Key: api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: "aaaa0000bbbb1111cccc2222"},
		Pod: api.PodRef{ID: "sandbox-polite", Namespace: "demo", Name: "polite-pod", UID: "uid-1"}, Name: "polite",
		State: "running", PID: 4711, Cgroup: "/kubepods/polite", Mode: quota.ModeEnforce, Level: quota.LevelReactive, Require: quota.LevelReactive, OOMGroup: true,
		PreparedAt: started, StartedAt: &started,
		GPUs: []api.ContainerGPU{{
			UUID: gpuUUID, Limits: limits(4 * gib), Container: none, Pod: limits(4 * gib), Current: 3 * gib, Peak: 4 * gib, NVML: 3 * gib, Ledger: 3 * gib, Known: true,
			Events: api.Events{Max: 12},
		}},
		Fences:    []api.Fence{{Name: "watch", State: "proven", Proof: "sample 12 ms old"}, {Name: "shim", State: "seen"}},
		Processes: []api.Process{{PID: 4711, GPU: gpuUUID, NVML: 3 * gib, Slot: 0, State: "live", Comm: "client"}},
	}
	d.mu.Lock()
	if d.pending {
		deadline := started.Add(5 * time.Second)
		polite.Resize = &api.Resize{GPU: gpuUUID, Desired: gib, Allocated: 4 * gib, Actuated: gib, Actual: 3 * gib, State: "pending", Deadline: &deadline}
	}
	d.mu.Unlock()
	bypass := api.Container{
		Key: api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: "aaaa9999"},
		Pod: api.PodRef{ID: "sandbox-bypass", Namespace: "demo", Name: "bypass-pod"}, Name: "bypass",
		State: "ended", Mode: quota.ModeEnforce, Level: quota.LevelReactive, Require: quota.LevelReactive, PreparedAt: started, StartedAt: &started, EndedAt: &ended,
		EndReason: "killed: used 2.5 GiB > memory.max 2 GiB",
		GPUs:      []api.ContainerGPU{{UUID: gpuUUID, Limits: limits(2 * gib), Container: none, Pod: limits(2 * gib), Peak: 5 * gib / 2, Shared: gib / 2, Known: true, Events: api.Events{OverMax: 2, OOM: 1, OOMKill: 1}}},
		Fences:    []api.Fence{{Name: "watch", State: "proven"}, {Name: "shim", State: "absent", Why: "static", PIDs: []int{4712}}},
	}
	hostile := api.Container{
		Key: api.ContainerKey{Engine: quota.EngineDocker, Scope: "moby", ID: "dddd"}, Pod: api.PodRef{ID: "dddd"}, State: "running", Mode: quota.ModeEnforce,
		Level: quota.LevelReactive, Require: quota.LevelReactive, PreparedAt: started, GPUs: []api.ContainerGPU{},
		Fences: []api.Fence{{Name: "shim", State: "absent", Why: "\x1b[2Jevil\nline"}},
	}
	return []api.Container{polite, hostile, bypass}
}

func (d *fakeDaemon) Containers(context.Context) ([]api.Container, error) { return d.containers(), nil }

func (d *fakeDaemon) Container(_ context.Context, id string) (api.Container, error) {
	var found []api.Container
	for _, c := range d.containers() {
		if strings.HasPrefix(c.Key.ID, id) || c.Name == id || c.Pod.Name == id || c.Pod.Name+"/"+c.Name == id {
			found = append(found, c)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return api.Container{}, &api.Error{Code: "E1408", Message: `no container "` + id + `": see gpufence ps --all`}
	default:
		return api.Container{}, &api.Error{Code: "E1409", Message: `"` + id + `" fits 2 containers: give more of the id`}
	}
}

func (d *fakeDaemon) Set(ctx context.Context, id string, req api.SetRequest) (api.SetResponse, error) {
	if _, err := d.Container(ctx, id); err != nil {
		return api.SetResponse{}, err
	}
	r := api.Resize{GPU: gpuUUID, Desired: 6 * gib, Allocated: 6 * gib, Actuated: 6 * gib, Actual: 3 * gib, State: "done"}
	resp := api.SetResponse{Resizes: []api.Resize{r}, Notices: []string{"until the container restarts; its annotation says 4Gi"}}
	switch value := req.Values["memory.max"]; {
	case req.Values["memory.mx"] != "":
		return api.SetResponse{}, &api.Error{Code: "E1301", Message: `there is no key "memory.mx": did you mean memory.max?`}
	case req.Values["memory.oom.group"] != "":
		resp.Notices = nil
		resp.Resizes = []api.Resize{
			{Key: "memory.high", GPU: gpuUUID, Desired: gib, Allocated: gib, Actuated: gib, Actual: gib, State: "done"},
			{Key: "memory.oom.group", State: "done"},
		}
	case value == "99Ti":
		return api.SetResponse{}, &api.Error{Code: "E1212", Message: "memory.max 99Ti is more than the GPU has (16 GiB)"}
	case value == "5Gi" && req.Scope == "container" && req.Force && req.DeadlineMillis == 1500:
		resp.Notices = []string{"scope, force and deadline arrived"}
	case value == "1Gi":
		r = api.Resize{GPU: gpuUUID, Desired: gib, Allocated: 4 * gib, Actuated: gib, Actual: 3 * gib, State: "pending"}
		if req.Wait {
			d.mu.Lock()
			d.pending = true
			d.mu.Unlock()
			select {
			case <-time.After(600 * time.Millisecond):
			case <-ctx.Done():
				return api.SetResponse{}, ctx.Err()
			}
			r.State, r.Actuated, r.Why = "ResizeFailed", 4*gib, "3 GiB in use at the deadline"
		}
		resp = api.SetResponse{Resizes: []api.Resize{r}}
	}
	return resp, nil
}

func (d *fakeDaemon) Events(ctx context.Context, since uint64, follow bool, emit func(*api.Event) error) error {
	pod := &api.PodRef{ID: "sandbox-bypass", Namespace: "demo", Name: "bypass-pod"}
	for _, ev := range []api.Event{
		{Seq: 1, Time: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), Type: "registered", Pod: pod, Name: "bypass", Message: "level reactive"},
		{Seq: 2, Time: time.Date(2026, 11, 30, 12, 1, 0, 0, time.UTC), Type: "kill", Code: "E1499", Pod: pod, Name: "bypass", GPU: gpuUUID, Message: "used 2.5 GiB > memory.max 2 GiB", MonotonicNS: 42},
		{Seq: 3, Time: time.Date(2026, 11, 30, 12, 2, 0, 0, time.UTC), Type: "gpu-unknown", GPU: gpuUUID, Message: "NVML did not\x1b[2J answer"},
	} {
		if ev.Seq <= since {
			continue
		}
		if err := emit(&ev); err != nil {
			return err
		}
	}
	for _, ev := range greedy() {
		if ev.Seq > since && !follow {
			if err := emit(&ev); err != nil {
				return err
			}
		}
	}
	if follow {
		return emit(&api.Event{Seq: 4, Time: time.Date(2026, 11, 30, 12, 3, 0, 0, time.UTC), Type: "ended", Container: &api.ContainerKey{ID: "dddd"}, Message: "exited"})
	}
	return nil
}

func (d *fakeDaemon) Version(context.Context) (api.Version, error) {
	return api.Version{Version: "v9.9.9", API: "v1", ABIMajor: 1, ABIMinor: 0, Driver: "570.133.20", PID: 77}, nil
}

func (d *fakeDaemon) GPUs(context.Context) ([]api.GPUState, error) { return nil, nil }

// greedy was killed, and is forgotten but by the journal.
func greedy() []api.Event {
	key := &api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: "eeee5555"}
	pod := &api.PodRef{ID: "sandbox-greedy", Namespace: "demo", Name: "greedy-pod"}
	at := time.Date(2026, 11, 30, 12, 5, 0, 0, time.UTC)
	numbers := map[string]uint64{"used_bytes": 5 * gib / 2, "max_bytes": 2 * gib, "slack_bytes": 64 << 20, "threshold_bytes": 2*gib + 64<<20, "first_sample_ns": 1_000_000_000, "second_sample_ns": 1_021_000_000}
	of := func(ev api.Event) api.Event {
		ev.Container, ev.Pod, ev.Name, ev.GPU = key, pod, "greedy", gpuUUID
		return ev
	}
	return []api.Event{
		of(api.Event{Seq: 20, Time: at, Type: "registered", Message: "level reactive"}),
		of(api.Event{Seq: 21, Time: at, Type: "kill-decided", ID: "k1", Message: "used 2.5 GiB > memory.max 2 GiB", Numbers: numbers, Candidates: []api.Candidate{
			{Name: "greedy-pod/greedy", Used: 5 * gib / 2, Max: 2 * gib}, {Name: "side\x1b[2J", Used: gib, Max: quota.Unlimited}}}),
		of(api.Event{Seq: 22, Time: at, Type: "kill", ID: "k1", Message: "used 2.5 GiB > memory.max 2 GiB", Numbers: numbers, MonotonicNS: 1_033_000_000}),
		of(api.Event{Seq: 23, Time: at, Type: "kill-confirmed", ID: "k1", Message: "the memory of greedy came back 40ms after SIGKILL"}),
		of(api.Event{Seq: 24, Time: at, Type: "ended", Message: "exited"}),
		{Seq: 25, Time: at, Type: "refused", Code: "E1203", Name: "typo", Pod: &api.PodRef{Name: "typo-pod", Namespace: "demo"}, Message: `memory.max "4096" has no unit: write 4096Mi`},
	}
}

func (d *fakeDaemon) Apply(_ context.Context, req api.ApplyRequest) (api.ApplyResponse, error) {
	var resp api.ApplyResponse
	for _, p := range req.Pods {
		out := api.AppliedPod{Namespace: p.Namespace, Name: p.Name}
		switch value := p.Annotations["gpufence.dev/memory.max"]; value {
		case "6Gi":
			out.Resizes = []api.AppliedResize{{Resize: api.Resize{GPU: gpuUUID, Desired: 6 * gib, Allocated: 6 * gib, Actuated: 6 * gib, Actual: 3 * gib, State: "done"}}}
			out.Notices = []string{"the pod's limit"}
		case "1Gi":
			out.Resizes = []api.AppliedResize{{Container: "main", Resize: api.Resize{GPU: gpuUUID, Desired: gib, Actual: 3 * gib, State: "ResizeFailed", Why: "3 GiB in use at the deadline"}}}
		case "4Gi":
		default:
			out.Error = &api.Error{Code: "E1203", Message: "memory.max has no unit"}
		}
		if len(p.Annotations) != 1 {
			out.Error = &api.Error{Code: "E1099", Message: "an annotation came that is nobody's business"}
		}
		resp.Pods = append(resp.Pods, out)
	}
	return resp, nil
}

func (d *fakeDaemon) Node(context.Context) (api.Node, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	started := time.Date(2026, 11, 30, 11, 0, 0, 0, time.UTC)
	n := api.Node{
		Version: api.Version{Version: "v9.9.9", API: "v1", Driver: "570.133.20", PID: 77}, Started: started, Switch: d.switched(), Mode: "enforce", Level: "reactive",
		Fences:  []api.Fence{{Name: "watch", State: "proven", Proof: "sample 12 ms old"}, {Name: "shim", State: "delivered"}},
		Health:  api.Health{Live: true, Ready: true},
		Config:  api.ConfigInfo{Path: "/etc/gpufence/config.toml", Loaded: started, LastGood: "/var/lib/gpufence/config.last-good.toml"},
		Cgroups: "v2", RunDir: "/nonexistent/run", Containers: 1, GPUs: 1, LastEvent: 3,
	}
	if d.sw.Position == api.SwitchDisabled {
		n.Config.Error = &api.Error{Code: "E1503", Message: "config.toml line 3: mode \"sometimes\" is not a mode"}
		n.Problems = []api.Problem{{About: "journal", Error: "no space left on device\x1b[2J", Since: started}}
		n.Drift = []string{"containerd: the handler gpufence lost pod_annotations"}
	}
	return n, nil
}

func (d *fakeDaemon) switched() api.Switch {
	if d.sw.Position == "" {
		return api.Switch{Position: api.SwitchRunning}
	}
	return d.sw
}

func (d *fakeDaemon) Health(context.Context) (api.Health, error) {
	return api.Health{Live: true, Ready: true}, nil
}

func (d *fakeDaemon) Reload(context.Context, api.ReloadRequest) (api.ConfigInfo, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sw.Position == api.SwitchDisabled {
		return api.ConfigInfo{}, &api.Error{Code: "E1503", Message: "config.toml line 3: mode \"sometimes\" is not a mode: write enforce"}
	}
	return api.ConfigInfo{Path: "/etc/gpufence/config.toml", NeedRestart: []string{"socket", "run-dir"}}, nil
}

func (d *fakeDaemon) move(position, reason string) (api.Switch, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	d.sw = api.Switch{Position: position, Reason: reason, Since: &t}
	if position == api.SwitchRunning {
		d.sw = api.Switch{Position: position}
	}
	return d.sw, nil
}

func (d *fakeDaemon) Quiesce(_ context.Context, req api.SwitchRequest) (api.Switch, error) {
	return d.move(api.SwitchQuiesced, req.Reason)
}

func (d *fakeDaemon) Resume(context.Context, api.SwitchRequest) (api.Switch, error) {
	return d.move(api.SwitchRunning, "")
}

func (d *fakeDaemon) Disable(_ context.Context, req api.SwitchRequest) (api.Switch, error) {
	return d.move(api.SwitchDisabled, req.Reason)
}

func (d *fakeDaemon) Prepare(context.Context, api.PrepareRequest) (api.PrepareResponse, error) {
	return api.PrepareResponse{}, nil
}

func (d *fakeDaemon) Register(context.Context, api.RegisterRequest) (api.RegisterResponse, error) {
	return api.RegisterResponse{}, nil
}

func (d *fakeDaemon) Unregister(context.Context, api.UnregisterRequest) error { return nil }

// Whatever gpufenced writes into its journal, why has a rule for it.
func TestEveryEventHasARule(t *testing.T) {
	files, err := filepath.Glob("../../../enforcer/daemon/*.go")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d sources of gpufenced: %v", len(files), err)
	}
	kinds := map[string]bool{}
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?:\bType: |\bev\.Type(?:, ev\.Code)? = |podEvent\([^,]+, )"([a-z-]+)"`).FindAllStringSubmatch(string(text), -1) {
			kinds[m[1]] = true
		}
	}
	if len(kinds) < 20 {
		t.Fatalf("only %d kinds of events were found", len(kinds))
	}
	for k := range kinds {
		if rules[k].rule == "" {
			t.Errorf("gpufenced writes events %q, and why has no rule for them", k)
		}
	}
	for _, k := range interesting {
		if rules[k].rule == "" || !kinds[k] {
			t.Errorf("why looks for events %q, which gpufenced does not write", k)
		}
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		in   string
		seq  uint64
		from time.Time
		ok   bool
	}{
		{"0", 0, time.Time{}, true},
		{"42", 42, time.Time{}, true},
		{"10m", 0, now.Add(-10 * time.Minute), true},
		{"2026-11-29T00:00:00Z", 0, time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC), true},
		{"-10m", 0, time.Time{}, false},
		{"-1", 0, time.Time{}, false},
		{"yesterday", 0, time.Time{}, false},
		{"", 0, time.Time{}, false},
		{"18446744073709551616", 0, time.Time{}, false},
	} {
		seq, from, err := parseSince(tt.in, now)
		if seq != tt.seq || !from.Equal(tt.from) || (err == nil) != tt.ok {
			t.Errorf("parseSince(%q) = %d, %v, %v; want %d, %v, ok %v", tt.in, seq, from, err, tt.seq, tt.from, tt.ok)
		}
	}
}
