// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/deviceplugin"
)

const (
	mib = uint64(1) << 20
	gib = uint64(1) << 30
	// contextBytes is what a context takes on the simulated T4.
	contextBytes = 104 * mib
)

// pod is one that is to be made.
type pod struct {
	name        string
	annotations map[string]string
	unmanaged   bool   // without a RuntimeClass
	class       string // another one than ours
	containers  []part
}

// part is one container of a pod.
type part struct {
	name    string
	gpus    int
	command []string
}

// one is a pod with one container that has one GPU.
func one(name, most string, command ...string) pod {
	return pod{name: name, annotations: map[string]string{"gpufence.dev/memory.max": most}, containers: []part{{"main", 1, command}}}
}

// client is the command of the GPU program that the shim reaches.
func client(lines ...string) []string { return append([]string{"/clients/client"}, lines...) }

// manifest is what a user would have written, as JSON.
func (p pod) manifest() (string, error) {
	var containers []any
	for _, part := range p.containers {
		container := map[string]any{"name": part.name, "image": clientImage, "imagePullPolicy": "Never", "command": part.command}
		if part.gpus > 0 {
			container["resources"] = map[string]any{"limits": map[string]any{deviceplugin.Resource: part.gpus}}
		}
		containers = append(containers, container)
	}
	spec := map[string]any{"containers": containers, "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false, "enableServiceLinks": false}
	if !p.unmanaged {
		spec["runtimeClassName"] = cmp.Or(p.class, handler)
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod", "spec": spec,
		"metadata": map[string]any{"name": p.name, "namespace": "default", "annotations": p.annotations},
	})
	if err != nil {
		return "", fmt.Errorf("write manifest: %w", err)
	}
	return string(text), nil
}

func (c *cluster) apply(ctx context.Context, p pod) error {
	text, err := p.manifest()
	if err != nil {
		return err
	}
	_, err = c.kubectl(ctx, text, "apply", "-f", "-")
	return err
}

// ended is how a container ended.
type ended struct {
	ExitCode int    `json:"exitCode"`
	Reason   string `json:"reason"`
	Message  string `json:"message"`
}

type containerState struct {
	Waiting *struct {
		Reason  string `json:"reason"`
		Message string `json:"message"`
	} `json:"waiting"`
	Running    *struct{} `json:"running"`
	Terminated *ended    `json:"terminated"`
}

// status is what the API says of a pod, as far as we care.
type status struct {
	Phase      string `json:"phase"`
	Conditions []struct {
		Type    string `json:"type"`
		Status  string `json:"status"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
	} `json:"conditions"`
	Containers []struct {
		Name         string         `json:"name"`
		ContainerID  string         `json:"containerID"`
		RestartCount int            `json:"restartCount"`
		State        containerState `json:"state"`
		LastState    containerState `json:"lastState"`
	} `json:"containerStatuses"`
}

func (c *cluster) status(ctx context.Context, name string) (status, error) {
	out, err := c.kubectl(ctx, "", "get", "pod", name, "-o", "json")
	if err != nil {
		return status{}, err
	}
	var p struct {
		Status status `json:"status"`
	}
	if err := json.Unmarshal([]byte(out), &p); err != nil {
		return status{}, fmt.Errorf("read pod %s: %w", name, err)
	}
	return p.Status, nil
}

func (s status) String() string {
	text, err := json.Marshal(s)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// running waits until all of a pod's containers run.
func (c *cluster) running(ctx context.Context, name string) error {
	return until(ctx, "pod "+name+" runs", func(ctx context.Context) (bool, string) {
		s, err := c.status(ctx, name)
		if err != nil {
			return false, err.Error()
		}
		all := s.Phase == "Running" && len(s.Containers) > 0
		for _, part := range s.Containers {
			all = all && part.State.Running != nil
		}
		return all, s.String()
	})
}

// begin applies a pod and waits until it runs.
func (c *cluster) begin(ctx context.Context, pods ...pod) error {
	for _, p := range pods {
		if err := c.apply(ctx, p); err != nil {
			return err
		}
	}
	for _, p := range pods {
		if err := c.running(ctx, p.name); err != nil {
			return err
		}
	}
	return nil
}

// remove deletes pods and waits until gpufenced has what they held back.
func (c *cluster) remove(ctx context.Context, names ...string) error {
	if len(names) == 0 {
		return nil
	}
	if _, err := c.kubectl(ctx, "", append([]string{"delete", "pod", "--ignore-not-found"}, names...)...); err != nil {
		return err
	}
	return until(ctx, "gpufenced has let "+strings.Join(names, " ")+" go", func(ctx context.Context) (bool, string) {
		all, err := c.client.Containers(ctx)
		if err != nil {
			return false, err.Error()
		}
		for _, one := range all {
			if slices.Contains(names, one.Pod.Name) && one.State == "running" {
				return false, fmt.Sprintf("%s of %s is %s", one.Name, one.Pod.Name, one.State)
			}
		}
		return true, ""
	})
}

// removeAll ends a step.
func (c *cluster) removeAll(ctx context.Context) error {
	out, err := c.kubectl(ctx, "", "get", "pods", "-o", "jsonpath={.items[*].metadata.name}")
	if err != nil {
		return err
	}
	return c.remove(ctx, strings.Fields(out)...)
}

// reply is a JSON line of a test client.
type reply struct {
	Op         string `json:"op"`
	OK         bool   `json:"ok"`
	ResultName string `json:"result_name"`
	Why        string `json:"why"`
	UUID       string `json:"uuid"`
	Granted    uint64 `json:"granted_bytes"`
	Held       uint64 `json:"held_bytes"`
	Total      uint64 `json:"total_bytes"`
	Reached    int    `json:"reached"`
}

// replies takes a client's output apart.
func replies(out string) []reply {
	var all []reply
	for line := range strings.Lines(out) {
		var r reply
		if json.Unmarshal([]byte(line), &r) == nil && r.Op != "" {
			all = append(all, r)
		}
	}
	return all
}

// hear waits for a client's reply to an operation.
func (c *cluster) hear(ctx context.Context, name, part, op string) (found reply, err error) {
	err = until(ctx, fmt.Sprintf("%s of %s says %s", part, name, op), func(ctx context.Context) (bool, string) {
		out, err := c.kubectl(ctx, "", "logs", name, "-c", part)
		if err != nil {
			return false, err.Error()
		}
		for _, r := range replies(out) {
			if r.Op == op {
				found = r
				return true, ""
			}
		}
		return false, out
	})
	return found, err
}

// event is one of Kubernetes.
type event struct {
	Type    string `json:"type"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// events are those about a pod.
func (c *cluster) events(ctx context.Context, name string) ([]event, error) {
	out, err := c.kubectl(ctx, "", "get", "events", "--field-selector", "involvedObject.name="+name, "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []event `json:"items"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, fmt.Errorf("read events of %s: %w", name, err)
	}
	return list.Items, nil
}

// tells waits for an event about a pod with a reason, where one is given, and words.
func (c *cluster) tells(ctx context.Context, name, reason string, words ...string) (found event, err error) {
	err = until(ctx, fmt.Sprintf("an event %s of %s with %q", reason, name, words), func(ctx context.Context) (bool, string) {
		all, err := c.events(ctx, name)
		if err != nil {
			return false, err.Error()
		}
		for _, e := range all {
			if (reason == "" || e.Reason == reason) && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(e.Message, w) }) {
				found = e
				return true, ""
			}
		}
		return false, fmt.Sprintf("%+v", all)
	})
	return found, err
}

// view is what gpufenced says of a container that runs.
func (c *cluster) view(ctx context.Context, name, part string) (api.Container, error) {
	all, err := c.client.Containers(ctx)
	if err != nil {
		return api.Container{}, err
	}
	for _, one := range all {
		if one.Pod.Name == name && one.Name == part && one.State == "running" {
			return one, nil
		}
	}
	return api.Container{}, fmt.Errorf("find %s of %s: gpufenced has no such container that runs", part, name)
}

// awaitView waits until gpufenced says so of a container.
func (c *cluster) awaitView(ctx context.Context, name, part, what string, so func(api.Container) bool) (found api.Container, err error) {
	err = until(ctx, fmt.Sprintf("%s of %s: %s", part, name, what), func(ctx context.Context) (bool, string) {
		found, err = c.view(ctx, name, part)
		if err != nil {
			return false, err.Error()
		}
		return so(found), fmt.Sprintf("%+v", found.GPUs)
	})
	return found, err
}

// journal waits for an event of gpufenced.
func (c *cluster) journal(ctx context.Context, what string, so func(api.Event) bool) (found api.Event, err error) {
	err = until(ctx, "gpufenced says "+what, func(ctx context.Context) (bool, string) {
		last := ""
		ok := false
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := c.client.Events(ctx, 0, false, func(e api.Event) error {
			last = e.Message
			if so(e) {
				found, ok = e, true
			}
			return nil
		}); err != nil {
			return false, err.Error()
		}
		return ok, last
	})
	return found, err
}
