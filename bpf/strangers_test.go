// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"math/bits"
	"os"
	"strconv"
	"strings"
	"testing"
)

// defined is a constant of the programs' source.
func defined(t *testing.T, name string) uint64 {
	t.Helper()
	text, err := os.ReadFile("src/gate.bpf.c")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "#define "+name+" ")
	rest, _, _ = strings.Cut(rest, "\n")
	word, _, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(strings.TrimSuffix(word, "ull"), 0, 64)
	if !found || err != nil {
		t.Fatalf("%s is %q: %v", name, rest, err)
	}
	return n
}

// TestNoTwoStrangersHaveTheSameWord: what the programs keep of a cgroup and a generation is their sum, the generation times
// an odd number. Two pairs have the same one where the difference of their ids is that of their generations times the
// number, modulo 2^64: so for no difference of generations may that be as near to 0 as ids lie.
func TestNoTwoStrangersHaveTheSameWord(t *testing.T) {
	golden, apart := defined(t, "GOLDEN"), uint64(1)<<38
	text, err := os.ReadFile("src/gate.bpf.c")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "#define WORDED (1ull << 38)") {
		t.Error("ids of other sizes make words, too")
	}
	nearest := ^uint64(0)
	for generations := uint64(1); generations < 1<<24; generations++ {
		product := generations * golden
		nearest = min(nearest, product, -product)
	}
	t.Logf("the nearest is %d, of %d bits", nearest, bits.Len64(nearest))
	if nearest < apart {
		t.Errorf("two pairs whose ids are %d apart have the same word", nearest)
	}
	if slots := defined(t, "STRANGERS"); slots&(slots-1) != 0 || slots > 1<<24 {
		t.Errorf("%d slots: a word may stay for as many generations", slots)
	}
}

// TestAWordIsNotKeptForLong: a slot is emptied once in as many generations as there are slots.
func TestAWordIsNotKeptForLong(t *testing.T) {
	g := accounts(t)
	m := g.maps["strangers"]
	slots := uint32(defined(t, "STRANGERS"))
	if m.MaxEntries() != slots {
		t.Fatalf("%d slots, want %d", m.MaxEntries(), slots)
	}
	for slot := range slots {
		if err := m.Put(slot, uint64(7)); err != nil {
			t.Fatal(err)
		}
	}
	for range slots {
		if err := g.begin(1); err != nil {
			t.Fatal(err)
		}
	}
	for slot := range slots {
		var word uint64
		if err := m.Lookup(slot, &word); err != nil || word != 0 {
			t.Fatalf("slot %d has %d after %d generations: %v", slot, word, slots, err)
		}
	}
}
