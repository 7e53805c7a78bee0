// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/gpufence/gpufence/enforcer/kube/cri"
)

// TestLoaded: real engines say over CRI what they have loaded, not what their files say.
func TestLoaded(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: container engines are not short")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s := newSite(ctx, t, "containerd1", "containerd", "crictl")
	through := func(t *testing.T, endpoint, handler, want string) {
		t.Helper()
		e, err := cri.Node{Root: "/", Kind: "containerd", Socket: strings.TrimPrefix(endpoint, "unix://")}.Ask(ctx)
		if err == nil {
			err = e.Through(handler)
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
		t.Logf("%s %s, handler %s: %v", e.Name, e.Version, handler, err)
	}
	for _, set := range []string{"containerd1", "containerd"} {
		t.Run(set, func(t *testing.T) {
			c := &containerd{set: set, use: "loaded", cri: true}
			t.Cleanup(func() { c.down(t) })
			c.configure(t, s)
			must(t, c.run(ctx))
			c.install(ctx, t)
			through(t, c.pods.endpoint, handler, "has not loaded the handler "+handler+", only runc")
			must(t, c.daemon.Stop(ctx))
			must(t, c.run(ctx))
			through(t, c.pods.endpoint, handler, "")
			through(t, c.pods.endpoint, "runc", "starts its default runtime and not gpufence-runtime")
		})
	}
	t.Run("CRI-O", func(t *testing.T) {
		c := &crio{}
		t.Cleanup(func() { c.down(t) })
		c.up(ctx, t, s)
		through(t, c.pods.endpoint, handler, "")
		through(t, c.pods.endpoint, "absent", "has not loaded the handler absent")
		through(t, c.pods.endpoint, "runc", "and not gpufence-runtime")
	})
}
