// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
)

// component is who reports.
const component = "gpufence"

// follow deals with the entries of the journal, one after the other, as long as the context lasts.
func (a *Agent) follow(ctx context.Context) {
	wait := a.opts.Pause
	for ctx.Err() == nil {
		began := a.opts.Now()
		err := a.followOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		if a.opts.Now().Sub(began) > a.opts.MaxPause {
			wait = a.opts.Pause // it had worked for a while
		}
		a.opts.Log.WithError(err).Warn("the events of gpufenced ended, following them again")
		if !pause(ctx, wait) {
			return
		}
		wait = min(2*wait, a.opts.MaxPause)
	}
}

func (a *Agent) followOnce(ctx context.Context) error {
	node, err := a.daemon.Node(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	if a.cursor.Seq > node.LastEvent {
		a.cursor.Seq = 0 // of another journal
	}
	since := a.cursor.Seq
	a.mu.Unlock()
	err = a.daemon.Events(ctx, since, true, func(ev api.Event) error { return a.handle(ctx, ev) })
	if err == nil {
		err = errors.New("gpufenced closed the connection")
	}
	return err
}

// handle deals with one entry; an error means that it is to come again.
func (a *Agent) handle(ctx context.Context, ev api.Event) error {
	switch ev.Type {
	case "registered":
		if ev.Pod != nil && ev.Pod.Namespace != "" {
			a.again(ev.Pod.Namespace + "/" + ev.Pod.Name)
		}
	case "gpu-unknown", "gpu-known", "config-drift", "config-drift-gone", "config-loaded", "started":
		a.poke()
	}
	if r, ok := kube.Of(ev); ok && a.opts.Now().Sub(ev.Time) < a.opts.MaxAge {
		// The time is of the name, since a journal that was lost counts from 1 again.
		if err := a.publish(ctx, a.mirrored(r), fmt.Sprintf("%s %d %d", a.opts.Node, ev.Seq, ev.Time.UnixNano()), ev.Time); err != nil {
			return err
		}
	}
	a.mu.Lock()
	a.cursor.Seq = ev.Seq
	late := a.opts.Now().Sub(a.cursor.at) > time.Second
	a.mu.Unlock()
	if !late {
		return nil
	}
	if err := a.saveCursor(); err != nil {
		// What is dealt with twice has the same names: no reason to stop.
		a.opts.Log.WithError(err).Warn("the cursor is not kept over a restart")
	}
	return nil
}

// publish makes the Event of a report, and the condition, and does not return before the API server
// took them, refused them for good, or they are too old. id is what the Event is about.
func (a *Agent) publish(ctx context.Context, r kube.Report, id string, began time.Time) error {
	sum := sha256.Sum256([]byte(id + " " + r.Reason))
	name := r.Pod.Name
	if len(name) > 200 {
		name = name[:200]
	}
	name += "." + hex.EncodeToString(sum[:8])
	a.mu.Lock()
	v := a.limiter.Admit(r, name, a.opts.Now())
	if v.Name == "" {
		a.dropped++
	}
	a.mu.Unlock()
	if c := r.Condition; c != nil {
		// First: whoever sees the pod fail looks for it at once.
		if err := a.insist(ctx, began, func() error { return a.condition(ctx, r) }); err != nil {
			return err
		}
	}
	if v.Name == "" {
		return nil
	}
	return a.insist(ctx, began, func() error {
		err := a.event(ctx, r, v)
		if apierrors.IsNotFound(err) && v.Count > 1 {
			// The first one has expired: this one stands for all of them.
			a.mu.Lock()
			a.limiter.Gone(r)
			a.mu.Unlock()
			return a.event(ctx, r, kube.Verdict{Name: name, Count: 1, First: v.First})
		}
		if err == nil {
			a.mu.Lock()
			a.sent++
			a.mu.Unlock()
		}
		return err
	})
}

// insist repeats a write until it is taken, refused for good, or too late.
func (a *Agent) insist(ctx context.Context, began time.Time, write func() error) error {
	for wait := a.opts.Pause; ; wait = min(2*wait, a.opts.MaxPause) {
		err := write()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		a.mu.Lock()
		a.failed++
		a.mu.Unlock()
		log := a.opts.Log.WithError(err)
		if final(err) || a.opts.Now().Sub(began) > a.opts.MaxAge {
			log.Warn("the API server does not take what was to be said of a pod")
			a.mu.Lock()
			a.dropped++
			a.mu.Unlock()
			return nil
		}
		log.Info("the API server does not answer, waiting")
		if !pause(ctx, wait) {
			return ctx.Err()
		}
	}
}

// final says that the same request will not be taken later either.
func final(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsConflict(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsGone(err) || apierrors.IsMethodNotSupported(err) || apierrors.IsRequestEntityTooLargeError(err)
}

func (a *Agent) event(ctx context.Context, r kube.Report, v kube.Verdict) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	events := a.client.CoreV1().Events(r.Pod.Namespace)
	now := metav1.NewTime(a.opts.Now())
	if v.Count > 1 {
		patch, err := json.Marshal(map[string]any{"count": v.Count, "lastTimestamp": now, "message": r.Message})
		if err != nil {
			return fmt.Errorf("count an event: %w", err)
		}
		_, err = events.Patch(ctx, v.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: component})
		return err
	}
	object := corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: r.Pod.Namespace, Name: r.Pod.Name, UID: types.UID(r.Pod.UID)}
	if r.Container != "" {
		object.FieldPath = "spec.containers{" + r.Container + "}"
	}
	_, err := events.Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: r.Pod.Namespace, Name: v.Name},
		InvolvedObject: object, Type: r.Type, Reason: r.Reason, Message: r.Message, Count: 1,
		Source: corev1.EventSource{Component: component, Host: a.opts.Node}, ReportingController: "gpufence.dev/agent", ReportingInstance: a.opts.Node,
		FirstTimestamp: now, LastTimestamp: now,
	}, metav1.CreateOptions{FieldManager: component})
	if apierrors.IsAlreadyExists(err) {
		return nil // said before a restart
	}
	return err
}

// condition writes the pod's condition. One that is to become False is written only where it is True.
func (a *Agent) condition(ctx context.Context, r kube.Report) error {
	c := r.Condition
	p, seen := a.pod(r.Pod.Namespace + "/" + r.Pod.Name)
	if !c.True && (!seen || !p.Exceeded || p.UID != r.Pod.UID) {
		return nil
	}
	status := corev1.ConditionFalse
	if c.True {
		status = corev1.ConditionTrue
	}
	patch, err := json.Marshal(map[string]any{
		// A pod of the same name that came after is not meant: the API server compares.
		"metadata": map[string]any{"uid": r.Pod.UID},
		"status": map[string]any{"conditions": []corev1.PodCondition{{
			Type: kube.ConditionExceeded, Status: status, Reason: c.Reason, Message: c.Message, LastTransitionTime: metav1.NewTime(a.opts.Now()),
		}}},
	})
	if err != nil {
		return fmt.Errorf("write a condition: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	_, err = a.client.CoreV1().Pods(r.Pod.Namespace).Patch(ctx, r.Pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{FieldManager: component}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // the pod is gone
	}
	return err
}
