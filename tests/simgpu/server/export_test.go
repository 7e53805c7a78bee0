// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// pass sends a request with descriptors and gives the answer with the one that came, or nil.
func pass(t *testing.T, conn *net.UnixConn, op wire.Op, fds []int, args ...uint64) (wire.Rep, *os.File) {
	t.Helper()
	r := wire.Req{Op: op}
	copy(r.Arg[:], args)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := conn.WriteMsgUnix(r.Encode(), rights, nil); err != nil {
		t.Fatal(err)
	}
	buf, control := make([]byte, wire.PacketMax), make([]byte, 256)
	n, cn, _, _, err := conn.ReadMsgUnix(buf, control)
	if err != nil {
		t.Fatal(err)
	}
	rep, _, err := wire.DecodeRep(buf[:n])
	if err != nil {
		t.Fatal(err)
	}
	file := descriptor(control[:cn])
	if file != nil {
		t.Cleanup(func() { _ = file.Close() })
	}
	return rep, file
}

// TestDescriptorStandsForMemory runs alone, as TestCloseLetsGoAtOnce and for its reason.
func TestDescriptorStandsForMemory(t *testing.T) {
	dir, s := start(t, "--gpus", "2")
	one, two, other := dial(t, dir, "gpu0"), dial(t, dir, "gpu0"), dial(t, dir, "gpu1")
	used := func() uint64 { return s.State().GPUs[0].UsedBytes }
	a, _ := ask(t, one, wire.OpAlloc, 0, 64<<20, uint64(wire.KindPhysical))
	rep, file := pass(t, one, wire.OpExport, nil, a.Val[0], 1, 5)
	if rep.Status != wire.OK || rep.Val[0] == 0 || file == nil {
		t.Fatalf("export: %+v, %v", rep, file)
	}
	fd := int(file.Fd())
	if got, _ := pass(t, other, wire.OpImport, []int{fd}); got.Status != wire.Elsewhere {
		t.Errorf("import by another GPU: %+v", got)
	}
	got, _ := pass(t, two, wire.OpImport, []int{fd})
	if got.Status != wire.OK || got.Val[0] == 0 || got.Val[1] != 64<<20 || got.Val[2] != 5 {
		t.Fatalf("import: %+v", got)
	}
	if used() != 64<<20 {
		t.Errorf("used %d", used())
	}
	byToken, _ := ask(t, two, wire.OpImport, rep.Val[0])
	if byToken.Status != wire.OK || byToken.Val[1] != 64<<20 {
		t.Errorf("import by token: %+v", byToken)
	}
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	for _, h := range []uint64{got.Val[0], byToken.Val[0]} {
		if free, _ := ask(t, two, wire.OpFree, h); free.Status != wire.OK || free.Val[0] != 0 {
			t.Errorf("free: %+v", free)
		}
	}
	if used() != 64<<20 {
		t.Errorf("used %d while there is a descriptor", used())
	}
	copied, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if again, _ := pass(t, two, wire.OpImport, []int{copied}); again.Status != wire.OK {
		t.Errorf("import by a copy: %+v", again)
	} else if free, _ := ask(t, two, wire.OpFree, again.Val[0]); free.Status != wire.OK {
		t.Errorf("free: %+v", free)
	}
	if err := unix.Close(copied); err != nil {
		t.Fatal(err)
	}
	if used() != 0 {
		t.Errorf("used %d after the last copy was closed", used())
	}
}

// TestCloseLetsGoAtOnce: who asks after a close finds what the descriptor kept gone, whoever asks: no
// sample before that is right to call it held. It runs alone: a child that another test forks has a copy of
// the descriptor until it executes its program.
func TestCloseLetsGoAtOnce(t *testing.T) {
	dir, s := start(t)
	gpu, ctl := dial(t, dir, "gpu0"), dial(t, dir, "ctl")
	for i := range 500 {
		a, _ := ask(t, gpu, wire.OpAlloc, 0, 64<<20, uint64(wire.KindPhysical))
		rep, file := pass(t, gpu, wire.OpExport, nil, a.Val[0], 1)
		if rep.Status != wire.OK || file == nil {
			t.Fatalf("export: %+v, %v", rep, file)
		}
		first := func() error { free, _ := ask(t, gpu, wire.OpFree, a.Val[0]); return statusError(free.Status) }
		second := file.Close
		if i%2 == 1 {
			first, second = second, first
		}
		if err := errors.Join(first(), second()); err != nil {
			t.Fatal(err)
		}
		var used uint64
		switch i % 3 {
		case 0:
			used = s.State().GPUs[0].UsedBytes
		case 1:
			m, _ := ask(t, ctl, wire.OpNVMLMemory, 0)
			used = m.Val[2]
		case 2:
			m, _ := ask(t, gpu, wire.OpMemInfo)
			used = m.Val[1] - m.Val[0]
		}
		if used != 0 {
			t.Fatalf("round %d: used %d after the close", i, used)
		}
	}
}

func statusError(s wire.Status) error {
	if s != wire.OK {
		return fmt.Errorf("status %d", s)
	}
	return nil
}

func TestDescriptorsThatStandForNothing(t *testing.T) {
	t.Parallel()
	dir, s := start(t)
	gpu := dial(t, dir, "gpu0")
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) }()
	for name, fds := range map[string][]int{"none": nil, "a file": {int(null.Fd())}, "a socket": {pair[0]}, "two": {pair[0], pair[1]}} {
		if rep, _ := pass(t, gpu, wire.OpImport, fds); rep.Status != wire.Invalid {
			t.Errorf("%s: %+v", name, rep)
		}
	}
	if rep, _ := pass(t, gpu, wire.OpMemInfo, []int{pair[0]}); rep.Status != wire.OK { // not asked for, not minded
		t.Errorf("a descriptor with another request: %+v", rep)
	}
	if rep, file := pass(t, gpu, wire.OpExport, nil, 99, 1); rep.Status != wire.NotFound || file != nil {
		t.Errorf("export of nothing: %+v, %v", rep, file)
	}
	// A pool has no memory of its own: a descriptor with a number.
	rep, file := pass(t, gpu, wire.OpExport, nil, 0, 1, 1234)
	if rep.Status != wire.OK || rep.Val[0] != 0 || file == nil {
		t.Fatalf("a number: %+v, %v", rep, file)
	}
	got, _ := pass(t, gpu, wire.OpImport, []int{int(file.Fd())})
	if got.Status != wire.OK || got.Val[0] != 0 || got.Val[2] != 1234 {
		t.Errorf("a number: %+v", got)
	}
	if used := s.State().GPUs[0].UsedBytes; used != 0 {
		t.Errorf("used %d", used)
	}
	set, _ := ask(t, gpu, wire.OpSettings)
	if set.Status != wire.OK || set.Val[0] != 32<<20 || set.Val[1] != 0 {
		t.Errorf("settings: %+v", set)
	}
	minus := int64(-40) << 20
	ctx, _ := ask(t, gpu, wire.OpCtxCreate)
	if rep, _ := ask(t, gpu, wire.OpCtxResize, ctx.Val[0], uint64(minus)); rep.Status != wire.OK || s.State().GPUs[0].UsedBytes != 64<<20 {
		t.Errorf("resize: %+v, used %d", rep, s.State().GPUs[0].UsedBytes)
	}
}
