// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// TestAudit: what somebody finds beside gpufence is said once, and again when it is another thing.
func TestAudit(t *testing.T) {
	found := func(id, why string) api.AuditContainer {
		return api.AuditContainer{Key: api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: id}, Pod: api.PodRef{ID: "p", Namespace: "team-a", Name: "notebook"}, Name: "main", PID: 7, Why: why}
	}
	said := func(b *bench) int {
		n := 0
		if err := b.d.Events(t.Context(), 0, false, func(ev *api.Event) error {
			if ev != nil && ev.Type == "unmanaged" && ev.Code == string(quota.CodeUnmanaged) && ev.Container != nil && strings.Contains(ev.Message, "team-a/notebook") {
				n++
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for policy, want := range map[string][]int{"warn": {1, 1, 2, 2, 3}, "allow": {0, 0, 0, 0, 0}} {
		b := newBench(t, func(c *config.Config) { c.Unmanaged = policy })
		b.start()
		for i, step := range [][]api.AuditContainer{
			{found("a", "it did not come through gpufence")},
			{found("a", "it did not come through gpufence")},
			{found("a", "its annotations were lost")},
			{},
			{found("a", "its annotations were lost")}, // it was mended, and is so again
		} {
			resp, err := b.d.Audit(t.Context(), api.AuditRequest{By: "nri", Containers: step})
			if err != nil || resp.Unmanaged != policy {
				t.Fatalf("%s: %+v %v", policy, resp, err)
			}
			if got := said(b); got != want[i] {
				t.Errorf("%s: after step %d it was said %d times, want %d", policy, i, got, want[i])
			}
		}
		for name, req := range map[string]api.AuditRequest{
			"no key":    {Containers: []api.AuditContainer{{Why: "x"}}},
			"long name": {Containers: []api.AuditContainer{func() api.AuditContainer { c := found("a", "x"); c.Name = strings.Repeat("n", maxID+1); return c }()}},
			"too many":  {Containers: make([]api.AuditContainer, maxAudit+1)},
		} {
			if _, err := b.d.Audit(t.Context(), req); api.ErrorOf(err).Code != string(quota.CodeBadRequest) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
