// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

var _ server.Applier = (*Daemon)(nil)

// maxApplyPods bounds one request.
const maxApplyPods = 10000

// Apply implements [server.Applier].
func (d *Daemon) Apply(ctx context.Context, req api.ApplyRequest) (api.ApplyResponse, error) {
	resp := api.ApplyResponse{Pods: []api.AppliedPod{}}
	if len(req.Pods) > maxApplyPods {
		return resp, quota.NewError(quota.CodeBadRequest, "%d pods in one request are more than %d", len(req.Pods), maxApplyPods)
	}
	if req.Source == "" {
		req.Source = api.SourceApply
	}
	if req.Source != api.SourceApply && req.Source != api.SourceSpec {
		return resp, quota.NewError(quota.CodeBadRequest, "source %.40q is neither apply nor spec", req.Source)
	}
	if req.Source == api.SourceSpec && req.Force {
		return resp, quota.NewError(quota.CodeBadRequest, "only an administrator may force: an annotation ends nobody")
	}
	d.mu.Lock()
	deadline, err := d.resizeDeadline(req.DeadlineMillis)
	d.mu.Unlock()
	if err != nil {
		return resp, err
	}
	var all [][]startedResize
	for _, pod := range req.Pods {
		var started []startedResize
		var notices []string
		err := d.patiently(ctx, func() (err error) {
			started, notices, err = d.beginApply(pod, order{source: req.Source, deadline: deadline, force: req.Force})
			return err
		})
		applied := api.AppliedPod{Namespace: pod.Namespace, Name: pod.Name, Notices: notices}
		if err != nil {
			applied.Error = api.ErrorOf(err)
		}
		resp.Pods = append(resp.Pods, applied)
		all = append(all, started)
	}
	for i, started := range all {
		for _, f := range d.follow(ctx, started, req.Wait) {
			resp.Pods[i].Resizes = append(resp.Pods[i].Resizes, api.AppliedResize{Container: f.name, Resize: f.view})
		}
	}
	return resp, nil
}

// beginApply changes what a pod's annotations say otherwise than its limits are. The caller holds
// mu.
func (d *Daemon) beginApply(pod api.ApplyPod, req order) ([]startedResize, []string, error) {
	if d.closed {
		return nil, nil, quota.NewError(quota.CodeUnreachable, "gpufenced is stopping").WithHint("start it again")
	}
	p, err := d.findPod(pod)
	if err != nil {
		return nil, nil, err
	}
	pol := d.cfg.Policy.For(p.Ref.Namespace)
	mark := ""
	if req.source == api.SourceSpec {
		if pod.UID == "" {
			return nil, nil, quota.NewError(quota.CodeBadRequest, "pod %.100s/%.100s has no uid in the request", pod.Namespace, pod.Name)
		}
		if !pol.Accept[p.Engine].ResizeByAnnotation {
			return nil, nil, quota.NewError(quota.CodeNotAccepted, "this node's policy does not let annotations of %s change limits of containers that run", p.Engine).
				WithHint("start the pod again, use `gpufence set`, or set resize-by-annotation = true in [accept.%s]", p.Engine)
		}
		pod.Annotations = withoutStatus(pod.Annotations)
		mark = specMark(pod.Annotations)
	}
	var changes []change
	var notices []string
	var follow []*registry.Container
	for _, c := range p.Containers {
		if c.State != registry.Running || mark != "" && c.Spec == mark && p.Spec == mark {
			continue
		}
		follow = append(follow, c)
		parsed, notes, err := quota.Parse(quota.Subject{
			Engine: c.Key.Engine, Namespace: p.Ref.Namespace, Pod: p.Ref.Name, Container: c.Name, Annotations: pod.Annotations, Env: c.Env, HasGPU: true,
		}, pol)
		if err != nil {
			return nil, nil, err
		}
		grant, more, err := parsed.Resolve(c.Grant.GPUs, pol)
		if err != nil {
			return nil, nil, err
		}
		for _, n := range slices.Concat(texts(notes), texts(more)) {
			if !slices.Contains(notices, n) {
				notices = append(notices, n)
			}
		}
		if grant.Require != c.Grant.Require {
			return nil, nil, quota.NewError(quota.CodeNotSettable, "%s of %s cannot be changed while the container runs", quota.KeyRequire, c.Display()).
				WithHint("start the pod again")
		}
		own := mark == "" || c.Spec != mark
		if own && grant.OOMGroup != c.Grant.OOMGroup {
			req.groups = append(req.groups, groupChange{c, grant.OOMGroup})
		}
		for _, g := range c.Grant.GPUs {
			for level, now := range map[policy.Level]quota.Limits{
				{Pod: p.ID()}:       limits(grant.Pod, g.UUID),
				{Container: c.ID()}: limits(grant.Container, g.UUID),
			} {
				// The pod's is the same from each of its containers. Whoever has followed these
				// annotations already keeps what was set since.
				if level.Pod == "" && !own || level.Pod != "" && mark != "" && p.Spec == mark {
					continue
				}
				target := d.target(p, g.UUID, level)
				ch := change{uuid: g.UUID, level: level, old: d.limitsOf(p, g.UUID, level), now: now, max: target.Max != now.Max}
				if !ch.max {
					ch.old = target
				}
				if target != now && !slices.Contains(changes, ch) {
					changes = append(changes, ch)
				}
			}
		}
	}
	if mark != "" && len(follow) == 0 {
		return d.ofSpec(p), notices, nil
	}
	// Maps have no order, answers and events do.
	slices.SortFunc(changes, func(a, b change) int {
		return cmp.Or(cmp.Compare(a.uuid, b.uuid), cmp.Compare(b.level.Pod, a.level.Pod), cmp.Compare(a.level.Container, b.level.Container))
	})
	if len(changes)+len(req.groups) == 0 {
		return nil, notices, d.followed(p, follow, mark)
	}
	started, err := d.begin(p, changes, req)
	if err != nil {
		return nil, nil, err
	}
	for _, g := range req.groups {
		started = append(started, groupStarted(g))
	}
	if err := d.followed(p, follow, mark); err != nil {
		return nil, nil, err
	}
	return started, append(notices, "a container of the pod that is started again goes back to the annotations that its sandbox was made with"), nil
}

// findPod finds the pod that a manifest names among those that run here.
func (d *Daemon) findPod(pod api.ApplyPod) (*registry.Pod, error) {
	var found []*registry.Pod
	for _, p := range d.reg.Pods() {
		runs := slices.ContainsFunc(p.Containers, func(c *registry.Container) bool { return c.State == registry.Running })
		if runs && p.Ref.Namespace == pod.Namespace && p.Ref.Name == pod.Name && (pod.UID == "" || p.Ref.UID == pod.UID) {
			found = append(found, p)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, quota.NewError(quota.CodeNoSuchContainer, "no container of pod %.100s/%.100s runs with a GPU on this node", pod.Namespace, pod.Name).
			WithHint("`gpufence ps --all` lists them")
	}
	return nil, quota.NewError(quota.CodeAmbiguousName, "%d sandboxes of pod %.100s/%.100s run on this node", len(found), pod.Namespace, pod.Name).
		WithHint("put the pod's uid into the manifest")
}

// specMark is the same for the same annotations, of those that may say something of limits.
func specMark(annotations map[string]string) string {
	h := sha256.New()
	for _, k := range slices.Sorted(maps.Keys(annotations)) {
		if quota.Ours(k) {
			fmt.Fprintf(h, "%d %s %d %s\n", len(k), k, len(annotations[k]), annotations[k])
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// withoutStatus leaves out what gpufence writes into pods itself.
func withoutStatus(annotations map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range annotations {
		if !quota.IsStatus(k) {
			out[k] = v
		}
	}
	return out
}

// followed remembers which annotations hold. If that cannot be saved they are followed again, which
// changes nothing unless somebody sets a limit meanwhile. The caller holds mu.
func (d *Daemon) followed(p *registry.Pod, containers []*registry.Container, mark string) error {
	if mark == "" {
		return nil
	}
	p.Spec = mark
	for _, c := range containers {
		c.Spec = mark
	}
	if err := d.save(p); err != nil {
		return stateError(err)
	}
	return nil
}

// ofSpec are what has become of the changes that a pod's annotations have led to and that have not
// ended well. One that has failed is not begun again for the same annotations, or it would fail
// again and again, with the shims refusing all the while: whoever sends them hears of it.
func (d *Daemon) ofSpec(p *registry.Pod) []startedResize {
	var out []startedResize
	for _, uuid := range p.GPUs {
		for _, r := range p.Resizes[uuid] {
			failed := r.State == policy.ResizeFailed && slices.ContainsFunc(p.Containers, func(c *registry.Container) bool {
				return c.ChangedBy == api.SourceSpec && (r.Level.Pod != "" || r.Level.Container == c.ID())
			})
			if failed || r.State == policy.ResizePending {
				out = append(out, startedResize{pod: p.Name, uuid: uuid, level: r.Level, old: r.Old, desired: r.Desired, since: r.Started, max: true})
			}
		}
	}
	return out
}
