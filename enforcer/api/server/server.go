// SPDX-License-Identifier: Apache-2.0

// Package server answers the protocol of enforcer/api on unix sockets for a [Service], and tells
// callers apart by the kernel's word. No peer, however many connections it opens and whatever it
// leaves unfinished, keeps another one out. It is apart from the protocol's types and client since
// it links net/http, which costs every process that has it its start.
package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Bounds of one exchange. A peer that stalls costs one goroutine for at most these.
const (
	readTimeout  = 10 * time.Second
	writeTimeout = 10 * time.Second
	idleTimeout  = 30 * time.Second
	// keepAlive is how often a followed stream of events says that it is alive, so that a
	// reader that went away is noticed.
	keepAlive = 15 * time.Second
)

// Service is what gpufenced does behind the socket. Its errors are an [*api.Error], or reach the
// caller as [api.ErrorOf] translates them.
type Service interface {
	Prepare(context.Context, api.PrepareRequest) (api.PrepareResponse, error)
	Register(context.Context, api.RegisterRequest) (api.RegisterResponse, error)
	Unregister(context.Context, api.UnregisterRequest) error
	Containers(context.Context) ([]api.Container, error)
	Container(ctx context.Context, id string) (api.Container, error)
	Set(ctx context.Context, id string, req api.SetRequest) (api.SetResponse, error)
	GPUs(context.Context) ([]api.GPUState, error)
	// Events emits, oldest first, what is newer than since; with follow it goes on until the
	// context ends or emit fails. A call of emit with nil asks only whether the reader is
	// still there.
	Events(ctx context.Context, since uint64, follow bool, emit func(*api.Event) error) error
	Version(context.Context) (api.Version, error)
	// Node is what gpufenced says of itself, for doctors.
	Node(context.Context) (api.Node, error)
	// Health is asked by probes: it must not wait for what may hang.
	Health(context.Context) (api.Health, error)
	Reload(context.Context, api.ReloadRequest) (api.ConfigInfo, error)
	Quiesce(context.Context, api.SwitchRequest) (api.Switch, error)
	Resume(context.Context, api.SwitchRequest) (api.Switch, error)
	Disable(context.Context, api.SwitchRequest) (api.Switch, error)
}

// Applier is a [Service] that follows changed manifests.
type Applier interface {
	Apply(context.Context, api.ApplyRequest) (api.ApplyResponse, error)
}

// Auditor is a [Service] that takes audits.
type Auditor interface {
	Audit(context.Context, api.AuditRequest) (api.AuditResponse, error)
}

// Options are the rim of a [Server].
type Options struct {
	// ReadGID may read; negative: only root may.
	ReadGID int
	// ReadTimeout bounds how long a peer may take for its header and for its body; 10 s.
	ReadTimeout time.Duration
	// Metrics answers GET /metrics; nil: there are none.
	Metrics http.Handler
	// MaxConns bounds the connections at one time; 512.
	MaxConns int
	// Logf hears of faults: a panic, an answer that could not be written.
	Logf func(format string, args ...any)
}

// Server answers on unix sockets that [Listen] or systemd made.
type Server struct {
	svc   Service
	opts  Options
	conns *conns
	http  *http.Server
}

// New makes a server of the service.
func New(svc Service, opts Options) *Server {
	if opts.Logf == nil {
		opts.Logf = func(string, ...any) {}
	}
	if opts.ReadTimeout <= 0 {
		opts.ReadTimeout = readTimeout
	}
	if opts.MaxConns <= 0 {
		opts.MaxConns = maxConns
	}
	s := &Server{svc: svc, opts: opts, conns: newConns(opts.MaxConns, min(maxConnsUID, opts.MaxConns))}
	s.http = httpServer(s, opts, s.conns)
	s.http.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		p, err := readPeer(c)
		return s.conns.context(ctx, c, peerResult{p, err})
	}
	return s
}

// httpServer has the bounds of one connection.
func httpServer(h http.Handler, opts Options, c *conns) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: opts.ReadTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    16 << 10,
		ConnState:         c.state,
		ErrorLog:          log.New(logWriter(opts.Logf), "", 0),
	}
}

type logWriter func(format string, args ...any)

func (w logWriter) Write(b []byte) (int, error) {
	w("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}

// Listen makes the socket, replacing one that a dead gpufenced left (the caller holds the lock
// of the run folder). With a gid that is not negative its group may connect, else only root.
func Listen(path string, gid int) (net.Listener, error) {
	switch fi, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("look at socket: %w", err)
	case fi.Mode().Type() != os.ModeSocket:
		return nil, fmt.Errorf("listen on %s: there is something else than a socket", path)
	default:
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove old socket: %w", err)
		}
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on socket: %w", err)
	}
	mode := os.FileMode(0o600)
	if gid >= 0 {
		mode = 0o660
		err = os.Chown(path, 0, gid)
	}
	if err == nil {
		err = os.Chmod(path, mode)
	}
	if err != nil {
		_ = l.Close() // the first error is the one to tell
		return nil, fmt.Errorf("set access of socket: %w", err)
	}
	return l, nil
}

// Serve answers until Shutdown; several listeners may be served at once.
func (s *Server) Serve(l net.Listener) error {
	if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	}
	return nil
}

// Shutdown stops listening and waits for the requests in progress until the context ends, then
// cuts them.
func (s *Server) Shutdown(ctx context.Context) error {
	if err := s.http.Shutdown(ctx); err != nil {
		return errors.Join(err, s.http.Close())
	}
	return nil
}

// route is what a path can be asked for; each takes one method.
type route struct {
	method string
	change bool // needs root
	doc    string
	req    any // zero values of the bodies; nil: none
	resp   any
	serve  func(s *Server, w http.ResponseWriter, r *http.Request, id string) error
}

// The whole protocol. {id} is one path segment, in which %2F stands for a slash.
var routes = map[string]route{
	"prepare":  post("Grant memory to a container that is about to be created, and make its pages. Idempotent by key.", (Service).Prepare),
	"register": post("Raise the fences of a prepared container around its first process. Idempotent by key.", (Service).Register),
	"unregister": post("Say that a container is gone. An unknown key is no error.", func(svc Service, ctx context.Context, req api.UnregisterRequest) (struct{}, error) {
		return struct{}{}, svc.Unregister(ctx, req)
	}),
	"containers":          get("List what is prepared, runs, or ended not long ago.", (Service).Containers),
	"containers/{id}":     {method: http.MethodGet, doc: "Show one container, by any unambiguous name.", resp: api.Container{}, serve: (*Server).container},
	"containers/{id}/set": {method: http.MethodPost, change: true, doc: "Change limits of a running container.", req: api.SetRequest{}, resp: api.SetResponse{}, serve: (*Server).set},
	"apply": post("Follow the annotations of pods whose manifests have changed.", func(svc Service, ctx context.Context, req api.ApplyRequest) (api.ApplyResponse, error) {
		a, ok := svc.(Applier)
		if !ok {
			return api.ApplyResponse{}, api.Errorf(quota.CodeNotEnforced, "this gpufenced does not follow manifests: use `gpufence set`")
		}
		return a.Apply(ctx, req)
	}),
	"audit": post("Report containers that have a GPU and are not fenced. Each is said once, and policy unmanaged deals with their processes.", func(svc Service, ctx context.Context, req api.AuditRequest) (api.AuditResponse, error) {
		a, ok := svc.(Auditor)
		if !ok {
			return api.AuditResponse{}, api.Errorf(quota.CodeNotEnforced, "this gpufenced takes no audits: upgrade it")
		}
		return a.Audit(ctx, req)
	}),
	"gpus":    get("List the node's GPUs as gpufenced sees them.", (Service).GPUs),
	"node":    get("Say what gpufenced knows of itself and of the node.", (Service).Node),
	"version": get("Say who answers.", (Service).Version),
	"events":  {method: http.MethodGet, doc: "Read the journal, one JSON object a line, oldest first.", resp: api.Event{}, serve: (*Server).events},
	"reload":  post("Read the configuration file again. A wrong one is refused, and what was in force goes on.", (Service).Reload),
	"quiesce": post("Let NVML go and refuse starts, for a driver upgrade. Limits stay with the shim.", (Service).Quiesce),
	"resume":  post("End quiesce or disable.", (Service).Resume),
	"disable": post("Break the glass: nothing is enforced, starts pass without a limit, and everything says so.", (Service).Disable),
}

// match finds the route of a path as it was sent: unescaping before splitting would make a
// slash in an id a border.
func match(escaped string) (rt route, id string, ok bool) {
	rest, ok := strings.CutPrefix(escaped, "/"+api.APIVersion+"/")
	if !ok {
		return rt, "", false
	}
	seg := strings.Split(rest, "/")
	if len(seg) >= 2 && seg[0] == "containers" && seg[1] != "" {
		id, seg[1] = seg[1], "{id}"
	} else if len(seg) > 1 {
		return rt, "", false
	}
	rt, ok = routes[strings.Join(seg, "/")]
	return rt, id, ok
}

// ServeHTTP answers one request; every path out of it that is not 2xx carries an [api.Error].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer func() {
		if p := recover(); p != nil {
			s.opts.Logf("panic in %s %s: %v\n%s", r.Method, r.URL.Path, p, debug.Stack())
			// If the header is out already this only cuts the body short, which the client sees.
			s.writeError(w, api.Errorf(quota.CodeInternal, "gpufenced has a fault in %s; its log has the details", r.URL.Path))
		}
	}()
	if err := s.serve(w, r); err != nil {
		s.writeError(w, err)
	}
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) error {
	st := connOf(r.Context())
	if st == nil {
		return api.Errorf(quota.CodeForbidden, "the caller is not known, since it did not come through a connection of this server")
	}
	defer s.conns.end(st)
	peer, err := st.peer.peer, st.peer.err
	if err != nil {
		return api.Errorf(quota.CodeForbidden, "the caller is not known, since its socket tells no credentials: %v", err)
	}
	if !peer.mayRead(s.opts.ReadGID) {
		return api.Errorf(quota.CodeForbidden, "uid %d may not ask gpufenced: run as root, or join the group gpufence to read", peer.UID)
	}
	if h := s.probe(r.URL.Path); h != nil {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			return withStatus(http.StatusMethodNotAllowed, quota.CodeBadRequest, "gpufenced does not take %.20s on %s: use GET", r.Method, r.URL.Path)
		}
		if !s.conns.begin(st) {
			return errEvicted
		}
		h.ServeHTTP(w, r)
		return nil
	}
	rt, id, ok := match(r.URL.EscapedPath())
	if !ok {
		return withStatus(http.StatusNotFound, quota.CodeBadRequest, "gpufenced %s has no path %.100q: it speaks /%s/..., so the caller may be of another version",
			api.BuildVersion, r.URL.Path, api.APIVersion)
	}
	if rt.method != r.Method {
		return withStatus(http.StatusMethodNotAllowed, quota.CodeBadRequest, "gpufenced does not take %.20s on %.100s: use %s", r.Method, r.URL.Path, rt.method)
	}
	if rt.change && peer.UID != 0 {
		return api.Errorf(quota.CodeForbidden, "uid %d may only read: run as root to change something", peer.UID)
	}
	// Whoever asks only has sent it all; a body marks its end itself.
	if rt.req == nil && !s.conns.begin(st) {
		return errEvicted
	}
	return rt.serve(s, w, r, id)
}

// errEvicted ends a request whose connection we closed to make room; nobody hears it.
var errEvicted = withStatus(http.StatusServiceUnavailable, quota.CodeBusy, "the connection was closed to make room for others: try again")

// get serves a question without a body.
func get[Resp any](doc string, f func(Service, context.Context) (Resp, error)) route {
	var zero Resp
	return route{method: http.MethodGet, doc: doc, resp: zero, serve: func(s *Server, w http.ResponseWriter, r *http.Request, _ string) error {
		resp, err := f(s.svc, r.Context())
		if err != nil {
			return err
		}
		return s.writeJSON(w, http.StatusOK, resp)
	}}
}

// post serves a request with a JSON body; all of them change something.
func post[Req, Resp any](doc string, f func(Service, context.Context, Req) (Resp, error)) route {
	var req Req
	var resp Resp
	return route{method: http.MethodPost, change: true, doc: doc, req: req, resp: resp, serve: func(s *Server, w http.ResponseWriter, r *http.Request, _ string) error {
		var req Req
		if err := s.readJSON(w, r, &req); err != nil {
			return err
		}
		resp, err := f(s.svc, r.Context(), req)
		if err != nil {
			return err
		}
		return s.writeJSON(w, http.StatusOK, resp)
	}}
}

func (s *Server) container(w http.ResponseWriter, r *http.Request, id string) error {
	return get("", func(svc Service, ctx context.Context) (api.Container, error) {
		name, err := unescapeID(id)
		if err != nil {
			return api.Container{}, err
		}
		return svc.Container(ctx, name)
	}).serve(s, w, r, "")
}

func (s *Server) set(w http.ResponseWriter, r *http.Request, id string) error {
	return post("", func(svc Service, ctx context.Context, req api.SetRequest) (api.SetResponse, error) {
		name, err := unescapeID(id)
		if err != nil {
			return api.SetResponse{}, err
		}
		return svc.Set(ctx, name, req)
	}).serve(s, w, r, "")
}

// events streams JSON lines. An error before the first line is an [api.Error]; later ones can only
// end the stream.
func (s *Server) events(w http.ResponseWriter, r *http.Request, _ string) error {
	q := r.URL.Query()
	var since uint64
	if v := q.Get("since"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			return api.Errorf(quota.CodeBadRequest, "since=%.40q is not the number of an event: write a decimal number, 0 for all", v)
		}
		since = n
	}
	var follow bool
	switch v := q.Get("follow"); v {
	case "", "0", "false":
	case "1", "true":
		follow = true
	default:
		return api.Errorf(quota.CodeBadRequest, "follow=%.40q is neither 1 nor 0", v)
	}
	if follow {
		leave, err := s.conns.stream(connOf(r.Context()).peer.peer.UID)
		if err != nil {
			return err
		}
		defer leave()
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	rc := http.NewResponseController(w)
	begun := false
	begin := func() {
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "application/jsonl")
			w.WriteHeader(http.StatusOK)
		}
	}
	emit := func(ev *api.Event) error {
		begin()
		line := []byte("\n")
		if ev != nil {
			b, err := json.Marshal(ev)
			if err != nil {
				return fmt.Errorf("encode event: %w", err)
			}
			line = append(b, '\n')
		}
		if err := rc.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return fmt.Errorf("set write deadline: %w", err)
		}
		if _, err := w.Write(line); err != nil {
			return fmt.Errorf("write event: %w", err)
		}
		return nil
	}
	flush := func(ev *api.Event) error {
		if err := emit(ev); err != nil {
			return err
		}
		if !follow {
			return nil // one flush at the end
		}
		return rc.Flush()
	}
	err := s.svc.Events(ctx, since, follow, flush)
	if err != nil && !begun {
		return err
	}
	begin()
	if err != nil && r.Context().Err() == nil {
		s.opts.Logf("events to %s ended: %v", r.RemoteAddr, err)
	}
	return nil
}

// KeepAlive is the period in which a followed stream of events is to be asked for its reader.
func KeepAlive() time.Duration { return keepAlive }

// readJSON reads a body that must be exactly one JSON object. Unknown fields are ignored (the
// two sides may differ by a version); everything else that does not fit is one sentence.
func (s *Server) readJSON(w http.ResponseWriter, r *http.Request, out any) error {
	rc := http.NewResponseController(w)
	if err := rc.SetReadDeadline(time.Now().Add(s.opts.ReadTimeout)); err != nil {
		return api.Errorf(quota.CodeInternal, "the connection takes no deadline: %v", err)
	}
	st := connOf(r.Context())
	body, err := io.ReadAll(http.MaxBytesReader(w, chargedBody{r.Body, s.conns, st}, api.MaxRequestBytes))
	if err != nil {
		var busy *statusError
		if errors.As(err, &busy) {
			return busy
		}
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return withStatus(http.StatusRequestEntityTooLarge, quota.CodeBadRequest, "the body of %s exceeds %d bytes", r.URL.Path, api.MaxRequestBytes)
		}
		return api.Errorf(quota.CodeBadRequest, "the body of %s ended early: %v", r.URL.Path, err)
	}
	if !s.conns.begin(st) {
		return errEvicted
	}
	// Without this the connection's reader would meet the deadline while the answer is still
	// being worked out, and cancel the request.
	if err := rc.SetReadDeadline(time.Time{}); err != nil {
		return api.Errorf(quota.CodeInternal, "the connection takes no deadline: %v", err)
	}
	if err := DecodeRequest(body, out); err != nil {
		return api.Errorf(quota.CodeBadRequest, "the body of %s is not a request: %v", r.URL.Path, err)
	}
	return nil
}

// DecodeRequest decodes one JSON object, and nothing but one, into out.
func DecodeRequest(body []byte, out any) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return errors.New("it is empty: send a JSON object")
	}
	if !utf8.Valid(body) {
		return errors.New("it is not UTF-8")
	}
	if bytes.TrimSpace(body)[0] != '{' {
		return errors.New("it is not a JSON object")
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	if err := dec.Decode(out); err != nil {
		var syntax *json.SyntaxError
		var wrong *json.UnmarshalTypeError
		switch {
		case errors.As(err, &syntax):
			return fmt.Errorf("at byte %d: %w", syntax.Offset, err)
		case errors.As(err, &wrong):
			return fmt.Errorf("field %.100q takes no %s", wrong.Field, wrong.Value)
		case errors.Is(err, io.ErrUnexpectedEOF):
			return errors.New("it ends in the middle")
		}
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("at byte %d: something follows the object", dec.InputOffset())
	}
	return nil
}

func (s *Server) writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	// A deadline that cannot be set only means that a stalled reader holds its goroutine longer.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)+1))
	w.WriteHeader(status)
	if _, err := w.Write(append(b, '\n')); err != nil {
		s.opts.Logf("write answer: %v", err)
	}
	return nil
}

func (s *Server) writeError(w http.ResponseWriter, err error) {
	e := api.ErrorOf(err)
	if err := s.writeJSON(w, status(err, e.Code), e); err != nil {
		s.opts.Logf("encode error answer: %v", err)
	}
}

// statusError is an [api.Error] whose HTTP status says more than its code.
type statusError struct {
	status int
	err    *api.Error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

func withStatus(status int, code quota.Code, format string, args ...any) error {
	return &statusError{status, api.Errorf(code, format, args...)}
}

// status maps an error to HTTP, for people with curl; the client goes by the code. What is not
// about the request itself is a refusal: 422.
func status(err error, code string) int {
	var st *statusError
	if errors.As(err, &st) {
		return st.status
	}
	switch quota.Code(code) {
	case quota.CodeBadRequest:
		return http.StatusBadRequest
	case quota.CodeForbidden:
		return http.StatusForbidden
	case quota.CodeNoSuchContainer:
		return http.StatusNotFound
	case quota.CodeAmbiguousName:
		return http.StatusConflict
	case quota.CodeInternal:
		return http.StatusInternalServerError
	case quota.CodeBusy, quota.CodeQuiesced:
		return http.StatusServiceUnavailable
	}
	return http.StatusUnprocessableEntity
}
