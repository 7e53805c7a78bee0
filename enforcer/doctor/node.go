// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// State is how much a finding matters.
type State string

// The states, the worst last.
const (
	OK   State = "ok"
	Info State = "info" // worth knowing
	Warn State = "warn" // works, with less than one may expect
	Fail State = "fail" // containers do not start, or are not fenced
)

// Finding is one line of an examination.
type Finding struct {
	Area  string `json:"area"` // gpufenced, configuration, fence, engine, kernel, neighbour
	Name  string `json:"name"`
	State State  `json:"state"`
	What  string `json:"what"`
	Fix   string `json:"fix,omitempty"` // the line that mends it
}

// Worst is the worst state among findings.
func Worst(findings []Finding) State {
	order := []State{OK, Info, Warn, Fail}
	worst := 0
	for _, f := range findings {
		worst = max(worst, slices.Index(order, f.State))
	}
	return order[worst]
}

// Node looks at kernel, driver, engines and neighbours below root.
func Node(root string) []Finding {
	var out []Finding
	out = append(out, kernel(root)...)
	out = append(out, fences(root)...)
	for _, e := range Engines(root) {
		out = append(out, e.findings()...)
	}
	return append(out, neighbours(root)...)
}

func (e *Engine) findings() []Finding {
	var out []Finding
	add := func(s State, what, fix string) {
		out = append(out, Finding{"engine", e.Name, s, what, fix})
	}
	for _, p := range e.Problems {
		add(Fail, p.What, p.Fix)
	}
	switch {
	case e.Handler != "" && len(e.Problems) == 0:
		add(OK, fmt.Sprintf("handler %s in %s starts %s", e.Handler, e.Config, e.Runtime), "")
	case e.Handler == "":
		add(Warn, "it is here and does not know gpufence: its containers are not fenced", e.install())
	}
	return out
}

// install is the shortest way to tell an engine of us.
func (e *Engine) install() string {
	switch e.Name {
	case "docker":
		return `in ` + e.Config + `: "runtimes": {"gpufence": {"path": "/usr/bin/gpufence-runtime.docker"}}`
	case "podman":
		return `in ` + e.Config + `: [engine.runtimes] gpufence = ["/usr/bin/gpufence-runtime.podman"]`
	case "cri-o":
		return `in /etc/crio/crio.conf.d/99-gpufence.conf: [crio.runtime.runtimes.gpufence] runtime_path = "/usr/bin/gpufence-runtime.crio"`
	}
	return `a runtime "gpufence" of type io.containerd.runc.v2 with options.BinaryName = "/usr/bin/gpufence-runtime.cri" and pod_annotations = ["gpufence.dev/*"]`
}

// text is a small file's, empty if it cannot be read.
func text(root, name string) string {
	b, err := read(filepath.Join(root, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func kernel(root string) []Finding {
	var out []Finding
	release := text(root, "proc/sys/kernel/osrelease")
	out = append(out, Finding{"kernel", "release", Info, or(release, "unknown"), ""})
	v2 := exists(filepath.Join(root, "sys/fs/cgroup/cgroup.controllers"))
	hybrid := exists(filepath.Join(root, "sys/fs/cgroup/unified/cgroup.controllers"))
	f := Finding{"kernel", "cgroups", OK, "v2", ""}
	switch {
	case v2:
	case hybrid:
		f.State, f.What = Info, "hybrid: containers are found and killed by the v2 tree, frozen by v1"
	default:
		f.State, f.What, f.Fix = Warn, "v1 only: kills go process by process", "systemd.unified_cgroup_hierarchy=1 on the kernel's command line"
	}
	return append(out, f)
}

var nvrm = regexp.MustCompile(`NVRM version:.*?\s(\d+)\.(\d+)(?:\.\d+)?\s`)

// fences says what each fence needs, and whether the node has it.
func fences(root string) []Finding {
	version := text(root, "proc/driver/nvidia/version")
	m := nvrm.FindStringSubmatch(version + " ")
	branch := 0
	if m != nil {
		branch, _ = strconv.Atoi(m[1]) // it consists of digits; a longer number is no branch we know
	}
	var out []Finding
	driver := Finding{"fence", "driver", Info, "", ""}
	switch {
	case m == nil:
		driver.What = "no NVIDIA driver is loaded"
		driver.Fix = "modprobe nvidia"
	case branch < 615:
		driver.What = fmt.Sprintf("driver %s.%s has no limits of its own", m[1], m[2])
		driver.Fix = "upgrade to driver R615 or newer, with cgroup v2"
	case !exists(filepath.Join(root, "sys/fs/cgroup/cgroup.controllers")):
		driver.What = fmt.Sprintf("driver %s.%s has limits of its own, which need cgroup v2", m[1], m[2])
		driver.Fix = "systemd.unified_cgroup_hierarchy=1 on the kernel's command line"
	case memacctOff(text(root, "proc/driver/nvidia/params")):
		driver.What = fmt.Sprintf("driver %s.%s has limits of its own, which are switched off", m[1], m[2])
		driver.Fix = "take RmMemacctMode=0 out of NVreg_RegistryDwords, and load the driver anew"
	case strings.Contains(strings.ToLower(text(root, "sys/fs/cgroup/dmem.capacity")), "nvidia"):
		driver.State, driver.What = OK, fmt.Sprintf("driver %s.%s limits cgroups through the kernel's dmem controller", m[1], m[2])
	default:
		driver.State = OK
		driver.What = fmt.Sprintf("driver %s.%s limits cgroups by accounts of its own, on which a container with a limit of its own is not held to its pod's", m[1], m[2])
		driver.Fix = "kernel 6.14 or newer, for pod and container limits together"
	}
	out = append(out, driver)

	mig, err := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*"))
	migFinding := Finding{"fence", "mig", Info, "no GPU has MIG instances", ""}
	if err == nil && len(mig) > 0 {
		migFinding = Finding{"fence", "mig", OK, fmt.Sprintf("%d MIG instances: each is a GPU of its own", len(mig)), ""}
	}
	out = append(out, migFinding)

	gate := Finding{"fence", "gate", Info, "", ""}
	lsms := text(root, "sys/kernel/security/lsm")
	var lacks []string
	if !exists(filepath.Join(root, "sys/kernel/btf/vmlinux")) {
		lacks = append(lacks, "BTF (CONFIG_DEBUG_INFO_BTF=y)")
	}
	if !slices.Contains(strings.Split(lsms, ","), "bpf") {
		lacks = append(lacks, "the BPF LSM")
		gate.Fix = "add bpf to the list lsm= on the kernel's command line"
		if lsms != "" {
			gate.Fix = "lsm=" + lsms + ",bpf on the kernel's command line"
		}
	}
	out = append(out, hard(driver, migFinding, gate))
	if len(lacks) > 0 {
		gate.What = "the kernel lacks " + strings.Join(lacks, " and ") + "; this version of gpufence has no gate"
	} else {
		gate.What = "the kernel could carry it; this version of gpufence has no gate"
	}
	return append(out, gate)
}

// memacctOff says whether the driver's parameters switch its limits off.
func memacctOff(params string) bool {
	for line := range strings.Lines(params) {
		if name, value, ok := strings.Cut(line, ":"); ok && name == "RegistryDwords" && memacct.MatchString(value) {
			return true
		}
	}
	return false
}

var memacct = regexp.MustCompile(`\bRmMemacctMode=(0x)?0+\b`)

// hard says whether a container that requires level hard can start here, and what would make it so.
func hard(driver, mig, gate Finding) Finding {
	switch {
	case driver.State == OK:
		return Finding{"fence", "hard", OK, "containers that require hard start: the driver holds them", ""}
	case mig.State == OK:
		return Finding{"fence", "hard", Info, "containers that require hard start only with a whole MIG instance for themselves", "for others: " + or(driver.Fix, "upgrade to driver R615 or newer")}
	}
	ways := []string{or(driver.Fix, "upgrade to driver R615 or newer"), "or give each container a MIG instance"}
	if gate.Fix != "" {
		ways = append(ways, "or, for the gate, "+gate.Fix)
	}
	return Finding{"fence", "hard", Info, "without the gate only watch is possible, and containers that require hard are refused (E1406)", strings.Join(ways, "; ")}
}

// neighbours are others who share, limit or inject GPUs.
func neighbours(root string) []Finding {
	var out []Finding
	add := func(name string, s State, what, fix string) {
		out = append(out, Finding{"neighbour", name, s, what, fix})
	}
	for _, p := range []string{"usr/local/vgpu/libvgpu.so", "usr/local/vgpu/ld.so.preload"} {
		if exists(filepath.Join(root, p)) {
			add("hami", Warn, "/"+p+" is here: containers with HAMi's preload are refused, since two libraries cannot both account for a GPU", "run each container under one of the two")
			break
		}
	}
	if preload := text(root, "etc/ld.so.preload"); strings.Contains(preload, "libvgpu") || strings.Contains(preload, "libgpufence") {
		add("ld.so.preload", Warn, "/etc/ld.so.preload of the host preloads "+preload+": every program of the host runs with it", "remove the line")
	}
	if procs := commands(root, "nvidia-cuda-mps"); len(procs) > 0 || exists(filepath.Join(root, "run/nvidia/mps")) {
		what := "an MPS control daemon"
		if len(procs) > 0 {
			what = strings.Join(procs, ", ")
		}
		add("mps", Warn, what+": the death of one client can fault its peers, so its clients are killed only with kill-mps = true", "kill-mps = true in config.toml, if that is wanted")
	}
	for _, p := range []string{"usr/bin/nvidia-container-runtime", "usr/local/nvidia/toolkit/nvidia-container-runtime"} {
		if exists(filepath.Join(root, p)) {
			add("nvidia-container-runtime", Info, "/"+p+": gpufence-runtime starts it, where it is the first of `runtimes` that exists", "")
			break
		}
	}
	specs := 0
	for _, dir := range []string{"etc/cdi", "var/run/cdi", "run/cdi"} {
		for _, ext := range []string{"*.yaml", "*.json"} {
			found, err := filepath.Glob(filepath.Join(root, dir, ext))
			if err == nil {
				specs += len(found)
			}
		}
		if dir == "var/run/cdi" {
			if dest, err := os.Readlink(filepath.Join(root, "var/run")); err == nil && strings.HasSuffix(dest, "run") {
				break // the same folder
			}
		}
	}
	if specs == 0 {
		add("cdi", Warn, "no CDI specification: gpufence cannot put a GPU into a container that the engine gives none", "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
	} else {
		add("cdi", OK, fmt.Sprintf("%d CDI specifications", specs), "")
	}
	return out
}

// commands are the names of running processes that begin so.
func commands(root, prefix string) []string {
	dirs, err := filepath.Glob(filepath.Join(root, "proc/[0-9]*"))
	if err != nil {
		return nil
	}
	var out []string
	for _, d := range dirs {
		comm, err := os.ReadFile(filepath.Join(d, "comm"))
		if err != nil {
			continue // it ended
		}
		if name := strings.TrimSpace(string(comm)); strings.HasPrefix(name, prefix) && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

func or(a, b string) string {
	if a == "" {
		return b
	}
	return a
}
