// SPDX-License-Identifier: Apache-2.0

// Package kube says in Kubernetes' words what gpufenced says in its own: which Event a journal
// entry is, which condition a pod gets, which labels a node has. It is pure: no clients, no clock,
// no files. Package agent carries it out.
//
// It promises: the reasons, the condition's type and the labels are a contract (docs/kubernetes.md)
// and only grow; a journal entry gives at most one Event; what a tenant chose (names, annotations)
// is cut before it goes into one.
package kube

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// The reasons of Events, as people and alerts know them.
const (
	ReasonFenced           = "GPUFenced"              // a container runs, with this level
	ReasonUnavailable      = "GPUMemoryUnavailable"   // it does not fit what is left
	ReasonRefused          = "GPUFenceRefused"        // it may not start for another reason
	ReasonExceeded         = "GPUMemoryLimitExceeded" // it was killed
	ReasonWould            = "GPUFenceWouldAct"       // mode warn or observe: what enforce would do
	ReasonNotEnded         = "GPUMemoryKillFailed"    // SIGKILL did not end it, or its memory stays in use
	ReasonResized          = "GPUMemoryResized"       // memory.max was changed, or the change is pending
	ReasonResizeFailed     = "ResizeFailed"           // it could not be
	ReasonShimAbsent       = "GPUShimAbsent"          // a process that the library does not see
	ReasonUnfenced         = "GPUUnfenced"            // it runs without the limits that it asked for
	ReasonUnmanaged        = "GPUUnmanaged"           // it uses a GPU past gpufence
	ReasonUnknownContainer = "GPUUnknownContainer"    // a key for a container that the pod does not have
	ReasonBadAnnotation    = "GPUBadAnnotation"       // a key or value that cannot be understood
	ReasonThrottled        = "GPUThrottled"           // slowed above memory.high
)

// The types of Events.
const (
	Normal  = "Normal"
	Warning = "Warning"
)

// ConditionExceeded is the condition of a pod of which a container was killed over its limit. A Job
// may name it in podFailurePolicy.
const ConditionExceeded = "gpufence.dev/GPUMemoryExceeded"

// Condition is what a pod's condition becomes.
type Condition struct {
	True    bool
	Reason  string
	Message string
}

// Report is what an entry of the journal is to a user of Kubernetes.
type Report struct {
	Pod       api.PodRef
	Container string
	Type      string
	Reason    string
	Message   string
	Condition *Condition // nil: as it is
}

// maxMessage is what the API server takes of an Event.
const maxMessage = 1024

// Of is the Event of an entry of the journal; false if it has none: it is not about a pod of
// Kubernetes, or says nothing to its owner.
func Of(ev api.Event) (Report, bool) {
	if ev.Pod == nil || ev.Pod.Namespace == "" || ev.Pod.Namespace == CanaryNamespace || ev.Pod.Name == "" || ev.Container == nil || !ev.Container.Engine.Kubernetes() {
		return Report{}, false
	}
	r := Report{Pod: *ev.Pod, Container: ev.Name, Type: Warning}
	text := ev.Message
	switch ev.Type {
	case "registered":
		r.Type, r.Reason = Normal, ReasonFenced
		r.Condition = &Condition{Reason: "Started", Message: "started again"}
	case "refused":
		r.Reason = ReasonRefused
		switch quota.Code(ev.Code) {
		case quota.CodeUnavailable, quota.CodeNamespaceTotal:
			r.Reason = ReasonUnavailable
		}
	case "would-refuse", "would-kill", "kill-withheld":
		r.Reason = ReasonWould
		text = strings.Replace(ev.Type, "-", " ", 1) + ": " + text
	case "kill":
		r.Reason = ReasonExceeded
		if quota.Code(ev.Code) == quota.CodeUnmanaged {
			r.Reason = ReasonUnmanaged
		} else {
			r.Condition = &Condition{True: true, Reason: ReasonExceeded, Message: cut(text)}
		}
	case "kill-failed", "kill-unconfirmed":
		r.Reason = ReasonNotEnded
	case "resize":
		r.Type, r.Reason = Normal, ReasonResized
	case "resize-failed":
		r.Reason = ReasonResizeFailed
	case "shim-absent":
		r.Type, r.Reason = Normal, ReasonShimAbsent
	case "start-unfenced", "pages-lost":
		r.Reason = ReasonUnfenced
	case "unmanaged":
		r.Reason = ReasonUnmanaged
	case "throttled":
		r.Type, r.Reason = Normal, ReasonThrottled
	default:
		return Report{}, false
	}
	if ev.Code != "" {
		text = ev.Code + " " + text
	}
	r.Message = cut(text)
	return r, true
}

// cut keeps a message inside what the API server takes, on one line.
func cut(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "?")), " ")
	if len(s) <= maxMessage {
		return s
	}
	s = s[:maxMessage-len("…")]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s + "…"
}

// Pod is a pod of the API server, as far as we look.
type Pod struct {
	Namespace, Name, UID string
	// RunUID is what the engine has for a UID: of a static pod another one than its mirror's.
	RunUID      string
	Annotations map[string]string // of quota.Ours only
	Containers  []string          // every name: init, ephemeral and usual ones
	Class       string            // runtimeClassName
	WantsGPU    bool              // a resource of NVIDIA's in a limit
	Running     bool              // the phase
	Ending      bool              // it has a deletion timestamp
	Exceeded    bool              // the condition as it is
}

// Ref is how reports name it.
func (p Pod) Ref() api.PodRef { return api.PodRef{Namespace: p.Namespace, Name: p.Name, UID: p.UID} }

// Mark tells sets of annotations apart: what begins with it has changed if it has.
func (p Pod) Mark() string {
	var b strings.Builder
	for _, k := range sortedKeys(p.Annotations) {
		fmt.Fprintf(&b, "%q=%q,", k, p.Annotations[k])
	}
	return b.String()
}

// Look is what can be said of a pod by its object alone, whether or not it has started: a key for a
// container that it does not have, or one that cannot be understood.
func Look(p Pod) []Report {
	err := quota.CheckNames(p.Annotations, p.Containers)
	if err == nil {
		return nil
	}
	r := Report{Pod: p.Ref(), Type: Warning, Reason: ReasonBadAnnotation, Message: cut(err.Error())}
	if quota.CodeOf(err) == quota.CodeNoSuchName {
		r.Reason = ReasonUnknownContainer
	}
	return []Report{r}
}

// Unmanaged says that a pod with a GPU runs past gpufence: it asks for a GPU, runs, and gpufenced
// has no container of it. A pod whose handler is not ours by name but fenced all the same is known
// to gpufenced.
func Unmanaged(p Pod, known func(uid string) bool) (Report, bool) {
	if !p.WantsGPU || !p.Running || p.Ending || known(p.RunUID) {
		return Report{}, false
	}
	why := "it has no runtimeClassName"
	if p.Class != "" {
		why = fmt.Sprintf("its runtimeClassName is %s", quota.Quote(p.Class))
	}
	what := "its GPU memory has no limit"
	if len(p.Annotations) > 0 {
		what = "its gpufence.dev/ annotations hold nothing"
	}
	return Report{Pod: p.Ref(), Type: Warning, Reason: ReasonUnmanaged, Message: cut(fmt.Sprintf(
		"%s the pod has a GPU and did not come through gpufence (%s): %s; set runtimeClassName: gpufence", quota.CodeUnmanaged, why, what))}, true
}

// Followed is the Event of what gpufenced answered to changed annotations; false if there is nothing
// to say. changed says that they have changed since we first saw the pod: what a node's policy does
// not follow is worth a word then only. What was followed shows in the journal.
func Followed(p Pod, answer api.AppliedPod, changed bool) (Report, bool) {
	if answer.Error == nil {
		return Report{}, false
	}
	switch quota.Code(answer.Error.Code) {
	case quota.CodeNoSuchContainer:
		return Report{}, false // none of its containers has a GPU and runs here
	case quota.CodeNoSuchName, quota.CodeUnknownKey:
		return Report{}, false // said by Look
	case quota.CodeNotAccepted:
		if !changed {
			return Report{}, false
		}
	}
	return Report{Pod: p.Ref(), Type: Warning, Reason: ReasonResizeFailed, Message: cut(answer.Error.Code + " " + answer.Error.Message)}, true
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// CanaryNamespace is where canaries say that they are; there need not be such a namespace, and no
// Event is made for it.
const CanaryNamespace = "gpufence-canary"
