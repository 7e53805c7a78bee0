// SPDX-License-Identifier: Apache-2.0

package server

import (
	"container/list"
	"context"
	"io"
	"net"
	"net/http"
	"sync"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Bounds of what all peers together may hold of us.
const (
	// maxConns are the connections at one time. One more costs the oldest that has not sent a
	// whole request yet its place, so that nobody shuts others out by not finishing.
	maxConns = 512
	// maxConnsUID are those of one user who is not root.
	maxConnsUID = 64
	// maxBodyBytes are the bodies that are being read or worked on.
	maxBodyBytes = 16 << 20
	// maxStreams are the followed streams of events, and maxStreamsUID those of one user who is
	// not root. They are the only requests that may last.
	maxStreams    = 128
	maxStreamsUID = 16
)

// conns keeps count of connections and of what they hold. Its lock is held over nothing that
// waits.
type conns struct {
	max, perUID int
	bytesMax    int64
	mu          sync.Mutex
	order       *list.List // of *conn, the oldest first
	of          map[net.Conn]*conn
	bytes       int64
	streams     int
	streamsOf   map[uint32]int
	connsOf     map[uint32]int
}

// conn is one connection. All of it is guarded by conns.mu but peer, which does not change.
type conn struct {
	net     net.Conn
	peer    peerResult
	at      *list.Element
	busy    bool  // a whole request is being answered
	evicted bool  // closed by us
	bytes   int64 // charged for the request's body
}

func newConns(limit, perUID int) *conns {
	return &conns{
		max: limit, perUID: perUID, bytesMax: maxBodyBytes,
		order: list.New(), of: map[net.Conn]*conn{}, streamsOf: map[uint32]int{}, connsOf: map[uint32]int{},
	}
}

type connKey struct{}

// context is http.Server's ConnContext: it takes a new connection in, in the accepting goroutine.
func (c *conns) context(ctx context.Context, nc net.Conn, p peerResult) context.Context {
	st := &conn{net: nc, peer: p}
	c.mu.Lock()
	defer c.mu.Unlock()
	uid := p.peer.UID
	if uid != 0 && c.connsOf[uid] >= c.perUID {
		c.makeRoom(st, func(o *conn) bool { return o.peer.peer.UID == uid })
	}
	if !st.evicted && c.order.Len() >= c.max {
		c.makeRoom(st, func(*conn) bool { return true })
	}
	if !st.evicted {
		st.at = c.order.PushBack(st)
		c.of[nc] = st
		c.connsOf[uid]++
	}
	return context.WithValue(ctx, connKey{}, st)
}

// makeRoom closes the oldest connection among those that has no whole request, or the new one.
func (c *conns) makeRoom(fresh *conn, among func(*conn) bool) {
	for e := c.order.Front(); e != nil; e = e.Next() {
		if o, ok := e.Value.(*conn); ok && !o.busy && among(o) {
			c.evict(o)
			return
		}
	}
	c.evict(fresh)
}

func (c *conns) evict(o *conn) {
	o.evicted = true
	c.remove(o)
	_ = o.net.Close() // its goroutine meets the error
}

// remove forgets a connection that is closed, or about to be.
func (c *conns) remove(o *conn) {
	if c.of[o.net] != o {
		return // it was not taken in, or is gone already
	}
	c.free(o)
	c.order.Remove(o.at)
	delete(c.of, o.net)
	uid := o.peer.peer.UID
	if c.connsOf[uid]--; c.connsOf[uid] <= 0 {
		delete(c.connsOf, uid)
	}
}

// state is http.Server's ConnState.
func (c *conns) state(nc net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st := c.of[nc]; st != nil && (s == http.StateClosed || s == http.StateHijacked) {
		c.remove(st)
	}
}

func connOf(ctx context.Context) *conn {
	st, _ := ctx.Value(connKey{}).(*conn) // nil: not a connection of this server
	return st
}

// begin says that the whole request is here; false: the connection was closed meanwhile, and
// nothing may be done for it.
func (c *conns) begin(st *conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st.evicted {
		return false
	}
	st.busy = true
	return true
}

// end says that the request is answered.
func (c *conns) end(st *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	st.busy = false
	c.free(st)
}

func (c *conns) free(st *conn) {
	c.bytes -= st.bytes
	st.bytes = 0
}

// charge counts n bytes of a body that is being read. Where all bodies together are too much, the
// largest that is not whole yet goes; false: that is this one.
func (c *conns) charge(st *conn, n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st.evicted {
		return false
	}
	st.bytes += int64(n)
	c.bytes += int64(n)
	for c.bytes > c.bytesMax {
		largest := st
		for e := c.order.Front(); e != nil; e = e.Next() {
			if o, ok := e.Value.(*conn); ok && !o.busy && o.bytes > largest.bytes {
				largest = o
			}
		}
		if largest == st {
			c.free(st)
			return false
		}
		c.evict(largest)
	}
	return true
}

// stream takes a place among the followed streams; the caller gives it back by the function.
func (c *conns) stream(uid uint32) (func(), error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams >= maxStreams || uid != 0 && c.streamsOf[uid] >= maxStreamsUID {
		return nil, withStatus(http.StatusServiceUnavailable, quota.CodeBusy, "too many follow the events already: end one of them, or ask without follow")
	}
	c.streams++
	c.streamsOf[uid]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.streams--
		if c.streamsOf[uid]--; c.streamsOf[uid] == 0 {
			delete(c.streamsOf, uid)
		}
	}, nil
}

// chargedBody is a request's body whose bytes are counted as they come.
type chargedBody struct {
	io.ReadCloser
	conns *conns
	conn  *conn
}

// Read implements [io.Reader].
func (b chargedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 && !b.conns.charge(b.conn, n) {
		return 0, withStatus(http.StatusServiceUnavailable, quota.CodeBusy, "too many large requests at one time: try again")
	}
	return n, err
}
