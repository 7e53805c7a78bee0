// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpufence/gpufence/enforcer/quota"
	cdispec "github.com/gpufence/gpufence/hook/cdi"
)

// injection is what it takes to add CDI devices to a document, whichever they are.
type injection struct {
	before, after specs.Spec // the document, decoded twice: the CDI library edits the second
	cache         *cdi.Cache
	read          string // the specifications' state before they were read
	err           error
}

// readInjection reads the specifications, and the text of a document.
func readInjection(text json.RawMessage, specDirs []string) *injection {
	in := &injection{read: cdispec.State(specDirs)}
	for _, s := range []*specs.Spec{&in.before, &in.after} {
		var err error
		if *s, err = decodeEdited(text); err != nil {
			in.err = invalid(err)
			return in
		}
	}
	// No watcher: this process lives for milliseconds.
	var err error
	if in.cache, err = cdi.NewCache(cdi.WithSpecDirs(specDirs...), cdi.WithAutoRefresh(false)); err != nil {
		in.err = quota.NewError(quota.CodeNoCDIDevice, "the CDI specifications in %s cannot be read: %w", strings.Join(specDirs, ", "), err)
	}
	return in
}

// decodeEdited decodes what the CDI library reads or changes of a document, and no more: to learn the many types of all of it takes
// a process that lives for milliseconds longer than the rest of its work.
func decodeEdited(text json.RawMessage) (specs.Spec, error) {
	var d struct {
		Process *struct {
			User specs.User `json:"user"`
			Env  []string   `json:"env"`
		} `json:"process"`
		Mounts []specs.Mount `json:"mounts"`
		Hooks  *specs.Hooks  `json:"hooks"`
		Linux  *struct {
			UIDMappings []specs.LinuxIDMapping          `json:"uidMappings"`
			GIDMappings []specs.LinuxIDMapping          `json:"gidMappings"`
			Namespaces  []specs.LinuxNamespace          `json:"namespaces"`
			Devices     []specs.LinuxDevice             `json:"devices"`
			NetDevices  map[string]specs.LinuxNetDevice `json:"netDevices"`
			IntelRdt    *specs.LinuxIntelRdt            `json:"intelRdt"`
			Resources   *struct {
				Devices []specs.LinuxDeviceCgroup `json:"devices"`
			} `json:"resources"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		return specs.Spec{}, err
	}
	s := specs.Spec{Mounts: d.Mounts, Hooks: d.Hooks}
	if d.Process != nil {
		s.Process = &specs.Process{User: d.Process.User, Env: d.Process.Env}
	}
	if l := d.Linux; l != nil {
		s.Linux = &specs.Linux{
			UIDMappings: l.UIDMappings, GIDMappings: l.GIDMappings, Namespaces: l.Namespaces,
			Devices: l.Devices, NetDevices: l.NetDevices, IntelRdt: l.IntelRdt,
		}
		if l.Resources != nil {
			s.Linux.Resources = &specs.LinuxResources{Devices: l.Resources.Devices}
		}
	}
	return s, nil
}

// inject adds CDI devices to the document that it was read of, once. Only what the CDI library may change
// is carried over, and of that only what did change, so that the fields it does not know, in the
// document or in an element of a list, stay.
func (in *injection) inject(root *object, names, specDirs []string) error {
	if in.err != nil {
		return in.err
	}
	if unresolved, err := in.cache.InjectDevices(&in.after, names...); err != nil {
		if len(unresolved) > 0 {
			return quota.NewError(quota.CodeNoCDIDevice, "no CDI specification in %s has %s%s",
				strings.Join(specDirs, ", "), strings.Join(unresolved, ", "), why(in.cache)).
				WithHint("write one with `gpufence cdi generate --output=/etc/cdi/gpufence.yaml`")
		}
		return quota.NewError(quota.CodeNoCDIDevice, "the CDI devices %s cannot be injected: %w", strings.Join(names, ", "), err)
	}
	return carryOver(root, &in.before, &in.after)
}

// why adds what was wrong with specifications that could have held the device.
func why(cache *cdi.Cache) string {
	var all []string
	for file, errs := range cache.GetErrors() {
		all = append(all, fmt.Sprintf("%s: %v", file, errors.Join(errs...)))
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return " (" + oneLine(strings.Join(all, "; ")) + ")"
}

// carryOver writes into the document what differs between the two specs, in the sections that
// CDI edits.
func carryOver(root *object, before, after *specs.Spec) error {
	process, err := root.child("process")
	if err != nil {
		return invalid(err)
	}
	user, err := process.child("user")
	if err != nil {
		return invalid(fmt.Errorf("process.%w", err))
	}
	hooks, err := root.child("hooks")
	if err != nil {
		return invalid(err)
	}
	linux, err := root.child("linux")
	if err != nil {
		return invalid(err)
	}
	resources, err := linux.child("resources")
	if err != nil {
		return invalid(fmt.Errorf("linux.%w", err))
	}
	net, err := linux.child("netDevices")
	if err != nil {
		return invalid(fmt.Errorf("linux.%w", err))
	}

	b, a := sectionsOf(before), sectionsOf(after)
	err = errors.Join(
		carryList(user, "additionalGids", b.gids, a.gids, nil),
		carryList(process, "env", b.env, a.env, nil),
		carryList(root, "mounts", b.mounts, a.mounts, nil),
		carryList(hooks, "prestart", b.hooks.Prestart, a.hooks.Prestart, slices.Contains), //nolint:staticcheck // CDI still has it
		carryList(hooks, "createRuntime", b.hooks.CreateRuntime, a.hooks.CreateRuntime, slices.Contains),
		carryList(hooks, "createContainer", b.hooks.CreateContainer, a.hooks.CreateContainer, slices.Contains),
		carryList(hooks, "startContainer", b.hooks.StartContainer, a.hooks.StartContainer, slices.Contains),
		carryList(hooks, "poststart", b.hooks.Poststart, a.hooks.Poststart, slices.Contains),
		carryList(hooks, "poststop", b.hooks.Poststop, a.hooks.Poststop, slices.Contains),
		carryList(linux, "devices", b.linux.Devices, a.linux.Devices, nil),
		carryList(resources, "devices", b.rules, a.rules, stillAllowed),
	)
	if err != nil {
		return invalid(err)
	}
	if !reflect.DeepEqual(b.linux.IntelRdt, a.linux.IntelRdt) {
		if err := carryValue(linux, "intelRdt", a.linux.IntelRdt); err != nil {
			return invalid(err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.linux.NetDevices)) {
		device := a.linux.NetDevices[name]
		if have, ok := b.linux.NetDevices[name]; ok && have == device {
			continue
		}
		if err := carryValue(net, name, device); err != nil {
			return invalid(err)
		}
	}
	return nil
}

// sections are the parts of a spec that CDI may edit, absent ones empty.
type sections struct {
	env    []string
	gids   []uint32
	mounts []specs.Mount
	hooks  specs.Hooks
	linux  specs.Linux
	rules  []specs.LinuxDeviceCgroup
}

func sectionsOf(s *specs.Spec) sections {
	out := sections{mounts: s.Mounts}
	if s.Process != nil {
		out.env, out.gids = s.Process.Env, s.Process.User.AdditionalGids
	}
	if s.Hooks != nil {
		out.hooks = *s.Hooks
	}
	if s.Linux != nil {
		out.linux = *s.Linux
		if s.Linux.Resources != nil {
			out.rules = s.Linux.Resources.Devices
		}
	}
	return out
}

// carryList writes the list after, whose elements keep the bytes that they had in the document.
// A new element for which had is true was added by an earlier pass. Elements are compared as
// JSON, for which an empty list and none are the same.
func carryList[T any](o *object, name string, before, after []T, had func(before []string, element string) bool) error {
	old, err := encodeAll(before)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	next, err := encodeAll(after)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if slices.Equal(old, next) {
		return nil
	}
	raw, err := o.list(name)
	if err != nil {
		return err
	}
	if len(raw) != len(old) {
		return fmt.Errorf("%s has %d elements, of which %d were understood", name, len(raw), len(old))
	}
	used := make([]bool, len(old))
	var list []json.RawMessage
	for _, element := range next {
		i := 0
		for i < len(old) && (used[i] || old[i] != element) {
			i++
		}
		switch {
		case i < len(old):
			used[i] = true
			list = append(list, raw[i])
		case had == nil || !had(old, element):
			list = append(list, json.RawMessage(element))
		}
	}
	if !sameList(raw, list) {
		o.setList(name, list)
	}
	return nil
}

func encodeAll[T any](list []T) ([]string, error) {
	var out []string
	for _, e := range list {
		text, err := encode(e)
		if err != nil {
			return nil, err
		}
		out = append(out, string(text))
	}
	return out, nil
}

// stillAllowed says whether the list has the device rule, with no refusal after it that could
// take it back.
func stillAllowed(list []string, rule string) bool {
	for _, r := range slices.Backward(list) {
		if r == rule {
			return true
		}
		var have specs.LinuxDeviceCgroup
		if err := json.Unmarshal([]byte(r), &have); err != nil || !have.Allow {
			return false
		}
	}
	return false
}

func carryValue(o *object, name string, v any) error {
	text, err := encode(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	o.set(name, text)
	return nil
}
