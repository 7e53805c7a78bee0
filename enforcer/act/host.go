// SPDX-License-Identifier: Apache-2.0

package act

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
)

// unified is the name of the v2 hierarchy.
const unified = "unified"

// preference is the order in which hierarchies are tried for a container's cgroup. The freezer is
// the first of v1: every engine gives a container one of its own, and a kill needs it.
var preference = []string{unified, "freezer", "pids", "devices", "memory", "cpu", "name=systemd"}

// maxCgroups bounds how many cgroups of one container are walked.
const maxCgroups = 10000

// Host is where to look: /proc and the mounted cgroup hierarchies.
type Host struct {
	proc   string
	mounts map[string]string // hierarchy -> mount point
	mode   string
	bootID string
	self   int
}

// NewHost looks at the hierarchies below cgroupRoot (v1, v2 or both). "" means /proc and
// /sys/fs/cgroup.
func NewHost(procRoot, cgroupRoot string) (*Host, error) {
	if procRoot == "" {
		procRoot = "/proc"
	}
	if cgroupRoot == "" {
		cgroupRoot = "/sys/fs/cgroup"
	}
	h := &Host{proc: procRoot, mounts: map[string]string{}, self: os.Getpid()}
	boot, err := os.ReadFile(filepath.Join(procRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return nil, fmt.Errorf("read boot id: %w", err)
	}
	h.bootID = strings.TrimSpace(string(boot))
	if isCgroup2(cgroupRoot) {
		h.mounts[unified] = cgroupRoot
		h.mode = "v2"
		return h, nil
	}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("look for cgroups: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(cgroupRoot, e.Name())
		// cpu and cpuacct are often symbolic links to one mount of both.
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			continue
		}
		if isCgroup2(dir) {
			h.mounts[unified] = dir
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			continue
		}
		for _, controller := range strings.Split(e.Name(), ",") {
			if controller == "systemd" {
				controller = "name=systemd"
			}
			h.mounts[controller] = dir
		}
	}
	switch _, two := h.mounts[unified]; {
	case len(h.mounts) == 0:
		return nil, fmt.Errorf("look for cgroups in %s: none is mounted there: %w", cgroupRoot, ErrNoCgroup)
	case !two:
		h.mode = "v1"
	case len(h.mounts) == 1:
		h.mode = "v2"
	default:
		h.mode = "hybrid"
	}
	return h, nil
}

func isCgroup2(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "cgroup.controllers"))
	return err == nil
}

// Mode says which cgroup layout the host has: v1, v2 or hybrid.
func (h *Host) Mode() string { return h.mode }

// BootID is this boot's.
func (h *Host) BootID() string { return h.bootID }

// Cgroup identifies a cgroup for the life of the boot. It is comparable.
type Cgroup struct {
	Hierarchy string `json:"hierarchy"` // unified, or the v1 controller that it was found by: freezer, pids, ...
	Path      string `json:"path"`      // within the hierarchy, as /proc/<pid>/cgroup says it
	Inode     uint64 `json:"inode"`
	BootID    string `json:"boot_id"`
}

func (c Cgroup) String() string { return c.Hierarchy + ":" + c.Path }

// holds says whether a process at path of the same hierarchy is in c.
func (c Cgroup) holds(path string) bool { return within(c.Path, path) }

func within(outer, path string) bool {
	return path == outer || outer == "/" || strings.HasPrefix(path, outer+"/")
}

// Process is a process as it was while its start time stood still.
type Process struct {
	PID     int
	Start   uint64 // ticks since boot, as this host's /proc says it
	State   byte   // of its first thread: R S D Z X T t I
	Exiting bool   // every thread is exiting or dead
	Comm    string
	PPID    int
	NSPID   int    // in its own pid namespace
	PIDNS   uint64 // inode of its pid namespace; 0 when it cannot be read any more
}

// gone turns what /proc says of a process that has ended, and cgroupfs of a cgroup that is gone, into
// ErrGone.
func gone(err error) error {
	// ENODEV is what files of a cgroup say that were opened before it went.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%w (%w)", ErrGone, err)
	}
	return err
}

type stat struct {
	comm    string
	state   byte
	ppid    int
	flags   uint64
	threads int
	start   uint64
}

// pfExiting is PF_EXITING of the kernel's task flags.
const pfExiting = 0x4

// dead says that a thread is exiting or has exited.
func (s stat) dead() bool { return s.flags&pfExiting != 0 || s.state == 'Z' || s.state == 'X' }

func parseStat(b []byte) (s stat, err error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return s, fmt.Errorf("parse stat: no name in %.80q", b)
	}
	s.comm = string(b[open+1 : end])
	f := strings.Fields(string(b[end+1:])) // f[0] is field 3
	const need = 20
	if len(f) < need || len(f[0]) != 1 {
		return s, fmt.Errorf("parse stat: %d fields in %.80q", len(f), b)
	}
	s.state = f[0][0]
	var errs [4]error
	s.ppid, errs[0] = strconv.Atoi(f[1])
	s.flags, errs[1] = strconv.ParseUint(f[6], 10, 64)
	s.threads, errs[2] = strconv.Atoi(f[17])
	s.start, errs[3] = strconv.ParseUint(f[19], 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return s, fmt.Errorf("parse stat: %w", err)
	}
	return s, nil
}

func (h *Host) path(pid int, name ...string) string {
	return filepath.Join(append([]string{h.proc, strconv.Itoa(pid)}, name...)...)
}

func (h *Host) stat(path string) (stat, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return stat{}, gone(err)
	}
	return parseStat(b)
}

// Process reads one.
func (h *Host) Process(pid int) (Process, error) {
	p, err := h.process(pid)
	if err != nil {
		return p, fmt.Errorf("read process %d: %w", pid, err)
	}
	return p, nil
}

func (h *Host) process(pid int) (Process, error) {
	s, err := h.stat(h.path(pid, "stat"))
	if err != nil {
		return Process{}, err
	}
	p := Process{PID: pid, Start: s.start, State: s.state, Comm: s.comm, PPID: s.ppid}
	if p.Exiting, err = h.exiting(pid, s); err != nil {
		return Process{}, err
	}
	status, err := os.ReadFile(h.path(pid, "status"))
	if err != nil {
		return Process{}, gone(err)
	}
	if p.NSPID, err = parseNSPID(status); err != nil {
		return Process{}, err
	}
	// The link goes when the process exits; that is no reason not to know the rest.
	if link, err := os.Readlink(h.path(pid, "ns/pid")); err == nil {
		if p.PIDNS, err = parseNamespace(link); err != nil {
			return Process{}, err
		}
	}
	again, err := h.stat(h.path(pid, "stat"))
	if err != nil {
		return Process{}, err
	}
	if again.start != s.start {
		return Process{}, ErrUnstable
	}
	return p, nil
}

// exiting looks at every thread: a first thread that has exited alone is a zombie, too, while the
// others go on using the GPU.
func (h *Host) exiting(pid int, s stat) (bool, error) {
	if !s.dead() || s.threads <= 1 {
		return s.dead(), nil
	}
	tasks, err := os.ReadDir(h.path(pid, "task"))
	if err != nil {
		return false, gone(err)
	}
	for _, t := range tasks {
		s, err := h.stat(h.path(pid, "task", t.Name(), "stat"))
		if errors.Is(err, ErrGone) {
			continue
		}
		if err != nil {
			return false, err
		}
		if !s.dead() {
			return false, nil
		}
	}
	return true, nil
}

// parseNSPID finds the pid in the innermost namespace.
func parseNSPID(status []byte) (int, error) {
	for line := range strings.Lines(string(status)) {
		rest, ok := strings.CutPrefix(line, "NSpid:")
		if !ok {
			continue
		}
		f := strings.Fields(rest)
		if len(f) == 0 {
			return 0, nil // it is being reaped
		}
		n, err := strconv.Atoi(f[len(f)-1])
		if err != nil {
			return 0, fmt.Errorf("parse NSpid: %w", err)
		}
		return n, nil
	}
	return 0, nil // a zombie whose pid is gone already
}

func parseNamespace(link string) (uint64, error) {
	rest, ok := strings.CutPrefix(link, "pid:[")
	rest, closed := strings.CutSuffix(rest, "]")
	if !ok || !closed {
		return 0, fmt.Errorf("parse pid namespace %q", link)
	}
	n, err := strconv.ParseUint(rest, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("parse pid namespace %q: %w", link, err)
	}
	return n, nil
}

// paths are a process's cgroup in each hierarchy. Of a first thread that has exited the kernel says "/"
// in each v1 hierarchy, while the others go on where they are: then one of these is asked.
func (h *Host) paths(pid int) (map[string]string, error) {
	paths, err := h.pathsIn(h.path(pid, "cgroup"))
	if err != nil {
		return nil, err
	}
	atRoot := false
	for hierarchy, path := range paths {
		atRoot = atRoot || hierarchy != unified && path == "/"
	}
	if !atRoot {
		return paths, nil
	}
	s, err := h.stat(h.path(pid, "stat"))
	if err != nil {
		return nil, err
	}
	if !s.dead() || s.threads <= 1 {
		return paths, nil
	}
	tasks, err := os.ReadDir(h.path(pid, "task"))
	if err != nil {
		return nil, gone(err)
	}
	for _, t := range tasks {
		s, err := h.stat(h.path(pid, "task", t.Name(), "stat"))
		if err == nil && s.dead() {
			continue
		}
		var of map[string]string
		if err == nil {
			of, err = h.pathsIn(h.path(pid, "task", t.Name(), "cgroup"))
		}
		if errors.Is(err, ErrGone) {
			continue
		}
		return of, err
	}
	return paths, nil
}

func (h *Host) pathsIn(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, gone(err)
	}
	controllers, two, err := cgroups.ParseCgroupFromReaderUnified(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, gone(err)
	}
	if controllers == nil {
		controllers = map[string]string{}
	}
	delete(controllers, "")
	if two != "" {
		controllers[unified] = two
	}
	return controllers, nil
}

// usable says whether a path can be looked up below a mount: absolute, inside our cgroup namespace
// and of a cgroup that still exists.
func usable(path string) error {
	if !strings.HasPrefix(path, "/") || filepath.Clean(path) != path {
		return fmt.Errorf("cgroup path %q: %w", path, ErrNoCgroup)
	}
	if strings.HasSuffix(path, " (deleted)") {
		return fmt.Errorf("cgroup %q: %w", path, ErrGone)
	}
	return nil
}

func (h *Host) dir(hierarchy, path string) (string, error) {
	mount, ok := h.mounts[hierarchy]
	if !ok {
		return "", fmt.Errorf("hierarchy %s is not mounted: %w", hierarchy, ErrNoCgroup)
	}
	if err := usable(path); err != nil {
		return "", err
	}
	return filepath.Join(mount, path), nil
}

func inode(dir string) (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return 0, gone(&fs.PathError{Op: "stat", Path: dir, Err: err})
	}
	return s.Ino, nil
}

// CgroupError says why no cgroup of a process can be its container's.
type CgroupError struct {
	PID    int
	Path   string // the last that was looked at
	Reason error  // ErrCgroupRoot, ErrCgroupOwn, ErrCgroupShared, ErrNoCgroup
	PIDs   []int  // of ErrCgroupShared: the others, some of them
}

func (e *CgroupError) Error() string {
	if len(e.PIDs) > 0 {
		return fmt.Sprintf("find cgroup of process %d: %v: %s holds %v", e.PID, e.Reason, e.Path, e.PIDs)
	}
	return fmt.Sprintf("find cgroup of process %d: %v (%s)", e.PID, e.Reason, e.Path)
}

// Unwrap gives the reason.
func (e *CgroupError) Unwrap() error { return e.Reason }

// ContainerCgroup finds the leaf cgroup of a container's first process and refuses what cannot be
// one: the root, our own, the runtime's (runtimePID, 0 for unknown), or one that holds any other
// process. Of several hierarchies the first counts in which the process has a cgroup of its own;
// the error, a [CgroupError], tells of the one that came closest.
func (h *Host) ContainerCgroup(pid, runtimePID int) (Cgroup, error) {
	before, err := h.Process(pid)
	if err != nil {
		return Cgroup{}, fmt.Errorf("find cgroup of process %d: %w", pid, err)
	}
	paths, err := h.paths(pid)
	if err != nil {
		return Cgroup{}, fmt.Errorf("find cgroup of process %d: %w", pid, err)
	}
	var strangers []map[string]string
	for _, other := range []int{h.self, runtimePID} {
		if other == 0 || other == pid {
			continue
		}
		p, err := h.paths(other)
		if errors.Is(err, ErrGone) {
			continue
		}
		if err != nil {
			return Cgroup{}, fmt.Errorf("find cgroup of process %d: %w", other, err)
		}
		strangers = append(strangers, p)
	}
	refused := &CgroupError{PID: pid, Reason: ErrNoCgroup}
	rank := map[error]int{ErrNoCgroup: 0, ErrCgroupRoot: 1, ErrCgroupOwn: 2, ErrCgroupShared: 3}
	refuse := func(path string, reason error, pids []int) {
		if rank[reason] >= rank[refused.Reason] {
			refused = &CgroupError{PID: pid, Path: path, Reason: reason, PIDs: pids}
		}
	}
	for _, hierarchy := range preference {
		path, ok := paths[hierarchy]
		if !ok {
			continue
		}
		dir, err := h.dir(hierarchy, path)
		if err != nil {
			refuse(path, ErrNoCgroup, nil)
			continue
		}
		if path == "/" {
			refuse(hierarchy+":"+path, ErrCgroupRoot, nil)
			continue
		}
		if slices.ContainsFunc(strangers, func(p map[string]string) bool { return within(path, p[hierarchy]) && p[hierarchy] != "" }) {
			refuse(hierarchy+":"+path, ErrCgroupOwn, nil)
			continue
		}
		number, err := inode(dir)
		if err != nil {
			refuse(path, ErrNoCgroup, nil)
			continue
		}
		c := Cgroup{Hierarchy: hierarchy, Path: path, Inode: number, BootID: h.bootID}
		others, err := h.othersIn(c, pid)
		if err != nil {
			return Cgroup{}, fmt.Errorf("find cgroup of process %d: %w", pid, err)
		}
		if len(others) > 0 {
			refuse(c.String(), ErrCgroupShared, others[:min(len(others), 8)])
			continue
		}
		after, err := h.Process(pid)
		if err != nil {
			return Cgroup{}, fmt.Errorf("find cgroup of process %d: %w", pid, err)
		}
		if after.Start != before.Start {
			return Cgroup{}, fmt.Errorf("find cgroup of process %d: %w", pid, ErrUnstable)
		}
		return c, nil
	}
	return Cgroup{}, refused
}

// othersIn are the processes of a cgroup but one; those that are about to be gone do not count.
func (h *Host) othersIn(c Cgroup, pid int) ([]int, error) {
	all, err := h.Procs(c)
	if err != nil {
		return nil, err
	}
	var others []int
	for _, p := range all {
		if p == pid {
			continue
		}
		other, err := h.Process(p)
		if errors.Is(err, ErrGone) || err == nil && other.Exiting {
			continue
		}
		others = append(others, p)
	}
	return others, nil
}

// Parent is the cgroup above one; the root is nobody's.
func (h *Host) Parent(c Cgroup) (Cgroup, error) {
	up := filepath.Dir(c.Path)
	if up == "/" || up == "." {
		return Cgroup{}, fmt.Errorf("find parent of cgroup %s: %w", c, ErrCgroupRoot)
	}
	dir, err := h.dir(c.Hierarchy, up)
	if err != nil {
		return Cgroup{}, fmt.Errorf("find parent of cgroup %s: %w", c, err)
	}
	number, err := inode(dir)
	if err != nil {
		return Cgroup{}, fmt.Errorf("find parent of cgroup %s: %w", c, err)
	}
	return Cgroup{Hierarchy: c.Hierarchy, Path: up, Inode: number, BootID: h.bootID}, nil
}

// CgroupOf is the path of a process in the same hierarchy as like.
func (h *Host) CgroupOf(pid int, like Cgroup) (string, error) {
	paths, err := h.paths(pid)
	if err != nil {
		return "", fmt.Errorf("find cgroup of process %d: %w", pid, err)
	}
	path, ok := paths[like.Hierarchy]
	if !ok {
		return "", fmt.Errorf("find cgroup of process %d in hierarchy %s: %w", pid, like.Hierarchy, ErrNoCgroup)
	}
	return path, nil
}

// Exists says whether a cgroup is still the same one.
func (h *Host) Exists(c Cgroup) (bool, error) {
	if c.BootID != h.bootID {
		return false, nil
	}
	dir, err := h.dir(c.Hierarchy, c.Path)
	if err != nil {
		return false, fmt.Errorf("look for cgroup %s: %w", c, err)
	}
	number, err := inode(dir)
	if errors.Is(err, ErrGone) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for cgroup %s: %w", c, err)
	}
	return number == c.Inode, nil
}

// Procs are the processes of a cgroup and of those below it, by rising pid. A cgroup that is
// gone has none.
func (h *Host) Procs(c Cgroup) ([]int, error) {
	root, err := h.dir(c.Hierarchy, c.Path)
	if err != nil {
		return nil, fmt.Errorf("list processes of cgroup %s: %w", c, err)
	}
	var pids []int
	count := 0
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
			return nil // removed meanwhile
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		if count++; count > maxCgroups {
			return fmt.Errorf("more than %d cgroups", maxCgroups)
		}
		b, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
			return nil
		case errors.Is(err, unix.EOPNOTSUPP):
			return nil // threaded: its processes are listed further up
		case err != nil:
			return err
		}
		for f := range strings.FieldsSeq(string(b)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return fmt.Errorf("parse cgroup.procs: %w", err)
			}
			if pid > 0 { // 0 is a process of another pid namespace
				pids = append(pids, pid)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list processes of cgroup %s: %w", c, err)
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Owner is the registered cgroup that a process belongs to: the outermost one that holds it.
// ok is false if it is in none. The process's start time was stable around the reading.
func (h *Host) Owner(pid int, registered []Cgroup) (p Process, c Cgroup, ok bool, err error) {
	if p, err = h.Process(pid); err != nil {
		return p, c, false, err
	}
	paths, err := h.paths(pid)
	if err != nil {
		return p, c, false, fmt.Errorf("find owner of process %d: %w", pid, err)
	}
	for _, r := range registered {
		path, in := paths[r.Hierarchy]
		if !in || !r.holds(path) || ok && len(r.Path) >= len(c.Path) {
			continue
		}
		same, err := h.Exists(r)
		if err != nil {
			return p, Cgroup{}, false, fmt.Errorf("find owner of process %d: %w", pid, err)
		}
		if same {
			c, ok = r, true
		}
	}
	again, err := h.stat(h.path(pid, "stat"))
	if err != nil {
		return p, Cgroup{}, false, fmt.Errorf("find owner of process %d: %w", pid, err)
	}
	if again.start != p.Start {
		return p, Cgroup{}, false, fmt.Errorf("find owner of process %d: %w", pid, ErrUnstable)
	}
	return p, c, ok, nil
}

// Identity is a process as node policy may name it. Exe is empty where the process is not in our
// mount namespace, in which any path could be anything, or where it cannot be read.
type Identity struct {
	Exe    string
	Cgroup string // in the v2 hierarchy, else where systemd keeps its units
}

// Identify looks at a process that started then.
func (h *Host) Identify(pid int, start uint64) (id Identity, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("identify process %d: %w", pid, err)
		}
	}()
	paths, err := h.paths(pid)
	if err != nil {
		return id, err
	}
	id.Cgroup = paths[unified]
	if id.Cgroup == "" || id.Cgroup == "/" {
		if p := paths["name=systemd"]; p != "" {
			id.Cgroup = p
		}
	}
	own, err := os.Readlink(h.path(h.self, "ns/mnt"))
	if err != nil {
		return id, err
	}
	// Kernel threads and what exits have neither.
	if ns, err := os.Readlink(h.path(pid, "ns/mnt")); err == nil && ns == own {
		if exe, err := os.Readlink(h.path(pid, "exe")); err == nil {
			id.Exe = strings.TrimSuffix(exe, " (deleted)") // replaced by an upgrade while it runs
		}
	}
	s, err := h.stat(h.path(pid, "stat"))
	if err != nil {
		return Identity{}, err
	}
	if s.start != start {
		return Identity{}, ErrUnstable
	}
	return id, nil
}

// Priority orders containers by what their engine told the kernel's OOM killer of the first
// process: the lower, the sooner it may go. 0 where it cannot be read.
func (h *Host) Priority(pid int) int {
	b, err := os.ReadFile(h.path(pid, "oom_score_adj"))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return -n
}
