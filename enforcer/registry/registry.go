// SPDX-License-Identifier: Apache-2.0

// Package registry remembers the containers and pods of a node: who was prepared, who runs, who
// ended not long ago, with what limits, counters and identity; and keeps that on disk, one file a
// pod, so that a gpufenced that was killed at any instruction finds it again.
//
// What it promises:
//   - Save returns only when the file is whole and on disk; a crash leaves the old file or the
//     new one, never a part.
//   - A file that cannot be understood is put aside, not deleted, and costs its own pod only.
//   - A GPU's index in a pod, and a container's, are given once in the pod's life.
//
// Nothing here is safe for concurrent use: gpufenced calls it under its own lock.
package registry

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// State is how far a container is.
type State string

// The states, in their order.
const (
	Prepared State = "prepared"
	Running  State = "running"
	Ended    State = "ended"
)

// Counters are a container's on one GPU, as gpufenced observed them; they only grow.
type Counters struct {
	OverMax      uint64 `json:"over_max"`
	OOM          uint64 `json:"oom"`
	OOMKill      uint64 `json:"oom_kill"`
	OOMGroupKill uint64 `json:"oom_group_kill,omitempty"`
	PeakBytes    uint64 `json:"peak_bytes"`
	FrozenNS     uint64 `json:"frozen_ns,omitempty"` // for being above memory.high
	// Local are the events of the container's own limits.
	Local api.Events `json:"local"`
	// Reported is what was folded of its processes' events into Local and the pod's counters.
	Reported ledger.SlotEvents `json:"reported"`
}

// PodCounters are a pod's on one GPU, over all containers that it had; they only grow.
type PodCounters struct {
	Events    api.Events `json:"events"`
	Local     api.Events `json:"local"` // of the pod's own limits
	PeakBytes uint64     `json:"peak_bytes"`
}

// Kill is the newest decision to kill in a container. It is saved before the signal, so that
// whoever finds it without SentNS knows that the signal may be missing.
type Kill struct {
	ID     string    `json:"id"` // ties the journal's entries together
	GPU    string    `json:"gpu"`
	Time   time.Time `json:"time"`
	Reason string    `json:"reason"`
	Group  bool      `json:"group"`
	PID    int       `json:"pid,omitempty"`
	Start  uint64    `json:"start,omitempty"`
	SentNS int64     `json:"sent_ns,omitempty"` // CLOCK_MONOTONIC of SIGKILL
	// Confirmed: the memory came back.
	Confirmed bool `json:"confirmed,omitempty"`
	// Unconfirmed: it was said that the memory did not come back in time.
	Unconfirmed bool `json:"unconfirmed,omitempty"`
}

// Container is one container in one life: a container that is created again under the same key
// is another one.
type Container struct {
	Key   api.ContainerKey `json:"key"`
	Index uint32           `json:"index"` // in the pod
	Name  string           `json:"name,omitempty"`
	State State            `json:"state"`
	// Held: its memory.min is reserved, though it does not run yet.
	Held bool `json:"held,omitempty"`
	// Pages: its folder of shared pages exists.
	Pages bool `json:"pages,omitempty"`
	// Grant is what holds now at the container's level; Grant.Pod is what the pod had when it
	// was made, Pod.Limits is what it has.
	Grant      quota.Grant `json:"grant"`
	Generation uint64      `json:"generation"` // of the limits page
	// ChangedBy is what changed its limits last (set, apply, spec), ChangedAt when; empty while they
	// are those that it started with.
	ChangedBy string    `json:"changed_by,omitempty"`
	ChangedAt time.Time `json:"changed_at,omitzero"`
	// Fingerprint of the request that it was prepared for.
	Fingerprint string `json:"fingerprint"`
	// Env are the variables of its environment that may say something of its limits.
	Env []string `json:"env,omitempty"`
	// Spec marks the annotations that the container has followed last.
	Spec string `json:"spec,omitempty"`
	// Answer is what prepare said, without the grant, to say it again.
	Answer         api.PrepareResponse `json:"answer"`
	ShimAbsent     string              `json:"shim_absent,omitempty"`
	TerminationLog string              `json:"termination_log,omitempty"`

	PID   int    `json:"pid,omitempty"`
	Start uint64 `json:"start,omitempty"`
	// Priority orders those that may have to make room: the lower, the sooner.
	Priority int         `json:"priority,omitempty"`
	Cgroup   *act.Cgroup `json:"cgroup,omitempty"`
	Level    quota.Level `json:"level,omitempty"`

	PreparedAt time.Time `json:"prepared_at"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	EndedAt    time.Time `json:"ended_at,omitzero"`
	EndReason  string    `json:"end_reason,omitempty"`

	Counters map[string]*Counters `json:"counters,omitempty"` // by GPU UUID
	// Reported are the events of its processes, frozen when it ended.
	Reported map[string]ledger.SlotEvents `json:"reported,omitempty"`
	// Shim is how the shim fence stood when it ended.
	Fences []api.Fence `json:"fences,omitempty"`
	Kill   *Kill       `json:"kill,omitempty"`
	// Promised is what its cgroup may have been promised by the GPUs' driver, to be taken back.
	Promised []Promise `json:"promised,omitempty"`

	pod *Pod
	id  policy.ContainerID // made when it was added: it is asked for all the time
}

// Promise is a soft limit of the driver's, which outlives its cgroup in the accounts of the ancestors.
type Promise struct {
	GPU       string `json:"gpu"`
	Dir       string `json:"dir"` // of the cgroup
	SoftBytes uint64 `json:"soft_bytes"`
}

// Pod is the container's.
func (c *Container) Pod() *Pod { return c.pod }

// ID names the container in this gpufenced and the next: pod folder and index.
func (c *Container) ID() policy.ContainerID { return c.id }

// join makes it a container of the pod, with its index.
func (c *Container) join(p *Pod) {
	c.pod, c.id = p, policy.ContainerID(p.Name+"/"+c.Folder())
}

// Folder is the name of its folder of shared pages in the pod's.
func (c *Container) Folder() string { return strconv.FormatUint(uint64(c.Index), 10) }

// Active says whether it counts: it was not ended.
func (c *Container) Active() bool { return c.State != Ended }

// CountersOn are the container's counters on a GPU.
func (c *Container) CountersOn(uuid string) *Counters {
	n := c.Counters[uuid]
	if n == nil {
		n = &Counters{}
		if c.Counters == nil {
			c.Counters = map[string]*Counters{}
		}
		c.Counters[uuid] = n
	}
	return n
}

// ContainerLimits are the container's own limits on a GPU.
func (c *Container) ContainerLimits(uuid string) quota.Limits {
	return limitsOn(c.Grant.Container, uuid)
}

// Display is how sentences call the container: pod and name where it has them.
func (c *Container) Display() string {
	switch {
	case c.pod != nil && c.pod.Ref.Name != "" && c.Name != "":
		return c.pod.Ref.Name + "/" + c.Name
	case c.Name != "":
		return c.Name
	}
	return short(c.Key.ID)
}

// Pod is the group that shares a ledger and a pod-level limit.
type Pod struct {
	Name   string       `json:"name"` // of its folder and state file
	Engine quota.Engine `json:"engine"`
	Scope  string       `json:"scope"`
	Ref    api.PodRef   `json:"ref"`
	BootID string       `json:"boot_id"`
	// GPUs are the UUIDs by the pod's index, which is the same in every page of the pod.
	GPUs []string `json:"gpus"`
	// Cgroup is the pod's own, under Kubernetes, until it is gone: so long the pod's memory.min
	// is held, also between two lives of its containers.
	Cgroup    *act.Cgroup `json:"cgroup,omitempty"`
	NextIndex uint32      `json:"next_index"`
	// Asked are the pod-level limits as its containers came with; Limits what holds now.
	Asked  map[string]quota.Limits `json:"asked,omitempty"`
	Limits map[string]quota.Limits `json:"limits,omitempty"`
	// Spec marks the annotations that the pod's own limits have followed last.
	Spec string `json:"spec,omitempty"`
	// ContextBytes is the largest context seen in this pod, by GPU.
	ContextBytes map[string]uint64       `json:"context_bytes,omitempty"`
	Counters     map[string]*PodCounters `json:"counters,omitempty"` // by GPU UUID
	Totals       *ledger.Totals          `json:"totals,omitempty"`
	// Resizes are the pending ones, by GPU UUID, of the pod and of its containers.
	Resizes map[string][]policy.Resize `json:"resizes,omitempty"`
	// Goals are what the pending ones lead to, by GPU UUID.
	Goals map[string][]Goal `json:"goals,omitempty"`
	// Planned are those that have not begun.
	Planned    []Planned    `json:"planned,omitempty"`
	Containers []*Container `json:"containers"`
}

// Goal is what becomes of a level's limits when its pending change of memory.max is done (After) or
// has failed (Before).
type Goal struct {
	Level  policy.Level `json:"level"`
	Before quota.Limits `json:"before"`
	After  quota.Limits `json:"after"`
}

// GoalOf is what a level's pending change leads to, nil if there is none. It may be changed in place.
func (p *Pod) GoalOf(uuid string, level policy.Level) *Goal {
	for i := range p.Goals[uuid] {
		if g := &p.Goals[uuid][i]; g.Level == level {
			return g
		}
	}
	return nil
}

// AddGoal remembers what a pending change leads to.
func (p *Pod) AddGoal(uuid string, g Goal) {
	p.DropGoal(uuid, g.Level)
	if p.Goals == nil {
		p.Goals = map[string][]Goal{}
	}
	p.Goals[uuid] = append(p.Goals[uuid], g)
}

// DropGoal forgets what a level's change leads to.
func (p *Pod) DropGoal(uuid string, level policy.Level) {
	if p.GoalOf(uuid, level) == nil {
		return
	}
	p.Goals[uuid] = slices.DeleteFunc(p.Goals[uuid], func(g Goal) bool { return g.Level == level })
	if len(p.Goals[uuid]) == 0 {
		delete(p.Goals, uuid)
	}
}

// Planned is a change of a limit that waits for others of its pod.
type Planned struct {
	Stage    int           `json:"stage"`
	GPU      string        `json:"gpu"`
	Level    policy.Level  `json:"level"`
	Limits   quota.Limits  `json:"limits"`
	Deadline time.Duration `json:"deadline"` // from its beginning
	Force    bool          `json:"force,omitempty"`
	Source   string        `json:"source"`
	Begun    bool          `json:"begun,omitempty"` // an earlier stage has begun
}

// ID names the pod in this gpufenced and the next.
func (p *Pod) ID() policy.PodID { return policy.PodID(p.Name) }

// PodLimits are the pod's limits on a GPU.
func (p *Pod) PodLimits(uuid string) quota.Limits { return limitsOn(p.Limits, uuid) }

// GPUIndex is a GPU's index in the pod, -1 if it has none.
func (p *Pod) GPUIndex(uuid string) int { return slices.Index(p.GPUs, uuid) }

// AddGPU gives a GPU an index in a pod.
func (r *Registry) AddGPU(p *Pod, uuid string) error {
	if p.GPUIndex(uuid) >= 0 {
		return nil
	}
	if len(p.GPUs) == ledger.GPUs {
		return fmt.Errorf("add GPU %s: the pod has %d already, more do not fit into its ledger", uuid, ledger.GPUs)
	}
	p.GPUs = append(p.GPUs, uuid)
	r.onGPU = nil
	return nil
}

// CountersOn are the pod's counters on a GPU.
func (p *Pod) CountersOn(uuid string) *PodCounters {
	n := p.Counters[uuid]
	if n == nil {
		n = &PodCounters{}
		if p.Counters == nil {
			p.Counters = map[string]*PodCounters{}
		}
		p.Counters[uuid] = n
	}
	return n
}

// Active says whether any of its containers counts.
func (p *Pod) Active() bool { return slices.ContainsFunc(p.Containers, (*Container).Active) }

// HasPages says whether any of its containers has a folder of shared pages.
func (p *Pod) HasPages() bool {
	return slices.ContainsFunc(p.Containers, func(c *Container) bool { return c.Pages })
}

// MinBytes is what the pod is promised on a GPU: the greater of its own memory.min and the sum of
// its containers', over those that run or are held. Its own is held until the pod's cgroup is gone,
// where it is known.
func (p *Pod) MinBytes(uuid string) uint64 {
	var sum, own uint64
	if p.Cgroup != nil && p.GPUIndex(uuid) >= 0 {
		own = p.PodLimits(uuid).Min
	}
	for _, c := range p.Containers {
		if !c.Holds(uuid) {
			continue
		}
		own = p.PodLimits(uuid).Min
		sum = satAdd(sum, c.ContainerLimits(uuid).Min)
	}
	// No promise inside the pod goes beyond what the pod may have.
	return max(own, min(sum, p.PodLimits(uuid).Max))
}

// Holds says whether the container counts for admission on a GPU.
func (c *Container) Holds(uuid string) bool {
	return (c.State == Running || c.State == Prepared && c.Held) &&
		slices.ContainsFunc(c.Grant.GPUs, func(g quota.GPU) bool { return g.UUID == uuid })
}

func satAdd(a, b uint64) uint64 {
	if a+b < a {
		return quota.Unlimited
	}
	return a + b
}

func limitsOn(m map[string]quota.Limits, uuid string) quota.Limits {
	if l, ok := m[uuid]; ok {
		return l
	}
	return quota.Limits{Max: quota.Unlimited, High: quota.Unlimited, SwapMax: quota.Unlimited}
}

// Registry is what is known of the node.
type Registry struct {
	pods map[string]*Pod
	keys map[api.ContainerKey]*Container
	// These in their order, nil when something was added or removed: every sample goes through them.
	sortedPods       []*Pod
	sortedContainers []*Container
	onGPU            map[string][]*Pod
}

// changed drops what was sorted.
func (r *Registry) changed() { r.sortedPods, r.sortedContainers, r.onGPU = nil, nil, nil }

// New makes an empty one.
func New() *Registry {
	return &Registry{pods: map[string]*Pod{}, keys: map[api.ContainerKey]*Container{}}
}

// PodName is the folder name of a pod: a readable beginning of its id, and a hash of what makes
// it unique, so that no id can leave the folder or meet another pod's.
func PodName(engine quota.Engine, scope, id string) string {
	sum := sha256.Sum256([]byte(string(engine) + "\x00" + scope + "\x00" + id))
	var b strings.Builder
	for _, r := range id {
		if b.Len() == 12 {
			break
		}
		if r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			b.WriteRune(r)
		}
	}
	return b.String() + "-" + hex.EncodeToString(sum[:10])
}

// Pods are all of them, by name. The slice is not to be changed; it stays as it is.
func (r *Registry) Pods() []*Pod {
	if r.sortedPods == nil {
		r.sortedPods = slices.SortedFunc(maps.Values(r.pods), func(a, b *Pod) int { return cmp.Compare(a.Name, b.Name) })
	}
	return r.sortedPods
}

// PodsOn are those that have a GPU, by name. The slice is not to be changed; it stays as it is.
func (r *Registry) PodsOn(uuid string) []*Pod {
	if r.onGPU == nil {
		r.onGPU = map[string][]*Pod{}
		for _, p := range r.Pods() {
			for _, uuid := range p.GPUs {
				r.onGPU[uuid] = append(r.onGPU[uuid], p)
			}
		}
	}
	return r.onGPU[uuid]
}

// Containers are all of them, the newest last. The slice is not to be changed; it stays as it is.
func (r *Registry) Containers() []*Container {
	order := func(a, b *Container) int { return cmp.Or(a.PreparedAt.Compare(b.PreparedAt), cmp.Compare(a.id, b.id)) }
	// One that is prepared again becomes the newest.
	if r.sortedContainers == nil || !slices.IsSortedFunc(r.sortedContainers, order) {
		r.sortedContainers = slices.SortedFunc(maps.Values(r.keys), order)
	}
	return r.sortedContainers
}

// Pod finds a pod by its folder name, nil if there is none.
func (r *Registry) Pod(name string) *Pod { return r.pods[name] }

// Lookup finds the container of a key, nil if there is none.
func (r *Registry) Lookup(key api.ContainerKey) *Container { return r.keys[key] }

// ByID finds a container by its ID, nil if there is none.
func (r *Registry) ByID(id policy.ContainerID) *Container {
	name, _, _ := strings.Cut(string(id), "/")
	if p := r.pods[name]; p != nil {
		for _, c := range p.Containers {
			if c.ID() == id {
				return c
			}
		}
	}
	return nil
}

// EnsurePod finds or makes a pod.
func (r *Registry) EnsurePod(engine quota.Engine, scope string, ref api.PodRef, bootID string) *Pod {
	name := PodName(engine, scope, ref.ID)
	p := r.pods[name]
	if p == nil {
		p = &Pod{Name: name, Engine: engine, Scope: scope, Ref: ref, BootID: bootID, Totals: &ledger.Totals{}}
		r.pods[name] = p
		r.changed()
	}
	return p
}

// Add puts a new container into a pod and gives it its index. An earlier life under the same key
// is dropped from the pod that it was in.
func (r *Registry) Add(p *Pod, c *Container) {
	if old := r.keys[c.Key]; old != nil {
		r.Remove(old)
		r.pods[p.Name] = p // Remove drops an empty pod
	}
	c.Index = p.NextIndex
	p.NextIndex++
	c.join(p)
	p.Containers = append(p.Containers, c)
	r.keys[c.Key] = c
	r.changed()
}

// Remove forgets a container, and its pod if that was the last one; it says whether it was.
func (r *Registry) Remove(c *Container) (podGone bool) {
	p := c.pod
	r.changed()
	p.Containers = slices.DeleteFunc(p.Containers, func(x *Container) bool { return x == c })
	if r.keys[c.Key] == c {
		delete(r.keys, c.Key)
	}
	if len(p.Containers) == 0 {
		delete(r.pods, p.Name)
		return true
	}
	return false
}

// Find finds a container by what people call it: an unambiguous beginning of its id, its name,
// its pod's name, pod/container, or either with the pod's namespace before it. Those that ended give way to those that did not, and earlier
// lives of the same container to the newest.
func (r *Registry) Find(name string) (*Container, error) {
	if name == "" {
		return nil, quota.NewError(quota.CodeNoSuchContainer, "no container was named")
	}
	var found []*Container
	for _, c := range r.keys {
		switch {
		case c.Key.ID == name:
			return r.newest(c.Key.ID, c), nil
		case strings.HasPrefix(c.Key.ID, name), c.Name == name, c.pod.Ref.Name == name,
			c.pod.Ref.Name+"/"+c.Name == name, c.pod.Ref.Namespace+"/"+c.pod.Ref.Name == name, c.pod.Ref.Namespace+"/"+c.pod.Ref.Name+"/"+c.Name == name:
			found = append(found, c)
		}
	}
	active := slices.DeleteFunc(slices.Clone(found), func(c *Container) bool { return !c.Active() })
	if len(active) > 0 {
		found = active
	}
	slices.SortFunc(found, func(a, b *Container) int { return cmp.Compare(a.Key.ID, b.Key.ID) })
	latest := map[string]*Container{}
	for _, c := range found {
		k := c.pod.Name + "\x00" + c.Name
		if c.Name == "" {
			k += c.Key.ID
		}
		if l := latest[k]; l == nil || c.PreparedAt.After(l.PreparedAt) {
			latest[k] = c
		}
	}
	switch len(latest) {
	case 0:
		return nil, quota.NewError(quota.CodeNoSuchContainer, "no container is called %.100q", name).
			WithHint("`gpufence ps --all` lists them")
	case 1:
		for _, c := range latest {
			return c, nil
		}
	}
	var names []string
	for _, c := range latest {
		names = append(names, c.Display()+" ("+short(c.Key.ID)+")")
	}
	slices.Sort(names)
	if len(names) > 5 {
		names = append(names[:5], "...")
	}
	return nil, quota.NewError(quota.CodeAmbiguousName, "%d containers are called %.100q: %s", len(latest), name, strings.Join(names, ", ")).
		WithHint("name one by more of its id, or as pod/container")
}

// newest prefers an active container among those that engines of several scopes gave one id.
func (r *Registry) newest(id string, c *Container) *Container {
	for _, o := range r.keys {
		if o.Key.ID != id || o == c {
			continue
		}
		if o.Active() && !c.Active() || o.Active() == c.Active() && o.PreparedAt.After(c.PreparedAt) {
			c = o
		}
	}
	return c
}

func short(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}
