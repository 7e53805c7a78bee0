// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"strings"
	"testing"
)

// The protocols of the shared pages, checked over every interleaving of a few processes that may be
// killed between any two of their steps. One step is one access to shared memory (memory is
// sequentially consistent here; the fences that make it so are the shim's). Each protocol comes
// with a wrong one that looks as good, and the checker must find what is wrong with it.

// explore visits every state that next can reach, and stops at the first that bad complains of.
func explore[S comparable](t *testing.T, first S, next func(S, func(S, string)), bad func(S) string) (states int, complaint string, trace []string) {
	t.Helper()
	const limit = 5_000_000
	type from struct {
		state S
		by    string
	}
	seen := map[S]from{first: {}}
	queue := []S{first}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		if complaint = bad(s); complaint != "" {
			for s != first {
				trace = append([]string{seen[s].by}, trace...)
				s = seen[s].state
			}
			return len(seen), complaint, trace
		}
		next(s, func(n S, by string) {
			if _, ok := seen[n]; !ok {
				seen[n] = from{s, by}
				queue = append(queue, n)
			}
		})
		if len(seen) > limit {
			t.Fatalf("more than %d states", limit)
		}
	}
	return len(seen), "", nil
}

func mustHold[S comparable](t *testing.T, first S, next func(S, func(S, string)), bad func(S) string) {
	t.Helper()
	states, complaint, trace := explore(t, first, next, bad)
	if complaint != "" {
		t.Fatalf("%s after %s", complaint, strings.Join(trace, ", "))
	}
	t.Logf("holds in %d states", states)
}

func mustFail[S comparable](t *testing.T, want string, first S, next func(S, func(S, string)), bad func(S) string) {
	t.Helper()
	states, complaint, trace := explore(t, first, next, bad)
	if !strings.Contains(complaint, want) {
		t.Fatalf("the checker found %q in %d states; a protocol that is wrong must show %q", complaint, states, want)
	}
	t.Logf("%s after %d steps: %s", complaint, len(trace), strings.Join(trace, ", "))
}

// ---- reserve -----------------------------------------------------------------------

const (
	reserveMax       = 10
	reserveProcesses = 3
)

type scheme int

const (
	announceThenSum scheme = iota
	checkThenAdd           // sums first, adds then
	globalCounter          // one sum beside the slots
)

// Program counters of a process. While it sums, pc is sumFirst + 2*slot (+1 after the owner).
const (
	pcStart = iota
	pcAnnounced
	pcWithdraw
	pcDriver // may call the driver
	pcHolds
	pcFreed // driver has freed, the charge is still there
	pcDone
	pcRefused
	pcAdd // of checkThenAdd: about to add
	sumFirst
)

type reserveSlot struct {
	generation int8
	state      SlotState
	counterGen int8
	units      int8
}

type reserveProcess struct {
	pc     int8
	sum    int8 // so far
	ownGen int8 // of the slot that is being summed, as read
	counts bool // its owner word said live
	dead   bool
	gone   bool // reclaimed
	truth  int8 // what the driver holds for it
	seen   int8 // of globalCounter: the value that was loaded
}

type reserveState struct {
	global  int8
	slot    [reserveProcesses]reserveSlot
	process [reserveProcesses]reserveProcess
	kills   int8
}

// reserveModel lets each process allocate wants[i] once, hold it, and free it, while gpufenced marks
// and reclaims the slots of those that were killed.
func reserveModel(s scheme, wants [reserveProcesses]int8, kills int8) (reserveState, func(reserveState, func(reserveState, string)), func(reserveState) string) {
	first := reserveState{kills: kills}
	for i := range first.slot {
		first.slot[i] = reserveSlot{generation: 1, state: SlotLive, counterGen: 1}
	}
	next := func(st reserveState, emit func(reserveState, string)) {
		for i := range st.process {
			p := st.process[i]
			name := fmt.Sprintf("p%d", i)
			if !p.dead {
				stepReserve(s, st, i, wants[i], func(n reserveState, by string) { emit(n, name+" "+by) })
				if st.kills > 0 {
					n := st
					n.kills--
					// The driver frees a killed process's memory; what it has not freed yet is
					// dying and in no reserve's sum, nor in this model's truth.
					n.process[i].dead, n.process[i].truth = true, 0
					emit(n, name+" killed")
				}
			} else if !p.gone {
				if st.slot[i].state == SlotLive {
					n := st
					n.slot[i].state = SlotDying
					emit(n, "gpufenced marks "+name)
				}
				n := st
				if s == globalCounter {
					n.global -= n.slot[i].units
				}
				n.slot[i].generation++
				n.slot[i].state = SlotFree
				n.process[i].gone = true
				emit(n, "gpufenced reclaims "+name)
			}
		}
	}
	bad := func(st reserveState) string {
		var truth, ledger int8
		quiet := true
		for i := range st.process {
			p, sl := st.process[i], st.slot[i]
			truth += p.truth
			if sl.state == SlotLive && sl.counterGen == sl.generation {
				ledger += sl.units
			}
			settled := p.pc == pcHolds || p.pc == pcDone || p.pc == pcRefused
			if !p.gone && (p.dead || !settled) {
				quiet = false
			}
		}
		if s == globalCounter {
			ledger = st.global
		}
		if truth > reserveMax {
			return fmt.Sprintf("overcommit: %d of %d", truth, reserveMax)
		}
		if quiet && ledger != truth {
			return fmt.Sprintf("leak: the ledger says %d, the driver holds %d", ledger, truth)
		}
		return ""
	}
	return first, next, bad
}

// stepReserve emits what one process may do next.
func stepReserve(s scheme, st reserveState, i int, want int8, emit func(reserveState, string)) {
	p := &st.process[i]
	charge := func(by int8) bool { // CAS that checks the generation
		sl := &st.slot[i]
		if sl.generation != 1 {
			return false
		}
		sl.units += by
		return true
	}
	lastSum := int8(sumFirst + 2*reserveProcesses)
	switch pc := p.pc; {
	case pc == pcStart && s == announceThenSum:
		charge(want)
		p.pc = sumFirst
		emit(st, "announces")
	case pc == pcStart && s == checkThenAdd:
		p.pc = sumFirst
		emit(st, "begins to sum")
	case pc == pcStart && s == globalCounter:
		p.seen, p.pc = st.global, pcAnnounced
		emit(st, "loads the sum")
	case pc == pcAnnounced: // globalCounter
		switch {
		case p.seen+want > reserveMax:
			p.pc = pcRefused
			emit(st, "is refused")
		case st.global != p.seen:
			p.pc = pcStart
			emit(st, "tries again")
		default:
			st.global += want
			p.pc = pcAdd
			emit(st, "adds to the sum")
		}
	case pc == pcAdd:
		charge(want)
		p.pc = pcDriver
		emit(st, "adds to its slot")
	case pc >= sumFirst && pc < lastSum:
		j := (pc - sumFirst) / 2
		if (pc-sumFirst)%2 == 0 {
			p.ownGen, p.counts = st.slot[j].generation, st.slot[j].state == SlotLive
			p.pc++
			emit(st, fmt.Sprintf("reads owner %d", j))
			return
		}
		if p.counts && st.slot[j].counterGen == p.ownGen {
			p.sum += st.slot[j].units
		}
		p.ownGen, p.counts = 0, false
		p.pc++
		emit(st, fmt.Sprintf("reads counter %d", j))
	case pc == lastSum:
		sum := p.sum
		p.sum = 0
		switch {
		case s == checkThenAdd && sum+want <= reserveMax:
			p.pc = pcAdd
			emit(st, "finds room")
		case s == checkThenAdd:
			p.pc = pcRefused
			emit(st, "is refused")
		case sum <= reserveMax:
			p.pc = pcDriver
			emit(st, "finds room")
		default:
			p.pc = pcWithdraw
			emit(st, "finds no room")
		}
	case pc == pcWithdraw:
		charge(-want)
		p.pc = pcRefused
		emit(st, "withdraws")
	case pc == pcDriver:
		p.truth, p.pc = want, pcHolds
		emit(st, "allocates")
		refused := st
		refused.process[i].truth, refused.process[i].pc = 0, pcFreed
		emit(refused, "is refused by the driver")
	case pc == pcHolds:
		p.truth, p.pc = 0, pcFreed
		emit(st, "frees")
	case pc == pcFreed:
		charge(-want)
		if s == globalCounter {
			st.global -= want
		}
		p.pc = pcDone
		emit(st, "uncharges")
	}
}

func TestModelReserve(t *testing.T) {
	for _, wants := range [][reserveProcesses]int8{{6, 5, 3}, {4, 4, 4}, {6, 6, 0}, {10, 1, 10}} {
		for kills := range int8(3) {
			t.Run(fmt.Sprintf("%v kills %d", wants, kills), func(t *testing.T) {
				first, next, bad := reserveModel(announceThenSum, wants, kills)
				mustHold(t, first, next, bad)
			})
		}
	}
	t.Run("check then add over-commits", func(t *testing.T) {
		first, next, bad := reserveModel(checkThenAdd, [reserveProcesses]int8{6, 5, 3}, 0)
		mustFail(t, "overcommit", first, next, bad)
	})
	t.Run("a global counter leaks", func(t *testing.T) {
		first, next, bad := reserveModel(globalCounter, [reserveProcesses]int8{6, 5, 3}, 1)
		mustFail(t, "leak", first, next, bad)
	})
	t.Run("a global counter without kills does not", func(t *testing.T) {
		first, next, bad := reserveModel(globalCounter, [reserveProcesses]int8{6, 5, 3}, 0)
		mustHold(t, first, next, bad)
	})
}

// ---- limits page ----------------------------------------------------------------------

type latchState struct {
	latch   int8
	copies  [2][2]int8 // two words each
	writer  int8       // 0: stores word 0, 1: word 1, 2: the latch
	version int8       // that is being written
	kills   int8       // of gpufenced, which starts again
	reader  int8
	s       int8
	words   [2]int8
}

// latchModel lets a writer publish versions, both words of a copy equal, and a reader accept what
// it has read if the latch has moved by less than accept meanwhile.
func latchModel(accept, versions int8) (latchState, func(latchState, func(latchState, string)), func(latchState) string) {
	next := func(st latchState, emit func(latchState, string)) {
		if st.version <= versions {
			n := st
			switch st.writer {
			case 0, 1:
				n.copies[(st.latch+1)&1][st.writer] = st.version
				n.writer++
				emit(n, fmt.Sprintf("gpufenced stores word %d of %d", st.writer, st.version))
			case 2:
				n.latch, n.writer, n.version = st.latch+1, 0, st.version+1
				emit(n, "gpufenced moves the latch")
			}
			if st.kills > 0 && st.writer > 0 {
				n := st
				n.kills--
				n.writer, n.version = 0, st.version+1 // a new one begins with what holds then
				emit(n, "gpufenced is killed and starts again")
			}
		}
		n := st
		switch st.reader {
		case 0:
			n.s, n.reader = st.latch, 1
			emit(n, "reader loads the latch")
		case 1, 2:
			n.words[st.reader-1] = st.copies[st.s&1][st.reader-1]
			n.reader++
			emit(n, fmt.Sprintf("reader loads word %d", st.reader-1))
		case 3:
			if st.latch-st.s < accept {
				n.reader = 4
				emit(n, "reader accepts")
			} else {
				n.reader, n.words = 0, [2]int8{}
				emit(n, "reader reads again")
			}
		case 4:
			n.reader, n.words = 0, [2]int8{}
			emit(n, "reader is asked again")
		}
	}
	bad := func(st latchState) string {
		if st.reader == 4 && st.words[0] != st.words[1] {
			return fmt.Sprintf("torn: %v", st.words)
		}
		return ""
	}
	return latchState{version: 1, kills: 2}, next, bad
}

func TestModelLimitsPage(t *testing.T) {
	first, next, bad := latchModel(1, 5)
	mustHold(t, first, next, bad)
	t.Run("accepting moved by one is torn", func(t *testing.T) {
		first, next, bad := latchModel(2, 5)
		mustFail(t, "torn", first, next, bad)
	})
}

// ---- takeover ----------------------------------------------------------------------------

type takeover struct {
	bump bool // the taker writes the next generation
	lock bool // the taker takes the slot's lock first
	swap bool // owner words change by compare-and-swap, else by a store after a look
}

// Processes of the takeover model: a was the owner, b and c found the heartbeat stale.
const takeoverProcesses = 3

type takeoverProcess struct {
	pc     int8
	alive  bool
	locked bool
	owns   int8 // generation that it believes to own, 0 for none
	charge int8 // what it has charged in that generation, by its own books
	word   takeoverOwner
}

type takeoverOwner struct {
	generation int8
	state      SlotState
	pid        int8 // index + 1
}

type takeoverState struct {
	owner      takeoverOwner
	counterGen int8
	units      int8
	process    [takeoverProcesses]takeoverProcess
	daemon     int8 // pc
	seen       takeoverOwner
	hasLock    bool // the daemon has the lock
	kills      int8
	writes     int8 // that are left, to keep it finite
}

func takeoverModel(v takeover) (takeoverState, func(takeoverState, func(takeoverState, string)), func(takeoverState) string) {
	first := takeoverState{owner: takeoverOwner{1, SlotLive, 1}, counterGen: 1, units: 3, kills: 2, writes: 4}
	for i := range first.process {
		first.process[i].alive = true
	}
	first.process[0] = takeoverProcess{pc: 9, alive: true, locked: true, owns: 1, charge: 3}
	lockHeld := func(st *takeoverState, but int) bool {
		for i := range st.process {
			if i != but && st.process[i].locked {
				return true
			}
		}
		return st.hasLock
	}
	next := func(st takeoverState, emit func(takeoverState, string)) {
		for i := range st.process {
			p := st.process[i]
			name := string(rune('a' + i))
			if !p.alive {
				continue
			}
			if st.kills > 0 {
				n := st
				n.kills--
				n.process[i] = takeoverProcess{pc: p.pc} // the kernel drops its locks
				emit(n, name+" killed")
			}
			n := st
			q := &n.process[i]
			switch p.pc {
			case 0: // take the lock
				if v.lock && lockHeld(&st, i) {
					continue
				}
				q.locked, q.pc = v.lock, 1
				emit(n, name+" takes the lock")
			case 1: // look at the owner
				q.word, q.pc = st.owner, 2
				emit(n, name+" looks")
			case 2: // change it
				generation := p.word.generation
				if p.word.state != SlotFree && v.bump {
					generation++
				}
				if v.swap && st.owner != p.word {
					q.pc, q.locked, q.word = 8, false, takeoverOwner{}
					emit(n, name+" loses the race")
					continue
				}
				n.owner = takeoverOwner{generation, SlotLive, int8(i + 1)}
				q.owns, q.charge, q.pc, q.word = generation, 0, 9, takeoverOwner{}
				emit(n, name+" takes over")
			case 9: // owner: charge one unit, by a CAS that checks the generation
				if i == 0 && p.locked {
					// exec, or closefrom(), loses the lock while the program goes on
					m := st
					m.process[0].locked = false
					emit(m, name+" loses its lock")
				}
				if st.writes == 0 {
					continue
				}
				n.writes--
				if st.owner.generation != p.owns {
					q.pc, q.owns, q.charge, q.locked = 8, 0, 0, false
					emit(n, name+" finds its slot gone")
					continue
				}
				q.pc = 10
				emit(n, name+" has checked its generation")
			case 10: // the CAS itself: the counter's own generation is part of the word
				q.pc = 9
				switch {
				case st.counterGen == p.owns:
					n.units++
					q.charge++
				case st.counterGen < p.owns: // a predecessor's: counts as 0
					n.counterGen, n.units = p.owns, 1
					q.charge++
				default: // a successor's: the CAS fails
					q.pc, q.owns, q.charge, q.locked = 8, 0, 0, false
				}
				emit(n, name+" charges")
			}
		}
		// gpufenced comes back and reclaims what it knows of a, which has exited.
		n := st
		switch st.daemon {
		case 0:
			if st.process[0].alive {
				break
			}
			n.hasLock, n.daemon = !lockHeld(&st, -1), 1 // a is known to have exited: also without
			emit(n, "gpufenced tries the lock")
		case 1:
			n.seen, n.daemon = st.owner, 2
			if st.owner.generation != 1 || st.owner.state == SlotFree {
				n.daemon, n.hasLock = 3, false
			}
			emit(n, "gpufenced looks")
		case 2:
			if !v.swap || st.owner == st.seen {
				n.owner = takeoverOwner{generation: 2, state: SlotFree}
			}
			n.daemon, n.hasLock = 3, false
			emit(n, "gpufenced reclaims")
		}
	}
	bad := func(st takeoverState) string {
		for i, p := range st.process {
			if !p.alive || p.owns == 0 {
				continue
			}
			for j := i + 1; j < takeoverProcesses; j++ {
				if q := st.process[j]; q.alive && q.owns == p.owns {
					return fmt.Sprintf("two owners of generation %d", p.owns)
				}
			}
			if st.owner.generation == p.owns && st.owner.pid != int8(i+1) {
				return fmt.Sprintf("the claim of %c is overwritten", 'a'+i)
			}
			if st.owner.generation == p.owns && st.counterGen == p.owns && st.units != p.charge {
				return fmt.Sprintf("a foreign write counts: %c charged %d, its slot says %d", 'a'+i, p.charge, st.units)
			}
		}
		return ""
	}
	return first, next, bad
}

func TestModelTakeover(t *testing.T) {
	first, next, bad := takeoverModel(takeover{bump: true, lock: true, swap: true})
	mustHold(t, first, next, bad)
	t.Run("without the lock the swap alone still gives one owner", func(t *testing.T) {
		first, next, bad := takeoverModel(takeover{bump: true, swap: true})
		mustHold(t, first, next, bad)
	})
	for name, c := range map[string]struct {
		variant takeover
		want    string
	}{
		"without a new generation old numbers count":     {takeover{lock: true, swap: true}, "foreign write counts"},
		"a store without the lock makes two owners":      {takeover{bump: true}, "owner"},
		"a store by gpufenced overwrites a peer's claim": {takeover{bump: true, lock: true}, "overwritten"},
	} {
		t.Run(name, func(t *testing.T) {
			first, next, bad := takeoverModel(c.variant)
			mustFail(t, c.want, first, next, bad)
		})
	}
}
