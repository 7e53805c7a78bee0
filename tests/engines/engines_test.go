// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/mounts"
	"github.com/gpufence/gpufence/tests/node"
)

func TestEngines(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: container engines are not short")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s := newSite(ctx, t, "containerd1", "containerd", "crictl")
	// What one engine refuses with, by step: all must use the same words.
	words := map[string]map[string]string{}
	for _, one := range []struct {
		name string
		engine
	}{
		{"containerd 1.7, ctr", &containerd{set: "containerd1"}},
		{"containerd 1.7, crictl", &containerd{set: "containerd1", cri: true}},
		{"containerd 2, ctr", &containerd{set: "containerd"}},
		{"containerd 2, crictl", &containerd{set: "containerd", cri: true}},
		{"containerd 1.7, NRI", &nri{containerd: containerd{set: "containerd1"}}},
		{"containerd 2, NRI", &nri{containerd: containerd{set: "containerd"}}},
		{"CRI-O", &crio{}},
		{"Docker 20.10", &docker{}},
		{"Podman", &podman{}},
		{"Podman, hook", &podman{hook: true}},
		{"gpufence run", &bare{}},
	} {
		t.Run(one.name, func(t *testing.T) {
			begun := time.Now()
			b := &bench{site: s, engine: one.engine, words: map[string]string{}}
			// Even where it could not start at all.
			t.Cleanup(func() { one.down(t); t.Logf("%.1f s", time.Since(begun).Seconds()) })
			one.up(ctx, t, s)
			t.Logf("up: %.1f s", time.Since(begun).Seconds())
			for _, step := range []struct {
				name string
				do   func(context.Context, *testing.T)
			}{
				{"limited", b.limited},
				{"bypass", b.bypass},
				{"wrong", b.wrong},
				{"unlimited", b.unlimited},
				{"gpufenced down", b.daemonDown},
			} {
				t.Run(step.name, func(t *testing.T) {
					begun := time.Now()
					t.Cleanup(func() {
						b.nothingLeft(ctx, t)
						t.Logf("%.1f s", time.Since(begun).Seconds())
					})
					step.do(ctx, t)
				})
			}
			words[one.name] = b.words
		})
	}
	for _, step := range []string{"wrong", "down"} {
		said := map[string][]string{}
		for name, w := range words {
			if w[step] != "" {
				said[w[step]] = append(said[w[step]], name)
			}
		}
		if len(said) > 1 {
			t.Errorf("not the same words: %q", said)
		}
		for w, names := range said {
			t.Logf("%d engines say: %s", len(names), w)
		}
	}
}

// bench is one engine under the steps.
type bench struct {
	*site
	engine
	words map[string]string
	used  []string
}

func (b *bench) begin(ctx context.Context, t *testing.T, r request) (begun, error) {
	t.Helper()
	b.used = append(b.used, r.name)
	return b.start(ctx, r)
}

// hear waits for the client's answer to an operation.
func hear(ctx context.Context, c begun, op string) (node.Reply, error) {
	var found node.Reply
	err := until(ctx, "an answer to "+op, func() (bool, error) {
		for _, r := range replies(c.output(ctx)) {
			if r.Op == op {
				found = r
				return true, nil
			}
		}
		if done, status, err := c.ended(ctx); err != nil || done {
			return false, fmt.Errorf("it ended with %d (%w): %s", status, err, c.output(ctx))
		}
		return false, nil
	})
	return found, err
}

func client(lines ...string) []string { return append([]string{"/clients/client"}, lines...) }

// limited holds a container at its limit, shows it, and holds what is exec'd into it.
func (b *bench) limited(ctx context.Context, t *testing.T) {
	const most = 1024 * mib
	c, err := b.begin(ctx, t, request{"limited", "1Gi", client("context", "fill 64", "meminfo", "hold")})
	must(t, err)
	info, err := hear(ctx, c, "meminfo")
	must(t, err)
	if info.TotalBytes != most {
		t.Errorf("cuMemGetInfo says %d MiB, want 1024", info.TotalBytes/mib)
	}
	fill, err := hear(ctx, c, "fill")
	must(t, err)
	if fill.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" || fill.GrantedBytes+contextBytes > most || fill.GrantedBytes+contextBytes+64*mib < most {
		t.Errorf("of 1024 MiB it got %d MiB and %s", fill.GrantedBytes/mib, fill.ResultName)
	}
	var view api.Container
	must(t, until(ctx, "gpufenced counts the refusal", func() (bool, error) {
		all, err := b.running(ctx)
		if err != nil {
			return false, err
		}
		if len(all) != 1 {
			return false, fmt.Errorf("gpufenced has %d containers: %+v", len(all), all)
		}
		view = all[0]
		return len(view.GPUs) == 1 && view.GPUs[0].Events.Max > 0, nil
	}))
	if view.Key.Engine != b.is() || view.GPUs[0].Limits.Max != most || view.Level != quota.LevelReactive {
		t.Errorf("gpufenced has %+v, %+v, level %s", view.Key, view.GPUs[0].Limits, view.Level)
	}
	out, err := b.exec(ctx, "limited", client("context", "fill 64")...)
	if errors.Is(err, errNoExec) {
		return
	}
	inside := replies(out)
	if len(inside) == 0 {
		t.Errorf("what was exec'd said nothing: %q %v", out, err)
	}
	for _, r := range inside {
		if r.GrantedBytes > 0 {
			t.Errorf("what was exec'd got %d MiB beside a full limit", r.GrantedBytes/mib)
		}
	}
}

// bypass kills what goes around the shim.
func (b *bench) bypass(ctx context.Context, t *testing.T) {
	earlier, err := b.Events(ctx)
	must(t, err)
	before := earlier[len(earlier)-1].Seq
	c, err := b.begin(ctx, t, request{"bypass", "1Gi", []string{"/clients/bypass", "128", "100"}})
	must(t, err)
	var status int
	must(t, until(ctx, "it is killed", func() (bool, error) {
		done, code, err := c.ended(ctx)
		status = code
		return done, err
	}))
	if status != 137 {
		t.Errorf("it ended with %d, want 137: %s", status, c.output(ctx))
	}
	said := ""
	must(t, until(ctx, "gpufenced says how it ended", func() (bool, error) {
		events, err := b.Events(ctx, "ended")
		for _, e := range events {
			if e.Seq > before {
				said = e.Message
			}
		}
		return said != "", err
	}))
	if !strings.Contains(said, "GPU memory limit exceeded: used 1.") || !strings.Contains(said, "> memory.max 1 GiB") {
		t.Errorf("gpufenced says of it %q", said)
	}
	if k, ok := c.(criContainer); ok {
		text, err := os.ReadFile(k.message)
		must(t, err)
		if !strings.Contains(string(text), "GPU memory limit exceeded") {
			t.Errorf("the termination message is %q", text)
		}
	}
}

var (
	sentence = regexp.MustCompile(`gpufence: E\d{4} .*`)
)

// refusal waits until a start has failed, and gives our sentence out of what the engine says.
func (b *bench) refusal(ctx context.Context, t *testing.T, r request, code string) string {
	t.Helper()
	c, err := b.begin(ctx, t, r)
	if err == nil {
		err = until(ctx, "the start fails", func() (bool, error) {
			done, status, err := c.ended(ctx)
			if err == nil && done {
				err = fmt.Errorf("ended with %d: %s", status, c.output(ctx))
			}
			return done, err
		})
	}
	if err == nil || !strings.Contains(err.Error(), code) {
		t.Fatalf("%s was not refused with %s: %v", r.name, code, err)
	}
	return sentence.FindString(strings.ReplaceAll(err.Error(), `\"`, "'"))
}

// wrong refuses a limit without a unit, with the same words under every engine.
func (b *bench) wrong(ctx context.Context, t *testing.T) {
	said := b.refusal(ctx, t, request{"wrong", "4096", client("context")}, "E1203")
	t.Logf("%s", said)
	if !strings.Contains(said, "4096Mi") {
		t.Errorf("it does not say what was meant: %s", said)
	}
	b.words["wrong"] = trim(said, "4096Mi")
}

// trim ends a sentence with its last word that counts, and names the key and not where it stood.
func trim(said, last string) string {
	if i := strings.Index(said, last); i >= 0 {
		said = said[:i+len(last)]
	}
	said = strings.NewReplacer("GPUFENCE_MEMORY_MAX", "memory.max", "gpufence.dev/memory.max", "memory.max", "'", `"`, `\`, "").Replace(said)
	return behindNumbers.ReplaceAllString(said, "")
}

var behindNumbers = regexp.MustCompile(` \(?(after|within) [0-9.]+m?s\)?`)

// unlimited starts a container without a limit where that is a person's own machine, and does not under Kubernetes.
func (b *bench) unlimited(ctx context.Context, t *testing.T) {
	r := request{"unlimited", "", client("context", "alloc 512", "meminfo", "hold")}
	if b.is().Kubernetes() {
		t.Logf("%s", b.refusal(ctx, t, r, "E1401"))
		return
	}
	c, err := b.begin(ctx, t, r)
	must(t, err)
	_, err = hear(ctx, c, "meminfo")
	must(t, err)
	t.Logf("%s", strings.Join(regexp.MustCompile(`gpufence: .*`).FindAllString(c.output(ctx), -1), "; "))
	all, err := b.running(ctx)
	must(t, err)
	if len(all) == 0 && isHook(b.engine) {
		return // the hook is for containers with an annotation of ours
	}
	if len(all) != 1 || len(all[0].GPUs) != 1 || all[0].GPUs[0].Limits.Max != quota.Unlimited {
		t.Errorf("gpufenced has %+v", all)
	}
}

func isHook(e engine) bool {
	p, ok := e.(*podman)
	return ok && p.hook
}

// daemonDown starts nothing with a GPU while nobody could hold it, and says so in time.
func (b *bench) daemonDown(ctx context.Context, t *testing.T) {
	must(t, b.Crash())
	begun := time.Now()
	said := b.refusal(ctx, t, request{"down", "1Gi", client("context")}, "E1501")
	took := time.Since(begun)
	must(t, b.StartDaemon(ctx))
	t.Logf("after %.1f s: %s", took.Seconds(), said)
	// NRI has no time to wait: its engine asks for an answer within 2 s.
	if _, ok := b.engine.(*nri); !ok && took < 2*time.Second {
		t.Errorf("it waited %s for gpufenced, want 2 s", took)
	}
	b.words["down"] = trim(said, b.Socket)
}

// nothingLeft removes the step's containers and sees that nothing of them is anywhere.
func (b *bench) nothingLeft(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, name := range b.used {
		if err := b.remove(ctx, name); err != nil {
			t.Errorf("remove %s: %v", name, err)
		}
	}
	b.used = nil
	must(t, until(ctx, "gpufenced has no container", func() (bool, error) {
		all, err := b.running(ctx)
		return len(all) == 0, err
	}))
	must(t, until(ctx, "no pages are left", func() (bool, error) {
		pages, err := mounts.Below(b.Path("run"))
		if err != nil {
			return false, err
		}
		all, err := b.Client.Containers(ctx)
		if err != nil {
			return false, err
		}
		// A preparation that was never registered keeps its pages for a while.
		return len(pages) == 0 || slices.ContainsFunc(all, func(c api.Container) bool { return c.State == "prepared" }), nil
	}))
	for _, pattern := range []string{"/sys/fs/cgroup/*/gpufence-run-*", "/sys/fs/cgroup/gpufence-run-*", "/sys/fs/cgroup/*/*/" + unique("*")} {
		left, err := filepath.Glob(pattern)
		if err != nil || len(left) > 0 {
			t.Errorf("cgroups are left: %q %v", left, err)
		}
	}
}
