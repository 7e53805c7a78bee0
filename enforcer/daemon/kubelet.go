// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/gpu"
)

// kubeletTime bounds what a start waits for the kubelet, which answers from memory.
const kubeletTime = time.Second

// PodDevices are the ids of the GPUs that the kubelet gave a container, without what marks them as
// one of several uses; none where it gave none.
type PodDevices func(ctx context.Context, namespace, pod, container string) ([]string, error)

// askKubelet makes selectors of what only the kubelet knows: what a device plugin meant by `all` or
// an index in the environment, and which instances stand behind the device node of a GPU in MIG
// mode. A claim that stays is of a container without a GPU.
func (d *Daemon) askKubelet(ctx context.Context, req *api.PrepareRequest) (notices []string, err error) {
	split := d.splitNodes(req)
	if !req.Key.Engine.Kubernetes() || len(req.Devices.Claimed) == 0 && len(split) == 0 {
		req.Devices.Claimed = nil
		return nil, nil
	}
	if d.kubelet == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, kubeletTime)
	defer cancel()
	ids, err := d.kubelet(ctx, req.Pod.Namespace, req.Pod.Name, req.ContainerName)
	d.once("kubelet", err)
	if err != nil {
		// A container without a GPU is safe; for one in whose spec there is a GPU, what follows refuses.
		return []string{fmt.Sprintf("the kubelet does not say which GPUs the container has: %v", err)}, nil
	}
	if len(split) == 0 {
		if len(ids) > 0 {
			req.Devices.Selectors, req.Devices.Claimed = ids, nil
		}
		return nil, nil
	}
	instances := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return !strings.HasPrefix(id, "MIG-") })
	if len(instances) > 0 {
		whole := slices.DeleteFunc(slices.Clone(req.Devices.Selectors), func(s string) bool { return slices.Contains(split, s) })
		req.Devices.Selectors = append(whole, instances...)
	}
	return nil, nil
}

// splitNodes are the device nodes in a spec that belong to GPUs in MIG mode: every one of their
// instances has the same.
func (d *Daemon) splitNodes(req *api.PrepareRequest) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []string
	for _, s := range req.Devices.Selectors {
		number, ok := strings.CutPrefix(path.Clean(s), "/dev/nvidia")
		if ok && req.Devices.Present && slices.ContainsFunc(d.split, func(i gpu.Info) bool { return strconv.Itoa(i.Minor) == number }) {
			out = append(out, s)
		}
	}
	return out
}
