// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	nriapi "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/documented"
	"github.com/gpufence/gpufence/tests/process"
)

// nri is containerd with gpufence-nri: pods have containerd's own runc, of whose configuration nothing is ours.
type nri struct {
	containerd
	both bool // the wrapper is installed, too

	plugin *process.Process
}

func (n *nri) socket() string { return n.s.Path(n.name() + ".nri") }

func (n *nri) up(ctx context.Context, t *testing.T, s *site) {
	if n.set == "" {
		n.set = "containerd"
	}
	n.cri, n.use = true, "-nri"
	n.edit = func(text string) string {
		text = strings.Replace(text, `, "io.containerd.nri.v1.nri"`, "", 1)
		text = strings.Replace(text, "  restrict_oom_score_adj = true\n", "  restrict_oom_score_adj = true\n  enable_cdi = true\n  cdi_spec_dirs = ["+strconv.Quote(s.Path("cdi"))+"]\n", 1)
		return text + fmt.Sprintf("[plugins.'io.containerd.nri.v1.nri']\n  disable = false\n  socket_path = %q\n  plugin_path = %q\n  plugin_config_path = %[2]q\n", n.socket(), filepath.Join(n.dir, "nri"))
	}
	n.configure(t, s)
	n.pods.handler = "runc"
	if n.both {
		n.install(ctx, t)
	}
	must(t, n.run(ctx))
	must(t, n.load(ctx))
	must(t, n.connect(ctx))
}

// replaced is the command of docs/nri.md with the test's socket.
func (n *nri) replaced(words []string) []string {
	out := slices.Clone(words)
	for i, w := range out {
		if w == "/var/run/nri/nri.sock" {
			out[i] = n.socket()
		}
	}
	return out
}

func (n *nri) log() string { return filepath.Join(n.dir, "gpufence-nri.log") }

// said counts what the plugin has said.
func (n *nri) said(what string) int {
	text, err := os.ReadFile(n.log())
	if err != nil {
		return 0
	}
	return strings.Count(string(text), what)
}

// What it says once it has looked through what runs, after it has connected.
const nothingFound, somethingFound = "each with a GPU came through gpufence", "have a GPU that is not fenced"

func (n *nri) audits() int { return n.said(nothingFound) + n.said(somethingFound) }

// connect starts the plugin as docs/nri.md does, and waits until it has looked through what runs.
func (n *nri) connect(ctx context.Context) error {
	commands, err := documented.Commands("docs/nri.md")
	if err != nil || len(commands) != 1 {
		return fmt.Errorf("docs/nri.md has %d commands, want the plugin's: %w", len(commands), err)
	}
	words := n.replaced(strings.Fields(commands[0].Text))
	before := n.audits()
	if n.plugin, err = start(ctx, words[0], n.log(), []string{gpufenceEnv(n.s)}, filepath.Join(n.s.dist, "bin", words[0]), words[1:]...); err != nil {
		return err
	}
	return n.plugin.Ready(ctx, func(context.Context) error {
		if n.audits() == before {
			return errors.New("it has not looked through what runs")
		}
		return nil
	})
}

func (n *nri) disconnect(ctx context.Context) error {
	err := n.plugin.Stop(ctx)
	n.plugin = nil
	return err
}

func (n *nri) down(t *testing.T) {
	if t.Failed() && n.s != nil {
		t.Logf("the end of the plugin's log:\n%s", process.Tail(n.log(), 12))
	}
	if err := n.plugin.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	n.containerd.down(t)
}

// fills is what a container does that takes what it gets and holds it.
func fills(name string) request { return request{name, "1Gi", client("context", "fill 64", "hold")} }

// filled says what is wrong with what it got of its 1 GiB.
func filled(ctx context.Context, c begun) error {
	const most = 1024 * mib
	r, err := hear(ctx, c, "fill")
	if err == nil && (r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" || r.GrantedBytes+contextBytes > most || r.GrantedBytes+contextBytes+64*mib < most) {
		err = fmt.Errorf("of 1024 MiB it got %d MiB and %s", r.GrantedBytes/mib, r.ResultName)
	}
	return err
}

// holds starts a pod, sees it held to its limit, and gives what containerd has of it.
func (n *nri) holds(ctx context.Context, name string, s sandbox) (specs.Spec, error) {
	if s.handler == "" {
		s.handler = "runc"
	}
	c, err := n.pods.startPod(ctx, fills(name), s)
	if err != nil {
		return specs.Spec{}, err
	}
	if err := filled(ctx, c); err != nil {
		return specs.Spec{}, err
	}
	return n.bundle(c.id)
}

func (n *nri) bundle(id string) (specs.Spec, error) {
	var spec specs.Spec
	text, err := os.ReadFile(filepath.Join(n.s.Path(n.name()), "io.containerd.runtime.v2.task/k8s.io", id, "config.json"))
	if err == nil {
		err = json.Unmarshal(text, &spec)
	}
	return spec, err
}

// TestNRI is what is particular to that way: fail-open while the plugin is away, found when it is back, fail-closed where
// the engine requires it, and others beside it. The steps follow each other on one containerd.
func TestNRI(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: container engines are not short")
	}
	ctx := t.Context()
	n := &nri{both: true}
	s := newSite(ctx, t, "containerd", "crictl")
	t.Cleanup(func() { n.down(t) })
	n.up(ctx, t, s)
	for _, step := range []struct {
		name string
		do   func(context.Context, *testing.T)
	}{
		{"beside the wrapper", n.besideTheWrapper},
		{"beside a plugin that comes before", n.behindAnother},
		{"beside a plugin that comes later", n.beforeAnother},
		{"away, and back", n.awayAndBack},
		{"away, and back, with kill", n.awayAndKilled},
		{"containerd restarts", n.engineRestarts},
		{"required", n.required},
	} {
		t.Run(step.name, func(t *testing.T) {
			begun := time.Now()
			defer func() { t.Logf("%.1f s", time.Since(begun).Seconds()) }()
			step.do(ctx, t)
			for name := range n.pods.ids {
				must(t, n.pods.remove(ctx, name))
			}
			// Also of what was refused after it was planned.
			must(t, until(ctx, "gpufenced has neither a container nor a promise to one", func() (bool, error) {
				all, err := s.Client.Containers(ctx)
				return !slices.ContainsFunc(all, func(c api.Container) bool { return c.State != "ended" }), err
			}))
		})
	}
}

// besideTheWrapper: what went through NRI and then through the wrapper is fenced once.
func (n *nri) besideTheWrapper(ctx context.Context, t *testing.T) {
	alone, err := n.holds(ctx, "alone", sandbox{})
	must(t, err)
	must(t, n.pods.remove(ctx, "alone"))
	both, err := n.holds(ctx, "both", sandbox{handler: handler})
	must(t, err)
	all, err := n.s.running(ctx)
	must(t, err)
	if len(all) != 1 || all[0].Key.ID != n.pods.ids["both"][1] {
		t.Errorf("gpufenced has %+v, want one container %s", all, n.pods.ids["both"][1])
	}
	for what, of := range map[string]func(specs.Spec) []string{
		"mounts": func(s specs.Spec) (out []string) {
			for _, m := range s.Mounts {
				out = append(out, m.Destination)
			}
			return out
		},
		"variables": func(s specs.Spec) (out []string) {
			for _, e := range s.Process.Env {
				name, _, _ := strings.Cut(e, "=")
				out = append(out, name)
			}
			return out
		},
		"hooks": func(s specs.Spec) (out []string) {
			for stage, hooks := range map[string][]specs.Hook{"prestart": s.Hooks.Prestart, "createRuntime": s.Hooks.CreateRuntime, "poststop": s.Hooks.Poststop} { //nolint:staticcheck // prestart is what it would be
				for _, h := range hooks {
					out = append(out, stage+" "+h.Path)
				}
			}
			return out
		},
		"devices": func(s specs.Spec) (out []string) {
			for _, d := range s.Linux.Devices {
				out = append(out, d.Path)
			}
			return out
		},
	} {
		first, second := of(alone), of(both)
		slices.Sort(first)
		slices.Sort(second)
		t.Logf("%d %s", len(second), what)
		if !slices.Equal(first, second) {
			t.Errorf("%s through NRI alone %q, through both %q", what, first, second)
		}
		if got := slices.Compact(slices.Clone(second)); len(got) != len(second) {
			t.Errorf("%s are there twice: %q", what, second)
		}
	}
}

// other is another's NRI plugin.
type other struct {
	adjust func(*nriapi.ContainerAdjustment)
	there  func() // once, when it is asked from the next container on
}

func (o *other) Synchronize(context.Context, []*nriapi.PodSandbox, []*nriapi.Container) ([]*nriapi.ContainerUpdate, error) {
	o.there()
	return nil, nil
}

func (o *other) CreateContainer(context.Context, *nriapi.PodSandbox, *nriapi.Container) (*nriapi.ContainerAdjustment, []*nriapi.ContainerUpdate, error) {
	a := &nriapi.ContainerAdjustment{}
	o.adjust(a)
	return a, nil, nil
}

// beside has another plugin connected until the step ends.
func (n *nri) beside(ctx context.Context, t *testing.T, index string, adjust func(*nriapi.ContainerAdjustment)) {
	t.Helper()
	there, closed := make(chan struct{}), make(chan struct{})
	s, err := stub.New(&other{adjust, sync.OnceFunc(func() { close(there) })}, stub.WithPluginName("other"), stub.WithPluginIdx(index), stub.WithSocketPath(n.socket()),
		stub.WithOnClose(sync.OnceFunc(func() { close(closed) })))
	must(t, err)
	must(t, s.Start(ctx))
	<-there
	t.Cleanup(func() {
		s.Stop()
		<-closed
	})
}

// behindAnother: the GPU comes from another's plugin, and nothing of what that one adds is lost.
func (n *nri) behindAnother(ctx context.Context, t *testing.T) {
	n.beside(ctx, t, "10", func(a *nriapi.ContainerAdjustment) {
		a.AddEnv("NVIDIA_VISIBLE_DEVICES", n.s.uuid)
		a.AddEnv("OF_THE_OTHER", "1")
		a.AddDevice(&nriapi.LinuxDevice{Path: "/dev/of-the-other", Type: "c", Major: 1, Minor: 3})
	})
	spec, err := n.holds(ctx, "behind", sandbox{without: true})
	must(t, err)
	if !slices.Contains(spec.Process.Env, "OF_THE_OTHER=1") || !slices.ContainsFunc(spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == "/dev/of-the-other" }) {
		t.Errorf("what the other plugin added is gone: %q %+v", spec.Process.Env, spec.Linux.Devices)
	}
}

// beforeAnother: what comes later cannot undo the fence, nor bring a GPU past it.
func (n *nri) beforeAnother(ctx context.Context, t *testing.T) {
	for _, tt := range []struct {
		name   string
		adjust func(*nriapi.ContainerAdjustment)
		want   string
	}{
		{"a GPU", func(a *nriapi.ContainerAdjustment) {
			a.AddDevice(&nriapi.LinuxDevice{Path: "/dev/nvidia7", Type: "c", Major: 195, Minor: 7})
		}, "another NRI plugin puts the GPU /dev/nvidia7 into the container"},
		{"a variable", func(a *nriapi.ContainerAdjustment) {
			a.RemoveEnv("NVIDIA_VISIBLE_DEVICES")
			a.AddEnv("NVIDIA_VISIBLE_DEVICES", "all")
		}, "another NRI plugin changed the variable NVIDIA_VISIBLE_DEVICES"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n.beside(ctx, t, "95", tt.adjust)
			_, err := n.holds(ctx, "before", sandbox{})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("it was not refused with %q: %v", tt.want, err)
			}
			must(t, n.pods.remove(ctx, "before"))
		})
	}
}

// unfenced starts a container while the plugin is away, which has the GPU by CDI from the engine.
func (n *nri) unfenced(ctx context.Context, t *testing.T, name string) criContainer {
	t.Helper()
	c, err := n.pods.startPod(ctx, request{name, "1Gi", client("context", "alloc 2048", "hold")}, sandbox{handler: "runc", cdi: "gpufence.dev/simgpu=0"})
	must(t, err)
	r, err := hear(ctx, c, "alloc")
	must(t, err)
	if !r.OK {
		t.Errorf("without a fence it did not get 2 GiB: %+v", r)
	}
	return c
}

// found waits for what the plugin's audit makes gpufenced say.
func (n *nri) found(ctx context.Context, t *testing.T, name string) api.Event {
	t.Helper()
	var event api.Event
	must(t, until(ctx, name+" was found", func() (bool, error) {
		events, err := n.s.Events(ctx, "unmanaged")
		for _, e := range events {
			if e.Pod != nil && e.Pod.Name == name && strings.Contains(e.Message, "found by nri") {
				event = e
			}
		}
		return event.Message != "", err
	}))
	t.Logf("%s", event.Message)
	return event
}

// awayAndBack: fail-open, as the page says; then it is found and reported, and what was fenced before is left alone.
func (n *nri) awayAndBack(ctx context.Context, t *testing.T) {
	_, err := n.holds(ctx, "before", sandbox{})
	must(t, err)
	must(t, n.disconnect(ctx))
	c := n.unfenced(ctx, t, "meanwhile")
	must(t, n.connect(ctx))
	e := n.found(ctx, t, "meanwhile")
	if e.Code != "E1412" || !strings.Contains(e.Message, "did not come through gpufence") {
		t.Errorf("gpufenced says %+v", e)
	}
	if got := n.said("1 running containers " + somethingFound); got != 1 {
		t.Errorf("the plugin found other than one container:\n%s", process.Tail(n.log(), 5))
	}
	if done, status, err := c.ended(ctx); done || err != nil {
		t.Errorf("with unmanaged = warn it ended with %d, %v", status, err)
	}
	_, err = n.holds(ctx, "after", sandbox{})
	must(t, err)
}

// awayAndKilled: the same under the policy that ends what uses a GPU unfenced.
func (n *nri) awayAndKilled(ctx context.Context, t *testing.T) {
	before, err := os.ReadFile(n.s.ConfigPath())
	must(t, err)
	restart := func(config string) {
		t.Helper()
		must(t, os.WriteFile(n.s.ConfigPath(), []byte(config), 0o600))
		must(t, n.s.StopDaemon(ctx))
		must(t, n.s.StartDaemon(ctx))
	}
	must(t, n.disconnect(ctx))
	c := n.unfenced(ctx, t, "killed")
	restart("unmanaged = \"kill\"\n" + string(before))
	must(t, n.connect(ctx))
	n.found(ctx, t, "killed")
	var status int
	must(t, until(ctx, "it is killed", func() (bool, error) {
		done, code, err := c.ended(ctx)
		status = code
		return done, err
	}))
	if status != 137 {
		t.Errorf("it ended with %d, want 137", status)
	}
	must(t, n.pods.remove(ctx, "killed"))
	// The plugin does not hold on to a gpufenced that has gone.
	_, err = n.holds(ctx, "after", sandbox{})
	must(t, err)
	restart(string(before))
}

// engineRestarts: the plugin comes back by itself, and finds what it fenced as it was. Then containerd requires it, with the
// lines of docs/nri.md.
func (n *nri) engineRestarts(ctx context.Context, t *testing.T) {
	_, err := n.holds(ctx, "lasting", sandbox{})
	must(t, err)
	before, connections := n.said(nothingFound), n.said("connected to NRI at")
	must(t, n.daemon.Stop(ctx))
	must(t, until(ctx, "the plugin says that it is away", func() (bool, error) { return n.said("containers start WITHOUT a fence") > 0, nil }))
	var lines string
	for _, b := range otherBlock.FindAllStringSubmatch(page(t, "nri.md"), -1) {
		if b[1] == "toml" {
			lines += b[2]
		}
	}
	text, err := os.ReadFile(n.config())
	must(t, err)
	if !strings.Contains(lines, "required_plugins") {
		t.Fatalf("docs/nri.md requires no plugin: %q", lines)
	}
	must(t, os.WriteFile(n.config(), []byte(string(text)+lines), 0o600))
	must(t, n.run(ctx))
	must(t, until(ctx, "the plugin has looked through what runs again", func() (bool, error) { return n.said(nothingFound) > before, nil }))
	if n.said("connected to NRI at") <= connections {
		t.Error("it has not connected again")
	}
	_, err = n.holds(ctx, "fresh", sandbox{})
	must(t, err)
	all, err := n.s.running(ctx)
	must(t, err)
	if len(all) != 2 {
		t.Errorf("gpufenced has %d containers, want the one from before and the new one", len(all))
	}
}

// required: with the page's lines the engine itself refuses while the plugin is away.
func (n *nri) required(ctx context.Context, t *testing.T) {
	must(t, n.disconnect(ctx))
	_, err := n.holds(ctx, "refused", sandbox{})
	if err == nil || !strings.Contains(err.Error(), "gpufence") || !strings.Contains(err.Error(), "required") {
		t.Errorf("the engine did not refuse it: %v", err)
	} else {
		t.Logf("%v", err)
	}
	must(t, n.pods.remove(ctx, "refused"))
	must(t, n.connect(ctx))
	_, err = n.holds(ctx, "granted", sandbox{})
	must(t, err)
}
