// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// The labels of a node. Whatever else begins with LabelDomain and is not wanted is not touched:
// people may have their own there (gpufence.dev/x-...).
const (
	LabelDomain  = "gpufence.dev/"
	LabelReady   = LabelDomain + "ready"   // "true", or absent
	LabelLevel   = LabelDomain + "level"   // hard, reactive, advisory, none
	LabelVersion = LabelDomain + "version" // gpufenced's
	LabelFence   = LabelDomain + "fence-"  // and the fence's name: its state
)

// Canary is what `gpufence canary` found, as it is handed over on the node, and what the engine said.
type Canary struct {
	Held bool `json:"held"`
	// Undecided: nothing can be said, since there was no room for it. What was known before stays.
	Undecided bool        `json:"undecided,omitempty"`
	Why       string      `json:"why,omitempty"` // of not held and undecided
	Level     quota.Level `json:"level,omitempty"`
	Time      time.Time   `json:"time"`
	// Version and Started are of the gpufenced that it ran with: another one is another canary.
	Version string    `json:"version,omitempty"`
	Started time.Time `json:"started,omitzero"`
	Steps   []string  `json:"steps,omitempty"` // what was proved, in order
	// Engine is why the engine starts nothing through gpufence, as it runs now; "" if it does. Who hands
	// over adds it: the canary does not go through the engine.
	Engine string `json:"engine,omitempty"`
}

// Node is all that decides about the labels.
type Node struct {
	State *api.Node // nil: gpufenced does not answer
	Why   string    // of State == nil
	// Canary is the last one that said something; nil: none was ever run.
	Canary *Canary
	// Handlers are those that the kubelet has from the engine; none are known before Kubernetes 1.30.
	Handlers []string
	Handler  string // ours
	Now      time.Time
	// CanaryAge is how old a canary may be.
	CanaryAge time.Duration
}

// Labels are the labels that the node should have (nil: that it should not), and one sentence each
// why it is not ready.
func Labels(n Node) (map[string]*string, []string) {
	out := map[string]*string{LabelReady: nil, LabelLevel: nil, LabelVersion: nil}
	reasons := notReady(n)
	if len(reasons) == 0 {
		out[LabelReady] = value("true")
	}
	if n.State == nil {
		return out, reasons
	}
	out[LabelLevel] = value(n.State.Level)
	out[LabelVersion] = value(n.State.Version.Version)
	for _, f := range n.State.Fences {
		out[LabelFence+f.Name] = value(f.State)
	}
	return out, reasons
}

func notReady(n Node) []string {
	if n.State == nil {
		return []string{"gpufenced does not answer: " + n.Why}
	}
	var out []string
	if !n.State.Ready {
		out = append(out, n.State.Reasons...)
		if len(out) == 0 {
			out = append(out, "gpufenced is not ready")
		}
	}
	if n.State.Mode != string(quota.ModeEnforce) {
		out = append(out, fmt.Sprintf("the node's policy has mode %s, which enforces nothing", n.State.Mode))
	}
	if len(n.Handlers) > 0 && !slices.Contains(n.Handlers, n.Handler) {
		out = append(out, fmt.Sprintf("the engine has no handler %s", n.Handler))
	}
	if n.Canary != nil && n.Canary.Engine != "" {
		out = append(out, n.Canary.Engine)
	}
	switch c := n.Canary; {
	case c == nil:
		out = append(out, "no canary has run yet")
	case !c.Held:
		out = append(out, "the canary was not held: "+c.Why)
	case !c.Started.Equal(n.State.Started):
		out = append(out, "gpufenced was started after the last canary")
	case n.Now.Sub(c.Time) > n.CanaryAge:
		out = append(out, fmt.Sprintf("the last canary is %s old", n.Now.Sub(c.Time).Round(time.Second)))
	}
	return out
}

// value is a string as a label may have it.
func value(s string) *string {
	b := []byte(s)
	for i, c := range b {
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.'
		if !ok {
			b[i] = '_'
		}
	}
	if len(b) > 63 {
		b = b[:63]
	}
	out := strings.Trim(string(b), "-_.")
	return &out
}

// Changes are the labels to write so that a node with labels has becomes as wanted; labels of ours
// about fences that are not known any more go.
func Changes(has map[string]string, wanted map[string]*string) map[string]*string {
	out := map[string]*string{}
	for k, v := range wanted {
		old, ok := has[k]
		switch {
		case v == nil && ok:
			out[k] = nil
		case v != nil && (!ok || old != *v):
			out[k] = v
		}
	}
	for k := range has {
		if _, known := wanted[k]; !known && strings.HasPrefix(k, LabelFence) {
			out[k] = nil
		}
	}
	return out
}
