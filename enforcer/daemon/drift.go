// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/doctor"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// driftInterval is how often the engines' configuration is looked at. It changes by hand or by a
// configuration manager, and the alert waits for minutes anyway.
const driftInterval = time.Minute

// enginesFile remembers, in the state folder, which engines were right.
const enginesFile = "engines.json"

// runDrift watches the engines' configuration.
func (d *Daemon) runDrift(ctx context.Context) {
	t := time.NewTicker(driftInterval)
	defer t.Stop()
	for {
		d.once("engines", d.lookAtEngines(d.node.root))
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// lookAtEngines says what was right and is not any more. It holds mu only to tell.
func (d *Daemon) lookAtEngines(root string) error {
	path := filepath.Join(d.journal.Dir(), enginesFile)
	before := map[string]string{}
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &before)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	// A file that is damaged remembers nothing; what is there now is written over it.
	drift, remember := doctor.Drift(before, doctor.Engines(root))
	if err != nil {
		err = fmt.Errorf("read which engines were right: %w", err)
	}
	if !maps.Equal(before, remember) {
		text, encodeErr := json.Marshal(remember)
		if encodeErr == nil {
			encodeErr = registry.WriteFile(path, append(text, '\n'), 0o600)
		}
		err = errors.Join(err, encodeErr)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range drift {
		if !slices.Contains(d.node.drift, s) {
			d.event(api.Event{Type: "config-drift", Message: cutTo(s, 1024)})
		}
	}
	if len(drift) == 0 && len(d.node.drift) > 0 {
		d.event(api.Event{Type: "config-drift-gone", Message: "the engines' configuration is as it should be again"})
	}
	d.node.drift = drift
	return err
}
