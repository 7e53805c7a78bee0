// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin is a small device plugin for tests: it hands out nvidia.com/gpu as NVIDIA's does
// with time-slicing, several replicas of each GPU, in each of the forms in which that one can hand a GPU
// over. It never looks at a GPU: it is told which there are.
//
// A container that asks for one gets a replica of the GPU that has the fewest left, so that pods share a
// GPU as long as that is possible.
package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Resource is what is handed out.
const Resource = "nvidia.com/gpu"

// Form is how a GPU is handed to a container.
type Form string

// The forms.
const (
	ByEnv         Form = "env"             // NVIDIA_VISIBLE_DEVICES with UUIDs
	ByMounts      Form = "volume-mounts"   // /var/run/nvidia-container-devices/UUID
	ByCDI         Form = "cdi-cri"         // CDI devices, which the engine injects
	ByAnnotations Form = "cdi-annotations" // annotations cdi.k8s.io/..., which the engine or a runtime injects
)

// separator is between a GPU's UUID and the number of a replica, as in NVIDIA's plugin.
const separator = "::"

// registerTime bounds a registration; the kubelet answers at once.
const registerTime = 10 * time.Second

// pollTime is how often the kubelet's socket is looked at: a kubelet that restarted has a new one and
// has forgotten its plugins.
const pollTime = 200 * time.Millisecond

// Options are what a [Plugin] is made of.
type Options struct {
	Dir      string   // the kubelet's folder of plugins; empty: where it always is
	GPUs     []string // UUIDs
	Replicas int
	Form     Form
	CDIKind  string // such as gpufence.dev/simgpu, whose devices have the UUIDs as names
	// Log hears what was handed out, in one line.
	Log func(format string, args ...any)
}

// Plugin is one that runs. Its methods may be called by several goroutines.
type Plugin struct {
	v1beta1.UnimplementedDevicePluginServer

	opts Options
	stop chan struct{}
	done sync.WaitGroup

	mu         sync.Mutex
	form       Form
	registered int
	err        error
}

// Start begins to serve; whether and when the kubelet has taken it says [Plugin.Registered].
func Start(opts Options) (*Plugin, error) {
	if opts.Dir == "" {
		opts.Dir = v1beta1.DevicePluginPath
	}
	if opts.Log == nil {
		opts.Log = func(string, ...any) {}
	}
	if len(opts.GPUs) == 0 || opts.Replicas < 1 {
		return nil, errors.New("start device plugin: no GPUs, or no replicas of them")
	}
	p := &Plugin{opts: opts, form: opts.Form, stop: make(chan struct{})}
	p.done.Go(p.run)
	return p, nil
}

// Hand changes the form for containers that start from now on.
func (p *Plugin) Hand(form Form) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.form = form
}

// Registered says how often a kubelet has taken the plugin, and what went wrong last.
func (p *Plugin) Registered() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.registered, p.err
}

// Close ends it. Containers keep what they have.
func (p *Plugin) Close() {
	close(p.stop)
	p.done.Wait()
}

// run serves and registers, again for each kubelet that comes.
func (p *Plugin) run() {
	kubelet := filepath.Join(p.opts.Dir, "kubelet.sock")
	var seen os.FileInfo
	var server *grpc.Server
	var serving sync.WaitGroup
	end := func() {
		if server != nil {
			server.Stop()
			serving.Wait()
			server = nil
		}
	}
	defer end()
	for tick := time.NewTicker(pollTime); ; {
		// A kubelet that starts removes what is in the folder, our socket too.
		if now, err := os.Stat(kubelet); err == nil && (seen == nil || !os.SameFile(seen, now) || !seen.ModTime().Equal(now.ModTime())) {
			end()
			started, err := p.serve(&serving)
			if err == nil {
				server = started
				err = p.register(kubelet)
			}
			p.mu.Lock()
			if p.err = err; err == nil {
				p.registered++
				seen = now
			}
			p.mu.Unlock()
		}
		select {
		case <-p.stop:
			tick.Stop()
			return
		case <-tick.C:
		}
	}
}

func (p *Plugin) endpoint() string { return "gpufence-test.sock" }

func (p *Plugin) serve(serving *sync.WaitGroup) (*grpc.Server, error) {
	socket := filepath.Join(p.opts.Dir, p.endpoint())
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("serve device plugin: %w", err)
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("serve device plugin: %w", err)
	}
	server := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(server, p)
	serving.Go(func() {
		if err := server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			p.mu.Lock()
			p.err = fmt.Errorf("serve device plugin: %w", err)
			p.mu.Unlock()
		}
	})
	return server, nil
}

func (p *Plugin) register(kubelet string) (err error) {
	conn, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("register device plugin: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(context.Background(), registerTime)
	defer cancel()
	if _, err := v1beta1.NewRegistrationClient(conn).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: p.endpoint(), ResourceName: Resource,
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	}); err != nil {
		return fmt.Errorf("register device plugin: %w", err)
	}
	return nil
}

// GetDevicePluginOptions says what the plugin wants to be asked.
func (p *Plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch lists the replicas; they never change.
func (p *Plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	var all v1beta1.ListAndWatchResponse
	for _, gpu := range p.opts.GPUs {
		for i := range p.opts.Replicas {
			all.Devices = append(all.Devices, &v1beta1.Device{ID: fmt.Sprintf("%s%s%d", gpu, separator, i), Health: v1beta1.Healthy})
		}
	}
	if err := stream.Send(&all); err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	select {
	case <-stream.Context().Done():
	case <-p.stop:
	}
	return nil
}

// GetPreferredAllocation packs: of the GPUs in question, replicas of the one with the fewest left.
func (p *Plugin) GetPreferredAllocation(_ context.Context, r *v1beta1.PreferredAllocationRequest) (*v1beta1.PreferredAllocationResponse, error) {
	var out v1beta1.PreferredAllocationResponse
	for _, c := range r.GetContainerRequests() {
		out.ContainerResponses = append(out.ContainerResponses, &v1beta1.ContainerPreferredAllocationResponse{
			DeviceIDs: pack(c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize())),
		})
	}
	return &out, nil
}

// pack chooses n of the available replicas, all that must be included first.
func pack(available, must []string, n int) []string {
	left := map[string]int{}
	for _, id := range available {
		left[gpuOf(id)]++
	}
	order := slices.Clone(available)
	slices.SortFunc(order, func(a, b string) int {
		return cmp.Or(cmp.Compare(left[gpuOf(a)], left[gpuOf(b)]), cmp.Compare(a, b))
	})
	chosen := slices.Clone(must)
	for _, id := range order {
		if len(chosen) >= n {
			break
		}
		if !slices.Contains(chosen, id) {
			chosen = append(chosen, id)
		}
	}
	return chosen
}

func gpuOf(id string) string {
	gpu, _, _ := strings.Cut(id, separator)
	return gpu
}

// Allocate hands the GPUs over.
func (p *Plugin) Allocate(_ context.Context, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	p.mu.Lock()
	form := p.form
	p.mu.Unlock()
	var out v1beta1.AllocateResponse
	for _, c := range r.GetContainerRequests() {
		var gpus []string
		for _, id := range c.GetDevicesIds() {
			if gpu := gpuOf(id); !slices.Contains(gpus, gpu) {
				gpus = append(gpus, gpu)
			}
		}
		answer, err := hand(form, p.opts.CDIKind, gpus)
		if err != nil {
			return nil, err
		}
		p.opts.Log("device plugin: %s by %s", strings.Join(c.GetDevicesIds(), " "), form)
		out.ContainerResponses = append(out.ContainerResponses, answer)
	}
	return &out, nil
}

func hand(form Form, kind string, gpus []string) (*v1beta1.ContainerAllocateResponse, error) {
	var names []string
	for _, gpu := range gpus {
		names = append(names, kind+"="+gpu)
	}
	out := &v1beta1.ContainerAllocateResponse{}
	switch form {
	case ByEnv:
		out.Envs = map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(gpus, ",")}
	case ByMounts:
		out.Envs = map[string]string{"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}
		for _, gpu := range gpus {
			out.Mounts = append(out.Mounts, &v1beta1.Mount{HostPath: "/dev/null", ContainerPath: "/var/run/nvidia-container-devices/" + gpu})
		}
	case ByCDI:
		for _, name := range names {
			out.CdiDevices = append(out.CdiDevices, &v1beta1.CDIDevice{Name: name})
		}
	case ByAnnotations:
		out.Annotations = map[string]string{"cdi.k8s.io/gpufence-test_gpu": strings.Join(names, ",")}
	default:
		return nil, fmt.Errorf("hand out GPUs: no form %q", form)
	}
	return out, nil
}
