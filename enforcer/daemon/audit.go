// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// Bounds of an audit.
const (
	maxAudit    = 4096
	maxAuditWhy = 1024
)

// Audit implements [server.Auditor]: it says of each container once why it is not fenced. Nobody is
// killed on somebody's word: a process that then uses a GPU is unmanaged, and policy deals with it.
func (d *Daemon) Audit(_ context.Context, req api.AuditRequest) (api.AuditResponse, error) {
	if len(req.Containers) > maxAudit || len(req.By) > 64 {
		return api.AuditResponse{}, quota.NewError(quota.CodeBadRequest, "an audit names at most %d containers, not %d", maxAudit, len(req.Containers))
	}
	for _, c := range req.Containers {
		if err := checkKey(c.Key); err != nil {
			return api.AuditResponse{}, err
		}
		if len(c.Pod.ID) > maxID || len(c.Pod.Name) > maxID || len(c.Pod.Namespace) > maxID || len(c.Pod.UID) > maxID || len(c.Name) > maxID {
			return api.AuditResponse{}, quota.NewError(quota.CodeBadRequest, "the names in the audit are too long")
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.audited == nil {
		d.audited = map[api.ContainerKey]string{}
	}
	said := map[api.ContainerKey]string{}
	for _, c := range req.Containers {
		why := cutTo(c.Why, maxAuditWhy)
		said[c.Key] = why
		if d.audited[c.Key] == why || d.cfg.Unmanaged == "allow" {
			continue
		}
		key, pod := c.Key, c.Pod
		state := "is not fenced"
		if r := d.reg.Lookup(c.Key); r != nil && r.State == registry.Running {
			state = "is fenced otherwise than its pod asks"
		}
		d.event(api.Event{Type: "unmanaged", Code: string(quota.CodeUnmanaged), Container: &key, Pod: &pod, Name: cutTo(c.Name, 256),
			Message: fmt.Sprintf("container %.64s of pod %.128s/%.128s %s: %s (found by %s; policy unmanaged = %q)", c.Name, pod.Namespace, pod.Name, state, why, req.By, d.cfg.Unmanaged),
			Numbers: map[string]uint64{"pid": uint64(max(c.PID, 0))}})
	}
	d.audited = said // who is not in the newest audit is gone, or mended
	return api.AuditResponse{Unmanaged: d.cfg.Unmanaged}, nil
}
