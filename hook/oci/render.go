// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// place is what rendering must know about the node and about an earlier pass.
type place struct {
	shimDir string   // /dev/gpufence or its substitute in this container
	runDir  string   // host files below it are ours
	majors  []int64  // of NVIDIA's character devices
	specs   []string // CDI directories
	// injection is read of the document as it is before rendering.
	injection func() *injection
}

// render applies edits to the document: first the devices, so that what follows has the last
// word over what CDI adds. Rendering twice gives what rendering once gave.
func render(root *object, e plan.Edits, p place) error {
	if len(e.CDIDevices) > 0 {
		if err := p.injection().inject(root, e.CDIDevices, p.specs); err != nil {
			return err
		}
	}
	for _, step := range []func(*object) error{
		func(root *object) error { return renderDrops(root, e.DropMounts, e.DropAnnotations) },
		func(root *object) error { return renderEnv(root, e.UnsetEnv, e.SetEnv) },
		func(root *object) error { return renderMounts(root, e.Mounts, p) },
		func(root *object) error { return renderHooks(root, e.Hooks) },
	} {
		if err := step(root); err != nil {
			return err
		}
	}
	if e.DenyDevices {
		return renderDeny(root, p.majors)
	}
	return nil
}

// renderEnv removes variables and then sets others at the end. Entries that stay keep their
// bytes.
func renderEnv(root *object, unset, set []string) error {
	if len(unset) == 0 && len(set) == 0 {
		return nil
	}
	process, err := root.child("process")
	if err != nil {
		return invalid(err)
	}
	old, err := process.list("env")
	if err != nil {
		return invalid(fmt.Errorf("process.%w", err))
	}
	names := map[string]bool{}
	for _, s := range set {
		name, _, _ := strings.Cut(s, "=")
		names[name] = true
	}
	var env []json.RawMessage
	for i, raw := range old {
		var entry string
		if err := json.Unmarshal(raw, &entry); err != nil {
			return invalid(fmt.Errorf("process.env[%d]: %w", i, err))
		}
		name, _, _ := strings.Cut(entry, "=")
		if names[name] || slices.ContainsFunc(unset, func(pattern string) bool { return matchName(pattern, name) }) {
			continue
		}
		env = append(env, raw)
	}
	for _, s := range set {
		env = append(env, quote(s))
	}
	if sameList(old, env) {
		return nil
	}
	process.setList("env", env)
	return nil
}

// renderDrops takes mounts of /dev/null and annotations away.
func renderDrops(root *object, destinations, annotations []string) error {
	if len(destinations) > 0 {
		old, err := root.list("mounts")
		if err != nil {
			return invalid(err)
		}
		var mounts []json.RawMessage
		for i, raw := range old {
			m, err := parseMount(raw)
			if err != nil {
				return invalid(fmt.Errorf("mounts[%d] %w", i, err))
			}
			if !slices.Contains(destinations, m.Destination) || path.Clean(m.Source) != "/dev/null" {
				mounts = append(mounts, raw)
			}
		}
		if !sameList(old, mounts) {
			root.setList("mounts", mounts)
		}
	}
	if len(annotations) == 0 {
		return nil
	}
	all, err := parseMap(root.get("annotations"))
	if err != nil {
		return invalid(fmt.Errorf("annotations %w", err))
	}
	before := len(all.members)
	all.members = slices.DeleteFunc(all.members, func(m member) bool { return slices.Contains(annotations, m.name) })
	if len(all.members) < before {
		root.set("annotations", all.bytes())
	}
	return nil
}

func matchName(pattern, name string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return name == pattern
}

// renderMounts puts our files last, over whatever the image or an engine mounts before. What
// is mounted at or below our folder and is not ours is refused: it would hide the limits from
// the shim, and its owner has no reason to be there.
func renderMounts(root *object, files []plan.File, p place) error {
	if len(files) == 0 {
		return nil
	}
	old, err := root.list("mounts")
	if err != nil {
		return invalid(err)
	}
	if files, err = overlay(files, old, p); err != nil {
		return err
	}
	ours := map[string]bool{}
	for _, f := range files {
		ours[path.Clean("/"+f.Destination)] = true
	}
	var mounts []json.RawMessage
	for i, raw := range old {
		m, err := parseMount(raw)
		if err != nil {
			return invalid(fmt.Errorf("mounts[%d] %w", i, err))
		}
		dest := path.Clean("/" + m.Destination)
		inside := below(dest, p.shimDir)
		if !ours[dest] && !inside {
			mounts = append(mounts, raw)
			continue
		}
		if inside && !isOurSource(m.Source, files, p.runDir) {
			return quota.NewError(quota.CodeMountConflict, "the container mounts %s at %s, where gpufence's own files go", m.Source, m.Destination).
				WithHint("mount it elsewhere")
		}
		// The image's or the user's /etc/ld.so.preload: its lines are in ours.
	}
	for _, f := range files {
		raw, err := encode(bindMount(f))
		if err != nil {
			return invalid(err)
		}
		mounts = append(mounts, raw)
	}
	if sameList(old, mounts) {
		return nil
	}
	root.setList("mounts", mounts)
	return nil
}

// overlay says where files go that stand in for others: over each mount of such a file, which goes
// behind them. A second pass finds it there. What nobody mounts is not stood in for.
func overlay(files []plan.File, mounts []json.RawMessage, p place) ([]plan.File, error) {
	var out []plan.File
	for _, f := range files {
		if f.Over == "" {
			out = append(out, f)
			continue
		}
		var over []string
		driver, moved, stands := "", "", false
		for i, raw := range mounts {
			m, err := parseMount(raw)
			if err != nil {
				return nil, invalid(fmt.Errorf("mounts[%d] %w", i, err))
			}
			dest := path.Clean("/" + m.Destination)
			if dest == f.Destination {
				moved = m.Source
			}
			bound := m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
			if !bound || below(dest, p.shimDir) || !isVersionOf(path.Base(dest), f.Over) {
				continue
			}
			if m.Source == f.Source || strings.Contains(m.Source, standInFolder) {
				stands = true
			} else {
				driver = cmp.Or(driver, m.Source)
			}
			if !slices.Contains(over, dest) {
				over = append(over, dest)
			}
		}
		if driver == "" && stands {
			driver = moved
		}
		if driver == "" {
			continue
		}
		out = append(out, plan.File{Source: driver, Destination: f.Destination})
		for _, dest := range over {
			out = append(out, plan.File{Source: f.Source, Destination: dest})
		}
	}
	return out, nil
}

// standInFolder is in the path of every library of ours that stands in for another, of whatever
// version.
const standInFolder = "/gpufence-stub/"

// isVersionOf says whether a file is a library by that name, of any version.
func isVersionOf(file, library string) bool {
	return file == library || strings.HasPrefix(file, library+".")
}

func parseMount(raw json.RawMessage) (specs.Mount, error) {
	var m specs.Mount
	if err := json.Unmarshal(raw, &m); err != nil {
		return m, fmt.Errorf("is not a mount: %w", err)
	}
	return m, nil
}

// isOurSource recognises a file that an earlier pass, or another way of delivery, mounted.
func isOurSource(source string, files []plan.File, runDir string) bool {
	return below(source, runDir) || slices.ContainsFunc(files, func(f plan.File) bool {
		return f.Source == source || path.Base(f.Source) == path.Base(source)
	})
}

// bindMount is one of our files. None holds a device, and only libraries are executable: the pages
// come from a file system that forbids it, and in a user namespace the runtime may not lift that.
func bindMount(f plan.File) specs.Mount {
	options := []string{"bind", "private", "nosuid", "nodev"}
	if !isLibrary(f.Destination) {
		options = append(options, "noexec")
	}
	if f.Writable {
		options = append(options, "rw")
	} else {
		options = append(options, "ro")
	}
	return specs.Mount{Destination: f.Destination, Type: "bind", Source: f.Source, Options: options}
}

// isLibrary says whether a file is loaded into programs, by its name.
func isLibrary(name string) bool {
	name = path.Base(name)
	return name != path.Base(preloadPath) && (strings.HasSuffix(name, ".so") || strings.Contains(name, ".so."))
}

// renderHooks adds our hooks behind the ones that are there, once: one with our program and
// our stage as its argument is ours, from an earlier pass.
func renderHooks(root *object, hooks []plan.Hook) error {
	if len(hooks) == 0 {
		return nil
	}
	all, err := root.child("hooks")
	if err != nil {
		return invalid(err)
	}
	for _, h := range hooks {
		old, err := all.list(h.Stage)
		if err != nil {
			return invalid(fmt.Errorf("hooks.%w", err))
		}
		var list []json.RawMessage
		for i, raw := range old {
			var have specs.Hook
			if err := json.Unmarshal(raw, &have); err != nil {
				return invalid(fmt.Errorf("hooks.%s[%d]: %w", h.Stage, i, err))
			}
			if path.Base(have.Path) == path.Base(h.Path) {
				continue
			}
			list = append(list, raw)
		}
		add := specs.Hook{Path: h.Path, Args: h.Args}
		if h.TimeoutSeconds > 0 {
			add.Timeout = &h.TimeoutSeconds
		}
		raw, err := encode(add)
		if err != nil {
			return invalid(err)
		}
		if list = append(list, raw); !sameList(old, list) {
			all.setList(h.Stage, list)
		}
	}
	return nil
}

// renderDeny keeps NVIDIA's devices from a container that was given none: rules that allow
// them by name go, and where a wildcard allows everything a refusal follows it.
func renderDeny(root *object, majors []int64) error {
	linux, err := root.child("linux")
	if err != nil {
		return invalid(err)
	}
	resources, err := linux.child("resources")
	if err != nil {
		return invalid(fmt.Errorf("linux.%w", err))
	}
	old, err := resources.list("devices")
	if err != nil {
		return invalid(fmt.Errorf("linux.resources.%w", err))
	}
	wildcard := false
	var rules []json.RawMessage
	for i, raw := range old {
		var r specs.LinuxDeviceCgroup
		if err := json.Unmarshal(raw, &r); err != nil {
			return invalid(fmt.Errorf("linux.resources.devices[%d]: %w", i, err))
		}
		named := r.Major != nil && slices.Contains(majors, *r.Major) && r.Type != "b"
		if named {
			continue // allowed: not here; denied: again below, behind everything
		}
		switch {
		case r.Type == "b" || r.Major != nil && *r.Major >= 0:
		case r.Allow:
			wildcard = true
		case (r.Minor == nil || *r.Minor < 0) && (r.Access == "" || strings.ContainsRune(r.Access, 'r') && strings.ContainsRune(r.Access, 'w')):
			wildcard = false // all of it is taken back, not some minor or only mknod
		}
		rules = append(rules, raw)
	}
	if wildcard {
		for _, major := range majors {
			raw, err := encode(specs.LinuxDeviceCgroup{Allow: false, Type: "c", Major: &major, Access: "rwm"})
			if err != nil {
				return invalid(err)
			}
			rules = append(rules, raw)
		}
	}
	if sameList(old, rules) {
		return nil
	}
	resources.setList("devices", rules)
	return nil
}

// nvidiaMajors reads /proc/devices: NVIDIA's majors besides 195 are given out when a module
// loads.
func nvidiaMajors(procDevices io.Reader) []int64 {
	majors := []int64{195}
	lines := bufio.NewScanner(procDevices)
	character := false
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		switch line {
		case "Character devices:":
			character = true
			continue
		case "Block devices:":
			character = false
			continue
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

func sameList(a, b []json.RawMessage) bool {
	return slices.EqualFunc(a, b, func(x, y json.RawMessage) bool { return bytes.Equal(x, y) })
}

// invalid is an error about the document's content.
func invalid(err error) error {
	return quota.NewError(quota.CodeSpecInvalid, "config.json: %w", err)
}
