// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"slices"
	"strings"
	"unicode"
)

const miB = 1 << 20

// unknownContextBytes is charged on a model that is not in the table: above every bare context
// that is in it.
const unknownContextBytes = 704 * miB

// contexts are upper bounds of a bare CUDA context: the driver backs the stack of every resident
// thread (1 KiB x threads x SMs) and adds 1.5 to 2.1 MiB an SM. The greatest seen replaces the
// bound at run time, so too much costs a container some MiB at its first start, and too little
// would let it over its limit. Words are matched whole and in order, the longest entry first.
var contexts = []struct {
	words []string
	bytes uint64
}{
	{[]string{"RTX", "PRO", "6000"}, 592 * miB},
	{[]string{"RTX", "6000", "ADA"}, 512 * miB},
	{[]string{"4060", "TI"}, 124 * miB},
	{[]string{"T4"}, 124 * miB},
	{[]string{"T4G"}, 124 * miB},
	{[]string{"V100"}, 328 * miB},
	{[]string{"V100S"}, 328 * miB},
	{[]string{"A10"}, 260 * miB},
	{[]string{"A10G"}, 260 * miB},
	{[]string{"A30"}, 230 * miB},
	{[]string{"A40"}, 304 * miB},
	{[]string{"A100"}, 444 * miB},
	{[]string{"A100X"}, 444 * miB},
	{[]string{"A800"}, 444 * miB},
	{[]string{"L4"}, 210 * miB},
	{[]string{"L40"}, 512 * miB},
	{[]string{"L40S"}, 512 * miB},
	{[]string{"3090"}, 296 * miB},
	{[]string{"4090"}, 462 * miB},
	{[]string{"5090"}, 612 * miB},
	{[]string{"H100"}, 542 * miB},
	{[]string{"H800"}, 542 * miB},
	{[]string{"H200"}, 542 * miB},
	{[]string{"GH200"}, 542 * miB},
	{[]string{"B200"}, 640 * miB},
	{[]string{"GB200"}, 640 * miB},
}

// ContextBytes is an upper bound of what one CUDA context takes on a model of GPU.
func ContextBytes(model string) uint64 {
	words := strings.FieldsFunc(strings.ToUpper(model), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	})
	best, length := uint64(unknownContextBytes), 0
	for _, c := range contexts {
		if len(c.words) > length && containsRun(words, c.words) {
			best, length = c.bytes, len(c.words)
		}
	}
	return best
}

// instanceFixedBytes is what of a context is not taken to shrink with the processors.
const instanceFixedBytes = 32 * miB

// instanceContextBytes is the bound of a context in a MIG instance, from that of the whole GPU: what
// the driver keeps for each SM is there only for the instance's.
func instanceContextBytes(whole uint64, share float64) uint64 {
	if !(share > 0 && share < 1) {
		return whole // a whole GPU, or nobody knows
	}
	const granule = 2 * miB
	scaled := (uint64(float64(whole)*share) + granule - 1) / granule * granule
	return min(whole, scaled+instanceFixedBytes)
}

func containsRun(words, run []string) bool {
	for i := 0; i+len(run) <= len(words); i++ {
		if slices.Equal(words[i:i+len(run)], run) {
			return true
		}
	}
	return false
}
