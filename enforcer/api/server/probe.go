// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Paths beside the versioned ones, named as everybody names them.
const (
	pathMetrics = api.PathMetrics
	pathLive    = "/healthz"
	pathReady   = "/readyz"
)

// maxProbeConns bounds the connections over TCP: a scraper or two, and the node's probes.
const maxProbeConns = 64

// probe is who answers a path that is not of the protocol; nil if none does.
func (s *Server) probe(path string) http.Handler {
	switch path {
	case pathMetrics:
		return s.opts.Metrics
	case pathLive:
		return s.health(func(h api.Health) bool { return h.Live })
	case pathReady:
		return s.health(func(h api.Health) bool { return h.Live && h.Ready })
	}
	return nil
}

func (s *Server) health(good func(api.Health) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, err := s.svc.Health(r.Context())
		if err != nil {
			s.writeError(w, err)
			return
		}
		code := http.StatusOK
		if !good(h) {
			code = http.StatusServiceUnavailable
		}
		if err := s.writeJSON(w, code, h); err != nil {
			s.writeError(w, err)
		}
	})
}

// ServeProbes answers GET of /metrics, /healthz and /readyz, and nothing else, to anybody who
// reaches the listener, until the context ends. Such a listener has no peer credentials.
func (s *Server) ServeProbes(ctx context.Context, l net.Listener) error {
	c := newConns(maxProbeConns, maxProbeConns)
	srv := httpServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		st := connOf(r.Context())
		h := s.probe(r.URL.Path)
		switch {
		case h == nil:
			s.writeError(w, withStatus(http.StatusNotFound, quota.CodeBadRequest, "%.100q is not here: there are %s, %s and %s", r.URL.Path, pathMetrics, pathLive, pathReady))
			return
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			s.writeError(w, withStatus(http.StatusMethodNotAllowed, quota.CodeBadRequest, "%.20s is not taken here: use GET", r.Method))
			return
		case !c.begin(st):
			return
		}
		defer c.end(st)
		h.ServeHTTP(w, r)
	}), s.opts, c)
	srv.ReadTimeout, srv.WriteTimeout = s.opts.ReadTimeout, 2*writeTimeout
	srv.ConnContext = func(ctx context.Context, nc net.Conn) context.Context { return c.context(ctx, nc, peerResult{}) }
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if srv.Shutdown(stop) != nil {
		_ = srv.Close() // whoever is slower than that loses an answer
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
