// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestPack(t *testing.T) {
	for _, c := range []struct {
		name            string
		available, must []string
		n               int
		want            []string
	}{
		{"the GPU with the fewest left", []string{"a::0", "a::1", "b::1"}, nil, 1, []string{"b::1"}},
		{"the same at first", []string{"b::0", "a::0", "a::1", "b::1"}, nil, 2, []string{"a::0", "a::1"}},
		{"what it must", []string{"a::0", "b::0"}, []string{"b::0"}, 2, []string{"b::0", "a::0"}},
		{"all", []string{"a::0"}, nil, 3, []string{"a::0"}},
	} {
		if got := pack(c.available, c.must, c.n); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// kubelet takes registrations, as far as a plugin sees it.
type kubelet struct {
	v1beta1.UnimplementedRegistrationServer
	mu    sync.Mutex
	heard []*v1beta1.RegisterRequest
}

func (k *kubelet) Register(_ context.Context, r *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.heard = append(k.heard, r)
	return &v1beta1.Empty{}, nil
}

func (k *kubelet) serve(t *testing.T, dir string) func() {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	v1beta1.RegisterRegistrationServer(s, k)
	go func() { _ = s.Serve(l) }() // ended by Stop
	return s.Stop
}

func await(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestPluginRegistersAgain: with a kubelet that came later, and with the next one; and hands out in
// every form.
func TestPluginRegistersAgain(t *testing.T) {
	dir, err := os.MkdirTemp("", "plugin-") // short: a socket's path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p, err := Start(Options{Dir: dir, GPUs: []string{"GPU-a", "GPU-b"}, Replicas: 2, Form: ByEnv, CDIKind: "example.dev/gpu"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	k := &kubelet{}
	for round := 1; round <= 2; round++ {
		stop := k.serve(t, dir)
		await(t, "registered", func() bool { n, _ := p.Registered(); return n == round })
		stop()
		if err := os.Remove(filepath.Join(dir, "kubelet.sock")); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	k.mu.Lock()
	if got := k.heard[1]; got.GetResourceName() != Resource || got.GetEndpoint() != "gpufence-test.sock" {
		t.Errorf("registered as %v", got)
	}
	k.mu.Unlock()
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, "gpufence-test.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := v1beta1.NewDevicePluginClient(conn)
	stream, err := client.ListAndWatch(t.Context(), &v1beta1.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if list, err := stream.Recv(); err != nil || len(list.GetDevices()) != 4 || list.GetDevices()[3].GetID() != "GPU-b::1" {
		t.Errorf("devices are %v, %v", list, err)
	}
	request := &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{"GPU-b::1", "GPU-b::0", "GPU-a::0"}}}}
	for form, ok := range map[Form]func(*v1beta1.ContainerAllocateResponse) bool{
		ByEnv: func(r *v1beta1.ContainerAllocateResponse) bool {
			return r.GetEnvs()["NVIDIA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
		},
		ByMounts: func(r *v1beta1.ContainerAllocateResponse) bool {
			return len(r.GetMounts()) == 2 && r.GetMounts()[0].GetContainerPath() == "/var/run/nvidia-container-devices/GPU-b"
		},
		ByCDI: func(r *v1beta1.ContainerAllocateResponse) bool {
			return len(r.GetCdiDevices()) == 2 && r.GetCdiDevices()[0].GetName() == "example.dev/gpu=GPU-b"
		},
		ByAnnotations: func(r *v1beta1.ContainerAllocateResponse) bool {
			return r.GetAnnotations()["cdi.k8s.io/gpufence-test_gpu"] == "example.dev/gpu=GPU-b,example.dev/gpu=GPU-a"
		},
	} {
		p.Hand(form)
		got, err := client.Allocate(t.Context(), request)
		if err != nil || len(got.GetContainerResponses()) != 1 || !ok(got.GetContainerResponses()[0]) {
			t.Errorf("%s: %v, %v", form, got, err)
		}
	}
	p.Hand("telepathy")
	if _, err := client.Allocate(t.Context(), request); err == nil {
		t.Error("a form that does not exist was handed out")
	}
}
