// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/hook/cdi"
)

const (
	// cdiPeriod is how often the specifications are looked at: a driver or a toolkit that is
	// installed is noticed in that time.
	cdiPeriod = 5 * time.Second
	// cdiDeadline bounds one generation.
	cdiDeadline = time.Minute
	// cdiRetry is how long a generation that failed is not tried again.
	cdiRetry = time.Minute
)

// nodeView is what refreshing needs of the daemon.
type nodeView interface {
	GPUs(context.Context) ([]api.GPUState, error)
	Node(context.Context) (api.Node, error)
}

// refreshCDI keeps our specification of the GPUs as it should be until the context ends.
func refreshCDI(ctx context.Context, d nodeView, cfg config.Config, log *logrus.Logger) {
	r := cdi.Refresher{
		Dirs: cfg.CDISpecDirs, Kinds: cfg.CDIKinds,
		Generate: func(ctx context.Context) (*specs.Spec, error) {
			ctx, cancel := context.WithTimeout(ctx, cdiDeadline)
			defer cancel()
			return generateApart(ctx, "/proc/self/exe", cfg.NVMLLibrary)
		},
	}
	if r.Path() == "" {
		return
	}
	var last string
	var failed time.Time
	for {
		if time.Since(failed) >= cdiRetry {
			did, err := r.Once(ctx, factsOf(ctx, d))
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				failed = time.Now()
				if last != err.Error() {
					log.WithError(err).Warn("cannot keep a CDI specification of the GPUs")
				}
				last = err.Error()
			case did != "":
				log.Info(did)
				last, failed = "", time.Time{}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(cdiPeriod):
		}
	}
}

// factsOf is the node as a specification has to describe it.
func factsOf(ctx context.Context, d nodeView) cdi.Facts {
	node, err := d.Node(ctx)
	if err != nil {
		return cdi.Facts{} // nothing is known, so nothing is done
	}
	f := cdi.Facts{Driver: node.Version.Driver}
	if node.Switch.Position == api.SwitchQuiesced {
		f.Down = "gpufence quiesce lets the driver go"
		return f
	}
	gpus, err := d.GPUs(ctx)
	if err != nil {
		return cdi.Facts{}
	}
	for _, g := range gpus {
		f.GPUs = append(f.GPUs, cdi.GPU{UUID: g.UUID, Position: position(g)})
	}
	return f
}

// position is how a specification may number a GPU; instances are found by their UUID only.
func position(g api.GPUState) string {
	if strings.HasPrefix(g.UUID, "MIG-") {
		return ""
	}
	return strconv.Itoa(g.Index)
}
