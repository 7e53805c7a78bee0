// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"math"
	"path"
	"sort"
)

// Backend is how the driver keeps account of cgroups, as NVreg's RmMemacctMode chooses it.
type Backend int

// The backends of drivers from R615 on, and none.
const (
	BackendOff  Backend = iota
	BackendMisc         // the driver's own: flat, the nearest limited ancestor alone
	BackendDmem         // the kernel's dmem controller: every ancestor
)

// NoLimit is NVML_DEVICE_MEMORY_LIMIT_MAX.
const NoLimit = math.MaxUint64

// account is what one cgroup is charged on one GPU. With misc there is one for each cgroup that has
// a limit; with dmem one for each that was ever charged or limited, and its parents'.
type account struct {
	path   string
	parent *account // of dmem: charged along
	used   uint64
	hard   uint64
	soft   uint64 // of dmem: dmem.min, which holds what the descendants were promised, too
}

// charge is some memory on an account; nil where nobody pays.
type charge struct {
	on    *account
	bytes uint64
}

// Limits are a cgroup's, and what is charged to it.
type Limits struct{ SoftBytes, HardBytes, UsedBytes uint64 }

func (g *GPU) backend() Backend {
	if g.cfg.Instance > 0 || g.cfg.Instances > 0 {
		return BackendOff // neither a GPU in MIG mode nor its instances
	}
	return g.knobs.MemoryLimits
}

// nearest is the account of the first of a cgroup and its ancestors that has one.
func (g *GPU) nearest(cgroup string) *account {
	for p := cgroup; p != "" && p != "/"; p = path.Dir(p) {
		if a := g.accounts[p]; a != nil {
			return a
		}
	}
	return nil
}

// open is a cgroup's account, made if it has none.
func (g *GPU) open(cgroup string) *account {
	if a := g.accounts[cgroup]; a != nil {
		return a
	}
	a := &account{path: cgroup, hard: NoLimit}
	if up := path.Dir(cgroup); up != "/" && g.backend() == BackendDmem {
		a.parent = g.open(up)
	}
	g.accounts[cgroup] = a
	return a
}

// charge puts n bytes on a cgroup's account, or refuses. What belongs to no cgroup, or on misc to
// none with a limit, is granted and on nobody's account; a limit that comes later never sees it.
func (g *GPU) charge(cgroup string, n uint64) (*account, error) {
	var on *account
	switch {
	case cgroup == "" || cgroup == "/":
		return nil, nil
	case g.backend() == BackendMisc:
		on = g.nearest(cgroup)
	case g.backend() == BackendDmem:
		on = g.open(cgroup)
	}
	for a := on; a != nil; a = a.parent {
		if n > a.hard || a.used > a.hard-n {
			return nil, ErrNoMemory
		}
	}
	g.add(on, int64(n))
	return on, nil
}

func (g *GPU) add(on *account, n int64) {
	for a := on; a != nil; a = a.parent {
		a.used = uint64(int64(a.used) + n)
		g.touched[a.path] = true
	}
}

// giveBack takes n bytes off what a context has, the newest first.
func (c *context) giveBack(g *GPU, n uint64) {
	for i := len(c.charges) - 1; i >= 0 && n > 0; i-- {
		k := min(n, c.charges[i].bytes)
		g.add(c.charges[i].on, -int64(k))
		c.charges[i].bytes -= k
		n -= k
		if c.charges[i].bytes == 0 {
			c.charges = c.charges[:i]
		}
	}
}

// SetLimits is nvmlDeviceSetMemoryLimits_v1.
func (g *GPU) SetLimits(now int64, cgroup string, soft, hard uint64) error {
	g.Advance(now)
	switch {
	case g.knobs.Lost:
		return ErrLost
	case g.backend() == BackendOff:
		return ErrNotSupported
	case cgroup == "/" && g.backend() == BackendDmem:
		return ErrNotFound // the root has no dmem.max
	case cgroup == "/":
		return ErrNotSupported
	case soft > hard || soft > g.cfg.TotalBytes || hard != NoLimit && hard > g.cfg.TotalBytes:
		return ErrInvalid
	}
	g.touched[cgroup] = true
	if g.backend() == BackendMisc {
		if soft == 0 && hard == NoLimit {
			delete(g.accounts, cgroup) // what is charged to it is nobody's from now on
			return nil
		}
		if a := g.accounts[cgroup]; a != nil && hard < a.used {
			return ErrInvalid
		}
		a := g.open(cgroup)
		a.soft, a.hard = soft, hard
		return nil
	}
	a := g.open(cgroup)
	if hard >= a.used {
		a.hard = hard
	} // else the kernel's setter changes nothing, and reports success
	if delta := int64(soft) - int64(a.soft); delta != 0 {
		for ; a != nil; a = a.parent {
			a.soft = uint64(max(0, int64(a.soft)+delta))
			g.touched[a.path] = true
		}
	}
	return nil
}

// GetLimits is nvmlDeviceGetMemoryLimits_v1.
func (g *GPU) GetLimits(now int64, cgroup string) (Limits, error) {
	g.Advance(now)
	switch {
	case g.knobs.Lost:
		return Limits{}, ErrLost
	case g.backend() == BackendOff:
		return Limits{}, ErrNotSupported
	case g.backend() == BackendMisc:
		a := g.nearest(cgroup)
		if a == nil {
			return Limits{}, ErrNotSupported // what a cgroup says that no limit concerns
		}
		return Limits{a.soft, a.hard, a.used}, nil
	case cgroup == "/":
		return Limits{}, ErrNotFound
	}
	if a := g.accounts[cgroup]; a != nil {
		return Limits{a.soft, a.hard, a.used}, nil
	}
	return Limits{HardBytes: NoLimit}, nil
}

// RemoveCgroup is the end of a cgroup: its limits go with it. On dmem the promise that its soft limit
// was to its ancestors stays with them.
func (g *GPU) RemoveCgroup(now int64, cgroup string) {
	g.Advance(now)
	delete(g.accounts, cgroup)
	g.touched[cgroup] = true
}

// shown is the account by which the driver answers a process of a cgroup for the device: misc that of
// the limit that holds it, dmem its own cgroup's alone.
func (g *GPU) shown(cgroup string) *account {
	switch g.backend() {
	case BackendMisc:
		return g.nearest(cgroup)
	case BackendDmem:
		return g.accounts[cgroup]
	}
	return nil
}

// AccountState is a cgroup's account for people, and for the kernel's files.
type AccountState struct {
	Cgroup    string `json:"cgroup"`
	UsedBytes uint64 `json:"used_bytes"`
	SoftBytes uint64 `json:"soft_bytes"`
	HardBytes uint64 `json:"hard_bytes"`
}

func (g *GPU) accountStates() []AccountState {
	out := []AccountState{}
	for _, a := range g.accounts {
		out = append(out, AccountState{a.path, a.used, a.soft, a.hard})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Cgroup < out[j].Cgroup })
	return out
}

// Touched are the cgroups whose accounts changed since it was last asked, with those that are gone as
// nil.
func (g *GPU) Touched() map[string]*AccountState {
	out := map[string]*AccountState{}
	for p := range g.touched {
		out[p] = nil
		if a := g.accounts[p]; a != nil {
			out[p] = &AccountState{a.path, a.used, a.soft, a.hard}
		}
	}
	clear(g.touched)
	return out
}

// SetCgroup moves an open file to a cgroup. Whether that counts is the backend's: misc goes by the
// cgroup in which the file was opened, dmem by the one of the task that asks.
func (c *Client) SetCgroup(cgroup string) {
	if c.gpu.backend() == BackendDmem {
		c.cgroup = cgroup
	}
}
