// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Subject is a container as far as its limits depend on it.
type Subject struct {
	Engine    Engine
	Namespace string // what CRI sets; "" elsewhere
	Pod       string // for messages
	Container string // its name in the pod; "" where containers have none
	// Annotations are all of the container's, Env its whole environment: Parse picks what
	// is ours and what policy accepts.
	Annotations map[string]string
	Env         []string
	HasGPU      bool // by other means than the gpu key
}

// Notice is one line for a person: something that is no reason to refuse.
type Notice string

// Request is a container's limits as parsed, before it is known which GPUs they are for.
type Request struct {
	engine    Engine
	namespace string
	name      string // of the container, in messages
	hasGPU    bool
	pod       level
	own       level // keys that name this container
	env       level // GPUFENCE_MEMORY_*: of the container too
	alias     aliases
}

// Parse reads the keys of a container and checks everything that does not depend on its GPUs.
// The error is an [*Error]. In observe and warn mode the caller makes a notice of it.
func Parse(s Subject, p Policy) (Request, []Notice, error) {
	r, notices, err := parse(s, p.For(s.Namespace))
	if err != nil {
		return Request{}, notices, err
	}
	return r, notices, nil
}

func parse(s Subject, p Policy) (Request, []Notice, *Error) {
	r := Request{engine: s.Engine, namespace: s.Namespace, hasGPU: s.HasGPU, name: containerName(s)}
	accept := p.Accept[s.Engine]
	var notices []Notice

	all, err := parseAnnotations(s.Annotations)
	if err != nil {
		return r, nil, err
	}
	if len(all) > 0 && !accept.Keys {
		return r, nil, NewError(CodeNotAccepted, "%s is not accepted from %s by this node's policy", firstGiven(all), s.Engine).
			WithHint("remove it, or set keys = true in [accept.%s]", s.Engine)
	}
	if err := r.takeLevels(s, all); err != nil {
		return r, nil, err
	}
	if len(r.pod.gpu)+len(r.own.gpu) > 0 {
		if !accept.GPU {
			return r, nil, NewError(CodeNotAccepted, "%s is not accepted from %s by this node's policy", KeyGPU, s.Engine).
				WithHint("let the device plugin choose, or set gpu = true in [accept.%s]", s.Engine)
		}
		r.hasGPU = true
	}

	env, names := envMap(s.Env)
	if accept.Env {
		if err := checkEnvNames(s.Env); err != nil {
			return r, nil, err
		}
		if err := r.takeEnv(env, names); err != nil {
			return r, nil, err
		}
	} else if n := firstEnv(env, names); n != "" {
		notices = append(notices, Notice(fmt.Sprintf("%s is not read from %s by this node's policy ([accept.%s] env)", n, s.Engine, s.Engine)))
	}

	if err := r.checkGPU(s); err != nil {
		return r, notices, err
	}
	ns, err := r.takeAliases(s, accept, env, names)
	notices = append(notices, ns...)
	if err != nil {
		return r, notices, err
	}
	if !r.hasGPU {
		return r, notices, nil
	}
	ns, err = r.checkDefault(p)
	return r, append(notices, ns...), err
}

func containerName(s Subject) string {
	switch {
	case s.Container != "" && s.Pod != "":
		return "container " + cut(s.Container) + " of pod " + cut(s.Pod)
	case s.Container != "":
		return "container " + cut(s.Container)
	case s.Pod != "":
		return "the sandbox of pod " + cut(s.Pod)
	}
	return "the container"
}

func firstGiven(all scopes) string {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, g := range all[name].given {
			return g
		}
	}
	return Domain
}

// takeLevels picks what concerns this container.
func (r *Request) takeLevels(s Subject, all scopes) *Error {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		l := all[name]
		switch {
		case name == "":
			r.pod = *l
		case name == s.Container:
			r.own = *l
		case !s.Engine.Kubernetes():
			// Elsewhere the whole group is this container: a key for another is a mistake.
			err := NewError(CodeContainerScope, "%s names a container, which only Kubernetes' pods have", l.given[0])
			_, key, _ := strings.Cut(strings.TrimPrefix(l.given[0], containerPrefix), ".")
			return err.WithHint("write %s%s", Domain, key)
		}
	}
	if !s.Engine.Kubernetes() {
		return nil
	}
	for _, l := range []level{r.pod, r.own} {
		for _, k := range slices.Sorted(maps.Keys(l.amounts)) {
			v := l.amounts[k]
			if err := v.noPositions(); err != nil {
				return err
			}
		}
	}
	return nil
}

// noPositions refuses 0=4Gi where the user cannot know the order of the GPUs.
func (v listAmount) noPositions() *Error {
	if i := slices.IndexFunc(v.list, func(e listed) bool { return e.uuid == "" }); i >= 0 {
		return NewError(CodeListPosition, "%s %s names GPU %d by position, which means nothing under Kubernetes", v.where, Quote(v.text), v.list[i].position).
			WithHint("write one amount for all GPUs, or UUIDs such as GPU-<uuid>=4Gi")
	}
	return nil
}

// envMap is the environment with the last of several values, and its names in order.
func envMap(env []string) (map[string]string, []string) {
	m := map[string]string{}
	var names []string
	for _, e := range env {
		name, value, ok := strings.Cut(e, "=")
		if !ok || !MatchEnv(name) {
			continue
		}
		if _, twice := m[name]; !twice {
			names = append(names, name)
		}
		m[name] = value
	}
	slices.Sort(names)
	return m, names
}

// firstEnv names one variable that would have been a limit.
func firstEnv(env map[string]string, names []string) string {
	for _, n := range names {
		if env[n] != "" && !strings.HasPrefix(n, "CUDA_DEVICE_SM_LIMIT") && n != "CUDA_DEVICE_MEMORY_SHARED_CACHE" {
			return n
		}
	}
	return ""
}

// envKeys maps GPUFENCE_MEMORY_SWAP_MAX to memory.swap.max.
func envKeys() map[string]string {
	m := map[string]string{}
	for _, k := range keys {
		if strings.HasPrefix(k.name, "memory.") {
			m["GPUFENCE_"+strings.ToUpper(strings.ReplaceAll(k.name, ".", "_"))] = k.name
		}
	}
	return m
}

// checkEnvNames refuses what was surely meant to be a variable of ours and is read by nobody.
func checkEnvNames(env []string) *Error {
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		upper := strings.ToUpper(strings.ReplaceAll(name, ".", "_"))
		if !strings.HasPrefix(upper, "GPUFENCE_MEM") || strings.HasPrefix(name, envPrefix) {
			continue
		}
		err := NewError(CodeUnknownKey, "%s is not a variable of gpufence", cut(name))
		all := slices.Sorted(maps.Keys(envKeys()))
		if near := Nearest(upper, all); near != "" {
			return err.WithHint("write %s", near)
		}
		return err.WithHint("they are %s", strings.Join(all, ", "))
	}
	return nil
}

func (r *Request) takeEnv(env map[string]string, names []string) *Error {
	known := envKeys()
	for _, n := range names {
		if !strings.HasPrefix(n, envPrefix) || env[n] == "" {
			continue // empty is how a compose file says: not set
		}
		name, ok := known[n]
		if !ok {
			err := NewError(CodeUnknownKey, "%s is not a variable of gpufence", cut(n))
			all := slices.Sorted(maps.Keys(known))
			var names []string
			for _, k := range all {
				names = append(names, strings.TrimPrefix(k, envPrefix))
			}
			if near := Nearest(strings.TrimPrefix(n, envPrefix), names); near != "" {
				return err.WithHint("write %s%s", envPrefix, near)
			}
			return err.WithHint("they are %s", strings.Join(all, ", "))
		}
		k, _ := lookup(name)
		if err := r.env.set(k, n, env[n], true); err != nil {
			return err
		}
		if v, ok := r.env.amounts[name]; ok && r.engine.Kubernetes() {
			if err := v.noPositions(); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkGPU refuses keys that bound nothing.
func (r *Request) checkGPU(s Subject) *Error {
	if r.hasGPU {
		return nil
	}
	given := append(slices.Clone(r.own.given), r.env.given...)
	if s.Engine.Kubernetes() {
		if len(given) == 0 {
			return nil
		}
		return NewError(CodeContainerKeyNoGPU, "%s is set, but %s has no GPU", given[0], r.name).
			WithHint("request a GPU for it (such as nvidia.com/gpu: 1), or remove the key")
	}
	given = append(given, r.pod.given...)
	if len(given) == 0 {
		return nil
	}
	return NewError(CodeKeyNoGPU, "%s is set, but %s has no GPU", given[0], r.name).
		WithHint("choose one (annotation %sgpu=any, NVIDIA_VISIBLE_DEVICES or --device), or remove the key", Domain)
}

// takeAliases reads aliases where nothing of ours says how much.
func (r *Request) takeAliases(s Subject, accept Accept, env map[string]string, names []string) ([]Notice, *Error) {
	found, err := annotationAliases(s, r.hasGPU)
	native := r.nativeAmount()
	if !accept.Aliases || native != "" || !r.hasGPU {
		// Not read at all, so that they cannot be wrong either.
		for _, n := range slices.Sorted(maps.Keys(s.Annotations)) {
			if !Ours(n) || strings.HasPrefix(n, Domain) || isContainerAlias(n) && !strings.HasPrefix(n, aliasPrefix+s.Container+".") {
				continue
			}
			switch {
			case native != "":
				return []Notice{Notice(fmt.Sprintf("%s is ignored, since %s is set", cut(n), native))}, nil
			case !r.hasGPU:
				return nil, nil
			}
			return []Notice{Notice(fmt.Sprintf("%s is not read from %s by this node's policy ([accept.%s] aliases)", cut(n), s.Engine, s.Engine))}, nil
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if accept.Env {
		fromEnv, err := envAliases(env, names)
		if err != nil {
			return nil, err
		}
		found.max = append(found.max, fromEnv.max...)
		found.min = append(found.min, fromEnv.min...)
	}
	if len(found.max) == 0 {
		found.max = found.min // a request alone is a limit too, as in the system it comes from
	}
	r.alias = found
	return nil, nil
}

// nativeAmount names a key of ours that says how much, or "".
func (r *Request) nativeAmount() string {
	for _, l := range []level{r.own, r.env, r.pod} {
		for _, k := range []string{KeyMemoryMax, KeyMemoryMin} {
			if v := l.amounts[k]; v.given() {
				return v.where
			}
		}
	}
	return ""
}

// containerMax are the values that bound the container itself; the lowest holds.
func (r Request) containerMax() []listAmount {
	return givenOf(append([]listAmount{r.own.amounts[KeyMemoryMax], r.env.amounts[KeyMemoryMax]}, r.alias.max...))
}

func (r Request) containerMin() []listAmount {
	return givenOf(append([]listAmount{r.own.amounts[KeyMemoryMin], r.env.amounts[KeyMemoryMin]}, r.alias.min...))
}

func (r Request) containerHigh() []listAmount {
	return givenOf([]listAmount{r.own.amounts[KeyMemoryHigh], r.env.amounts[KeyMemoryHigh]})
}

func (r Request) containerSwap() []listAmount {
	return givenOf([]listAmount{r.own.amounts[KeyMemorySwapMax], r.env.amounts[KeyMemorySwapMax]})
}

func givenOf(vs []listAmount) []listAmount {
	return slices.DeleteFunc(vs, func(v listAmount) bool { return !v.given() })
}

// checkDefault fails early where nothing bounds the container and policy wants something.
func (r Request) checkDefault(p Policy) ([]Notice, *Error) {
	given := append(givenOf([]listAmount{r.pod.amounts[KeyMemoryMax]}), r.containerMax()...)
	if len(given) > 0 {
		onlyMax := !slices.ContainsFunc(given, func(v listAmount) bool {
			return !v.only(func(a Amount) bool { return a.Kind == KindUnlimited }) || v.rest.Kind != KindNone
		})
		if onlyMax && p.hasCeiling() {
			return nil, maxUnderCeiling(given[0].where, p)
		}
		return nil, nil
	}
	switch d := p.Default[r.engine]; {
	case d.Kind == DefaultUnlimited && !p.hasCeiling():
		return []Notice{Notice(fmt.Sprintf("%s has no memory.max: its GPU memory is not limited", r.name))}, nil
	case d.Kind == DefaultUnlimited:
		return []Notice{Notice(fmt.Sprintf("%s has no memory.max: it gets the node's ceiling of %s", r.name, p.Ceiling))}, nil
	case d.Kind == DefaultAmount:
		return []Notice{Notice(fmt.Sprintf("%s has no memory.max: it gets the node's default of %s", r.name, d))}, nil
	}
	return nil, r.noLimit("")
}

// noLimit is the refusal under deny; on names the GPU that a list left out, as " on GPU-…".
func (r Request) noLimit(on string) *Error {
	err := NewError(CodeNoLimit, "%s has a GPU and no memory.max%s, which this node's policy denies", r.name, on)
	if r.engine.Kubernetes() {
		return err.WithHint("add the pod annotation %s%s: 4Gi, and see that the engine passes %s* annotations on", Domain, KeyMemoryMax, Domain)
	}
	return err.WithHint("add the annotation %s%s=4Gi", Domain, KeyMemoryMax)
}

func maxUnderCeiling(where string, p Policy) *Error {
	return NewError(CodeMaxUnderCeiling, "%s \"max\" is above the ceiling of %s that this node's policy sets", where, p.Ceiling).
		WithHint("write at most that")
}

// Limited says whether anything bounds the container: a key, an alias or the environment, at
// either level, other than `max`. The node's default is not looked at.
func (r Request) Limited() bool {
	return slices.ContainsFunc(append(r.containerMax(), r.pod.amounts[KeyMemoryMax]), func(v listAmount) bool {
		return v.given() && !v.only(func(a Amount) bool { return a.Kind == KindUnlimited })
	})
}

// HasContainerKey says whether a key names this container.
func (r Request) HasContainerKey() bool { return len(r.own.given) > 0 }

// HasGPU says whether the container has a GPU, be it by the gpu key alone.
func (r Request) HasGPU() bool { return r.hasGPU }

// Selectors is the gpu key in the form of api.DeviceRequest.Selectors: "any", "any=2" (a
// count), "all", or UUIDs; none if it was not given.
func (r Request) Selectors() []string {
	if len(r.own.gpu) > 0 {
		return slices.Clone(r.own.gpu)
	}
	return slices.Clone(r.pod.gpu)
}

// KeepEnv are the variables to set in the container so that its limits from the environment are
// found again when the same spec is read once more, although [EnvNames] were taken out. It is
// empty where the environment gave none.
func (r Request) KeepEnv(g Grant) []string {
	fromEnv := func(v listAmount) bool { return v.env }
	var out []string
	if slices.ContainsFunc(r.containerMax(), fromEnv) {
		out = append(out, "GPUFENCE_MEMORY_MAX="+envForm(g, func(l Limits) uint64 { return l.Max }, Unlimited))
	}
	if slices.ContainsFunc(r.containerMin(), fromEnv) {
		out = append(out, "GPUFENCE_MEMORY_MIN="+envForm(g, func(l Limits) uint64 { return l.Min }, 0))
	}
	if slices.ContainsFunc(r.containerHigh(), fromEnv) {
		out = append(out, "GPUFENCE_MEMORY_HIGH="+envForm(g, func(l Limits) uint64 { return l.High }, Unlimited))
	}
	if slices.ContainsFunc(r.containerSwap(), fromEnv) {
		out = append(out, "GPUFENCE_MEMORY_SWAP_MAX="+envForm(g, func(l Limits) uint64 { return l.SwapMax }, 0))
	}
	if r.env.oomGroup != nil {
		out = append(out, fmt.Sprintf("GPUFENCE_MEMORY_OOM_GROUP=%t", *r.env.oomGroup))
	}
	return out
}

// envForm writes a value of every GPU, as one where they agree.
func envForm(g Grant, of func(Limits) uint64, missing uint64) string {
	var parts []string
	same := true
	first := missing
	for i, gpu := range g.GPUs {
		v := missing
		if l, ok := g.Container[gpu.UUID]; ok {
			v = of(l)
		}
		if i == 0 {
			first = v
		}
		same = same && v == first
		parts = append(parts, gpu.UUID+"="+FormatBytes(v))
	}
	if same {
		return FormatBytes(first)
	}
	return strings.Join(parts, ",")
}
