// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"time"
)

// Limiter keeps a loud pod from filling the API server with Events. The same thing said again within
// Window is folded into the Event that said it first; beyond that each pod has a bucket, and the node
// has one. A kill is never dropped for a pod's bucket, only folded.
//
// It is not safe for concurrent use. Its memory is bounded by MaxKeys.
type Limiter struct {
	Window  time.Duration // within which the same is folded
	Burst   float64       // of a pod's bucket
	Refill  time.Duration // of one token of it
	MaxKeys int

	said    map[said]*told
	buckets map[string]*bucket
}

type said struct{ uid, container, reason string }

type told struct {
	name  string // of the Event
	first time.Time
	last  time.Time
	count int32
}

type bucket struct {
	tokens float64
	at     time.Time
}

// NewLimiter has the values that docs/kubernetes.md names.
func NewLimiter() *Limiter {
	return &Limiter{Window: 10 * time.Minute, Burst: 25, Refill: time.Minute, MaxKeys: 4096, said: map[said]*told{}, buckets: map[string]*bucket{}}
}

// Verdict is what becomes of a report.
type Verdict struct {
	// Name is of the Event to make, or to count up if Count is above 1; "" if it is dropped.
	Name  string
	Count int32
	First time.Time
}

// Admit decides about a report; name is what a new Event would be called.
func (l *Limiter) Admit(r Report, name string, now time.Time) Verdict {
	key := said{r.Pod.UID, r.Container, r.Reason}
	t := l.said[key]
	fold := t != nil && now.Sub(t.first) < l.Window
	if !l.take(r.Pod.UID, now) && (fold || r.Reason != ReasonExceeded) {
		if fold {
			t.count++ // shows with the next one that is let through
		}
		return Verdict{}
	}
	if fold {
		t.count++
		t.last = now
		return Verdict{Name: t.name, Count: t.count, First: t.first}
	}
	l.prune(now)
	l.said[key] = &told{name: name, first: now, last: now, count: 1}
	return Verdict{Name: name, Count: 1, First: now}
}

// Gone forgets that an Event exists: the API server does not have it any more.
func (l *Limiter) Gone(r Report) { delete(l.said, said{r.Pod.UID, r.Container, r.Reason}) }

func (l *Limiter) take(uid string, now time.Time) bool {
	b := l.buckets[uid]
	if b == nil {
		b = &bucket{tokens: l.Burst, at: now}
		l.buckets[uid] = b
	}
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(l.Burst, b.tokens+float64(d)/float64(l.Refill))
		b.at = now
	}
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// prune keeps memory bounded: what is older than the window says nothing any more, a full bucket is
// as good as none; and where that is not enough, all goes, which only folds less.
func (l *Limiter) prune(now time.Time) {
	if len(l.said) < l.MaxKeys && len(l.buckets) < l.MaxKeys {
		return
	}
	for k, t := range l.said {
		if now.Sub(t.first) >= l.Window {
			delete(l.said, k)
		}
	}
	for uid, b := range l.buckets {
		if b.tokens+float64(now.Sub(b.at))/float64(l.Refill) >= l.Burst {
			delete(l.buckets, uid)
		}
	}
	if len(l.said) >= l.MaxKeys {
		clear(l.said)
	}
	if len(l.buckets) >= l.MaxKeys {
		clear(l.buckets)
	}
}
