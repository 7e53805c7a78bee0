// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// notReady is why the scheduler should not send pods with a GPU here, one sentence each. It is
// stricter than health: a GPU that takes no container, or an engine that starts containers past
// gpufence, is a reason, since the scheduler cannot know which of them a pod will meet. The caller
// holds mu.
func (d *Daemon) notReady() []string {
	var out []string
	switch sw := d.node.sw; sw.Position {
	case api.SwitchQuiesced, api.SwitchDisabled:
		why := "gpufence is " + sw.Position
		if sw.Since != nil {
			why += " since " + sw.Since.Format(time.RFC3339)
		}
		if sw.Reason != "" {
			why += " (" + sw.Reason + ")"
		}
		out = append(out, why)
	}
	if err := d.noGPUs(); err != nil {
		out = append(out, api.ErrorOf(err).Message)
	} else {
		for _, uuid := range d.order {
			if _, err := d.usable(uuid); err != nil {
				out = append(out, api.ErrorOf(err).Message)
			}
		}
	}
	if d.shimExpected() {
		if _, err := resolveLibrary(d.shimLib); err != nil {
			out = append(out, api.ErrorOf(err).Message)
		}
	}
	for _, s := range d.node.drift {
		out = append(out, "an engine's configuration has changed: "+s)
	}
	if late := d.mono() - time.Duration(d.node.tickBy.Load()); late > liveLimit {
		out = append(out, fmt.Sprintf("sampling is late by %s", late.Round(time.Second)))
	}
	return out
}

// shimExpected says whether a start needs the shim's library.
func (d *Daemon) shimExpected() bool {
	return d.cfg.Policy.Mode == quota.ModeEnforce && d.cfg.ShimDelivery != "off"
}
