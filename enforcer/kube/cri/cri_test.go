// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fake is an engine.
type fake struct {
	runtime.UnimplementedRuntimeServiceServer
	name   string
	names  []string
	config string
	// silent engines have no Version, half ones no Status.
	silent, half bool
}

func (f *fake) Version(ctx context.Context, r *runtime.VersionRequest) (*runtime.VersionResponse, error) {
	if f.silent {
		return f.UnimplementedRuntimeServiceServer.Version(ctx, r)
	}
	return &runtime.VersionResponse{RuntimeName: f.name, RuntimeVersion: "v9"}, nil
}

func (f *fake) Status(_ context.Context, r *runtime.StatusRequest) (*runtime.StatusResponse, error) {
	if f.half {
		return nil, errors.New("out of order")
	}
	out := &runtime.StatusResponse{}
	for _, n := range f.names {
		out.RuntimeHandlers = append(out.RuntimeHandlers, &runtime.RuntimeHandler{Name: n})
	}
	if r.Verbose && f.config != "" {
		out.Info = map[string]string{"config": f.config}
	}
	return out, nil
}

// node has the engine at a socket of its own.
func node(t *testing.T, socket string, f *fake) string {
	t.Helper()
	root, err := os.MkdirTemp("", "cri") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	serve(t, root, socket, f)
	return root
}

func serve(t *testing.T, root, socket string, f *fake) {
	t.Helper()
	at := filepath.Join(root, socket)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	runtime.RegisterRuntimeServiceServer(s, f)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

const (
	right = `{"containerd":{"runtimes":{"runc":{"runtimeType":"io.containerd.runc.v2","options":{"BinaryName":""}},
		"gpufence":{"PodAnnotations":["gpufence.dev/*"],"options":{"BinaryName":"/opt/gpufence/bin/gpufence-runtime.cri","SystemdCgroup":true}}}}}`
	foreign = `{"containerd":{"runtimes":{"gpufence":{"PodAnnotations":["gpufence.dev/*"],"options":{"BinaryName":"/usr/bin/nvidia-container-runtime"}}}}}`
	unnamed = `{"containerd":{"runtimes":{"gpufence":{"PodAnnotations":["gpufence.dev/*"],"options":null}}}}`
	deaf    = `{"containerd":{"runtimes":{"gpufence":{"PodAnnotations":["nvidia.com/*","[broken"],"options":{"BinaryName":"/usr/bin/gpufence-runtime.cri"}}}}}`
	crio    = `{"sandboxImage":"pause","crio":{"Runtimes":{"gpufence":{"RuntimePath":"/usr/bin/gpufence-runtime.crio"},"crun":{"RuntimePath":"/usr/bin/crun"}}}}`
)

func TestThrough(t *testing.T) {
	tests := []struct {
		name string
		f    fake
		want string // "": it does
	}{
		{"containerd 2", fake{name: "containerd", names: []string{"", "runc", "gpufence"}, config: right}, ""},
		{"containerd 1.7 lists none", fake{name: "containerd", config: right}, ""},
		{"CRI-O", fake{name: "cri-o", names: []string{"crun", "gpufence"}, config: crio}, ""},
		{"names only", fake{name: "cri-o", names: []string{"", "gpufence"}, config: `{"sandboxImage":"pause"}`}, ""},
		{"written, not loaded", fake{name: "containerd", names: []string{"", "runc"}, config: `{"containerd":{"runtimes":{"runc":{}}}}`},
			"containerd has not loaded the handler gpufence, only runc: where its files name gpufence, it has not read them since: restart it on the node (systemctl restart containerd)"},
		{"the same in 1.7", fake{name: "containerd", config: `{"containerd":{"runtimes":{"runc":{}}}}`}, "containerd has not loaded the handler gpufence, only runc"},
		{"CRI-O has not loaded it", fake{name: "cri-o", names: []string{"crun"}}, "(systemctl restart crio)"},
		{"in the files and not in use", fake{name: "containerd", names: []string{"runc"}, config: right}, "has not loaded the handler gpufence, only runc"},
		{"wrapped, not loaded", fake{name: "containerd", names: []string{"gpufence"}, config: foreign}, "starts /usr/bin/nvidia-container-runtime and not gpufence-runtime: "},
		{"the default runtime", fake{name: "containerd", names: []string{"gpufence"}, config: unnamed}, "starts its default runtime and not gpufence-runtime"},
		{"annotations do not pass", fake{name: "containerd", names: []string{"gpufence"}, config: deaf}, "passes no gpufence.dev annotations on"},
		{"it does not say", fake{name: "cri-o"}, "cri-o v9 does not say which handlers it has loaded, so nobody knows whether gpufence is one"},
		{"not JSON", fake{name: "containerd", names: []string{"gpufence"}, config: `{`}, "says of its handlers: "},
		{"not ours to read", fake{name: "containerd", names: []string{"gpufence"}, config: `{"containerd":[]}`}, "says of its handlers: "},
		{"no CRI", fake{silent: true}, "for its version: "},
		{"half of CRI", fake{half: true}, "for its handlers: "},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			root := node(t, "/run/engine.sock", &c.f)
			e, err := Node{Root: root, Kind: "containerd", Socket: "/var/run/engine.sock"}.Ask(t.Context())
			if err == nil {
				err = e.Through("gpufence")
			}
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

func TestSockets(t *testing.T) {
	docker := fake{silent: true} // its containerd has CRI switched off
	root := node(t, "/run/containerd/containerd.sock", &docker)
	n := Node{Root: root, Kind: "containerd"}
	if _, err := n.Ask(t.Context()); err == nil || !strings.Contains(err.Error(), "/run/containerd/containerd.sock") {
		t.Errorf("%v", err)
	}
	serve(t, root, "/run/k3s/containerd/containerd.sock", &fake{name: "containerd", config: right})
	if e, err := n.Ask(t.Context()); err != nil || e.Through("gpufence") != nil {
		t.Errorf("%+v, %v", e, err)
	}
	// One that nobody listens on any more is passed over.
	if err := os.Remove(filepath.Join(root, "/run/k3s/containerd/containerd.sock")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "/run/k3s/containerd/containerd.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	docker.silent, docker.config = false, right
	if _, err := n.Ask(t.Context()); err != nil {
		t.Error(err)
	}
	for name, n := range map[string]Node{
		"no socket":          {Root: t.TempDir(), Kind: "containerd"},
		"no socket of CRI-O": {Root: root, Kind: "crio"},
	} {
		if _, err := n.Ask(t.Context()); err == nil || !strings.Contains(err.Error(), "--engine-socket") {
			t.Errorf("%s: %v", name, err)
		}
	}
	file := filepath.Join(root, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := (Node{Root: file, Kind: "crio"}).Ask(t.Context()); err == nil || !strings.Contains(err.Error(), "look at crio's socket") {
		t.Error(err)
	}
}
