// SPDX-License-Identifier: Apache-2.0

package daemon

import "sync"

// lock is a mutex that counts how often it was held by somebody who may have changed what a step goes
// by. Who comes back with every sample can so leave out a comparison of everything with what it was:
// nobody who changes it has to say so.
type lock struct {
	sync.Mutex
	changes uint64 // guarded by the mutex
}

// Lock is for everybody who does not know better.
func (l *lock) Lock() {
	l.Mutex.Lock()
	l.changes++
}

// LockToLook is for whoever changes nothing of what [Daemon.repeats] compares: which pods and containers
// there are, their limits and changes of them, kills, and configuration.
func (l *lock) LockToLook() { l.Mutex.Lock() }

// changed is for whoever finds, holding the lock to look, that something is to be changed after all.
func (l *lock) changed() { l.changes++ }
