// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

var errEOF = io.EOF

// snapshotTries is how often a ledger is read before it counts as broken: pread does not promise
// that a word which changes meanwhile arrives whole, a page that somebody broke stays broken.
const snapshotTries = 3

// Ledger is one pod's ledger, as gpufenced sees it.
type Ledger struct {
	path  string
	slots int
	size  int64

	mu   sync.Mutex // OFD locks do not tell our own goroutines apart
	file *os.File
	high int // slots read so far; only grows

	// kept is what was read last, header, slots and overflow slot, and last its snapshot: where no
	// byte has changed, nothing has to be judged again.
	kept []byte
	last *Snapshot
	// front and glanced are, one behind the other, what of kept belongs to the first frontGPUs,
	// glanced without the heads of slots: a pod's pages and what they are compared with are out of the
	// caches each time.
	front, glanced []byte
	frontGPUs      int
	// page is the ledger as its pod sees it. It is only ever compared with kept, to see whether it
	// must be read at all; under a pod that cuts the file that is an error, as everywhere.
	page  *mapping
	looks int // at the mapping since everything was compared
	// glances are those that may leave heads out, since one that did not; peeks those that may leave
	// slots out.
	glances, peeks int
}

const (
	// wholeEvery is how many looks compare only what belongs to GPUs that the pod has, before one
	// compares all; sizeEvery how many leave out the size of the file.
	wholeEvery = 64
	sizeEvery  = 16
	// headsEvery is how many glances there are to one that compares the heads of slots, too.
	headsEvery = 4
	// slotsEvery is how many peeks there are to one that compares slots, too.
	slotsEvery = 3
)

// closeness is how much of a ledger is compared to see whether it has changed.
type closeness int

const (
	closely  closeness = iota // all that belongs to the pod's GPUs
	aGlance                   // the heads of slots hardly ever
	onlyPeek                  // slots hardly ever
)

// scratch are buffers to read a ledger into.
var scratch = sync.Pool{New: func() any { return new([]byte) }}

func createLedger(path string, slots int, plain bool) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// Every user of the pod's containers writes here; chmod, since open's mode is cut by umask.
	if err := f.Chmod(0o666); err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	if err := allocate(f, ledgerBytes(slots), plain); err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	head := make([]byte, headerBytes)
	le := binary.LittleEndian
	le.PutUint64(head[headerMagic:], LedgerMagic)
	le.PutUint16(head[headerMajor:], ABIMajor)
	le.PutUint16(head[headerMinor:], ABIMinor)
	le.PutUint32(head[headerHeaderBytes:], ledgerHeaderBytes)
	le.PutUint64(head[headerTotalBytes:], uint64(ledgerBytes(slots)))
	le.PutUint32(head[headerSlotCount:], uint32(slots))
	le.PutUint32(head[headerSlotBytes:], slotBytes)
	le.PutUint32(head[headerGPUCountMax:], GPUs)
	if _, err := f.WriteAt(head, 0); err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	return nil
}

func openLedger(path string, slots int) (*Ledger, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	return &Ledger{path: path, slots: slots, size: ledgerBytes(slots), file: f}, nil
}

func (l *Ledger) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	if l.page != nil {
		err = errors.Join(err, l.page.unmap())
		l.page = nil
	}
	return err
}

// Slots is how many slots it has, the overflow slot not counted.
func (l *Ledger) Slots() int { return l.slots }

// Snapshot reads and checks it. A broken one is [ErrBroken]. The same snapshot comes again while
// nothing has changed, so it is not to be written to.
func (l *Ledger) Snapshot() (*Snapshot, error) { return l.SnapshotOf(GPUs) }

// SnapshotOf is for a pod that has only the first so many GPUs: what a pod scribbles where nothing
// belongs is found a little later.
func (l *Ledger) SnapshotOf(gpus int) (*Snapshot, error) { return l.snapshot(gpus, closely) }

// GlanceOf is [Ledger.SnapshotOf] for when nothing else speaks for a change: what changes in the head
// of a slot alone is found a little later. Whoever charges, gives back or is refused changes what the
// slot says of the GPU; what changes in heads alone is how often memory was allocated, what is
// imported, and who has a slot that has charged nothing yet. So is what is in the overflow slot while
// there are slots that nobody has had yet.
func (l *Ledger) GlanceOf(gpus int) (*Snapshot, error) { return l.snapshot(gpus, aGlance) }

// PeekOf is [Ledger.GlanceOf] for when the number of the sample, too, has stood still in all limits
// pages of the pod since slots were looked at last: they are looked at every third time, and lose no
// peak meanwhile. What the shims ask for is in the header, which is looked at each time.
func (l *Ledger) PeekOf(gpus int) (*Snapshot, error) { return l.snapshot(gpus, onlyPeek) }

func (l *Ledger) snapshot(gpus int, look closeness) (*Snapshot, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil, fmt.Errorf("read ledger %s: %w", l.path, fs.ErrClosed)
	}
	var err error
	for range snapshotTries {
		if err = l.read(gpus, look); err == nil {
			return l.last, nil
		}
		l.last = nil
		if !errors.Is(err, ErrBroken) {
			return nil, err
		}
	}
	return nil, err
}

// unchanged says that the ledger is, byte for byte, what it was when it was read last, as far as the
// first GPUs go, and as closely as it is looked at.
func (l *Ledger) unchanged(gpus int, look closeness) bool {
	if l.last == nil || len(l.kept) != headerBytes+l.high*slotBytes+slotBytes {
		return false
	}
	l.looks++
	whole := l.looks >= wholeEvery || gpus >= GPUs
	if whole || l.looks%sizeEvery == 0 {
		var info unix.Stat_t
		// It cannot block, so Go's scheduler need not know: that would wake its monitor each time.
		_, _, failed := unix.RawSyscall(unix.SYS_FSTAT, l.file.Fd(), uintptr(unsafe.Pointer(&info)), 0) //nolint:gosec // the kernel's struct
		if failed != 0 || info.Size != l.size {
			return false // reading says what is wrong
		}
	}
	if l.page == nil {
		m, err := mapToRead(l.file, int(l.size))
		if err != nil {
			return false // by pread, then
		}
		l.page = m
	}
	if whole {
		l.looks, gpus, look = 0, GPUs, closely
	}
	look = l.closer(look)
	want, from, size := l.kept, 0, slotBytes
	switch {
	case look == aGlance:
		l.cut(gpus)
		want, from, size = l.glanced, slotGPU, gpus*slotGPUBytes
	case gpus < GPUs:
		l.cut(gpus)
		want, size = l.front, slotGPU+gpus*slotGPUBytes
	}
	same := false
	err := l.page.guarded(func() error {
		same = l.page.same(0, want[:headerBytes])
		if look == onlyPeek {
			return nil
		}
		slots := want[headerBytes:]
		for i := 0; i < l.high && same; i++ {
			same = l.page.same(int(slotOffset(i))+from, slots[i*size:][:size])
		}
		// It is on a page of its own, and only used when all slots are.
		if look == closely || l.high == l.slots {
			same = same && l.page.same(int(slotOffset(l.slots))+from, slots[l.high*size:])
		}
		return nil
	})
	return err == nil && same
}

// closer lets every few peeks be a glance, and every few glances a close look. A glance among peeks
// counts for two: it comes more rarely.
func (l *Ledger) closer(look closeness) closeness {
	if look == onlyPeek {
		if l.peeks++; l.peeks < slotsEvery {
			return onlyPeek
		}
		look = aGlance
		l.glances++
	}
	l.peeks = 0
	if look == aGlance {
		if l.glances++; l.glances < headsEvery {
			return aGlance
		}
	}
	l.glances = 0
	return closely
}

// cut makes what is compared for so many GPUs out of what was read.
func (l *Ledger) cut(gpus int) {
	if l.frontGPUs == gpus {
		return
	}
	l.frontGPUs = gpus
	l.front, l.glanced = append(l.front[:0], l.kept[:headerBytes]...), append(l.glanced[:0], l.kept[:headerBytes]...)
	for slots := l.kept[headerBytes:]; len(slots) > 0; slots = slots[slotBytes:] {
		l.front = append(l.front, slots[:slotGPU+gpus*slotGPUBytes]...)
		l.glanced = append(l.glanced, slots[slotGPU:][:gpus*slotGPUBytes]...)
	}
}

func (l *Ledger) read(gpus int, look closeness) error {
	if l.unchanged(gpus, look) {
		return nil
	}
	l.looks, l.glances, l.peeks = 0, 0, 0
	buffer, ok := scratch.Get().(*[]byte)
	if !ok {
		buffer = new([]byte)
	}
	defer scratch.Put(buffer)
	var head, overflow []byte
	for {
		// One byte more than the overflow slot has: a file that has grown shows by it.
		size := ledgerHeaderBytes + l.high*slotBytes
		if len(*buffer) < size+slotBytes+1 {
			*buffer = make([]byte, size+slotBytes+1)
		}
		head, overflow = (*buffer)[:size], (*buffer)[size:size+slotBytes+1]
		if err := l.pread(head, 0); err != nil {
			return err
		}
		// The hint saves reading 500 empty slots. It is the pod's to write, so it may only make us
		// read more than before, up to all.
		hint := binary.LittleEndian.Uint64(head[headerHighSlot:])
		if hint <= uint64(l.high) || l.high == l.slots {
			break
		}
		l.high = int(min(hint, uint64(l.slots)))
	}
	switch n, err := l.file.ReadAt(overflow, slotOffset(l.slots)); {
	case n == len(overflow):
		return &BrokenError{Path: l.path, Why: fmt.Sprintf("it has more than %d bytes", l.size)}
	case err != nil && !errors.Is(err, errEOF):
		return fmt.Errorf("read ledger: %w", err)
	case n != slotBytes:
		return &BrokenError{Path: l.path, Why: fmt.Sprintf("it has less than %d bytes", l.size)}
	}
	header, slots, overflow := head[:headerBytes], head[ledgerHeaderBytes:], overflow[:slotBytes]
	s, why := parseLedger(header, slots, overflow, l.slots)
	if why != "" {
		return &BrokenError{Path: l.path, Why: why}
	}
	l.kept = append(append(append(l.kept[:0], header...), slots...), overflow...)
	l.last, l.frontGPUs = s, 0
	return nil
}

func (l *Ledger) pread(b []byte, offset int64) error {
	if len(b) == 0 {
		return nil
	}
	n, err := l.file.ReadAt(b, offset)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, errEOF) {
		return &BrokenError{Path: l.path, Why: fmt.Sprintf("short read: %d of %d bytes at %d", n, len(b), offset)}
	}
	return fmt.Errorf("read ledger: %w", err)
}

// parseLedger judges private copies: the header, the first slots, and the overflow slot of a
// ledger of so many slots. why is not empty if a rule is broken.
func parseLedger(head, slots, overflow []byte, slotCount int) (s *Snapshot, why string) {
	le := binary.LittleEndian
	if len(head) < headerBytes || len(slots)%slotBytes != 0 || len(slots) > slotCount*slotBytes || len(overflow) != slotBytes {
		return nil, "short read"
	}
	for _, f := range []struct {
		name      string
		got, want uint64
	}{
		{"magic", le.Uint64(head[headerMagic:]), LedgerMagic},
		{"abi_major", uint64(le.Uint16(head[headerMajor:])), ABIMajor},
		{"header_bytes", uint64(le.Uint32(head[headerHeaderBytes:])), ledgerHeaderBytes},
		{"total_bytes", le.Uint64(head[headerTotalBytes:]), uint64(ledgerBytes(slotCount))},
		{"slot_count", uint64(le.Uint32(head[headerSlotCount:])), uint64(slotCount)},
		{"slot_bytes", uint64(le.Uint32(head[headerSlotBytes:])), slotBytes},
		{"gpu_count_max", uint64(le.Uint32(head[headerGPUCountMax:])), GPUs},
	} {
		if f.got != f.want {
			return nil, fmt.Sprintf("%s is %#x, not %#x", f.name, f.got, f.want)
		}
	}
	s = &Snapshot{ReclaimRequest: le.Uint64(head[headerReclaimRequest:])}
	for i := 0; i < len(slots)/slotBytes; i++ {
		b := slots[i*slotBytes : (i+1)*slotBytes]
		owner := unpackOwner(le.Uint64(b[slotOwner:]))
		switch owner.State {
		case SlotFree:
			continue
		case SlotLive, SlotDying:
		default:
			return nil, fmt.Sprintf("slot %d is in state %d", i, owner.State)
		}
		if owner.PID == 0 {
			return nil, fmt.Sprintf("slot %d is %s without an owner", i, owner.State)
		}
		slot, why := parseSlot(b, i)
		if why != "" {
			return nil, why
		}
		s.Slots = append(s.Slots, slot)
	}
	if s.Overflow, why = parseSlot(overflow, slotCount); why != "" {
		return nil, why
	}
	return s, ""
}

func parseSlot(b []byte, index int) (s Slot, why string) {
	le := binary.LittleEndian
	s = Slot{
		Index:          index,
		Owner:          unpackOwner(le.Uint64(b[slotOwner:])),
		PIDNSInode:     le.Uint64(b[slotPidnsInode:]),
		StartTicks:     le.Uint64(b[slotStartTicks:]),
		ContainerIndex: le.Uint32(b[slotContainerIndex:]),
		ShimABI:        le.Uint32(b[slotShimABI:]),
		Allocs:         le.Uint64(b[slotAllocs:]),
		Frees:          le.Uint64(b[slotFrees:]),
	}
	if s.ShimABI >= importsABI {
		s.Imports = le.Uint64(b[slotImports:])
	}
	for i := range s.GPU {
		g := &s.GPU[i]
		e := b[slotGPU+i*slotGPUBytes:]
		for _, c := range []struct {
			name   string
			offset int
			to     *uint64
		}{{"device", slotGPUDevice, &g.DeviceBytes}, {"managed", slotGPUManaged, &g.ManagedBytes}, {"swap", slotGPUSwap, &g.SwapBytes}} {
			w := le.Uint64(e[c.offset:])
			if uint32(w>>unitsBits) != s.Generation {
				continue
			}
			units := w & unitsMask
			// The upper half of the range is a counter that went below 0: 2 PiB fit no GPU, also
			// not while several threads announce at once.
			if units > unitsMask/2 {
				return Slot{}, fmt.Sprintf("slot %d gpu %d: %s counts %d units", index, i, c.name, units)
			}
			*c.to = units * UnitBytes
		}
		for p := range g.Peak {
			w := le.Uint64(e[slotGPUPeak+8*p:])
			if units := w & unitsMask; units <= unitsMask/2 {
				g.Peak[p] = Peak{Sample: uint32(w >> unitsBits), Bytes: units * UnitBytes}
			}
		}
		g.Events = SlotEvents{
			Max:    le.Uint64(e[slotGPUEventsMax:]),
			Device: le.Uint64(e[slotGPUEventsDevice:]),
			High:   le.Uint64(e[slotGPUEventsHigh:]),

			ThrottledMS: uint64(le.Uint32(b[slotThrottled+4*i:])),
		}
	}
	return s, ""
}

func (l *Ledger) check(slot int) error {
	if slot < 0 || slot >= l.slots {
		return fmt.Errorf("slot %d of %s is not between 0 and %d", slot, l.path, l.slots-1)
	}
	if l.file == nil {
		return fmt.Errorf("slot %d of %s: %w", slot, l.path, fs.ErrClosed)
	}
	return nil
}

func (l *Ledger) flock(slot int, typ int16) unix.Flock_t {
	return unix.Flock_t{Type: typ, Whence: io.SeekStart, Start: slotOffset(slot), Len: slotBytes}
}

// tryLock takes a slot's lock exclusively if nobody has it.
func (l *Ledger) tryLock(slot int) (bool, error) {
	lk := l.flock(slot, unix.F_WRLCK)
	switch err := unix.FcntlFlock(l.file.Fd(), unix.F_OFD_SETLK, &lk); {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EACCES):
		return false, nil
	default:
		return false, fmt.Errorf("lock slot %d of %s: %w", slot, l.path, err)
	}
}

func (l *Ledger) unlock(slot int) error {
	lk := l.flock(slot, unix.F_UNLCK)
	if err := unix.FcntlFlock(l.file.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
		return fmt.Errorf("unlock slot %d of %s: %w", slot, l.path, err)
	}
	return nil
}

// LockFree says whether nobody holds a slot's lock: a live slot's owner is gone then (it
// exited, or exec closed its file).
func (l *Ledger) LockFree(slot int) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.check(slot); err != nil {
		return false, err
	}
	lk := l.flock(slot, unix.F_WRLCK)
	if err := unix.FcntlFlock(l.file.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return false, fmt.Errorf("probe lock of slot %d of %s: %w", slot, l.path, err)
	}
	return lk.Type == unix.F_UNLCK, nil
}

// withSlot maps a slot's pages for the time of f; base is the slot's offset in the mapping.
func (l *Ledger) withSlot(slot int, f func(m *mapping, base int) error) (err error) {
	from := slotOffset(slot) &^ (pageBytes - 1)
	to := slotOffset(slot) + slotBytes
	m, err := mapShared(l.file, from, int(to-from))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.unmap()) }()
	l.glances, l.peeks = headsEvery, slotsEvery // what we change is seen at once
	return m.guarded(func() error { return f(m, int(slotOffset(slot)-from)) })
}

// change swaps a slot's owner word if it is of that generation and in one of the states.
func change(m *mapping, base int, generation uint32, from []SlotState, to func(Owner) Owner) error {
	for {
		word := m.load(base + slotOwner)
		owner := unpackOwner(word)
		match := false
		for _, s := range from {
			match = match || owner.State == s
		}
		if !match || owner.Generation != generation {
			return fmt.Errorf("it is %s in generation %d, not in %d: %w", owner.State, owner.Generation, generation, ErrMoved)
		}
		if m.swap(base+slotOwner, word, to(owner).pack()) {
			return nil
		}
		// Lost a race: judged again. Only a hostile owner can go on like this, so a bound:
		// the generation or state moves with every legal change.
		if again := unpackOwner(m.load(base + slotOwner)); again.Generation == owner.Generation && again.State == owner.State {
			return fmt.Errorf("its owner word moves: %w", ErrMoved)
		}
	}
}

// MarkDying takes a live slot of that generation out of the reserves' sums.
func (l *Ledger) MarkDying(slot int, generation uint32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.check(slot); err != nil {
		return fmt.Errorf("mark dying: %w", err)
	}
	err := l.withSlot(slot, func(m *mapping, base int) error {
		return change(m, base, generation, []SlotState{SlotLive}, func(o Owner) Owner {
			o.State = SlotDying
			return o
		})
	})
	if err != nil {
		return fmt.Errorf("mark slot %d of %s dying: %w", slot, l.path, err)
	}
	return nil
}

// Reclaim frees a slot of that generation. Unless the owner is known to have exited, its lock
// must be free ([ErrBusy]): a child that inherited the file by fork may keep the lock of a
// parent that is gone, and cannot claim anything by it.
func (l *Ledger) Reclaim(slot int, generation uint32, exited bool) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.check(slot); err != nil {
		return fmt.Errorf("reclaim: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("reclaim slot %d of %s: %w", slot, l.path, err)
		}
	}()
	locked, err := l.tryLock(slot)
	if err != nil {
		return err
	}
	if !locked && !exited {
		return ErrBusy
	}
	if locked {
		defer func() { err = errors.Join(err, l.unlock(slot)) }()
	}
	return l.withSlot(slot, func(m *mapping, base int) error {
		// What the slot counted goes with its generation; its events go on, see Totals.
		return change(m, base, generation, []SlotState{SlotLive, SlotDying}, func(o Owner) Owner {
			return Owner{Generation: nextGeneration(o.Generation), State: SlotFree}
		})
	})
}

// ClearOverflow sets the overflow slot's charges to 0 if there are any and nobody uses it, and says
// whether it did. Its events stay, see [Totals].
func (l *Ledger) ClearOverflow() (cleared bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return false, fmt.Errorf("clear overflow slot of %s: %w", l.path, fs.ErrClosed)
	}
	now := make([]byte, slotBytes)
	if err := l.pread(now, slotOffset(l.slots)); err != nil {
		return false, err
	}
	// The first words of each GPU: the three counters and the two peaks.
	zero := make([]byte, slotGPUEventsMax)
	var charged []int
	for gpu := range GPUs {
		at := slotGPU + gpu*slotGPUBytes
		if string(now[at:at+len(zero)]) != string(zero) {
			charged = append(charged, at)
		}
	}
	if len(charged) == 0 {
		return false, nil
	}
	locked, err := l.tryLock(l.slots)
	if err != nil || !locked {
		return false, err
	}
	defer func() { err = errors.Join(err, l.unlock(l.slots)) }()
	for _, at := range charged {
		if _, err := l.file.WriteAt(zero, slotOffset(l.slots)+int64(at)); err != nil {
			return false, fmt.Errorf("clear overflow slot: %w", err)
		}
	}
	return true, nil
}
