// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/deviceplugin"
)

// cleanupTime is what the end of a run needs at most.
const cleanupTime = 3 * time.Minute

func TestKubernetes(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: a whole cluster is not short")
	}
	// Ended from outside, or late, the steps fail and the clean-up runs all the same.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if deadline, ok := t.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-cleanupTime))
		defer cancel()
	}
	c := newCluster(ctx, t)
	for _, step := range []struct {
		name string
		do   func(context.Context, *testing.T, *cluster)
	}{
		{"limit by annotation", limited},
		{"two pods share a GPU, replicas by env", sharedByEnv},
		{"two pods share a GPU, replicas by CDI", sharedByCDI},
		{"a pod that does not fit is refused until it does", refused},
		{"over its limit it is killed, restarts and is fenced again", killed},
		{"limits of pod and containers, and a sidecar without GPU", several},
		{"without the policy a wrong annotation is refused at start", wrongAtStart},
		{"with the policy it is refused when it is applied", wrongAtApply},
		{"a pod without the RuntimeClass is seen", unmanaged},
		{"annotations that get lost are refused", lost},
		{"restarts disturb nothing", restarts},
		{"a limit follows its annotation", resized},
		{"upgrade, rollback, uninstall and reinstall disturb nothing", upgrade},
		{"the commands of docs", docs},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			begun := time.Now()
			defer func() { t.Logf("%.1f s", time.Since(begun).Seconds()) }()
			c.plugin.Hand(deviceplugin.ByEnv)
			step.do(ctx, t, c)
			if err := c.removeAll(ctx); err != nil {
				t.Error(err)
			}
		}) {
			// What follows starts from nothing all the same.
			if err := c.removeAll(ctx); err != nil {
				t.Error(err)
			}
		}
		if ctx.Err() != nil {
			t.Fatalf("out of time: %v", context.Cause(ctx))
		}
	}
}

// filled is a pod that takes what it gets, in steps of 64 MiB, and then holds it.
func filled(name, most string) pod {
	return one(name, most, client("context", "fill 64", "meminfo", "hold")...)
}

// checkFilled sees to it that a client got its limit and no more: all of it but for the context and
// less than a step.
func checkFilled(t *testing.T, r reply, most uint64) {
	t.Helper()
	if !r.OK || r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" || r.Granted+contextBytes > most || r.Granted+contextBytes+64*mib < most {
		t.Errorf("of %d MiB it got %d MiB and %s, with a context of %d MiB", most/mib, r.Granted/mib, r.ResultName, contextBytes/mib)
	}
}

func limited(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.begin(ctx, filled("limited", "4Gi")))
	info, err := c.hear(ctx, "limited", "main", "meminfo")
	must(t, err)
	if info.Total != 4*gib {
		t.Errorf("cuMemGetInfo says %d MiB, want 4096", info.Total/mib)
	}
	fill, err := c.hear(ctx, "limited", "main", "fill")
	must(t, err)
	checkFilled(t, fill, 4*gib)
	view, err := c.awaitView(ctx, "limited", "main", "it was refused at its limit", func(v api.Container) bool {
		return len(v.GPUs) == 1 && v.GPUs[0].Events.Max > 0
	})
	must(t, err)
	if g := view.GPUs[0]; g.Limits.Max != 4*gib || g.Current > 4*gib || g.NVML > 4*gib || view.Level != quota.LevelReactive {
		t.Errorf("gpufenced says %+v, level %s", g, view.Level)
	}
	if view.Pod.Namespace != "default" || view.Key.Engine != quota.EngineCRI {
		t.Errorf("it is %+v, %+v", view.Key, view.Pod)
	}
	// exec'd processes are inside, too.
	out, err := c.kubectl(ctx, "", "exec", "limited", "--", "/clients/client", "context", "fill 64")
	inside := replies(out)
	if len(inside) == 0 {
		t.Errorf("a process from kubectl exec said nothing: %q %v", out, err)
	}
	for _, r := range inside {
		if r.Granted > 0 {
			t.Errorf("a process from kubectl exec got %d MiB beside 4 GiB", r.Granted/mib)
		}
	}
	s, err := c.status(ctx, "limited")
	must(t, err)
	if s.Containers[0].RestartCount != 0 {
		t.Errorf("it restarted: %s", s)
	}
}

func sharedByEnv(ctx context.Context, t *testing.T, c *cluster) { shared(ctx, t, c) }

func sharedByCDI(ctx context.Context, t *testing.T, c *cluster) {
	c.plugin.Hand(deviceplugin.ByCDI)
	shared(ctx, t, c)
}

func shared(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.begin(ctx, filled("first", "6Gi"), filled("second", "7Gi")))
	uuid := map[string]string{}
	for name, most := range map[string]uint64{"first": 6 * gib, "second": 7 * gib} {
		fill, err := c.hear(ctx, name, "main", "fill")
		must(t, err)
		checkFilled(t, fill, most)
		view, err := c.awaitView(ctx, name, "main", "it holds what it got", func(v api.Container) bool {
			return len(v.GPUs) == 1 && v.GPUs[0].NVML > most-100*mib
		})
		must(t, err)
		if g := view.GPUs[0]; g.Limits.Max != most || g.Current > most || g.NVML > most {
			t.Errorf("%s: gpufenced says %+v", name, g)
		}
		uuid[name] = view.GPUs[0].UUID
	}
	if uuid["first"] != uuid["second"] {
		t.Errorf("they have GPUs %v: nothing was shared", uuid)
	}
}

func refused(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.begin(ctx, filled("first", "6Gi"), filled("second", "6Gi")))
	must(t, c.apply(ctx, filled("third", "6Gi")))
	e, err := c.tells(ctx, "third", "", "GPUMemoryUnavailable", "E1402")
	must(t, err)
	t.Logf("%s: %s", e.Reason, e.Message)
	if c.agent {
		e, err := c.tells(ctx, "third", "GPUMemoryUnavailable")
		must(t, err)
		t.Logf("%s: %s", e.Reason, e.Message)
	}
	// The phase of a pod whose container failed to start and will be tried again may be Pending or Running.
	s, err := c.status(ctx, "third")
	must(t, err)
	for _, part := range s.Containers {
		if part.State.Running != nil {
			t.Errorf("the third runs: %s", s)
		}
	}
	must(t, c.remove(ctx, "first"))
	must(t, c.running(ctx, "third")) // the kubelet tries again
	fill, err := c.hear(ctx, "third", "main", "fill")
	must(t, err)
	checkFilled(t, fill, 6*gib)
}

func killed(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.begin(ctx, filled("neighbour", "6Gi")))
	// No library of ours can be loaded into it, so only gpufenced can hold it.
	must(t, c.apply(ctx, one("greedy", "2Gi", "/clients/bypass", "128", "100")))
	const sentence = "GPU memory limit exceeded"
	var last ended
	must(t, until(ctx, "greedy was killed twice", func(ctx context.Context) (bool, string) {
		s, err := c.status(ctx, "greedy")
		if err != nil || len(s.Containers) == 0 {
			return false, fmt.Sprint(s, err)
		}
		one := s.Containers[0]
		for _, was := range []*ended{one.LastState.Terminated, one.State.Terminated} {
			if was != nil {
				last = *was
			}
		}
		return one.RestartCount >= 2, s.String()
	}))
	if last.ExitCode != 137 || !strings.Contains(last.Message, sentence) || !strings.Contains(last.Message, "gpufence.dev/memory.max") {
		t.Errorf("the API says that it ended with %+v", last)
	}
	out, err := c.kubectl(ctx, "", "describe", "pod", "greedy")
	must(t, err)
	if !strings.Contains(out, sentence) {
		t.Errorf("kubectl describe does not say %q:\n%s", sentence, out)
	}
	t.Logf("kubectl describe: %s", strings.TrimSpace(last.Message))
	kills := map[string]bool{}
	must(t, c.client.Events(ctx, 0, false, func(e api.Event) error {
		if e.Type == "kill" && e.Pod != nil && e.Pod.Name == "greedy" {
			kills[e.Container.ID] = true
		}
		return nil
	}))
	if len(kills) < 2 {
		t.Errorf("gpufenced killed %d containers of it, want 2 or more", len(kills))
	}
	s, err := c.status(ctx, "neighbour")
	must(t, err)
	if s.Containers[0].RestartCount != 0 || s.Containers[0].State.Running == nil {
		t.Errorf("its neighbour did not stay: %s", s)
	}
}

func several(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.begin(ctx, pod{
		name:        "several",
		annotations: map[string]string{"gpufence.dev/memory.max": "6Gi", "gpufence.dev/container.main.memory.max": "4Gi"},
		containers: []part{
			{"main", 1, client("context", "fill 64", "hold")},
			{"helper", 1, []string{"/bin/sh", "-c", `until [ -e /tmp/go ]; do sleep 0.1; done; exec /clients/client context "fill 64" hold`}},
			{"sidecar", 0, []string{"/bin/sleep", "3600"}},
		},
	}))
	fill, err := c.hear(ctx, "several", "main", "fill")
	must(t, err)
	checkFilled(t, fill, 4*gib)
	_, err = c.kubectl(ctx, "", "exec", "several", "-c", "helper", "--", "touch", "/tmp/go")
	must(t, err)
	rest, err := c.hear(ctx, "several", "helper", "fill")
	must(t, err)
	checkFilled(t, rest, 6*gib-fill.Held-contextBytes)
	main, err := c.view(ctx, "several", "main")
	must(t, err)
	helper, err := c.view(ctx, "several", "helper")
	must(t, err)
	if main.GPUs[0].UUID != helper.GPUs[0].UUID {
		t.Fatalf("they are on different GPUs: their pod's limit was not tried")
	}
	if g := main.GPUs[0]; g.Container.Max != 4*gib || g.Pod.Max != 6*gib || g.PodCurrent > 6*gib {
		t.Errorf("gpufenced says %+v", g)
	}
	if out, err := c.kubectl(ctx, "", "exec", "several", "-c", "sidecar", "--", "/bin/sh", "-c", "ls /dev/simgpu 2>&1; echo =$NVIDIA_VISIBLE_DEVICES"); err != nil || !strings.Contains(out, "No such file") {
		t.Errorf("the sidecar sees GPUs: %s %v", out, err)
	}
}

func wrongAtStart(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.apply(ctx, filled("wrong", "4096")))
	e, err := c.tells(ctx, "wrong", "", "E1203", "write 4096Mi")
	must(t, err)
	t.Logf("%s: %s", e.Reason, e.Message)
	out, err := c.kubectl(ctx, "", "describe", "pod", "wrong")
	must(t, err)
	if !strings.Contains(out, "write 4096Mi") {
		t.Errorf("kubectl describe does not say how to mend it:\n%s", out)
	}
}

// wrongAtApply leaves the policies where they are.
func wrongAtApply(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.put(ctx, c.chart, policies))
	p := filled("wrong", "4096")
	must(t, until(ctx, "kubectl apply is refused", func(ctx context.Context) (bool, string) {
		// A policy takes a moment to be heard of.
		err := c.apply(ctx, p)
		if err == nil {
			err = c.remove(ctx, p.name)
			return false, fmt.Sprintf("it was taken (%v)", err)
		}
		return strings.Contains(err.Error(), "E1203") && strings.Contains(err.Error(), "write 4096Mi"), err.Error()
	}))
	err := c.apply(ctx, p)
	if err == nil {
		t.Fatal("it was taken")
	}
	t.Logf("%v", err)
	must(t, c.begin(ctx, filled("right", "1Gi")))
	if _, err := c.kubectl(ctx, "", "annotate", "--overwrite", "pod", "right", "gpufence.dev/memory.max=4g"); err == nil || !strings.Contains(err.Error(), "E1202") {
		t.Errorf("a change to 4g: %v", err)
	}
	if _, err := c.kubectl(ctx, "", "annotate", "pod", "right", "gpufence.dev/memory.maks=4Gi"); err == nil || !strings.Contains(err.Error(), "E1301") {
		t.Errorf("a key that does not exist: %v", err)
	}
}

func unmanaged(ctx context.Context, t *testing.T, c *cluster) {
	c.plugin.Hand(deviceplugin.ByCDI) // without a wrapper of anybody, env gives nothing
	p := one("free", "1Gi", client("context", "fill 64 2048", "hold")...)
	p.unmanaged = true
	must(t, c.begin(ctx, p))
	_, err := c.hear(ctx, "free", "main", "fill")
	must(t, err)
	e, err := c.journal(ctx, "that somebody is unmanaged", func(e api.Event) bool { return e.Type == "unmanaged" })
	must(t, err)
	t.Logf("%s", e.Message)
	must(t, until(ctx, "it is counted", func(ctx context.Context) (bool, string) {
		gpus, err := c.client.GPUs(ctx)
		if err != nil {
			return false, err.Error()
		}
		var sum uint64
		for _, g := range gpus {
			sum += g.UnmanagedBytes
		}
		return sum >= 2*gib, fmt.Sprintf("%d bytes", sum)
	}))
	if c.agent {
		e, err := c.tells(ctx, "free", "GPUUnmanaged", "runtimeClassName")
		must(t, err)
		t.Logf("%s: %s", e.Reason, e.Message)
	}
}

func lost(ctx context.Context, t *testing.T, c *cluster) {
	before, err := os.ReadFile(c.dropIn())
	must(t, err)
	var kept []string
	for line := range strings.Lines(string(before)) {
		if !strings.Contains(line, "pod_annotations") {
			kept = append(kept, line)
		}
	}
	if len(kept) == 0 || len(strings.Join(kept, "")) == len(before) {
		t.Fatalf("the drop-in has no line pod_annotations:\n%s", before)
	}
	must(t, os.WriteFile(c.dropIn(), []byte(strings.Join(kept, "")), 0o600))
	must(t, c.restartContainerd(ctx))
	// Of a class without the label, which goes when the node's configuration is not what it was.
	_, err = c.kubectl(ctx, `{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"gpufence-anywhere"},"handler":"`+handler+`"}`, "apply", "-f", "-")
	must(t, err)
	p := filled("lost", "2Gi")
	p.class = "gpufence-anywhere"
	must(t, c.apply(ctx, p))
	e, err := c.tells(ctx, "lost", "", "E1401")
	must(t, err)
	t.Logf("%s: %s", e.Reason, e.Message)
	must(t, os.WriteFile(c.dropIn(), before, 0o600))
	must(t, c.restartContainerd(ctx))
	must(t, c.running(ctx, "lost"))
	fill, err := c.hear(ctx, "lost", "main", "fill")
	must(t, err)
	checkFilled(t, fill, 2*gib)
}

func (c *cluster) restartContainerd(ctx context.Context) error {
	if err := c.containerd.Stop(ctx); err != nil {
		return err
	}
	return c.runContainerd(ctx)
}

// lasting are pods that must not notice what happens: one that holds what it may, one that goes on
// to ask for more than it may, and how they are seen to be the same.
type lasting struct {
	before map[string]status
}

func (c *cluster) lasting(ctx context.Context) (lasting, error) {
	l := lasting{before: map[string]status{}}
	if err := c.begin(ctx, filled("holds", "3Gi"), one("asks", "3Gi", client("context", "grow 64 8192 20")...)); err != nil {
		return l, err
	}
	if _, err := c.hear(ctx, "holds", "main", "fill"); err != nil {
		return l, err
	}
	if _, err := c.awaitView(ctx, "asks", "main", "it is at its limit", func(v api.Container) bool {
		return len(v.GPUs) == 1 && v.GPUs[0].Events.Max > 0
	}); err != nil {
		return l, err
	}
	for _, name := range []string{"holds", "asks"} {
		s, err := c.status(ctx, name)
		if err != nil {
			return l, err
		}
		l.before[name] = s
	}
	return l, nil
}

// check sees to it that the pods are the same as before, and inside their limits.
func (l lasting) check(ctx context.Context, t *testing.T, c *cluster, after string) {
	t.Helper()
	for name, before := range l.before {
		s, err := c.status(ctx, name)
		if err != nil {
			t.Errorf("after %s: %v", after, err)
			continue
		}
		if len(s.Containers) != 1 || s.Containers[0].ContainerID != before.Containers[0].ContainerID || s.Containers[0].RestartCount != 0 || s.Containers[0].State.Running == nil {
			t.Errorf("after %s %s is not what it was: %s", after, name, s)
		}
		v, err := c.awaitView(ctx, name, "main", "it holds what it may after "+after, func(v api.Container) bool {
			return len(v.GPUs) == 1 && v.GPUs[0].NVML > 3*gib-100*mib
		})
		if err != nil {
			t.Error(err)
			continue
		}
		if g := v.GPUs[0]; g.Limits.Max != 3*gib || g.NVML > 3*gib || g.Events.OOMKill > 0 {
			t.Errorf("after %s gpufenced says of %s %+v", after, name, g)
		}
	}
}

// fresh starts a pod and ends it again.
func (c *cluster) fresh(ctx context.Context, t *testing.T, after string) {
	t.Helper()
	if err := c.begin(ctx, filled("fresh", "1Gi")); err != nil {
		t.Fatalf("after %s: %v", after, err)
	}
	fill, err := c.hear(ctx, "fresh", "main", "fill")
	if err != nil {
		t.Fatalf("after %s: %v", after, err)
	}
	checkFilled(t, fill, gib)
	if err := c.remove(ctx, "fresh"); err != nil {
		t.Fatalf("after %s: %v", after, err)
	}
}

func restarts(ctx context.Context, t *testing.T, c *cluster) {
	l, err := c.lasting(ctx)
	must(t, err)
	for _, restart := range []struct {
		of string
		do func() error
	}{
		{"a crash of gpufenced", func() error {
			if err := c.gpufenced.Kill(); err != nil {
				return err
			}
			return c.startGpufenced(ctx)
		}},
		{"a restart of gpufenced", func() error {
			if err := c.gpufenced.Stop(ctx); err != nil {
				return err
			}
			return c.startGpufenced(ctx)
		}},
		{"a restart of containerd", func() error { return c.restartContainerd(ctx) }},
		{"a restart of the kubelet", func() error {
			if err := c.kubelet.Stop(ctx); err != nil {
				return err
			}
			if err := c.startKubelet(ctx); err != nil {
				return err
			}
			if err := c.awaitNode(ctx); err != nil {
				return err
			}
			return c.awaitPlugin(ctx)
		}},
	} {
		begun := time.Now()
		if err := restart.do(); err != nil {
			t.Fatalf("%s: %v", restart.of, err)
		}
		l.check(ctx, t, c, restart.of)
		c.fresh(ctx, t, restart.of)
		t.Logf("%s: %.1f s", restart.of, time.Since(begun).Seconds())
	}
}

func resized(ctx context.Context, t *testing.T, c *cluster) {
	if !c.agent {
		skip(t, "gpufence-agent is not built")
	}
	must(t, c.begin(ctx, one("grows", "2Gi", client("context", "grow 64 4096 20", "hold")...)))
	_, err := c.awaitView(ctx, "grows", "main", "it is at its limit", func(v api.Container) bool {
		return len(v.GPUs) == 1 && v.GPUs[0].Events.Max > 0
	})
	must(t, err)
	before, err := c.status(ctx, "grows")
	must(t, err)
	begun := time.Now()
	_, err = c.kubectl(ctx, "", "annotate", "--overwrite", "pod", "grows", "gpufence.dev/memory.max=5Gi")
	must(t, err)
	v, err := c.awaitView(ctx, "grows", "main", "its limit is 5Gi", func(v api.Container) bool { return len(v.GPUs) == 1 && v.GPUs[0].Limits.Max == 5*gib })
	must(t, err)
	t.Logf("after %.2f s, changed by %s", time.Since(begun).Seconds(), v.ChangedBy)
	grown, err := c.hear(ctx, "grows", "main", "grow")
	must(t, err)
	if grown.Reached == 0 || grown.Held < 4*gib {
		t.Errorf("it has %d MiB, want 4096", grown.Held/mib)
	}
	_, err = c.kubectl(ctx, "", "annotate", "--overwrite", "pod", "grows", "gpufence.dev/memory.max=4500Mi")
	must(t, err)
	_, err = c.awaitView(ctx, "grows", "main", "its limit is 4500Mi", func(v api.Container) bool { return len(v.GPUs) == 1 && v.GPUs[0].Limits.Max == 4500*mib })
	must(t, err)
	s, err := c.status(ctx, "grows")
	must(t, err)
	if s.Containers[0].ContainerID != before.Containers[0].ContainerID || s.Containers[0].RestartCount != 0 {
		t.Errorf("it was started again: %s", s)
	}
	e, err := c.tells(ctx, "grows", "GPUMemoryResized")
	must(t, err)
	t.Logf("%s: %s", e.Reason, e.Message)
}

func upgrade(ctx context.Context, t *testing.T, c *cluster) {
	must(t, c.buildNext(ctx))
	l, err := c.lasting(ctx)
	must(t, err)
	restart := func(version string) {
		t.Helper()
		must(t, c.gpufenced.Stop(ctx))
		must(t, c.startGpufenced(ctx))
		v, err := c.client.Version(ctx)
		must(t, err)
		if version != "" && v.Version != version || version == "" && v.Version == nextVersion {
			t.Errorf("gpufenced is version %s, want %q", v.Version, version)
		}
	}
	engine := func(verb, root string, more ...string) {
		t.Helper()
		out, err := c.installFrom(ctx, root, verb, more...)
		must(t, err)
		t.Logf("gpufence %s: %s", verb, strings.Join(strings.Fields(out), " "))
	}
	engine("install", c.path("next"))
	restart(nextVersion)
	l.check(ctx, t, c, "an upgrade")
	c.fresh(ctx, t, "an upgrade")

	engine("install", c.dist)
	restart("")
	l.check(ctx, t, c, "a rollback")
	c.fresh(ctx, t, "a rollback")

	out, err := c.installFrom(ctx, c.path("opt"), "uninstall")
	switch {
	case c.state() != "/run/containerd":
		t.Log("another containerd has /run/containerd: who uses the runtime is not seen, and the refusal to uninstall not tried")
	case err == nil || !strings.Contains(err.Error(), "use the runtime"):
		t.Fatalf("uninstall went on beside pods that run: %s %v", out, err)
	default:
		t.Logf("%v", err)
	}
	engine("uninstall", c.path("opt"), "--force")
	if _, err := os.Stat(c.dropIn()); err == nil {
		t.Errorf("%s was left", c.dropIn())
	}
	must(t, c.restartContainerd(ctx))
	l.check(ctx, t, c, "an uninstallation")
	// containerd itself looks a pod's handler up for each exec: what --force costs until it is back.
	if _, err := c.kubectl(ctx, "", "exec", "holds", "--", "/bin/true"); err != nil && !strings.Contains(err.Error(), "no runtime for") {
		t.Errorf("after an uninstallation: %v", err)
	}
	must(t, c.apply(ctx, filled("early", "1Gi")))
	// By the engine that does not know the handler, or by the scheduler that was told so by the label.
	_, err = c.tells(ctx, "early", "")
	must(t, err)
	if s, err := c.status(ctx, "early"); err != nil || s.Phase != "Pending" {
		t.Errorf("without the handler a pod is %s, %v", s, err)
	}
	must(t, c.remove(ctx, "early"))

	engine("install", c.dist)
	must(t, c.restartContainerd(ctx))
	l.check(ctx, t, c, "a new installation")
	if _, err := c.kubectl(ctx, "", "exec", "holds", "--", "/bin/true"); err != nil {
		t.Errorf("after a new installation: %v", err)
	}
	c.fresh(ctx, t, "a new installation")
}
