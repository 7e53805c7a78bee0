// SPDX-License-Identifier: Apache-2.0

package simnode

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	mib = uint64(1) << 20
	gib = uint64(1) << 30
	ms  = time.Millisecond

	contextBytes = 16 * mib
	totalBytes   = 192 * gib
	period       = 100 * ms
	uuid         = "GPU-00000000-0000-0000-0000-000000000000"
)

// point is what a process held from a time on.
type point struct {
	at    time.Duration
	bytes uint64
}

// proc is a process on the GPU. It is listed from its context on until what it left is freed.
type proc struct {
	pid     int
	start   uint64
	cont    *cont
	bytes   uint64 // true, now
	history []point
	dead    bool
	died    time.Duration
	known   bool          // to gpufenced, when it died
	freed   time.Duration // when NVML forgets it, if it is dead

	shim      bool
	slot      int
	charge    uint64
	peaks     map[uint64]uint64
	marked    bool
	reclaimed bool
	found     bool // gpufenced has found the slot's owner
}

// at is what the process held then, as NVML would say, and whether it was listed.
func (p *proc) at(t time.Duration) (uint64, bool) {
	if p.dead && t >= p.freed {
		return 0, false
	}
	for i := len(p.history) - 1; i >= 0; i-- {
		if p.history[i].at <= t {
			return p.history[i].bytes, true
		}
	}
	return 0, false
}

func (p *proc) set(now time.Duration, bytes uint64, horizon time.Duration) {
	p.bytes = bytes
	// What is older than the longest look back is one point.
	for len(p.history) > 1 && p.history[1].at <= now-horizon {
		p.history = p.history[1:]
	}
	p.history = append(p.history, point{now, bytes})
}

// What a container is like.
const (
	good  = iota // its processes load the shim
	plain        // without the shim, keeps to its limit by itself
	rogue        // without the shim, and does not
)

type cont struct {
	id    policy.ContainerID
	name  string
	pod   *pod
	kind  int
	mode  quota.Mode
	group bool
	grant quota.Limits
	ended bool
	since time.Duration // ended

	excess    uint64 // as the limits page says
	published uint64
	over      time.Duration // since when it is truly above its limit and the slack; 0 for not
	overNoted bool
	blind     time.Duration // of that, while NVML did not say
	resize    *policy.Resize
	changed   time.Duration // when its limit last did
	overdue   time.Duration // that a resize has gone on after its deadline and could be judged
	fits      time.Duration // since when what is listed of it fits the resize; -1 for not
}

type pod struct {
	id        policy.PodID
	limits    quota.Limits
	conts     []*cont
	excess    uint64
	published uint64
}

// minBytes is what a pod is promised.
func (p *pod) minBytes() uint64 {
	sum := uint64(0)
	alive := false
	for _, c := range p.conts {
		if !c.ended {
			sum, alive = sum+c.grant.Min, true
		}
	}
	if !alive {
		return 0
	}
	return max(sum, p.limits.Min)
}

// keeps says that the pod stays within its limit by itself. Beside a container that no shim sees, the
// others' shims learn of its memory only when NVML shows it.
func (p *pod) keeps() bool {
	kinds := map[int]bool{}
	for _, c := range p.conts {
		kinds[c.kind] = true
	}
	return !kinds[rogue] && len(kinds) == 1
}

// model is a GPU and who is on it.
type model struct {
	Scenario
	rng     *rand.Rand
	cfg     policy.Config
	pol     quota.Policy
	gpu     quota.GPU
	lag     time.Duration
	freeLag time.Duration

	now      time.Duration
	number   uint64
	core     *policy.GPU
	out      policy.Output
	outAt    time.Duration
	haveOut  bool
	wasAbove bool

	restarted time.Duration

	conts    []*cont // ended ones, too, while they are followed
	pods     []*pod
	procs    []*proc // dead ones, too, while somebody may speak of them
	byCont   map[*cont][]*proc
	byPID    map[int][]*proc
	nextID   int
	nextPID  int
	nextSlot int
	oldPIDs  []int // free again
	active   []*cont
	lost     time.Duration // until then
	stats    Stats
	trace    []string // the newest of what happened
	failure  error
}

func newModel(s Scenario) *model {
	m := &model{
		Scenario: s, rng: rand.New(rand.NewPCG(s.Seed, uint64(s.GPU)+1)), cfg: policy.DefaultConfig(), pol: quota.DefaultPolicy(),
		now: time.Hour, number: 1, byCont: map[*cont][]*proc{}, byPID: map[int][]*proc{}, nextPID: 1000,
	}
	m.gpu = quota.GPU{UUID: uuid, Name: "simulated", TotalBytes: totalBytes, AllocatableBytes: totalBytes / 100 * 97, ContextBytes: contextBytes}
	m.lag = []time.Duration{0, 20 * ms, 100 * ms, 200 * ms, 500 * ms, m.cfg.Settle}[m.rng.IntN(6)]
	m.freeLag = []time.Duration{0, 50 * ms, 300 * ms, 2 * time.Second, 6 * time.Second}[m.rng.IntN(5)]
	if s.Features&Lag == 0 {
		m.lag = 0
	}
	if s.Features&FreeLag == 0 {
		m.freeLag = 0
	}
	m.core = policy.NewGPU(uuid, m.cfg)
	return m
}

func (m *model) on(f Feature) bool { return m.Features&f != 0 }

func (m *model) say(format string, args ...any) {
	if len(m.trace) >= 60 {
		m.trace = m.trace[1:]
	}
	m.trace = append(m.trace, fmt.Sprintf("%v ", m.now)+fmt.Sprintf(format, args...))
}

func (m *model) fail(format string, args ...any) {
	if m.failure == nil {
		m.failure = fmt.Errorf(format, args...)
	}
}

// horizon is how far back anybody looks.
func (m *model) horizon() time.Duration { return m.lag + 5*time.Second }

// live is what the living processes of a container hold.
func (m *model) live(c *cont) (sum uint64) {
	for _, p := range m.byCont[c] {
		if !p.dead {
			sum += p.bytes
		}
	}
	return sum
}

// liveAt is what an answer to a call that began then has shown of the processes of a container that
// lived then.
func (m *model) liveAt(c *cont, began time.Duration) (sum uint64) {
	for _, p := range m.byCont[c] {
		if !p.dead || p.died > began {
			b, _ := p.at(began - m.lag)
			sum += b
		}
	}
	return sum
}

// listedAt is what NVML would have said of a container then, the dead included.
func (m *model) listedAt(c *cont, t time.Duration) (sum uint64) {
	for _, p := range m.byCont[c] {
		b, _ := p.at(t)
		sum += b
	}
	return sum
}

func (m *model) used() (sum uint64) {
	for _, p := range m.procs {
		b, _ := p.at(m.now)
		sum += b
	}
	return sum
}

// charged is what a shim adds up. The slots of the dead are left out: a reserve that they stop
// tries again until gpufenced has marked them.
func (m *model) charged(c *cont) (sum uint64) {
	for _, p := range m.byCont[c] {
		if p.shim && !p.dead {
			sum += p.charge
		}
	}
	return sum
}

// alloc is one allocation: the shim's reserve, then the driver.
func (m *model) alloc(p *proc, bytes uint64) {
	c := p.cont
	if p.shim {
		own, pod := m.charged(c), uint64(0)
		podKnown := true
		for _, o := range c.pod.conts {
			pod += m.charged(o)
			podKnown = podKnown && o.kind == good
		}
		fits := own+bytes <= c.published && pod+bytes <= c.pod.published
		if fits != (own+c.excess+bytes <= c.published && pod+c.pod.excess+bytes <= c.pod.published) {
			m.stats.Refused++
			if podKnown {
				m.fail("a legal allocation of %d is refused to %s: it is charged %d of %d, its pod %d of %d, excess %d and %d",
					bytes, c.id, own, c.published, pod, c.pod.published, c.excess, c.pod.excess)
			}
			return
		}
		if !fits {
			m.stats.Refused++
			return
		}
	}
	if used := m.used(); used+bytes > totalBytes {
		m.full(c, bytes, used)
		return
	}
	m.stats.Allocs++
	if p.shim {
		p.charge += bytes
		p.touch(m.number)
	}
	p.set(m.now, p.bytes+bytes, m.horizon())
	m.crossed(c)
}

// touch keeps the greatest charge during the newest sample.
func (p *proc) touch(number uint64) {
	if p.peaks == nil {
		p.peaks = map[uint64]uint64{}
	}
	for n := range p.peaks {
		if n+1 < number {
			delete(p.peaks, n)
		}
	}
	p.peaks[number] = max(p.peaks[number], p.charge)
}

// full is a GPU without room. It must not hit who keeps to his guarantee, unless somebody uses what
// nobody was promised.
func (m *model) full(c *cont, bytes, used uint64) {
	m.say("the GPU is full for %s", c.id)
	if m.live(c)+bytes > c.pod.minBytes() || len(c.pod.conts) > 1 {
		return
	}
	beyond := uint64(0)
	for _, p := range m.pods {
		held := uint64(0)
		for _, o := range p.conts {
			if !o.ended {
				held += m.live(o)
				// What its own dead have left is its own doing.
				held += m.listedAt(o, m.now) - m.live(o)
			}
		}
		beyond += held - min(held, p.minBytes())
	}
	if beyond == 0 {
		m.fail("the guarantee of %s is broken: %d of %d are used, nobody uses more than he was promised, and it cannot have %d", c.id, used, totalBytes, bytes)
	}
}

func (m *model) free(p *proc, bytes uint64) {
	bytes = min(bytes, p.bytes-min(p.bytes, contextBytes))
	if bytes == 0 {
		return
	}
	m.stats.Frees++
	if p.shim {
		p.touch(m.number)
		p.charge -= bytes
	}
	p.set(m.now, p.bytes-bytes, m.horizon())
	m.crossed(p.cont)
}

// crossed keeps since when a container is truly above its limit and the slack.
func (m *model) crossed(c *cont) {
	limit := c.grant.Max
	above := limit != quota.Unlimited && m.live(c) > limit+m.cfg.Slack(limit)
	switch {
	case above && !c.overNoted:
		c.over, c.overNoted, c.blind = m.now, true, 0
	case !above:
		c.overNoted = false
	}
}

func (m *model) fork(c *cont) {
	var pid int
	if n := len(m.oldPIDs); m.on(ReusedPID) && n > 0 && m.rng.IntN(2) == 0 && m.mayReuse(m.oldPIDs[n-1], c) {
		pid = m.oldPIDs[n-1]
		m.oldPIDs = m.oldPIDs[:n-1]
	} else {
		m.nextPID++
		pid = m.nextPID
	}
	m.nextID++
	p := &proc{pid: pid, start: uint64(m.nextID), cont: c, shim: c.kind == good}
	if p.shim {
		p.slot = m.nextSlot
		m.nextSlot++
		if m.charged(c)+c.excess+contextBytes > c.published {
			return // no context, no process on the GPU
		}
	} else if m.live(c)+contextBytes > c.grant.Max {
		return
	}
	m.stats.Processes++
	m.procs = append(m.procs, p)
	m.byCont[c] = append(m.byCont[c], p)
	m.byPID[pid] = append(m.byPID[pid], p)
	m.alloc(p, contextBytes)
	if p.bytes == 0 {
		// Refused after all: it ends, and leaves nothing.
		m.exit(p)
	}
}

// mayReuse: whoever gets the pid of a process that is still listed cannot be told from it if
// gpufenced has never seen the first one: it lived for less than NVML lags, or gpufenced has
// restarted since. A kernel gives a pid away after all others, so there that takes ten thousands of
// forks within the lag. What is listed under a pid counts for the dead one until it is stuck, so an
// heir without a slot is not seen for as long; here such ones wait until nothing is listed.
func (m *model) mayReuse(pid int, c *cont) bool {
	if len(m.byPID[pid]) > 1 {
		return false // three within the lag
	}
	for _, p := range m.byPID[pid] {
		if m.now < p.freed+m.lag+2*period && (c.kind != good || !p.known || p.died <= m.restarted) {
			return false
		}
	}
	return true
}

// entangled says that a process of the container has, or had, the pid of another one, and that
// the one which is dead is not yet forgotten: what is listed under the pid counts for the dead.
func (m *model) entangled(c *cont) bool {
	for _, p := range m.byCont[c] {
		for _, o := range m.byPID[p.pid] {
			if o != p && (p.dead && m.now-p.died < m.cfg.StuckAfter+m.lag+5*period || o.dead && m.now-o.died < m.cfg.StuckAfter+m.lag+5*period) {
				return true
			}
		}
	}
	return false
}

// heirs says that somebody has the pid of a process that is still listed.
func (m *model) heirs() bool {
	for _, p := range m.procs {
		if p.dead && m.now < p.freed+m.lag+2*period {
			for _, o := range m.byPID[p.pid] {
				if !o.dead {
					return true
				}
			}
		}
	}
	return false
}

func (m *model) exit(p *proc) {
	if p.dead {
		return
	}
	if p.shim {
		p.touch(m.number)
	}
	for _, known := range m.out.Processes {
		// By a slot or by NVML: of one that it knows by chance nothing is expected.
		p.known = p.known || known.PID == p.pid && known.Start == p.start && (known.Listed || known.Slot >= 0)
	}
	p.dead, p.died, p.freed = true, m.now, m.now+m.freeLag
	m.oldPIDs = append(m.oldPIDs, p.pid)
	m.crossed(p.cont)
}

func (m *model) end(c *cont) {
	if c.ended {
		return
	}
	m.say("%s ends", c.id)
	for _, p := range m.byCont[c] {
		m.exit(p)
	}
	c.ended, c.since, c.resize = true, m.now, nil
}

// start asks for a new container in a pod, a new one or one that has room for it.
func (m *model) start() {
	m.nextID++
	name := fmt.Sprintf("c%d", m.nextID)
	c := &cont{id: policy.ContainerID(name), name: name, mode: quota.ModeEnforce, group: m.rng.IntN(4) > 0, fits: -1}
	switch n := m.rng.IntN(10); {
	case n == 0 && m.on(Rogues):
		c.kind = rogue
	case n < 3:
		c.kind = plain
	}
	if c.kind == rogue && m.rng.IntN(5) == 0 {
		c.mode = quota.ModeObserve
	}
	size := []string{"1Gi", "2Gi", "3%", "1536Mi", "6000Mi", "2%", "4Gi"}[m.rng.IntN(7)]
	keys := map[string]string{"gpufence.dev/container." + name + ".memory.max": size}
	if m.rng.IntN(4) == 0 {
		keys["gpufence.dev/container."+name+".memory.min"] = "512Mi"
	}
	var p *pod
	if m.on(BigPods) && m.rng.IntN(4) == 0 {
		for _, o := range m.pods {
			if len(o.conts) < 3 && o.minBytes() > 0 && o.limits.Max != quota.Unlimited {
				p = o
				break
			}
		}
	}
	fresh := p == nil
	if fresh {
		p = &pod{id: policy.PodID("pod-" + name), limits: quota.Limits{Max: quota.Unlimited, High: quota.Unlimited}}
		if m.rng.IntN(2) == 0 {
			keys["gpufence.dev/memory.max"] = "7Gi"
			keys["gpufence.dev/memory.min"] = "0"
		}
	}
	c.pod = p
	request, _, err := quota.Parse(quota.Subject{Engine: quota.EngineCRI, Namespace: "n", Pod: string(p.id), Container: name, Annotations: keys, HasGPU: true}, m.pol)
	if err == nil {
		var grant quota.Grant
		if grant, _, err = request.Resolve([]quota.GPU{m.gpu}, m.pol); err == nil {
			c.grant = grant.Container[uuid]
			if l, ok := grant.Pod[uuid]; ok && fresh {
				p.limits = l
			}
		}
	}
	if err != nil {
		m.fail("a request is refused: %v: %v", keys, err)
		return
	}
	p.conts = append(p.conts, c)
	if err := m.admit(p, p.minBytes(), c.grant.Max > c.grant.Min); err != nil {
		p.conts = p.conts[:len(p.conts)-1]
		m.stats.NotAdmitted++
		return
	}
	m.stats.Admitted++
	m.stats.Started++
	if fresh {
		m.pods = append(m.pods, p)
		p.published = p.limits.Max
	}
	c.published = c.grant.Max
	m.conts = append(m.conts, c)
	m.say("%s starts in %s with %d..%d, kind %d", c.id, p.id, c.grant.Min, c.grant.Max, c.kind)
	m.promises()
}

// admit is what gpufenced asks before it promises.
func (m *model) admit(p *pod, want uint64, overcommit bool) error {
	in := policy.AdmitInput{
		UUID: uuid, AllocatableBytes: m.gpu.AllocatableBytes, MinBytes: want, DyingBytes: m.out.DyingBytes,
		UnmanagedBytes: m.out.UnmanagedSteadyBytes, UnattributedBytes: m.out.UnattributedBytes,
		FreeNow: overcommit, FreeKnown: m.haveOut, FreeBytes: totalBytes - min(totalBytes, m.used()),
		ChargedBytes: m.out.Pods[p.id].ChargedBytes,
	}
	for _, c := range m.conts {
		if c.ended && c.since > m.outAt {
			in.DyingBytes += m.out.Containers[c.id].ChargedBytes
		}
	}
	for _, o := range m.pods {
		if o != p {
			in.Others = append(in.Others, policy.Guarantee{Pod: o.id, MinBytes: o.minBytes(), ChargedBytes: m.out.Pods[o.id].ChargedBytes})
		}
	}
	return policy.Admit(in)
}

// promises must never exceed what there is.
func (m *model) promises() {
	sum := uint64(0)
	for _, p := range m.pods {
		sum += p.minBytes()
	}
	if sum > m.gpu.AllocatableBytes {
		m.fail("%d bytes are promised of %d", sum, m.gpu.AllocatableBytes)
	}
}

// set changes a container's limit.
func (m *model) set(c *cont) {
	limit := (512 + m.rng.Uint64N(120)*64) * mib
	if limit == c.grant.Max || c.grant.Min > limit && c.grant.Min != c.grant.Max {
		return
	}
	next := c.grant
	follows := next.Min == next.Max
	if next.Max = limit; follows {
		next.Min = limit
	}
	if limit > c.grant.Max {
		before := c.grant
		c.grant = next
		err := m.admit(c.pod, c.pod.minBytes(), next.Max > next.Min)
		c.grant = before
		if err != nil {
			m.stats.NotAdmitted++
			return
		}
		m.stats.Grows++
	} else {
		m.stats.Shrinks++
	}
	force := m.rng.IntN(6) == 0
	r := m.core.StartResize(policy.Level{Container: c.id}, c.grant.Max, limit, m.now, m.now+time.Duration(1+m.rng.IntN(5))*time.Second, force)
	c.resize, c.published, c.overdue, c.fits, c.changed = nil, limit, 0, -1, m.now
	m.say("%s is to go from %d to %d (force %v)", c.id, c.grant.Max, limit, force)
	if r.State == policy.ResizePending {
		c.resize = &r
		return
	}
	c.grant = next
	m.crossed(c)
	m.promises()
}
