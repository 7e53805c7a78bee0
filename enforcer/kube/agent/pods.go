// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// mirror is on the API server's picture of a static pod, and names the UID that the node has for it.
const mirror = "kubernetes.io/config.mirror"

// podState is what we remember of a pod while it exists.
type podState struct {
	uid       string
	first     string    // its annotations when we first saw it
	looked    string    // those that were looked at
	sent      string    // those that gpufenced has followed, or refused
	sentAt    time.Time // when
	unmanaged int       // how often in a row it was found past gpufence
}

// watch sets up the informer of the node's pods, which keeps of them what we look at.
func (a *Agent) watch() {
	only := fields.OneTermEqualSelector("spec.nodeName", a.opts.Node).String()
	pods := a.client.CoreV1().Pods(metav1.NamespaceAll)
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = only
			return pods.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = only
			return pods.Watch(ctx, o)
		},
	}
	add := func(object any) {
		if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(object); err == nil { // an object without a name is none
			a.queue.Add(key)
		}
	}
	a.store, a.pods = cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(source, a.client), ObjectType: &corev1.Pod{}, Transform: strip, ResyncPeriod: a.opts.Resync,
		Handler: cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, now any) { add(now) }, DeleteFunc: add},
	})
}

// strip keeps of a pod what we look at, so that the memory of a node with hundreds stays small.
func strip(object any) (any, error) {
	p, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	out := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion, DeletionTimestamp: p.DeletionTimestamp,
		Annotations: map[string]string{},
	}}
	for k, v := range p.Annotations {
		if quota.Ours(k) || k == mirror {
			out.Annotations[k] = v
		}
	}
	out.Spec.NodeName, out.Spec.RuntimeClassName = p.Spec.NodeName, p.Spec.RuntimeClassName
	for from, to := range map[*[]corev1.Container]*[]corev1.Container{&p.Spec.Containers: &out.Spec.Containers, &p.Spec.InitContainers: &out.Spec.InitContainers} {
		for _, c := range *from {
			kept := corev1.Container{Name: c.Name}
			for name, q := range c.Resources.Limits {
				if strings.HasPrefix(string(name), "nvidia.com/") && !q.IsZero() {
					kept.Resources.Limits = corev1.ResourceList{name: q}
				}
			}
			*to = append(*to, kept)
		}
	}
	for _, c := range p.Spec.EphemeralContainers {
		out.Spec.EphemeralContainers = append(out.Spec.EphemeralContainers, corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: c.Name}})
	}
	out.Status.Phase = p.Status.Phase
	for _, c := range p.Status.Conditions {
		if c.Type == kube.ConditionExceeded {
			out.Status.Conditions = append(out.Status.Conditions, c)
		}
	}
	return out, nil
}

// view is a pod as package kube takes it.
func view(p *corev1.Pod) kube.Pod {
	out := kube.Pod{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), RunUID: string(p.UID), Annotations: map[string]string{},
		Running: p.Status.Phase == corev1.PodRunning, Ending: p.DeletionTimestamp != nil,
	}
	if uid := p.Annotations[mirror]; uid != "" {
		out.RunUID = uid
	}
	for k, v := range p.Annotations {
		if quota.Ours(k) && !quota.IsStatus(k) {
			out.Annotations[k] = v
		}
	}
	if p.Spec.RuntimeClassName != nil {
		out.Class = *p.Spec.RuntimeClassName
	}
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for _, c := range list {
			out.Containers = append(out.Containers, c.Name)
			out.WantsGPU = out.WantsGPU || len(c.Resources.Limits) > 0 // only NVIDIA's are kept
		}
	}
	for _, c := range p.Spec.EphemeralContainers {
		out.Containers = append(out.Containers, c.Name)
	}
	for _, c := range p.Status.Conditions {
		out.Exceeded = out.Exceeded || c.Type == kube.ConditionExceeded && c.Status == corev1.ConditionTrue
	}
	return out
}

// pod is a pod of this node by namespace/name.
func (a *Agent) pod(key string) (kube.Pod, bool) {
	object, ok, err := a.store.GetByKey(key)
	if err != nil || !ok {
		return kube.Pod{}, false
	}
	p, ok := object.(*corev1.Pod)
	if !ok {
		return kube.Pod{}, false
	}
	return view(p), true
}

// mirrored gives a report about a static pod the UID that the API server has for it.
func (a *Agent) mirrored(r kube.Report) kube.Report {
	if p, ok := a.pod(r.Pod.Namespace + "/" + r.Pod.Name); ok && p.RunUID == r.Pod.UID {
		r.Pod.UID = p.UID
	}
	return r
}

// again sends a pod's annotations once more, since one of its containers has started.
func (a *Agent) again(key string) {
	a.mu.Lock()
	if s := a.known[key]; s != nil {
		s.sentAt = time.Time{}
	}
	a.mu.Unlock()
	a.queue.Add(key)
}

// work deals with pods that changed.
func (a *Agent) work(ctx context.Context) {
	for {
		key, shutdown := a.queue.Get()
		if shutdown {
			return
		}
		if err := a.sync(ctx, key); err != nil && ctx.Err() == nil {
			a.opts.Log.WithError(err).WithField("pod", key).Info("the annotations of a pod wait")
			a.queue.AddRateLimited(key)
		} else {
			a.queue.Forget(key)
		}
		a.queue.Done(key)
	}
}

// sync says what a pod's annotations say wrong, and sends those of one that runs to gpufenced.
func (a *Agent) sync(ctx context.Context, key string) error {
	p, ok := a.pod(key)
	if !ok {
		a.mu.Lock()
		delete(a.known, key)
		a.mu.Unlock()
		return nil
	}
	mark := p.Mark()
	a.mu.Lock()
	s := a.known[key]
	if s == nil || s.uid != p.UID {
		s = &podState{uid: p.UID, first: mark}
		a.known[key] = s
	}
	look := s.looked != mark && len(p.Annotations) > 0
	send := p.Running && !p.Ending && (len(p.Annotations) > 0 || s.first != mark) && (s.sent != mark || a.opts.Now().Sub(s.sentAt) >= a.opts.Resync)
	changed := s.first != mark
	a.mu.Unlock()
	if look {
		for _, r := range kube.Look(p) {
			if err := a.publish(ctx, r, fmt.Sprintf("%s %s", p.UID, mark), a.opts.Now()); err != nil {
				return err
			}
		}
		a.mu.Lock()
		s.looked = mark
		a.mu.Unlock()
	}
	if !send {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := a.daemon.Apply(call, api.ApplyRequest{Source: api.SourceSpec, Pods: []api.ApplyPod{{
		Namespace: p.Namespace, Name: p.Name, UID: p.RunUID, Annotations: p.Annotations,
	}}})
	if err != nil {
		return fmt.Errorf("tell gpufenced of changed annotations: %w", err)
	}
	a.mu.Lock()
	s.sent, s.sentAt = mark, a.opts.Now()
	a.mu.Unlock()
	for _, answer := range resp.Pods {
		if r, ok := kube.Followed(p, answer, changed); ok {
			if err := a.publish(ctx, r, fmt.Sprintf("%s %s %s", p.UID, mark, answer.Error.Code), a.opts.Now()); err != nil {
				return err
			}
		}
	}
	return nil
}

// audit looks for pods that use a GPU past gpufence. Twice in a row: a pod may have begun to run
// between the list of pods and that of containers.
func (a *Agent) audit(ctx context.Context) {
	for pause(ctx, a.opts.Audit) {
		containers, err := a.daemon.Containers(ctx)
		if err != nil {
			continue // said by the node's loop
		}
		uids := map[string]bool{}
		for _, c := range containers {
			uids[c.Pod.UID] = true
		}
		for _, object := range a.store.List() {
			pod, ok := object.(*corev1.Pod)
			if !ok {
				continue
			}
			p := view(pod)
			r, found := kube.Unmanaged(p, func(uid string) bool { return uids[uid] })
			a.mu.Lock()
			s := a.known[p.Namespace+"/"+p.Name]
			say := false
			if s != nil && s.uid == p.UID {
				if !found {
					s.unmanaged = 0
				} else {
					s.unmanaged++
					say = s.unmanaged == 2
				}
			}
			a.mu.Unlock()
			if !say {
				continue
			}
			if err := a.publish(ctx, r, p.UID, a.opts.Now()); err != nil {
				return // the context has ended
			}
		}
	}
}
