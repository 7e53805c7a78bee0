// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapping is a part of a shared file in our address space. Every access is one atomic u64: no
// copy() ever runs over words that another process reads.
type mapping struct {
	path string
	data []byte
}

func mapShared(f *os.File, offset int64, length int) (*mapping, error) {
	data, err := unix.Mmap(int(f.Fd()), offset, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return &mapping{path: f.Name(), data: data}, nil
}

// mapToRead maps a file that only others write, from its beginning.
func mapToRead(f *os.File, length int) (*mapping, error) {
	data, err := unix.Mmap(int(f.Fd()), 0, length, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return &mapping{path: f.Name(), data: data}, nil
}

// same compares with private bytes, word by word. A word that changes meanwhile is the old one or
// the new one; nothing that is read stays.
func (m *mapping) same(offset int, private []byte) bool {
	if len(private) == 0 {
		return true
	}
	_ = m.data[offset+len(private)-1]
	shared, ours := unsafe.Pointer(&m.data[offset]), unsafe.Pointer(&private[0]) //nolint:gosec // lengths and offsets are multiples of 8
	for i := 0; i < len(private); i += 8 {
		if atomic.LoadUint64((*uint64)(unsafe.Add(shared, i))) != *(*uint64)(unsafe.Add(ours, i)) {
			return false
		}
	}
	return true
}

func (m *mapping) word(offset int) *uint64 {
	_ = m.data[offset+7]
	return (*uint64)(unsafe.Pointer(&m.data[offset])) //nolint:gosec // an aligned word of a shared page
}

func (m *mapping) load(offset int) uint64     { return atomic.LoadUint64(m.word(offset)) }
func (m *mapping) store(offset int, v uint64) { atomic.StoreUint64(m.word(offset), v) }
func (m *mapping) swap(offset int, old, v uint64) bool {
	return atomic.CompareAndSwapUint64(m.word(offset), old, v)
}

func (m *mapping) unmap() error {
	if m.data == nil {
		return nil
	}
	err := unix.Munmap(m.data)
	m.data = nil
	if err != nil {
		return fmt.Errorf("unmap %s: %w", m.path, err)
	}
	return nil
}

// guarded runs f, which touches the mapping. A file that was cut under it makes an error, where
// Go would otherwise end the program on SIGBUS.
func (m *mapping) guarded(f func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(old)
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		// Only a fault has an address; anything else is our own mistake.
		if fault, ok := r.(interface {
			error
			Addr() uintptr
		}); ok {
			err = &BrokenError{Path: m.path, Why: "the file was cut while it was mapped (" + fault.Error() + ")"}
			return
		}
		panic(r)
	}()
	return f()
}
