// SPDX-License-Identifier: Apache-2.0

// Package cri asks the container engine of a node, over CRI, which handlers it has loaded. The files
// of its configuration say what it will do when it is started again; only the engine says what it
// does now. The kubelet passes on the names of handlers, where both are new enough, and nothing of
// what they start.
//
// It promises: an engine that does not say which handlers it has is never taken for one that has
// ours; where the engine says what a handler starts, that is judged, too. It keeps no connection.
package cri

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// wrapper is what our runtime is called, before the engine's suffix.
const wrapper = "gpufence-runtime"

// patience is how long an engine may take to answer.
const patience = 5 * time.Second

// sockets are where the engines of the usual distributions serve CRI, by what `gpufence install`
// calls them. Those that a distribution brings for its kubelet come before the one that may be there
// for Docker only.
var sockets = map[string][]string{
	"containerd": {"/run/k3s/containerd/containerd.sock", "/var/snap/microk8s/common/run/containerd.sock", "/run/k0s/containerd.sock", "/run/containerd/containerd.sock"},
	"crio":       {"/run/crio/crio.sock"},
}

// Node is where to ask.
type Node struct {
	Root   string // the node's root as we see it
	Kind   string // containerd, crio
	Socket string // on the node; "" looks where the distributions have it
}

// Engine is what one said.
type Engine struct {
	Name    string // as it calls itself: containerd, cri-o
	Version string
	// Handlers are those that it has loaded; nil if it does not say.
	Handlers map[string]Handler
}

// Handler is what the engine said about one.
type Handler struct {
	// Detailed: the engine said what it starts, not its name only.
	Detailed bool
	Program  string // "" is the engine's default
	// Filters: annotations reach the program only if they match one of Annotations.
	Filters     bool
	Annotations []string
}

// Ask asks the first engine that answers.
func (n Node) Ask(ctx context.Context) (Engine, error) {
	if n.Socket != "" {
		return ask(ctx, n.on(n.Socket))
	}
	known := sockets[n.Kind]
	var failed []error
	for _, s := range known {
		at := n.on(s)
		if _, err := os.Stat(at); err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				failed = append(failed, fmt.Errorf("look at %s's socket: %w", n.Kind, err))
			}
			continue
		}
		e, err := ask(ctx, at)
		if err == nil {
			return e, nil
		}
		failed = append(failed, err)
	}
	if len(failed) == 0 {
		return Engine{}, fmt.Errorf("find %s's socket: it is none of %s: name it with --engine-socket (host.engineSocket of the chart)", n.Kind, strings.Join(known, ", "))
	}
	return Engine{}, errors.Join(failed...)
}

// on is a path of the node. Its /var/run is a link to /run, which from here would be ours.
func (n Node) on(socket string) string {
	if rest, ok := strings.CutPrefix(socket, "/var/run/"); ok {
		socket = "/run/" + rest
	}
	return filepath.Join(n.Root, socket)
}

func ask(ctx context.Context, socket string) (e Engine, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return Engine{}, fmt.Errorf("connect to %s: %w", socket, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := runtime.NewRuntimeServiceClient(conn)
	version, err := client.Version(ctx, &runtime.VersionRequest{})
	if err != nil {
		return Engine{}, fmt.Errorf("ask %s for its version: %w", socket, err)
	}
	status, err := client.Status(ctx, &runtime.StatusRequest{Verbose: true})
	if err != nil {
		return Engine{}, fmt.Errorf("ask %s for its handlers: %w", socket, err)
	}
	e = Engine{Name: version.GetRuntimeName(), Version: version.GetRuntimeVersion()}
	if e.Handlers, err = handlers(status); err != nil {
		return Engine{}, fmt.Errorf("read what %s says of its handlers: %w", socket, err)
	}
	return e, nil
}

// handlers takes the details where the engine has them. They are meant for people to read, so an
// engine may have none; the names are a part of CRI since Kubernetes 1.30.
func handlers(status *runtime.StatusResponse) (map[string]Handler, error) {
	var out map[string]Handler
	if len(status.GetRuntimeHandlers()) > 0 {
		out = map[string]Handler{}
		for _, h := range status.GetRuntimeHandlers() {
			out[h.GetName()] = Handler{}
		}
	}
	text := status.GetInfo()["config"]
	if text == "" {
		return out, nil
	}
	var config struct {
		Containerd struct {
			Runtimes map[string]struct {
				PodAnnotations []string
				Options        map[string]any
			}
		}
		Crio struct {
			Runtimes map[string]struct{ RuntimePath string }
		}
	}
	if err := json.Unmarshal([]byte(text), &config); err != nil {
		return nil, err
	}
	details := map[string]Handler{}
	for name, r := range config.Containerd.Runtimes {
		program, _ := r.Options["BinaryName"].(string) // other shims have other options
		details[name] = Handler{Detailed: true, Program: program, Filters: true, Annotations: r.PodAnnotations}
	}
	for name, r := range config.Crio.Runtimes {
		details[name] = Handler{Detailed: true, Program: r.RuntimePath}
	}
	if len(details) == 0 {
		return out, nil
	}
	if out == nil { // containerd 1.7
		return details, nil
	}
	for name := range out {
		if h, ok := details[name]; ok {
			out[name] = h
		}
	}
	return out, nil
}

// Through is nil if the engine, as it runs now, starts the handler's containers through gpufence.
func (e Engine) Through(handler string) error {
	if e.Handlers == nil {
		return fmt.Errorf("%s %s does not say which handlers it has loaded, so nobody knows whether %s is one: use a newer version", e.Name, e.Version, handler)
	}
	h, ok := e.Handlers[handler]
	if !ok {
		names := slices.DeleteFunc(slices.Sorted(maps.Keys(e.Handlers)), func(s string) bool { return s == "" }) // that is the default
		return fmt.Errorf("%s has not loaded the handler %s, only %s: %s", e.Name, handler, strings.Join(names, ", "), e.restart())
	}
	if !h.Detailed {
		return nil
	}
	if base := path.Base(h.Program); base != wrapper && !strings.HasPrefix(base, wrapper+".") {
		starts := h.Program
		if starts == "" {
			starts = "its default runtime"
		}
		return fmt.Errorf("the handler %s, as %s has loaded it, starts %s and not %s: %s", handler, e.Name, starts, wrapper, e.restart())
	}
	if h.Filters && !slices.ContainsFunc(h.Annotations, func(p string) bool {
		ok, err := path.Match(p, "gpufence.dev/memory.max")
		return ok && err == nil // what containerd cannot read matches nothing there either
	}) {
		return fmt.Errorf("the handler %s, as %s has loaded it, passes no gpufence.dev annotations on, so limits get lost: %s", handler, e.Name, e.restart())
	}
	return nil
}

// restart is what to do; `gpufence doctor` says whether the files are right.
func (e Engine) restart() string {
	unit := e.Name
	if e.Name == "cri-o" {
		unit = "crio"
	}
	return fmt.Sprintf("where its files name gpufence, it has not read them since: restart it on the node (systemctl restart %s), or let `gpufence install` do that with --restart-mode systemd when it writes them", unit)
}
