// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
)

// nodeEvery is how often the node's labels are read again though nothing has changed for us: others
// may have written them.
const nodeEvery = time.Minute

// poke lets the node be looked at now.
func (a *Agent) poke() {
	select {
	case a.wake <- struct{}{}:
	default: // it will be already
	}
}

// nodeView is what the node's loop remembers.
type nodeView struct {
	state    *api.Node
	heard    time.Time // of gpufenced's last answer
	began    time.Time
	handlers []string
	read     time.Time // of the node's object
	has      map[string]string
	reasons  []string
}

// keepNode keeps the labels of the node as they should be.
func (a *Agent) keepNode(ctx context.Context) {
	v := nodeView{began: a.opts.Now()}
	for {
		if err := a.look(ctx, &v); err != nil && ctx.Err() == nil {
			a.opts.Log.WithError(err).Warn("the labels of the node may be old")
			v.read = time.Time{}
		}
		a.mu.Lock()
		a.beat = a.opts.Now()
		a.mu.Unlock()
		t := time.NewTimer(a.opts.Tick)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-a.wake:
			t.Stop()
		case <-t.C:
		}
	}
}

func (a *Agent) look(ctx context.Context, v *nodeView) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	state, why := a.daemon.Node(ctx)
	now := a.opts.Now()
	switch {
	case why == nil:
		v.state, v.heard = &state, now
	case v.state != nil && now.Sub(v.heard) < a.opts.Patience, v.state == nil && now.Sub(v.began) < a.opts.Patience:
		return nil // being restarted, most likely: the label stays as it is for that long
	default:
		v.state = nil
	}
	canary, err := readCanary(a.opts.CanaryFile)
	if err != nil {
		a.opts.Log.WithError(err).Warn("the canary's result cannot be read")
	}
	if now.Sub(v.read) >= nodeEvery || v.has == nil {
		node, err := a.client.CoreV1().Nodes().Get(ctx, a.opts.Node, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("read the node: %w", err)
		}
		v.has, v.read, v.handlers = node.Labels, now, nil
		if v.has == nil {
			v.has = map[string]string{}
		}
		for _, h := range node.Status.RuntimeHandlers {
			v.handlers = append(v.handlers, h.Name)
		}
	}
	in := kube.Node{State: v.state, Canary: canary, Handlers: v.handlers, Handler: a.opts.Handler, Now: now, CanaryAge: a.opts.CanaryAge}
	if why != nil {
		in.Why = why.Error()
	}
	wanted, reasons := kube.Labels(in)
	if !slices.Equal(reasons, v.reasons) {
		v.reasons = reasons
		if len(reasons) == 0 {
			a.opts.Log.Info("the node is ready")
		} else {
			a.opts.Log.WithField("why", strings.Join(reasons, "; ")).Warn("the node is not ready")
		}
	}
	changes := kube.Changes(v.has, wanted)
	if len(changes) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": changes}})
	if err != nil {
		return fmt.Errorf("write the node's labels: %w", err)
	}
	node, err := a.client.CoreV1().Nodes().Patch(ctx, a.opts.Node, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: component})
	if err != nil {
		a.mu.Lock()
		a.failed++
		a.mu.Unlock()
		return fmt.Errorf("write the node's labels: %w", err)
	}
	if v.has = node.Labels; v.has == nil {
		v.has = map[string]string{}
	}
	return nil
}

// readCanary reads what was handed over by who ran it; nil if nothing was yet.
func readCanary(file string) (*kube.Canary, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read canary: %w", err)
	}
	var c kube.Canary
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, fmt.Errorf("read canary: %w", err)
	}
	return &c, nil
}
