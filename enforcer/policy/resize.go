// SPDX-License-Identifier: Apache-2.0

package policy

import "time"

// Level is which limit a resize changes.
type Level struct {
	Pod       PodID       // the pod's, if Container is empty
	Container ContainerID // the container's
}

// Resize is a change of memory.max at one level on one GPU. It is plain data, so that it can be
// saved and put back with [GPU.RestoreResize] after a restart.
//
// desired is what was asked, allocated what admission has given, actuated what the fences hold
// now, actual what was read back last: the greater of the charge and nothing above actuated.
type Resize struct {
	Level     Level         `json:"level"`
	Old       uint64        `json:"old"`
	Desired   uint64        `json:"desired"`
	Allocated uint64        `json:"allocated"`
	Actuated  uint64        `json:"actuated"`
	Actual    uint64        `json:"actual"`
	State     string        `json:"state"` // pending, done, ResizeFailed
	Why       string        `json:"why,omitempty"`
	Deadline  time.Duration `json:"deadline"` // monotonic, of this boot
	Force     bool          `json:"force,omitempty"`
	LeastUse  uint64        `json:"least_use"` // since it began
}

// States of a resize.
const (
	ResizePending = "pending"
	ResizeDone    = "done"
	ResizeFailed  = "ResizeFailed"
)

// ResizeChange is a resize that ended. When done, the grant becomes Desired; when it failed, the
// grant is Old, which it always was.
type ResizeChange struct{ Resize Resize }

// StartResize begins a change from old (the grant) to desired. Growing is done at once: admit it
// before. Shrinking is done at once if the charge allows, else it is pending: the limits page
// shows the new limit from now on, see PublishedMax. A resize of the same level that is still
// pending is replaced; its Old stays.
func (g *GPU) StartResize(level Level, old, desired uint64, now, deadline time.Duration, force bool) Resize {
	panic("soon")
}

// RestoreResize puts a pending one back after a restart.
func (g *GPU) RestoreResize(r Resize) {}

// PendingResizes are those that have not ended, to be saved and shown.
func (g *GPU) PendingResizes() []Resize { return nil }
