// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/user"
	"strconv"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
)

// shutdownTime is how long requests in progress may take when we are told to stop.
const shutdownTime = 2 * time.Second

// Serve answers on the listener (nil: on a socket of our own at the path) and runs the daemon
// until the context ends. ready is called once requests are taken.
func (d *Daemon) Serve(ctx context.Context, l net.Listener, ready func()) error {
	gid := readGroup()
	if l == nil {
		var err error
		if l, err = server.Listen(d.cfg.Socket, gid); err != nil {
			return err
		}
	}
	srv := server.New(d, server.Options{
		ReadGID: gid, Metrics: d.node.metrics.Handler(), Logf: func(format string, args ...any) { d.log.Warnf(format, args...) },
	})
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	probed := make(chan error, 1)
	if addr := d.cfg.MetricsAddress; addr == "" {
		probed <- nil
	} else if tcp, err := new(net.ListenConfig).Listen(ctx, "tcp", addr); err != nil {
		// Monitoring that does not work is no reason to leave containers unwatched.
		d.once("metrics-address", err)
		probed <- nil
	} else {
		go func() { probed <- srv.ServeProbes(ctx, tcp) }()
	}
	served := make(chan error, 1)
	go func() {
		err := srv.Serve(l)
		stop() // without a socket there is no point in going on
		served <- err
	}()
	ready()
	runErr := d.Run(ctx)
	end, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	err := srv.Shutdown(end)
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // streams of events are cut
	}
	return errors.Join(runErr, err, <-served, <-probed)
}

// readGroup is the gid of group gpufence, whose members may read; -1 if there is none.
func readGroup() int {
	g, err := user.LookupGroup("gpufence")
	if err != nil {
		return -1
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return -1
	}
	return gid
}

// Describe is a line for the log about what the daemon works with.
func (d *Daemon) Describe() string {
	return fmt.Sprintf("gpufenced %s on %s, state in %s, cgroups %s", api.BuildVersion, d.cfg.Socket, d.cfg.RunDir, d.host.Mode())
}
