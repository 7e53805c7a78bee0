// SPDX-License-Identifier: Apache-2.0

// Package kubelet asks the kubelet's pod-resources socket which GPUs it gave a container: the one
// place that knows, where a device plugin says so by `all` or by an index in the environment, as
// every image may.
//
// What it promises: an answer is of this pod and container only, lists each GPU once, and takes off
// what device plugins append to a GPU that they hand out several times (GPU-x::3 is GPU-x). It keeps
// no connection, and waits as long as the context allows.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Sockets are where kubelets of the usual distributions serve it; the first that exists is asked.
var Sockets = []string{
	"/var/lib/kubelet/pod-resources/kubelet.sock",
	"/var/snap/microk8s/common/var/lib/kubelet/pod-resources/kubelet.sock",
	"/var/lib/k0s/kubelet/pod-resources/kubelet.sock",
}

// maxAnswer bounds what a kubelet may send: it lists every pod of the node.
const maxAnswer = 16 << 20

// Devices are the ids of the GPUs of a container, as [Ask] gives them, from this node's kubelet;
// none where no kubelet serves.
func Devices(ctx context.Context, namespace, pod, container string) ([]string, error) {
	for _, s := range Sockets {
		switch _, err := os.Stat(s); {
		case err == nil:
			return Ask(ctx, s, namespace, pod, container)
		case !errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("look at the kubelet's socket: %w", err)
		}
	}
	return nil, nil
}

// Ask asks the kubelet behind the socket.
func Ask(ctx context.Context, socket, namespace, pod, container string) (ids []string, err error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := podresources.NewPodResourcesListerClient(conn)
	got, err := client.Get(ctx, &podresources.GetPodResourcesRequest{PodName: pod, PodNamespace: namespace})
	if err == nil {
		return gpus(got.GetPodResources(), container), nil
	}
	if ctx.Err() != nil || status.Code(err) == codes.Unavailable {
		return nil, fmt.Errorf("ask %s: %w", socket, err)
	}
	// Older kubelets have no Get, others have it switched off, and neither says so in one way only.
	all, listErr := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if listErr != nil {
		return nil, fmt.Errorf("ask %s: %w", socket, errors.Join(listErr, err))
	}
	for _, p := range all.GetPodResources() {
		if p.GetName() == pod && p.GetNamespace() == namespace {
			return gpus(p, container), nil
		}
	}
	return nil, nil
}

// gpus are the GPUs and instances among a container's devices.
func gpus(p *podresources.PodResources, container string) []string {
	var out []string
	for _, c := range p.GetContainers() {
		if c.GetName() != container {
			continue
		}
		for _, d := range c.GetDevices() {
			for _, id := range d.GetDeviceIds() {
				id, _, _ = strings.Cut(id, "::")
				if (strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-")) && !slices.Contains(out, id) {
					out = append(out, id)
				}
			}
		}
	}
	return out
}
