// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// fake is a kubelet with one pod; an old one has no Get.
type fake struct {
	podresources.UnimplementedPodResourcesListerServer
	pods  []*podresources.PodResources
	old   bool
	stuck bool
	lists int
}

func (f *fake) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	f.lists++
	return &podresources.ListPodResourcesResponse{PodResources: f.pods}, nil
}

func (f *fake) Get(ctx context.Context, req *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	if f.stuck {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if f.old {
		return nil, errors.New("PodResources API Get method disabled")
	}
	for _, p := range f.pods {
		if p.Name == req.PodName && p.Namespace == req.PodNamespace {
			return &podresources.GetPodResourcesResponse{PodResources: p}, nil
		}
	}
	return nil, errors.New("pod not found")
}

func serve(t *testing.T, f *fake) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubelet") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(s, f)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return socket
}

func resources(devices ...*podresources.ContainerDevices) []*podresources.PodResources {
	return []*podresources.PodResources{
		{Namespace: "other", Name: "p", Containers: []*podresources.ContainerResources{{Name: "main", Devices: []*podresources.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-wrong"}}}}}},
		{Namespace: "ns", Name: "p", Containers: []*podresources.ContainerResources{
			{Name: "sidecar"},
			{Name: "main", Devices: devices},
		}},
	}
}

func TestAsk(t *testing.T) {
	of := func(resource string, ids ...string) *podresources.ContainerDevices {
		return &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids}
	}
	tests := []struct {
		name      string
		devices   []*podresources.ContainerDevices
		pod       string
		container string
		want      []string
	}{
		{"whole GPUs", []*podresources.ContainerDevices{of("nvidia.com/gpu", "GPU-a", "GPU-b")}, "p", "main", []string{"GPU-a", "GPU-b"}},
		{"replicas of time-slicing", []*podresources.ContainerDevices{of("nvidia.com/gpu.shared", "GPU-a::0"), of("nvidia.com/gpu.shared", "GPU-a::3")}, "p", "main", []string{"GPU-a"}},
		{"a MIG instance", []*podresources.ContainerDevices{of("nvidia.com/mig-1g.10gb", "MIG-c")}, "p", "main", []string{"MIG-c"}},
		{"devices of others", []*podresources.ContainerDevices{of("intel.com/gpu", "card0"), of("nvidia.com/gpu", "GPU-a")}, "p", "main", []string{"GPU-a"}},
		{"the sidecar has none", []*podresources.ContainerDevices{of("nvidia.com/gpu", "GPU-a")}, "p", "sidecar", nil},
		{"nobody knows the pod", nil, "q", "main", nil},
	}
	for _, tt := range tests {
		for _, old := range []bool{false, true} {
			f := &fake{pods: resources(tt.devices...), old: old}
			got, err := Ask(t.Context(), serve(t, f), "ns", tt.pod, tt.container)
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("%s, old %t: got %q, %v", tt.name, old, got, err)
			}
			if old && f.lists != 1 {
				t.Errorf("%s: an old kubelet was asked for its list %d times", tt.name, f.lists)
			}
		}
	}
}

func TestAskFails(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Ask(ctx, serve(t, &fake{stuck: true}), "ns", "p", "main"); err == nil {
		t.Error("a kubelet that hangs gave an answer")
	}
	socket := filepath.Join(t.TempDir(), "none")
	if _, err := Ask(t.Context(), socket, "ns", "p", "main"); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("nobody listens: %v", err)
	}
}

func TestDevicesWithoutKubelet(t *testing.T) {
	before := Sockets
	t.Cleanup(func() { Sockets = before })
	Sockets = []string{filepath.Join(t.TempDir(), "none")}
	if got, err := Devices(t.Context(), "ns", "p", "main"); err != nil || got != nil {
		t.Errorf("got %q, %v", got, err)
	}
	Sockets = append(Sockets, serve(t, &fake{pods: resources(&podresources.ContainerDevices{DeviceIds: []string{"GPU-a"}})}))
	if got, err := Devices(t.Context(), "ns", "p", "main"); err != nil || !slices.Equal(got, []string{"GPU-a"}) {
		t.Errorf("got %q, %v", got, err)
	}
}
