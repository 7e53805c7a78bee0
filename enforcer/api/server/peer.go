// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"unicode/utf8"
	"unsafe" //nolint:depguard // getsockopt has no safe form for a list

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// peer is who connected, by the kernel's word at the time of connect.
type peer struct {
	PID    int
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
}

// mayRead tells whether the peer may ask anything at all.
func (p peer) mayRead(gid int) bool {
	if p.UID == 0 {
		return true
	}
	return gid >= 0 && (p.GID == uint32(gid) || slices.Contains(p.Groups, uint32(gid)))
}

// peerResult keeps the error for the answer: a connection whose peer is unknown is refused.
type peerResult struct {
	peer peer
	err  error
}

func readPeer(conn net.Conn) (p peer, err error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return p, fmt.Errorf("%T is not a unix socket", conn)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return p, fmt.Errorf("open connection: %w", err)
	}
	var cred *unix.Ucred
	var credErr, groupsErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		p.Groups, groupsErr = peerGroups(int(fd))
	}); err != nil {
		return p, fmt.Errorf("use connection: %w", err)
	}
	if credErr != nil {
		return p, fmt.Errorf("read peer credentials: %w", credErr)
	}
	p.PID, p.UID, p.GID = int(cred.Pid), cred.Uid, cred.Gid
	// Supplementary groups can only add the right to read: without them (old kernels, a peer
	// that has none) the primary group decides.
	if groupsErr != nil {
		p.Groups = nil
	}
	return p, nil
}

// peerGroups reads SO_PEERGROUPS, which x/sys has no call for.
func peerGroups(fd int) ([]uint32, error) {
	groups := make([]uint32, 64)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			return groups[:size/4], nil
		case errno == unix.ERANGE && int(size/4) > len(groups) && size/4 <= 1<<16:
			groups = make([]uint32, size/4)
		default:
			return nil, errno
		}
	}
}

// unescapeID turns the path segment of an id into what the user wrote.
func unescapeID(seg string) (string, error) {
	id, err := url.PathUnescape(seg)
	if err != nil || !utf8.ValidString(id) {
		return "", api.Errorf(quota.CodeBadRequest, "the container name %.100q in the path is not valid text", seg)
	}
	return id, nil
}
