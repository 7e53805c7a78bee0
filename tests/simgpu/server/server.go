// SPDX-License-Identifier: Apache-2.0

// Package server plays the kernel driver: it puts the GPUs of package driver behind the
// sockets that simgpu.h describes, and an HTTP socket for people and tests.
//
// Locks: each GPU has one, held over every call into its model, and, where the knobs say so,
// over the time that an NVML query takes, since the real driver holds its lock meanwhile. A
// hung call waits without a lock. No lock is held while another GPU's is taken. Below a GPU's come, in
// this order, the one for handing out descriptors and the one for the server's lists.
package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// Config is what simgpud is started with.
type Config struct {
	Dir           string // of the sockets; made if missing
	DriverVersion string
	CUDAVersion   uint32
	GPUs          []driver.Config // minors and numbers are set by New, instances made
	Knobs         driver.Knobs
	DmemDir       string // where the kernel's dmem files are shown; "": nowhere
	Log           *log.Logger
}

// Server is a running simgpud.
type Server struct {
	cfg      Config
	gpus     []*gpu
	contexts sync.Mutex // contexts are created one at a time on a node
	conns    sync.WaitGroup
	done     chan struct{}
	mu       sync.Mutex
	open     map[net.Conn]struct{}
	exports  map[uint64]*export // by the descriptor's socket cookie
	handing  sync.Mutex         // held while a descriptor is sent, until our copy is closed
	dmem     sync.Mutex         // held over each of its files
	closed   bool
}

// gpu is a model and its lock.
type gpu struct {
	mu        sync.Mutex
	model     *driver.GPU
	instances []*gpu            // of one that is split; nothing is allocated on itself
	wake      chan struct{}     // the next event may have come nearer
	change    chan struct{}     // closed and replaced when the knobs change; under mu
	limited   map[string]folder // cgroups that were given limits; under mu
}

// Now is CLOCK_MONOTONIC in ns: the same clock as every other process on the machine has.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(fmt.Sprintf("read CLOCK_MONOTONIC: %v", err)) // the kernel has this clock
	}
	return ts.Nano()
}

// New checks the configuration; nothing is listening yet.
func New(cfg Config) (*Server, error) {
	switch {
	case cfg.Knobs.NVMLLag > driver.MaxLag:
		return nil, fmt.Errorf("nvml-lag %s: at most %s", cfg.Knobs.NVMLLag, driver.MaxLag)
	}
	if cfg.Log == nil {
		cfg.Log = log.New(io.Discard, "", 0)
	}
	s := &Server{cfg: cfg, done: make(chan struct{}), open: map[net.Conn]struct{}{}, exports: map[uint64]*export{}}
	var all, instances []driver.Config
	for i, c := range cfg.GPUs {
		if c.Instances < 0 || c.Instances > wire.MIGMax {
			return nil, fmt.Errorf("GPU %d: %d instances: at most %d", i, c.Instances, wire.MIGMax)
		}
		c.Minor = i
		c.CUDAVersion = cfg.CUDAVersion
		all = append(all, c)
		instances = append(instances, c.Split()...)
	}
	all = append(all, instances...)
	if len(all) > wire.GPUsMax {
		return nil, fmt.Errorf("%d GPUs and instances: at most %d", len(all), wire.GPUsMax)
	}
	for i, c := range all {
		c.Number = i
		if c.TotalBytes < 64<<20 || c.ReservedBytes >= c.TotalBytes {
			return nil, fmt.Errorf("GPU %d: %d bytes with %d reserved: too small", i, c.TotalBytes, c.ReservedBytes)
		}
		g := &gpu{model: driver.New(c, cfg.Knobs, Now()), wake: make(chan struct{}, 1), change: make(chan struct{}), limited: map[string]folder{}}
		if c.Instance > 0 {
			whole := s.gpus[c.Minor]
			whole.instances = append(whole.instances, g)
		}
		s.gpus = append(s.gpus, g)
	}
	return s, nil
}

// Run listens, calls ready, and serves until ctx ends. The sockets are gone when it returns.
func (s *Server) Run(ctx context.Context, ready func()) (err error) {
	if err := os.MkdirAll(s.cfg.Dir, 0o755); err != nil {
		return fmt.Errorf("make socket folder: %w", err)
	}
	var listeners []net.Listener
	defer func() {
		close(s.done)
		for _, l := range listeners {
			// Unlinks the socket too. HTTP's server may have closed its own already.
			if closeErr := l.Close(); !errors.Is(closeErr, net.ErrClosed) {
				err = errors.Join(err, closeErr)
			}
		}
		s.closeAll()
		s.conns.Wait()
	}()
	names := []string{wire.Ctl}
	for _, g := range s.gpus {
		names = append(names, g.model.Config().Socket())
	}
	serve := make([]func(), 0, len(names)+1)
	for i, name := range names {
		l, err := listen(ctx, "unixpacket", filepath.Join(s.cfg.Dir, name), 0o666)
		if err != nil {
			return err
		}
		listeners = append(listeners, l)
		handle := s.serveCtl
		if i > 0 {
			g := s.gpus[i-1]
			handle = func(c *net.UnixConn) { s.serveGPU(g, c) }
		}
		serve = append(serve, func() { s.accept(l, handle) })
	}
	admin, err := listen(ctx, "unix", filepath.Join(s.cfg.Dir, wire.Admin), 0o600)
	if err != nil {
		return err
	}
	listeners = append(listeners, admin)
	serve = append(serve, func() { s.serveAdmin(admin) })
	for _, f := range serve {
		s.conns.Go(f)
	}
	for _, g := range s.gpus {
		s.conns.Go(func() { s.tick(g) })
	}
	if err := s.showCapacity(); err != nil {
		return err
	}
	ready()
	<-ctx.Done()
	return nil
}

// listen makes a socket; one that a dead simgpud left is replaced, a living one is not.
func listen(ctx context.Context, network, path string, mode os.FileMode) (net.Listener, error) {
	if conn, err := new(net.Dialer).DialContext(ctx, network, path); err == nil {
		_ = conn.Close() // it answered, that was all we wanted
		return nil, fmt.Errorf("listen on %s: another simgpud is using it", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("replace stale socket: %w", err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, network, path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s for its clients: %w", path, err), l.Close())
	}
	return l, nil
}

func (s *Server) accept(l net.Listener, handle func(*net.UnixConn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			select {
			case <-s.done:
				return
			default:
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			s.cfg.Log.Printf("accept on %s: %v", l.Addr(), err)
			time.Sleep(10 * time.Millisecond) // out of descriptors: do not spin
			continue
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = conn.Close() // we are going, nobody is told
			return
		}
		s.open[conn] = struct{}{}
		s.conns.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.conns.Done()
			defer func() {
				s.mu.Lock()
				delete(s.open, conn)
				s.mu.Unlock()
				_ = conn.Close() // nothing was buffered
			}()
			if c, ok := conn.(*net.UnixConn); ok { // our listeners make no others
				handle(c)
			}
		}()
	}
}

func (s *Server) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.open {
		_ = c.Close() // as above
	}
}

// tick lets time pass in g's model.
func (s *Server) tick(g *gpu) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		s.enter(g)
		g.model.Advance(Now())
		next, some := g.model.NextEvent()
		g.mu.Unlock()
		wait := time.Hour
		if some {
			wait = time.Duration(max(0, next-Now()))
		}
		timer.Reset(wait)
		select {
		case <-s.done:
			return
		case <-g.wake:
		case <-timer.C:
		}
	}
}

func (g *gpu) poke() {
	select {
	case g.wake <- struct{}{}:
	default: // it is awake already
	}
}

// unhang waits while calls at level hang on g. False: simgpud ends first.
func (s *Server) unhang(g *gpu, level driver.Hang) bool {
	for {
		g.mu.Lock()
		hung, change := g.model.Knobs().Hang >= level, g.change
		g.mu.Unlock()
		if !hung {
			return true
		}
		select {
		case <-change:
		case <-s.done:
			return false
		}
	}
}

// sleep waits for d, or until simgpud ends.
func (s *Server) sleep(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.done:
	}
}

// request is what a client sent, with the descriptor that came along, or nil.
type request struct {
	wire.Req
	file *os.File
}

// answer is what it gets, with a descriptor or nil.
type answer struct {
	rep     wire.Rep
	payload []byte
	file    *os.File
}

// exchange reads requests and writes what reply gives until the other end closes.
func (s *Server) exchange(conn *net.UnixConn, reply func(request) answer) {
	buf := make([]byte, wire.ReqBytes+1)
	control := make([]byte, unix.CmsgSpace(maxDescriptors*4))
	for {
		n, cn, _, _, err := conn.ReadMsgUnix(buf, control)
		if err != nil || n == 0 {
			return // closed, or the process is gone
		}
		file := descriptor(control[:cn])
		req, err := wire.DecodeReq(buf[:n])
		out := answer{rep: wire.Rep{Status: wire.Invalid}}
		if err == nil {
			out = reply(request{req, file})
		}
		_ = file.Close() // ours was for looking only; of nil this is an error that says so
		if out.file != nil {
			err = s.hand(conn, out)
		} else {
			_, err = conn.Write(out.rep.Encode(out.payload))
		}
		if err != nil {
			return // as above
		}
	}
}

func status(err error) wire.Status {
	switch {
	case err == nil:
		return wire.OK
	case errors.Is(err, driver.ErrNoMemory):
		return wire.NoMemory
	case errors.Is(err, driver.ErrNotFound):
		return wire.NotFound
	case errors.Is(err, driver.ErrLost):
		return wire.Lost
	case errors.Is(err, driver.ErrNotSupported):
		return wire.NotSupported
	case errors.Is(err, driver.ErrBusy):
		return wire.Busy
	case errors.Is(err, errElsewhere):
		return wire.Elsewhere
	case errors.Is(err, errNotRoot):
		return wire.NotPermitted
	case errors.Is(err, errCgroup):
		return wire.NoCgroup
	default:
		return wire.Invalid
	}
}

// serveGPU is an open device file.
func (s *Server) serveGPU(g *gpu, conn *net.UnixConn) {
	who, err := owner(conn)
	if err != nil {
		s.cfg.Log.Printf("open %s: %v", g.model.Config().Socket(), err)
		return
	}
	g.mu.Lock()
	file := g.model.Open(Now(), who)
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		file.Close(Now())
		s.showDmem(g)
		g.mu.Unlock()
		g.poke()
	}()
	s.exchange(conn, func(req request) answer {
		if !s.unhang(g, driver.HangAll) {
			return answer{rep: wire.Rep{Status: wire.Lost}}
		}
		if len(g.instances) > 0 && req.Op != wire.OpInfo {
			return answer{rep: wire.Rep{Status: wire.NotSupported}}
		}
		if req.Op == wire.OpCtxCreate {
			g.mu.Lock()
			d := g.model.Knobs().ContextTime
			g.mu.Unlock()
			if d > 0 {
				s.contexts.Lock()
				s.sleep(d)
				s.contexts.Unlock()
			}
			defer g.poke()
		}
		s.enter(g)
		defer g.mu.Unlock()
		defer s.showDmem(g)
		s.pays(g, file, who.PID)
		switch req.Op {
		case wire.OpExport:
			return s.export(g, file, req)
		case wire.OpImport:
			return s.importMemory(g, file, req)
		}
		rep, payload := answerGPU(g.model, file, req.Req)
		return answer{rep: rep, payload: payload}
	})
}

func answerGPU(m *driver.GPU, file *driver.Client, req wire.Req) (rep wire.Rep, payload []byte) {
	now := Now()
	var err error
	switch req.Op {
	case wire.OpInfo:
		d := m.Device()
		payload = d.Encode()
	case wire.OpCtxCreate:
		rep.Val[0], rep.Val[1], err = file.CreateContext(now, wire.List(req.Arg[0]), wire.ContextKind(req.Arg[1]))
	case wire.OpCtxDestroy:
		rep.Val[0], err = file.DestroyContext(now, req.Arg[0])
	case wire.OpAlloc:
		var a driver.Alloc
		a, err = file.Allocate(now, req.Arg[0], req.Arg[1], wire.Kind(req.Arg[2]))
		rep.Val = [7]uint64{a.Handle, a.Grew, a.Block, a.Offset, a.Bytes}
	case wire.OpFree:
		rep.Val[0], rep.Val[1], err = file.Free(now, req.Arg[0])
	case wire.OpMemInfo:
		rep.Val[0], rep.Val[1], err = file.MemInfo(now)
	case wire.OpLaunch:
		d := time.Duration(-1)
		if req.Arg[1] != wire.KernelDefault {
			d = time.Duration(min(req.Arg[1], uint64(time.Hour)))
		}
		d, err = file.Launch(now, req.Arg[0], d)
		rep.Val[0] = uint64(d)
	case wire.OpMigrate:
		rep.Val[0], err = file.Migrate(now, req.Arg[0], req.Arg[1] != 0)
	case wire.OpCtxResize:
		err = file.ResizeContext(now, req.Arg[0], int64(req.Arg[1]))
	case wire.OpSettings:
		rep.Val[0], rep.Val[1] = m.Settings()
	default:
		err = driver.ErrInvalid
	}
	rep.Status = status(err)
	return rep, payload
}

// serveCtl is what NVML asks.
func (s *Server) serveCtl(conn *net.UnixConn) {
	who, err := owner(conn)
	if err != nil {
		s.cfg.Log.Printf("open ctl: %v", err)
		return
	}
	s.exchange(conn, func(req request) answer {
		if req.Op == wire.OpNode {
			n := wire.Node{
				DriverVersion: s.cfg.DriverVersion, NVMLVersion: strconv.Itoa(int(s.cfg.CUDAVersion/1000)) + "." + s.cfg.DriverVersion,
				CUDAVersion: s.cfg.CUDAVersion, GPUCount: uint32(len(s.gpus)),
			}
			return answer{payload: n.Encode()}
		}
		if req.Arg[0] >= uint64(len(s.gpus)) {
			return answer{rep: wire.Rep{Status: wire.NotFound}}
		}
		g := s.gpus[req.Arg[0]]
		if req.Op != wire.OpDevice && !s.unhang(g, driver.HangNVML) {
			return answer{rep: wire.Rep{Status: wire.Lost}}
		}
		if req.Op == wire.OpNVMLMemory || req.Op == wire.OpNVMLProcs {
			s.pay(g)
		}
		if req.Op == wire.OpLimitsSet || req.Op == wire.OpLimitsGet {
			s.enter(g)
			defer g.mu.Unlock()
			return answer{rep: s.limits(g, who, req)}
		}
		if len(g.instances) > 0 && req.Op != wire.OpDevice {
			rep, payload := s.answerSplit(g, who, req.Req)
			return answer{rep: rep, payload: payload}
		}
		s.enter(g)
		defer g.mu.Unlock()
		rep, payload := answerNVML(g.model, who, req.Req)
		return answer{rep: rep, payload: payload}
	})
}

// pay takes the time of an NVML query, with the GPU's lock if the knobs say so.
func (s *Server) pay(g *gpu) {
	g.mu.Lock()
	k := g.model.Knobs()
	if k.CallLock {
		s.sleep(k.CallCost)
	}
	g.mu.Unlock()
	if !k.CallLock {
		s.sleep(k.CallCost)
	}
}

// answerSplit is what NVML says of a GPU that is split: what its instances say together. How busy
// it is nobody knows then.
func (s *Server) answerSplit(g *gpu, who driver.Owner, req wire.Req) (rep wire.Rep, payload []byte) {
	var err error
	g.mu.Lock()
	cfg := g.model.Config()
	if g.model.Knobs().Lost {
		err = driver.ErrLost
	}
	g.mu.Unlock()
	if err == nil && req.Op != wire.OpNVMLMemory && req.Op != wire.OpNVMLProcs {
		err = driver.ErrNotSupported
	}
	if err != nil {
		return wire.Rep{Status: status(err)}, nil
	}
	for _, m := range g.instances {
		s.enter(m)
		part, rows := answerNVML(m.model, who, req)
		m.mu.Unlock()
		if part.Status != wire.OK {
			return wire.Rep{Status: part.Status}, nil
		}
		payload = append(payload, rows...)
		if req.Op == wire.OpNVMLProcs {
			rep.Val[0] += part.Val[0]
		} else {
			rep.Val[2] += part.Val[2]
		}
	}
	if req.Op == wire.OpNVMLProcs {
		rep.Val[0] = min(rep.Val[0], wire.ProcsMax)
		return rep, payload[:rep.Val[0]*wire.ProcBytes]
	}
	rep.Val[0], rep.Val[1] = cfg.TotalBytes, cfg.ReservedBytes
	rep.Val[2] = min(rep.Val[2], cfg.TotalBytes-cfg.ReservedBytes)
	rep.Val[3] = cfg.TotalBytes - cfg.ReservedBytes - rep.Val[2]
	return rep, payload
}

func answerNVML(m *driver.GPU, who driver.Owner, req wire.Req) (rep wire.Rep, payload []byte) {
	now := Now()
	var err error
	switch req.Op {
	case wire.OpDevice:
		d := m.Device()
		payload = d.Encode()
	case wire.OpNVMLMemory:
		var mem driver.Memory
		cgroup := "" // the first version of the call knows no limits
		if req.Arg[1] >= 2 {
			cgroup = who.Unified
		}
		mem, err = m.NVMLMemory(now, cgroup)
		rep.Val = [7]uint64{mem.Total, mem.Reserved, mem.Used, mem.Free}
	case wire.OpNVMLProcs:
		var rows []wire.Proc
		rows, err = m.NVMLProcesses(now, wire.List(req.Arg[1]))
		if m.Knobs().PIDView == driver.PIDCaller {
			rows = asSeenBy(who.PID, rows, func(r *wire.Proc) *uint32 { return &r.PID })
		}
		rep.Val[0] = uint64(len(rows))
		payload = wire.EncodeProcs(rows)
	case wire.OpNVMLUtil:
		var busy uint32
		busy, err = m.NVMLUtilization(now)
		rep.Val[0] = uint64(busy)
	case wire.OpNVMLProcUtil:
		wall := time.Now().UnixMicro()
		age := uint64(wall) - min(req.Arg[1], uint64(wall))
		window := time.Duration(min(age, uint64(time.Hour.Microseconds()))) * time.Microsecond
		var rows []wire.ProcUtil
		rows, err = m.NVMLProcessUtilization(now, window)
		for i := range rows {
			rows[i].TimeStampUS = uint64(wall)
		}
		if m.Knobs().PIDView == driver.PIDCaller {
			rows = asSeenBy(who.PID, rows, func(r *wire.ProcUtil) *uint32 { return &r.PID })
		}
		rep.Val[0] = uint64(len(rows))
		payload = wire.EncodeProcUtils(rows)
	default:
		err = driver.ErrInvalid
	}
	rep.Status = status(err)
	if err != nil {
		return wire.Rep{Status: rep.Status}, nil
	}
	return rep, payload
}
