// SPDX-License-Identifier: Apache-2.0

package api

import "context"

// AuditRequest is POST /v1/audit: containers that somebody who sees the engine's found with a GPU
// that is not fenced. gpufenced says so, once each, and its policy on unmanaged use says what
// becomes of their processes.
type AuditRequest struct {
	By         string           `json:"by"` // who looked: nri
	Containers []AuditContainer `json:"containers"`
}

// AuditContainer is one of them.
type AuditContainer struct {
	Key  ContainerKey `json:"key"`
	Pod  PodRef       `json:"pod"`
	Name string       `json:"name,omitempty"` // in its pod
	PID  int          `json:"pid,omitempty"`
	Why  string       `json:"why"` // a sentence
}

// AuditResponse says which policy holds for what was reported.
type AuditResponse struct {
	Unmanaged string `json:"unmanaged"` // allow, warn, deny, kill
}

// Audit reports containers that are not fenced.
func (c *Client) Audit(ctx context.Context, req AuditRequest) (AuditResponse, error) {
	var resp AuditResponse
	return resp, c.call(ctx, methodPost, "/v1/audit", req, &resp)
}
