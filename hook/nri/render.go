// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// place is what rendering must know about the node.
type place struct {
	shimDir string
	runDir  string
	specs   []string // CDI directories
	majors  []int64  // of NVIDIA's character devices
}

// render makes an adjustment of edits. What somebody else has put where ours goes is refused, since
// NRI does not tell who it was, and the later of two would win unseen.
func render(ctr *api.Container, e plan.Edits, grant quota.Grant, p place) (*api.ContainerAdjustment, error) {
	a := &api.ContainerAdjustment{}
	var injected []plan.Mount
	if len(e.CDIDevices) > 0 {
		var err error
		if injected, err = renderCDI(a, e.CDIDevices, p.specs); err != nil {
			return nil, err
		}
	}
	renderDrops(a, ctr, e)
	if err := renderEnv(a, ctr.GetEnv(), e, grant); err != nil {
		return nil, err
	}
	if err := renderMounts(a, ctr.GetMounts(), injected, e.Mounts, p); err != nil {
		return nil, err
	}
	renderHooks(a, ctr.GetHooks(), e.Hooks)
	if e.DenyDevices {
		renderDeny(a, ctr, p.majors)
	}
	return a, nil
}

// renderCDI resolves the devices here, so that it does not matter whether the engine could, and
// what they mount is known.
func renderCDI(a *api.ContainerAdjustment, names, dirs []string) ([]plan.Mount, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, quota.NewError(quota.CodeNoCDIDevice, "the CDI specifications in %s cannot be read: %w", strings.Join(dirs, ", "), err)
	}
	spec := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	if _, err := cache.InjectDevices(spec, names...); err != nil {
		return nil, quota.NewError(quota.CodeNoCDIDevice, "the CDI devices %s cannot be injected: %w", strings.Join(names, ", "), err).
			WithHint("write a specification with `gpufence cdi generate --output=/etc/cdi/gpufence.yaml`")
	}
	if len(spec.Process.User.AdditionalGids) > 0 || spec.Linux.IntelRdt != nil || len(spec.Linux.NetDevices) > 0 {
		return nil, quota.NewError(quota.CodeNoCDIDevice, "the CDI devices %s need what NRI cannot give (groups, network devices or RDT)", strings.Join(names, ", ")).
			WithHint("use the runtime wrapper (`gpufence install`), or make the device nodes accessible for all")
	}
	for _, e := range spec.Process.Env {
		name, value, _ := strings.Cut(e, "=")
		if name != visible {
			a.AddEnv(name, value)
		}
	}
	for _, d := range spec.Linux.Devices {
		dev := &api.LinuxDevice{Path: d.Path, Type: d.Type, Major: d.Major, Minor: d.Minor}
		if d.FileMode != nil {
			dev.FileMode = api.FileMode(*d.FileMode)
		}
		if d.UID != nil {
			dev.Uid = api.UInt32(*d.UID)
		}
		if d.GID != nil {
			dev.Gid = api.UInt32(*d.GID)
		}
		a.AddDevice(dev)
	}
	var mounts []plan.Mount
	for _, m := range spec.Mounts {
		a.AddMount(&api.Mount{Destination: m.Destination, Source: m.Source, Type: cmp.Or(m.Type, "bind"), Options: m.Options})
		mounts = append(mounts, plan.Mount{Destination: m.Destination, Source: m.Source, Type: cmp.Or(m.Type, "bind"), Options: m.Options})
	}
	if spec.Hooks != nil {
		a.AddHooks(api.FromOCIHooks(spec.Hooks))
	}
	return mounts, nil
}

// renderDrops takes away what asks a runtime underneath for GPUs.
func renderDrops(a *api.ContainerAdjustment, ctr *api.Container, e plan.Edits) {
	for _, destination := range e.DropMounts {
		a.RemoveMount(destination)
	}
	for _, name := range e.DropAnnotations {
		if _, there := ctr.GetAnnotations()[name]; there { // others are the pod's, which no runtime sees
			a.RemoveAnnotation(name)
		}
	}
}

const visible = "NVIDIA_VISIBLE_DEVICES"

// renderEnv sets variables. Where a plugin may take none away, those that would be read by others
// are made to say what was granted, or nothing.
func renderEnv(a *api.ContainerAdjustment, env []string, e plan.Edits, grant quota.Grant) error {
	set := map[string]string{}
	var order []string
	put := func(name, value string) {
		if _, had := set[name]; !had {
			order = append(order, name)
		}
		set[name] = value
	}
	seen := map[string]int{}
	for _, v := range env {
		name, _, _ := strings.Cut(v, "=")
		seen[name]++
		if slices.ContainsFunc(e.UnsetEnv, func(pattern string) bool { return matchName(pattern, name) }) {
			put(name, grantedEnv(name, grant))
		}
	}
	for _, s := range e.SetEnv {
		name, value, _ := strings.Cut(s, "=")
		// A container without a GPU and without the variable is left alone: NRI sees every pod.
		if name == visible && e.DenyDevices && seen[name] == 0 {
			continue
		}
		put(name, value)
	}
	for _, name := range order {
		if seen[name] > 1 {
			return quota.NewError(quota.CodeSpecInvalid, "the container has the variable %s twice, of which NRI changes one", name).
				WithHint("set it once")
		}
		a.RemoveEnv(name) // another plugin may have set it, and the last word is ours
		a.AddEnv(name, set[name])
	}
	return nil
}

// grantedEnv is what a variable says that NVIDIA's toolkit reads; others are emptied.
func grantedEnv(name string, grant quota.Grant) string {
	if name != "NVIDIA_GPU_MEMORY_LIMIT" && name != "NVIDIA_GPU_MEMORY_REQUEST" {
		return ""
	}
	least := quota.Unlimited
	for _, g := range grant.GPUs {
		for _, level := range []map[string]quota.Limits{grant.Container, grant.Pod} {
			if l, ok := level[g.UUID]; ok {
				least = min(least, l.Max)
			}
		}
		least = min(least, g.TotalBytes)
	}
	if least == quota.Unlimited {
		return ""
	}
	return strconv.FormatUint(least>>20, 10)
}

func matchName(pattern, name string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return name == pattern
}

// renderMounts adds our files behind what is there. It refuses what would be hidden by them, or hide
// them: the image's own preload file cannot be read here, and a mounted one is somebody's.
func renderMounts(a *api.ContainerAdjustment, old []*api.Mount, injected []plan.Mount, files []plan.File, p place) error {
	if len(files) == 0 {
		return nil
	}
	mounts := slices.Clone(injected)
	for _, m := range old {
		mounts = append(mounts, plan.Mount{Destination: m.GetDestination(), Source: m.GetSource(), Type: m.GetType(), Options: m.GetOptions()})
	}
	files = overlay(files, mounts, p.shimDir)
	ours := map[string]string{}
	for _, f := range files {
		ours[path.Clean("/"+f.Destination)] = f.Source
	}
	for _, m := range mounts {
		dest := path.Clean("/" + m.Destination)
		if dest != p.shimDir && !strings.HasPrefix(dest, p.shimDir+"/") && dest != preloadPath {
			continue
		}
		if m.Source != ours[dest] && !strings.HasPrefix(path.Clean(m.Source), p.runDir+"/") {
			return quota.NewError(quota.CodeMountConflict, "%s is mounted at %s, by the pod or by another NRI plugin, where gpufence's own files go", m.Source, m.Destination).
				WithHint("mount it elsewhere, or let that plugin leave the pod alone")
		}
	}
	for _, f := range files {
		options := []string{"bind", "private", "nosuid", "nodev"}
		if name := path.Base(f.Destination); name == path.Base(preloadPath) || !strings.HasSuffix(name, ".so") && !strings.Contains(name, ".so.") {
			options = append(options, "noexec")
		}
		if f.Writable {
			options = append(options, "rw")
		} else {
			options = append(options, "ro")
		}
		if slices.ContainsFunc(old, func(m *api.Mount) bool { return path.Clean("/"+m.GetDestination()) == f.Destination }) {
			a.RemoveMount(f.Destination)
		}
		a.AddMount(&api.Mount{Destination: f.Destination, Source: f.Source, Type: "bind", Options: options})
	}
	return nil
}

// overlay says where files go that stand in for others: over each mount of such a library, which
// goes behind them.
func overlay(files []plan.File, mounts []plan.Mount, dir string) []plan.File {
	var out []plan.File
	for _, f := range files {
		if f.Over == "" {
			out = append(out, f)
			continue
		}
		driver := ""
		var over []string
		for _, m := range mounts {
			dest := path.Clean("/" + m.Destination)
			base := path.Base(dest)
			if base != f.Over && !strings.HasPrefix(base, f.Over+".") || strings.HasPrefix(dest, dir+"/") || m.Source == f.Source {
				continue
			}
			driver = cmp.Or(driver, m.Source)
			if !slices.Contains(over, dest) {
				over = append(over, dest)
			}
		}
		if driver == "" {
			continue
		}
		out = append(out, plan.File{Source: driver, Destination: f.Destination})
		for _, dest := range over {
			out = append(out, plan.File{Source: f.Source, Destination: dest})
		}
	}
	return out
}

// renderHooks adds our hooks, unless they are there.
func renderHooks(a *api.ContainerAdjustment, have *api.Hooks, hooks []plan.Hook) {
	for _, h := range hooks {
		old := have.GetCreateRuntime()
		if h.Stage == "poststop" {
			old = have.GetPoststop()
		}
		if slices.ContainsFunc(old, func(o *api.Hook) bool { return o.GetPath() == h.Path && slices.Equal(o.GetArgs(), h.Args) }) {
			continue
		}
		timeout := h.TimeoutSeconds
		add := []*api.Hook{{Path: h.Path, Args: h.Args, Timeout: api.Int(&timeout)}}
		if h.Stage == "poststop" {
			a.AddHooks(&api.Hooks{Poststop: add})
		} else {
			a.AddHooks(&api.Hooks{CreateRuntime: add})
		}
	}
}

// renderDeny refuses NVIDIA's devices where a wildcard allows everything.
func renderDeny(a *api.ContainerAdjustment, ctr *api.Container, majors []int64) {
	wildcard := false
	for _, r := range ctr.GetLinux().GetResources().GetDevices() {
		every := func(n *api.OptionalInt64) bool { return n == nil || n.GetValue() < 0 }
		switch {
		case r.GetType() == "b" || !every(r.GetMajor()):
		case r.GetAllow():
			wildcard = true
		case every(r.GetMinor()) && (r.GetAccess() == "" || strings.ContainsRune(r.GetAccess(), 'r') && strings.ContainsRune(r.GetAccess(), 'w')):
			wildcard = false // all of it is taken back, not some minor or only mknod
		}
	}
	if !wildcard {
		return
	}
	if a.Linux == nil {
		a.Linux = &api.LinuxContainerAdjustment{}
	}
	a.Linux.Resources = &api.LinuxResources{}
	for _, major := range majors {
		a.Linux.Resources.Devices = append(a.Linux.Resources.Devices, &api.LinuxDeviceCgroup{Allow: false, Type: "c", Major: api.Int64(major), Access: "rwm"})
	}
}

// Majors are the numbers of NVIDIA's character devices in /proc/devices: besides 195 they are given
// out when a module loads.
func Majors(procDevices string) []int64 {
	majors := []int64{195}
	character := false
	for line := range strings.Lines(procDevices) {
		line = strings.TrimSpace(line)
		switch line {
		case "Character devices:":
			character = true
		case "Block devices:":
			character = false
		}
		number, name, ok := strings.Cut(line, " ")
		if !ok || !character || !strings.HasPrefix(strings.TrimSpace(name), "nvidia") {
			continue
		}
		if n, err := strconv.ParseInt(number, 10, 32); err == nil && !slices.Contains(majors, n) {
			majors = append(majors, n)
		}
	}
	return majors
}
