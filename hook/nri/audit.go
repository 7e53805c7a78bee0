// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"time"

	"github.com/containerd/nri/pkg/api"

	gpufence "github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// auditTime bounds an audit: NRI waits for Synchronize.
const auditTime = 1500 * time.Millisecond

// Synchronize looks through what runs already, after each connection: what started while nobody was
// connected, and what lost its annotations on the way.
func (p *Plugin) Synchronize(ctx context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	ctx, cancel := context.WithTimeout(ctx, auditTime)
	defer cancel()
	known, err := p.daemon.Containers(ctx)
	if err != nil {
		// To be away again would help nobody: the containers that are created next are refused.
		p.log.Errorf("the running containers were not looked through: %s", sentence(err))
		return nil, nil
	}
	found := p.audit(pods, containers, known)
	if len(found) == 0 {
		p.log.Infof("looked through %d running containers: each with a GPU came through gpufence", len(containers))
		return nil, nil
	}
	answer, err := p.daemon.Audit(ctx, gpufence.AuditRequest{By: "nri", Containers: found})
	if err != nil {
		p.log.Errorf("%d containers with a GPU that is not fenced could not be reported: %s", len(found), sentence(err))
		return nil, nil
	}
	p.log.Warnf("%d running containers have a GPU that is not fenced (policy unmanaged = %q)", len(found), answer.Unmanaged)
	return nil, nil
}

// audit lists the containers that should be fenced and are not.
func (p *Plugin) audit(pods []*api.PodSandbox, containers []*api.Container, known []gpufence.Container) []gpufence.AuditContainer {
	engine := p.engineNow()
	byID := map[string]*api.PodSandbox{}
	for _, pod := range pods {
		byID[pod.GetId()] = pod
	}
	running := map[gpufence.ContainerKey]gpufence.Container{}
	for _, k := range known {
		if k.State == "running" {
			running[k.Key] = k
		}
	}
	var out []gpufence.AuditContainer
	for _, ctr := range containers {
		pod := byID[ctr.GetPodSandboxId()]
		if pod == nil || p.exempt(pod) || ctr.GetState() != api.ContainerState_CONTAINER_RUNNING && ctr.GetState() != api.ContainerState_CONTAINER_PAUSED {
			continue
		}
		c := readContainer(engine, pod, ctr)
		why := p.unfenced(c, running)
		if why != "" {
			out = append(out, gpufence.AuditContainer{Key: p.key(&c), Pod: c.pod, Name: c.input.Container, PID: int(ctr.GetPid()), Why: why})
		}
	}
	return out
}

// unfenced is why a running container is not as it should be, "" if it is.
func (p *Plugin) unfenced(c container, running map[gpufence.ContainerKey]gpufence.Container) string {
	request, err := plan.Ask(c.input, p.set.Policy)
	have, known := running[p.key(&c)]
	switch {
	case known && err == nil && request.Quota.Limited() && !limited(have):
		return "its pod asks for a limit, and it was started without one: its annotations were lost on the way"
	case known:
		return ""
	case err != nil:
		return "it would not have been started: " + err.Error()
	case request.Action != plan.ActionPrepare || request.Mode == quota.ModeObserve || len(request.Selectors) == 0:
		return "" // no GPU, or one that only the kubelet could tell: its use is seen by gpufenced
	}
	return "it has a GPU and did not come through gpufence"
}

func limited(c gpufence.Container) bool {
	for _, g := range c.GPUs {
		if g.Limits.Max != quota.Unlimited {
			return true
		}
	}
	return false
}
