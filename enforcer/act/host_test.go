// SPDX-License-Identifier: Apache-2.0

package act

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// fake is a made-up /proc and /sys/fs/cgroup.
type fake struct {
	t            *testing.T
	proc, cgroup string
}

const fakeBoot = "11111111-2222-3333-4444-555555555555"

func newFake(t *testing.T) *fake {
	dir := t.TempDir()
	f := &fake{t, filepath.Join(dir, "proc"), filepath.Join(dir, "cgroup")}
	f.write("proc/sys/kernel/random/boot_id", fakeBoot+"\n")
	return f
}

func (f *fake) write(path, content string) {
	f.t.Helper()
	path = filepath.Join(filepath.Dir(f.proc), path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

// layout mounts hierarchies: "" for pure v2, else names of folders, "unified" being v2.
func (f *fake) layout(hierarchies ...string) {
	if len(hierarchies) == 0 {
		f.write("cgroup/cgroup.controllers", "")
		f.write("cgroup/cgroup.procs", "")
	}
	for _, h := range hierarchies {
		f.write("cgroup/"+h+"/cgroup.procs", "")
		if h == "unified" {
			f.write("cgroup/"+h+"/cgroup.controllers", "")
		}
	}
}

type fakeProc struct {
	pid, nspid, ns int
	start          uint64
	state          byte
	flags          int
	comm           string
	cgroups        []string
	threads        []string // state and flags of each, "S 0"; one thread if empty
}

func statLine(pid int, comm string, state byte, flags, threads int, start uint64) string {
	return fmt.Sprintf("%d (%s) %c 1 %d %d 0 -1 %d 0 0 0 0 0 0 0 0 20 0 %d 0 %d 1000 100 18446744073709551615 0 0\n", pid, comm, state, pid, pid, flags, threads, start)
}

func (f *fake) process(p fakeProc) {
	f.t.Helper()
	if p.state == 0 {
		p.state = 'S'
	}
	if p.nspid == 0 {
		p.nspid = p.pid
	}
	if p.comm == "" {
		p.comm = "app"
	}
	dir := fmt.Sprintf("proc/%d/", p.pid)
	f.write(dir+"stat", statLine(p.pid, p.comm, p.state, p.flags, max(1, len(p.threads)), p.start))
	for i, th := range p.threads {
		var state byte
		var flags int
		if _, err := fmt.Sscanf(th, "%c %d", &state, &flags); err != nil {
			f.t.Fatal(err)
		}
		f.write(fmt.Sprintf("%stask/%d/stat", dir, p.pid+i), statLine(p.pid+i, p.comm, state, flags, len(p.threads), p.start))
	}
	f.write(dir+"status", fmt.Sprintf("Name:\t%s\nPid:\t%d\nNSpid:\t%d\t%d\nThreads:\t1\n", p.comm, p.pid, p.pid, p.nspid))
	f.write(dir+"cgroup", strings.Join(p.cgroups, "\n")+"\n")
	if p.ns != 0 {
		link := filepath.Join(f.proc, fmt.Sprint(p.pid), "ns", "pid")
		if err := os.MkdirAll(filepath.Dir(link), 0o700); err != nil {
			f.t.Fatal(err)
		}
		if err := os.Symlink(fmt.Sprintf("pid:[%d]", p.ns), link); err != nil {
			f.t.Fatal(err)
		}
	}
	for _, line := range p.cgroups {
		part := strings.SplitN(line, ":", 3)
		mount := map[string]string{"name=systemd": "systemd"}[part[1]]
		if mount == "" {
			mount = part[1]
		}
		path := filepath.Join("cgroup", mount, part[2], "cgroup.procs")
		if part[1] == "" {
			path = filepath.Join("cgroup", part[2], "cgroup.procs")
			if _, err := os.Stat(filepath.Join(f.cgroup, "unified")); err == nil {
				path = filepath.Join("cgroup/unified", part[2], "cgroup.procs")
			}
		}
		// Missing before the first process of a cgroup.
		old, err := os.ReadFile(filepath.Join(filepath.Dir(f.proc), path))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			f.t.Fatal(err)
		}
		f.write(path, string(old)+fmt.Sprintln(p.pid))
	}
}

func (f *fake) host() *Host {
	f.t.Helper()
	h, err := NewHost(f.proc, f.cgroup)
	if err != nil {
		f.t.Fatal(err)
	}
	h.self = 1000
	return h
}

func TestNewHost(t *testing.T) {
	for want, hierarchies := range map[string][]string{"v1": {"freezer", "cpu,cpuacct", "systemd"}, "hybrid": {"freezer", "unified"}, "v2": nil} {
		f := newFake(t)
		f.layout(hierarchies...)
		h := f.host()
		if h.Mode() != want || h.BootID() != fakeBoot {
			t.Errorf("mode %s, want %s; boot %s", h.Mode(), want, h.BootID())
		}
		if want == "v1" && (h.mounts["cpuacct"] == "" || h.mounts["cpuacct"] != h.mounts["cpu"] || h.mounts["name=systemd"] == "") {
			t.Errorf("mounts %v", h.mounts)
		}
	}
	// Some hosts mount v2 in a folder alone.
	f := newFake(t)
	f.layout("unified")
	if h := f.host(); h.Mode() != "v2" {
		t.Errorf("mode %s", h.Mode())
	}
	f = newFake(t)
	if _, err := NewHost(f.proc, f.cgroup); err == nil {
		t.Error("no cgroup folder: no error")
	}
	f.write("cgroup/file", "")
	if _, err := NewHost(f.proc, f.cgroup); !errors.Is(err, ErrNoCgroup) {
		t.Errorf("nothing mounted: %v", err)
	}
	if _, err := NewHost(t.TempDir(), f.cgroup); err == nil {
		t.Error("no boot id: no error")
	}
}

func TestProcess(t *testing.T) {
	f := newFake(t)
	f.layout()
	f.process(fakeProc{pid: 7, nspid: 2, ns: 4026532000, start: 12345, comm: "a) b (c"})
	h := f.host()
	p, err := h.Process(7)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Process{PID: 7, Start: 12345, State: 'S', Comm: "a) b (c", PPID: 1, NSPID: 2, PIDNS: 4026532000}); p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
	if _, err := h.Process(8); !errors.Is(err, ErrGone) {
		t.Errorf("no process: %v", err)
	}
	for name, want := range map[string]struct {
		p       fakeProc
		exiting bool
	}{
		"alive":                  {fakeProc{}, false},
		"zombie":                 {fakeProc{state: 'Z', flags: 4}, true},
		"exiting":                {fakeProc{state: 'R', flags: 0x404}, true},
		"only the first thread":  {fakeProc{state: 'Z', flags: 4, threads: []string{"Z 4", "S 0"}}, false},
		"every thread":           {fakeProc{state: 'Z', flags: 4, threads: []string{"Z 4", "R 4"}}, true},
		"another thread exiting": {fakeProc{threads: []string{"S 0", "R 4"}}, false},
	} {
		f := newFake(t)
		f.layout()
		want.p.pid = 9
		f.process(want.p)
		if p, err := f.host().Process(9); err != nil || p.Exiting != want.exiting {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

func TestProcessGarbage(t *testing.T) {
	for name, change := range map[string][2]string{
		"stat without name": {"proc/7/stat", "7 app S"},
		"short stat":        {"proc/7/stat", "7 (app) S 1 2"},
		"stat of words":     {"proc/7/stat", strings.ReplaceAll(statLine(7, "app", 'S', 0, 1, 5), " 5 ", " five ")},
		"NSpid of words":    {"proc/7/status", "NSpid:\tseven\n"},
	} {
		f := newFake(t)
		f.layout()
		f.process(fakeProc{pid: 7})
		f.write(change[0], change[1])
		if _, err := f.host().Process(7); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for text, want := range map[string]int{"NSpid:\t5\n": 5, "NSpid:\t5\t1\n": 1, "NSpid:\n": 0, "Name: x\n": 0} {
		if n, err := parseNSPID([]byte(text)); n != want || err != nil {
			t.Errorf("parseNSPID(%q) = %d, %v", text, n, err)
		}
	}
	for _, text := range []string{"", "pid:[", "pid:[x]", "net:[5]"} {
		if _, err := parseNamespace(text); err == nil {
			t.Errorf("parseNamespace(%q) worked", text)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte(statLine(7, "app", 'S', 4, 2, 99)))
	f.Add([]byte("7 (a) b) R"))
	f.Add([]byte(")("))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseStat(b)
		if err == nil && !strings.Contains(string(b), "("+s.comm+")") {
			t.Fatalf("comm %q of %q", s.comm, b)
		}
	})
}

func TestContainerCgroup(t *testing.T) {
	const pod = "/kubepods/burstable/podx/"
	for name, c := range map[string]struct {
		layout []string
		init   []string
		others []fakeProc
		want   string
		err    error
	}{
		"v2":                        {nil, []string{"0::" + pod + "c1"}, nil, "unified:" + pod + "c1", nil},
		"v1":                        {[]string{"freezer", "pids"}, []string{"5:pids:" + pod + "c1", "4:freezer:" + pod + "c1"}, nil, "freezer:" + pod + "c1", nil},
		"hybrid, in the root of v2": {[]string{"freezer", "unified"}, []string{"4:freezer:" + pod + "c1", "0::/"}, nil, "freezer:" + pod + "c1", nil},
		"hybrid, shared in v2":      {[]string{"freezer", "unified"}, []string{"4:freezer:" + pod + "c1", "0::/session"}, []fakeProc{{pid: 8, cgroups: []string{"0::/session"}}}, "freezer:" + pod + "c1", nil},
		"only named":                {[]string{"systemd"}, []string{"1:name=systemd:/x.scope"}, nil, "name=systemd:/x.scope", nil},
		"root":                      {nil, []string{"0::/"}, nil, "", ErrCgroupRoot},
		"root everywhere":           {[]string{"freezer", "unified"}, []string{"4:freezer:/", "0::/"}, nil, "", ErrCgroupRoot},
		"our own":                   {nil, []string{"0::/system.slice/gpufenced.service"}, []fakeProc{{pid: 1000, cgroups: []string{"0::/system.slice/gpufenced.service"}}}, "", ErrCgroupOwn},
		"above ours":                {nil, []string{"0::/system.slice"}, []fakeProc{{pid: 1000, cgroups: []string{"0::/system.slice/gpufenced.service"}}}, "", ErrCgroupOwn},
		"the runtime's":             {nil, []string{"0::/user.slice"}, []fakeProc{{pid: 600, cgroups: []string{"0::/user.slice"}}}, "", ErrCgroupOwn},
		"shared":                    {nil, []string{"0::/x"}, []fakeProc{{pid: 8, cgroups: []string{"0::/x"}}}, "", ErrCgroupShared},
		"shared below":              {nil, []string{"0::/x"}, []fakeProc{{pid: 8, cgroups: []string{"0::/x/y"}}}, "", ErrCgroupShared},
		"beside a zombie":           {nil, []string{"0::/x"}, []fakeProc{{pid: 8, state: 'Z', flags: 4, cgroups: []string{"0::/x"}}}, "unified:/x", nil},
		"outside our namespace":     {nil, []string{"0::/../x"}, nil, "", ErrNoCgroup},
		"deleted":                   {nil, []string{"0::/x (deleted)"}, nil, "", ErrNoCgroup},
		"not mounted":               {[]string{"freezer"}, []string{"5:pids:/x"}, nil, "", ErrNoCgroup},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.layout(c.layout...)
			for _, p := range c.others {
				f.process(p)
			}
			f.process(fakeProc{pid: 7, start: 5, cgroups: c.init})
			got, err := f.host().ContainerCgroup(7, 600)
			if !errors.Is(err, c.err) || c.err == nil && (err != nil || got.String() != c.want) {
				t.Fatalf("%+v, %v; want %s, %v", got, err, c.want, c.err)
			}
			if err != nil {
				var e *CgroupError
				if !errors.As(err, &e) || e.PID != 7 || strings.Contains(err.Error(), "\n") {
					t.Errorf("error %#v", err)
				}
				if errors.Is(c.err, ErrCgroupShared) && !slices.Equal(e.PIDs, []int{8}) {
					t.Errorf("names %v", e.PIDs)
				}
				return
			}
			if got.Inode == 0 || got.BootID != fakeBoot {
				t.Errorf("identity %+v", got)
			}
		})
	}
	f := newFake(t)
	f.layout()
	if _, err := f.host().ContainerCgroup(7, 0); !errors.Is(err, ErrGone) {
		t.Errorf("no process: %v", err)
	}
	f.process(fakeProc{pid: 7})
	f.write("proc/7/cgroup", "garbage\n")
	if _, err := f.host().ContainerCgroup(7, 0); err == nil {
		t.Error("a garbage cgroup file was understood")
	}
}

func TestOwner(t *testing.T) {
	f := newFake(t)
	f.layout("freezer", "unified")
	f.process(fakeProc{pid: 7, start: 5, ns: 1, cgroups: []string{"4:freezer:/pod/c1", "0::/"}})
	f.process(fakeProc{pid: 8, start: 6, cgroups: []string{"4:freezer:/pod/c1/docker/inner", "0::/"}})
	f.process(fakeProc{pid: 9, start: 7, cgroups: []string{"4:freezer:/pod/c10", "0::/"}})
	f.process(fakeProc{pid: 10, start: 8, cgroups: []string{"4:freezer:/", "0::/u/c2/x"}})
	f.write("cgroup/unified/u/c2/cgroup.procs", "")
	h := f.host()
	identify := func(hierarchy, path string) Cgroup {
		dir, err := h.dir(hierarchy, path)
		if err != nil {
			t.Fatal(err)
		}
		n, err := inode(dir)
		if err != nil {
			t.Fatal(err)
		}
		return Cgroup{hierarchy, path, n, fakeBoot}
	}
	c1 := identify("freezer", "/pod/c1")
	inner := identify("freezer", "/pod/c1/docker/inner")
	c2 := identify("unified", "/u/c2")
	removed := c2
	removed.Inode++
	lastBoot := c1
	lastBoot.BootID = "x"
	for pid, want := range map[int]Cgroup{7: c1, 8: c1, 9: {}, 10: c2} {
		for _, order := range [][]Cgroup{{inner, c1, c2}, {c2, c1, inner}} {
			p, got, ok, err := h.Owner(pid, order)
			if err != nil || got != want || ok != (want != Cgroup{}) || p.PID != pid {
				t.Errorf("owner of %d: %+v %+v %v %v", pid, p, got, ok, err)
			}
		}
	}
	for _, c := range []Cgroup{removed, lastBoot} {
		if _, _, ok, err := h.Owner(10, []Cgroup{c}); ok || err != nil {
			t.Errorf("a cgroup that is gone owns: %v", err)
		}
		if same, err := h.Exists(c); same || err != nil {
			t.Errorf("Exists(%+v) = %v, %v", c, same, err)
		}
	}
	if same, err := h.Exists(c1); !same || err != nil {
		t.Errorf("Exists = %v, %v", same, err)
	}
	if same, err := h.Exists(Cgroup{"freezer", "/none", 1, fakeBoot}); same || err != nil {
		t.Errorf("Exists of nothing = %v, %v", same, err)
	}
	if _, err := h.Exists(Cgroup{"freezer", "/../x", 1, fakeBoot}); err == nil {
		t.Error("a path with .. was looked up")
	}
	if _, _, _, err := h.Owner(99, []Cgroup{c1}); !errors.Is(err, ErrGone) {
		t.Errorf("owner of nobody: %v", err)
	}
	if path, err := h.CgroupOf(8, c1); err != nil || path != "/pod/c1/docker/inner" {
		t.Errorf("CgroupOf = %q, %v", path, err)
	}
	if _, err := h.CgroupOf(8, Cgroup{Hierarchy: "rdma"}); !errors.Is(err, ErrNoCgroup) {
		t.Errorf("CgroupOf in a missing hierarchy: %v", err)
	}
	pids, err := h.Procs(c1)
	if err != nil || !slices.Equal(pids, []int{7, 8}) {
		t.Errorf("Procs = %v, %v", pids, err)
	}
	if pids, err := h.Procs(Cgroup{Hierarchy: "freezer", Path: "/none"}); err != nil || len(pids) != 0 {
		t.Errorf("Procs of nothing = %v, %v", pids, err)
	}
	f.write("cgroup/freezer/pod/c10/cgroup.procs", "nine\n")
	if _, err := h.Procs(identify("freezer", "/pod/c10")); err == nil {
		t.Error("garbage in cgroup.procs was understood")
	}
}

func TestIdentify(t *testing.T) {
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	p, err := h.Process(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	id, err := h.Identify(p.PID, p.Start)
	if err != nil || id.Exe != exe || !strings.HasPrefix(id.Cgroup, "/") {
		t.Errorf("%+v, %v", id, err)
	}
	if _, err := h.Identify(p.PID, p.Start+1); !errors.Is(err, ErrUnstable) {
		t.Errorf("another process of that pid: %v", err)
	}
	if _, err := h.Identify(1<<22-1, 1); !errors.Is(err, ErrGone) {
		t.Errorf("nobody: %v", err)
	}
	text, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strconv.Itoa(-h.Priority(p.PID)), strings.TrimSpace(string(text)); got != want {
		t.Errorf("priority -%s, want -%s", got, want)
	}
	if h.Priority(1<<22-1) != 0 {
		t.Error("nobody's priority")
	}
}
