// SPDX-License-Identifier: Apache-2.0

package gatecredit

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// gateModel is a container at a driver, as the gate and NVML see it.
type gateModel struct {
	now                           time.Duration
	used, peak, charged, credited uint64 // the gate's
	unanswered                    uint64 // of what is charged
	real, own                     uint64 // the driver's
	lag                           time.Duration
	slow                          time.Duration // from when NVML was asked until the account is read
	past                          []struct {
		at    time.Duration
		bytes uint64
	}
}

func (m *gateModel) note() {
	m.past = append(m.past, struct {
		at    time.Duration
		bytes uint64
	}{m.now, m.real + m.own})
}

func (m *gateModel) alloc(limit, n uint64) bool {
	if m.used+n > limit {
		return false
	}
	m.used += n
	m.charged += n
	m.peak = max(m.peak, m.used)
	m.real += n
	m.note()
	return true
}

func (m *gateModel) free(n uint64, forged, credit bool) {
	if credit {
		m.used -= n
		m.credited += n
	}
	if !forged {
		m.real -= n
	}
	m.note()
}

func (m *gateModel) step(c *Credit, limit, overhead uint64) Verdict {
	nvml := uint64(0)
	for _, p := range m.past {
		if p.at <= m.now-m.lag-m.slow {
			nvml = p.bytes
		}
	}
	v := c.Step(Account{m.used, m.charged, m.charged - m.unanswered, m.credited, m.peak}, Truth{At: m.now, Took: m.slow, NVMLBytes: nvml, OverheadBytes: overhead, LimitBytes: limit})
	m.used = uint64(int64(m.used) + v.AdjustBytes)
	m.peak = m.used
	return v
}

const mb = 1 << 20

func newCredit() *Credit {
	return &Credit{Settle: time.Second, Margin: func(uint64) uint64 { return 64 * mb }}
}

// TestLegalChurnIsNeverForged: whatever a program allocates and frees within its limit, with NVML lagging up to
// 900 ms and a context that it has beside, it is neither accused nor charged anything.
func TestLegalChurnIsNeverForged(t *testing.T) {
	for seed := range uint64(60) {
		for _, lag := range []time.Duration{0, 200 * time.Millisecond, 900 * time.Millisecond} {
			r := rand.New(rand.NewPCG(seed, uint64(lag)))
			m := &gateModel{lag: lag, own: 300 * mb}
			m.note()
			c := newCredit()
			const limit = 4096 * mb
			var live []uint64
			for i := range 3000 {
				m.now += time.Duration(r.IntN(12)) * time.Millisecond
				if n := uint64(1+r.IntN(900)) * mb; r.IntN(2) == 0 && m.alloc(limit, n) {
					live = append(live, n)
				} else if len(live) > 0 {
					k := r.IntN(len(live))
					m.free(live[k], false, true)
					live = append(live[:k], live[k+1:]...)
				}
				if i%15 == 0 {
					if v := m.step(c, limit, 320*mb); v.NoCredit || v.Kill || v.AdjustBytes > 0 {
						t.Fatalf("seed %d, lag %s, at %s: %+v", seed, lag, m.now, v)
					}
					if m.used < m.real {
						t.Fatalf("seed %d, lag %s, at %s: charged %d of %d MiB", seed, lag, m.now, m.used/mb, m.real/mb)
					}
				}
			}
		}
	}
}

// TestLegalChurnBesideASlowNVML: an answer is as old as the call took, and the lag comes on top of that. Nobody is accused
// for it, and nothing that is held is given back.
func TestLegalChurnBesideASlowNVML(t *testing.T) {
	for seed := range uint64(60) {
		for _, slow := range []time.Duration{300 * time.Millisecond, 1900 * time.Millisecond} {
			r := rand.New(rand.NewPCG(seed, uint64(slow)))
			m := &gateModel{lag: 900 * time.Millisecond, slow: slow, own: 300 * mb}
			m.note()
			c := newCredit()
			const limit = 4096 * mb
			var live []uint64
			for i := range 2000 {
				m.now += time.Duration(r.IntN(60)) * time.Millisecond
				n := uint64(1+r.IntN(3000)) * mb
				if grown := r.IntN(2) == 0 && m.alloc(limit, n); grown {
					live = append(live, n)
				} else if len(live) > 0 && r.IntN(3) > 0 {
					k := r.IntN(len(live))
					m.free(live[k], false, true)
					live = append(live[:k], live[k+1:]...)
				}
				if i%3 == 0 {
					if v := m.step(c, limit, 320*mb); v.NoCredit || v.Kill || v.AdjustBytes > 0 {
						t.Fatalf("seed %d, calls of %s, at %s: %+v", seed, slow, m.now, v)
					}
					if m.used < m.real {
						t.Fatalf("seed %d, calls of %s, at %s: charged %d of %d MiB", seed, slow, m.now, m.used/mb, m.real/mb)
					}
				}
			}
		}
	}
}

// TestForgedFreesAreFound: within a settle and some samples of the first, it is charged back; the second kills.
func TestForgedFreesAreFound(t *testing.T) {
	for _, lag := range []time.Duration{0, 200 * time.Millisecond} {
		for _, wait := range []int{0, 3, 30} { // samples between a forged free and its use
			t.Run(fmt.Sprint(lag, wait), func(t *testing.T) {
				m := &gateModel{lag: lag, own: 300 * mb}
				c := newCredit()
				const limit = 1000 * mb
				credit, found, killed := true, 0, false
				var most uint64
				for i := 0; i < 400 && !killed; i++ {
					m.now += 100 * time.Millisecond
					if m.used > 0 && credit && found == 1 { // honestly, to begin anew
						m.free(m.used, false, true)
					}
					if i%(wait+1) == 0 && credit && m.alloc(limit, 800*mb) {
						m.free(800*mb, true, credit)
					}
					v := m.step(c, limit, 320*mb)
					credit = !v.NoCredit
					if v.AdjustBytes > 0 {
						found++
					}
					killed = v.Kill
					most = max(most, m.real)
					if found == 1 && v.NoCredit && i > 40 { // it gives back, to be believed again
						m.real = m.used
						m.note()
					}
				}
				if !killed || found != 2 {
					t.Fatalf("found %d, killed %v, with up to %d MiB", found, killed, most/mb)
				}
				t.Logf("killed at %s, %d MiB at most", m.now, most/mb)
			})
		}
	}
}

// TestWhatTheDriverTakesForItselfIsNotForged: a context that grows beyond its bound, without any free.
func TestWhatTheDriverTakesForItselfIsNotForged(t *testing.T) {
	m := &gateModel{}
	c := newCredit()
	m.alloc(1000*mb, 500*mb)
	for range 50 {
		m.now += 100 * time.Millisecond
		m.own += 20 * mb
		m.note()
		if v := m.step(c, 2000*mb, 0); v.NoCredit || v.Kill || v.AdjustBytes != 0 {
			t.Fatalf("%+v", v)
		}
	}
}

// TestFreesThatTheGateDoesNotSeeAreGivenBack after a settle, and never more than is free.
func TestFreesThatTheGateDoesNotSeeAreGivenBack(t *testing.T) {
	m := &gateModel{lag: 200 * time.Millisecond}
	c := newCredit()
	m.alloc(1000*mb, 600*mb)
	for i := range 40 {
		m.now += 100 * time.Millisecond
		if i == 20 {
			m.real -= 500 * mb
			m.note()
		}
		m.step(c, 1000*mb, 0)
		if m.used < m.real {
			t.Fatalf("at %s: charged %d of %d", m.now, m.used, m.real)
		}
	}
	if m.used != 100*mb {
		t.Errorf("charged %d MiB, want 100", m.used/mb)
	}
}

// TestSums: what moves from one GPU to the other between the calls makes neither a sum that is too great nor one
// that is too small; what is there on both is found.
func TestSums(t *testing.T) {
	at := func(i int) time.Duration { return time.Duration(i) * 100 * time.Millisecond }
	s := &Sums{Settle: time.Second}
	gpus := []string{"a", "b"}
	for i := range 40 { // 100 MB that are always on the one that is asked, or always on the other
		a, b := uint64(100*mb), uint64(100*mb)
		if i >= 20 || i%2 == 1 {
			a, b = 0, 0
		}
		s.Take("a", at(i), a, 1)
		s.Take("b", at(i), b, 2)
		least, most, overhead, ok := s.Bounds(gpus, at(i))
		if i < 8 {
			if ok {
				t.Errorf("%d answers were enough", i+1)
			}
			continue
		}
		if !ok || least > 100*mb || i < 20 && most < 100*mb || overhead != 3 {
			t.Fatalf("answer %d: %d to %d, %d beside, %v", i, least, most, overhead, ok)
		}
	}
	for i := 40; i < 60; i++ {
		s.Take("a", at(i), 100*mb, 1)
		s.Take("b", at(i), 200*mb, 2)
	}
	if least, most, _, ok := s.Bounds(gpus, at(59)); !ok || least != 300*mb || most != 300*mb {
		t.Errorf("%d to %d, %v", least, most, ok)
	}
	s.Take("a", at(80), 100*mb, 1)
	s.Take("a", at(81), 100*mb, 1)
	if _, _, _, ok := s.Bounds(gpus, at(81)); ok {
		t.Error("a GPU that has not told for longer than a settle was added up")
	}
	if _, _, _, ok := s.Bounds(nil, at(81)); ok {
		t.Error("nothing was added up")
	}
}

// TestForgedFreeBetweenRareSamples: on a node that is short of time samples are further apart than a settle, and a free
// that did not happen is found all the same.
func TestForgedFreeBetweenRareSamples(t *testing.T) {
	for _, apart := range []time.Duration{20 * time.Millisecond, 100 * time.Millisecond, 900 * time.Millisecond, 1600 * time.Millisecond, 5 * time.Second, time.Minute} {
		m, c := &gateModel{own: 10 * mb}, newCredit()
		const limit = 4096 * mb
		look := func(n int) (adjusted int64, kill bool) {
			for range n {
				m.now += apart
				v := m.step(c, limit, 0)
				adjusted, kill = adjusted+max(0, v.AdjustBytes), kill || v.Kill
			}
			return adjusted, kill
		}
		m.alloc(limit, 1024*mb)
		if n, kill := look(20); n != 0 || kill {
			t.Fatalf("samples %v apart: a legal program is accused", apart)
		}
		settle := 5 + int(time.Second/apart)
		m.free(1024*mb, true, true)
		if n, kill := look(settle); n < 900*mb || kill {
			t.Errorf("samples %v apart: %d MiB are charged back, kill %v", apart, n/mb, kill)
		}
		m.free(1024*mb, true, true)
		if _, kill := look(2 * settle); !kill {
			t.Errorf("samples %v apart: not killed for the second time", apart)
		}
	}
}

// TestAHeldUpRequestStaysCharged: who asks can hold a request up between the gate and the driver for as long as it likes.
// Until the driver has answered NVML says nothing about it.
func TestAHeldUpRequestStaysCharged(t *testing.T) {
	m, c := &gateModel{}, newCredit()
	const limit = 1000 * mb
	look := func(n int) {
		for range n {
			m.now += 100 * time.Millisecond
			m.step(c, limit, 0)
		}
	}
	m.note()
	look(20)
	m.alloc(limit, 900*mb)
	m.real, m.unanswered = 0, 900*mb
	m.note()
	look(100)
	if m.used != 900*mb {
		t.Fatalf("%d MiB charged of a request of 900 that may still be given", m.used/mb)
	}
	m.real, m.unanswered = 900*mb, 0
	m.note()
	look(100)
	if m.used != 900*mb {
		t.Errorf("%d MiB charged, 900 were given", m.used/mb)
	}
	m.alloc(limit, 100*mb)
	m.real -= 100 * mb // it was refused by the driver
	m.note()
	look(30)
	if m.used != 900*mb {
		t.Errorf("%d MiB charged of 900 when nothing is held up any more", m.used/mb)
	}
}
