// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"math/bits"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

const blockSlots = int(wire.PageBytes / wire.AlignBytes)

// block is one page that small allocations share, a bit for every 512 bytes.
type block struct {
	handle uint64
	used   [blockSlots / 64]uint64
	taken  int
	shared *reference // once it was exported
	on     *account   // that pays
}

// place finds room for n slots, first fit, and takes it.
func (b *block) place(n int) (slot int, ok bool) {
	if blockSlots-b.taken < n {
		return 0, false
	}
	run := 0
	for i := 0; i < blockSlots; i++ {
		if word := b.used[i/64]; i%64 == 0 && word == ^uint64(0) {
			run = 0
			i += 63
			continue
		} else if word>>(i%64)&1 != 0 {
			run = 0
			i += bits.TrailingZeros64(^(word >> (i % 64))) - 1
			continue
		}
		if run++; run == n {
			slot = i - n + 1
			b.mark(slot, n, true)
			return slot, true
		}
	}
	return 0, false
}

func (b *block) mark(slot, n int, taken bool) {
	for i := slot; i < slot+n; i++ {
		if taken {
			b.used[i/64] |= 1 << (i % 64)
		} else {
			b.used[i/64] &^= 1 << (i % 64)
		}
	}
	if taken {
		b.taken += n
	} else {
		b.taken -= n
	}
}
