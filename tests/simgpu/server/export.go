// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// maxDescriptors is how many descriptors a request may bring; more than one is refused, but has to be
// received to be closed.
const maxDescriptors = 16

// handTime bounds how long a client may leave an answer with a descriptor unread.
const handTime = time.Second

var errElsewhere = errors.New("memory of another GPU")

// export is what a descriptor stands for. The descriptor is one end of a pair of sockets, so
// that the other end tells when its last copy is closed; which descriptor a client shows us is
// known by the cookie that the kernel gives each socket.
//
// The kernel marks the other end before the close of the last copy returns, so whoever enters the GPU
// later finds the memory let go of (settle), as with the real driver, whose file is released within the
// close.
type export struct {
	gpu   *gpu
	token uint64 // 0: no memory
	value uint64
	watch syscall.RawConn // our end
	letGo func(now int64) // of the memory; called once, under the GPU's lock
}

// over says whether the last copy of the descriptor is closed.
func (e *export) over() bool {
	gone := false
	err := e.watch.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n > 0 && poll[0].Revents&unix.POLLHUP != 0 // an error: its reader will tell
	})
	return err != nil || gone // our end is only closed once it was over
}

// enter takes g's lock, with all that was let go of before.
func (s *Server) enter(g *gpu) {
	g.mu.Lock()
	s.settle(g)
}

// settle lets go of the memory of g whose descriptors are closed. Called with g's lock.
func (s *Server) settle(g *gpu) {
	s.handing.Lock() // else a copy of ours may be on its way to a client
	defer s.handing.Unlock()
	s.mu.Lock()
	var over []*export
	for id, e := range s.exports {
		if e.gpu == g && e.over() {
			over = append(over, e)
			delete(s.exports, id)
		}
	}
	s.mu.Unlock()
	for _, e := range over {
		e.letGo(Now())
	}
}

// hand sends an answer with a descriptor. Nobody settles until our copy is closed: the client may have
// closed its own by then.
func (s *Server) hand(conn *net.UnixConn, out answer) error {
	s.handing.Lock()
	defer s.handing.Unlock()
	err := conn.SetWriteDeadline(time.Now().Add(handTime))
	if err == nil {
		_, _, err = conn.WriteMsgUnix(out.rep.Encode(out.payload), unix.UnixRights(int(out.file.Fd())), nil)
	}
	_ = out.file.Close() // the client has its own now
	return errors.Join(err, conn.SetWriteDeadline(time.Time{}))
}

// descriptor takes the descriptor out of a control message. More than one is as good as none.
func descriptor(control []byte) *os.File {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	var all []int
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err == nil { // else it is not a message of rights
			all = append(all, fds...)
		}
	}
	if len(all) == 1 {
		return os.NewFile(uintptr(all[0]), "from a client")
	}
	for _, fd := range all {
		_ = unix.Close(fd) // nobody asked for it
	}
	return nil
}

func cookie(fd int) (uint64, error) {
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read socket cookie: %w", err)
	}
	return c, nil
}

// export answers OpExport. Called with g's lock.
func (s *Server) export(g *gpu, file *driver.Client, req request) (out answer) {
	handle, with, value := req.Arg[0], req.Arg[1] != 0, req.Arg[2]
	e := &export{gpu: g, value: value}
	var err error
	if handle != 0 {
		e.token, err = file.Export(Now(), handle)
	}
	if err == nil && with {
		out.file, err = s.issue(e)
	}
	out.rep = wire.Rep{Status: status(err), Val: [7]uint64{e.token}}
	return out
}

func rawConn(conn net.Conn) (syscall.RawConn, error) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("watch descriptor: %T has none", conn)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("watch descriptor: %w", err)
	}
	return raw, nil
}

// issue makes a descriptor that stands for e. Called with the lock of e's GPU.
func (s *Server) issue(e *export) (*os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make descriptor: %w", err)
	}
	theirs, ours := os.NewFile(uintptr(pair[0]), "export"), os.NewFile(uintptr(pair[1]), "export's watch")
	conn, err := net.FileConn(ours)
	_ = ours.Close() // conn has a copy
	if err == nil {
		e.watch, err = rawConn(conn)
	}
	id, cookieErr := cookie(pair[0])
	e.letGo = func(int64) {}
	if err = errors.Join(err, cookieErr); err == nil && e.token != 0 {
		e.letGo, err = e.gpu.model.Keep(Now(), e.token)
	}
	if err != nil {
		_ = theirs.Close() // it goes to nobody
		if conn != nil {
			_ = conn.Close() // as above
		}
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = theirs.Close() // we are going, nobody is told
		_ = conn.Close()   // as above
		return nil, driver.ErrLost
	}
	s.exports[id] = e
	s.open[conn] = struct{}{}
	s.conns.Go(func() {
		// Nothing is ever said: it ends when the last copy of the other end is closed.
		for buf := make([]byte, 1); ; {
			if n, err := conn.Read(buf); err != nil || n == 0 {
				break
			}
		}
		s.enter(e.gpu)
		e.gpu.mu.Unlock()
		s.mu.Lock()
		delete(s.open, conn)
		s.mu.Unlock()
		_ = conn.Close() // nothing was buffered
	})
	return theirs, nil
}

// importMemory answers OpImport. Called with g's lock.
func (s *Server) importMemory(g *gpu, file *driver.Client, req request) (out answer) {
	token, value := req.Arg[0], uint64(0)
	var err error
	if token == 0 {
		token, value, err = s.standsFor(g, req.file)
	}
	if err == nil && token != 0 {
		out.rep.Val[0], out.rep.Val[1], err = file.Import(Now(), token, req.Arg[1])
	}
	out.rep.Val[2] = value
	out.rep.Status = status(err)
	return out
}

func (s *Server) standsFor(g *gpu, file *os.File) (token, value uint64, err error) {
	if file == nil {
		return 0, 0, driver.ErrInvalid
	}
	id, err := cookie(int(file.Fd()))
	if err != nil {
		return 0, 0, errors.Join(driver.ErrInvalid, err) // not even a socket
	}
	s.mu.Lock()
	e := s.exports[id]
	s.mu.Unlock()
	switch {
	case e == nil:
		return 0, 0, driver.ErrInvalid
	case e.gpu != g:
		return 0, 0, errElsewhere
	}
	return e.token, e.value, nil
}
