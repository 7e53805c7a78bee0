// SPDX-License-Identifier: Apache-2.0

// Package plan decides what becomes of a container: whether it concerns us, which GPUs it has,
// and which edits of its spec fence it.
//
// It is pure: no I/O, no clock, no state; the same input gives the same edits. It believes no
// marker in a spec, so that asking again about a spec which it has edited (by the wrapper after
// NRI, by a bundle that is run twice) finds the same limits and adds nothing.
package plan

import (
	"errors"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	// hookTimeoutSeconds is above what the hook allows itself, so that its own sentence is
	// what a user sees.
	hookTimeoutSeconds = 10

	createRuntime = "createRuntime"
	poststop      = "poststop"

	// KindGPU is what gpufenced calls the GPUs in specifications that it generates. The kind is our
	// own, so that no file of ours can make a name of somebody else's ambiguous.
	KindGPU = "gpufence.dev/gpu"

	// void keeps a low-level nvidia-container-runtime from adding anything.
	visible     = "NVIDIA_VISIBLE_DEVICES"
	visibleVoid = visible + "=void"

	// Where else that one reads which GPUs to add, before it looks at the variable: annotations, mounts, and,
	// where its swarm-resource names them, variables that Swarm sets for its generic resources.
	cdiPrefix     = "cdi.k8s.io/"
	requestFolder = "/var/run/nvidia-container-devices"
	swarmPrefix   = "DOCKER_RESOURCE_"
)

// Ask finds out what a spec asks for. The error is a [*quota.Error] and means that the
// container must not start. In observe and warn mode there is no error: what would have been
// one is a notice.
func Ask(in Input, p quota.Policy) (Request, error) {
	p = p.For(in.Namespace)
	found := detect(in)
	r := Request{Mode: p.Mode, Selectors: found.selectors, Present: found.present, Notices: found.notices}
	if in.Sandbox && len(found.selectors) == 0 && !found.traces {
		return Request{Action: ActionSkip, Mode: p.Mode}, nil
	}

	enforce := p.Mode == quota.ModeEnforce
	subject := quota.Subject{
		Engine: in.Engine, Namespace: in.Namespace, Pod: in.Pod, Container: in.Container,
		Annotations: in.Annotations, Env: in.Env, HasGPU: len(found.selectors) > 0,
	}
	parsed, notices, err := quota.Parse(subject, p)
	if len(found.claimed) > 0 {
		// Only the kubelet knows. What is wrong in either case is wrong now.
		r.Claimed, r.NoGPU = found.claimed, err
		subject.HasGPU = true
		given, more, errGiven := quota.Parse(subject, p)
		switch {
		case errGiven == nil:
			parsed, notices, err = given, more, nil
		case err == nil && errors.Is(errGiven, quota.CodeNoLimit):
		default:
			err = errGiven
		}
		if len(parsed.Selectors()) > 0 {
			r.Claimed, r.NoGPU = nil, nil // the key says it
		}
	}
	for _, n := range notices {
		r.Notices = append(r.Notices, string(n))
	}
	if err != nil {
		if enforce {
			return Request{}, err
		}
		r.Notices = append(r.Notices, wouldRefuse(err, p.Mode))
	}
	r.Quota = parsed

	if wanted := parsed.Selectors(); len(wanted) > 0 {
		if len(r.Selectors) > 0 {
			r.Notices = append(r.Notices, "the key gpu is ignored, since "+found.by+" chose the container's GPUs")
		} else {
			r.Selectors = wanted
		}
	}
	switch {
	case len(r.Selectors) > 0 || len(r.Claimed) > 0:
		r.Action = ActionPrepare
	case enforce:
		r.Action = ActionAlone
		return r, nil
	default:
		r.Action = ActionSkip // nothing is edited, and there is nothing to count
		return r, nil
	}
	if !in.Privileged || !parsed.Limited() || len(r.Claimed) > 0 {
		return r, nil // without a limit there is no fence that it could switch off; with a claim gpufenced decides
	}
	err = quota.NewError(quota.CodePrivileged, "%s is privileged (CAP_SYS_ADMIN, CAP_BPF or the host's pid namespace) and could switch its fences off", called(in)).
		WithHint("drop these, or set %s = \"report\" in [privileged] of this node's policy", in.Engine)
	switch {
	case !p.PrivilegedRefuse[in.Engine]:
		r.Notices = append(r.Notices, called(in)+" is privileged and could switch its fences off")
	case enforce:
		return Request{}, err
	default:
		r.Notices = append(r.Notices, wouldRefuse(err, p.Mode))
	}
	return r, nil
}

func called(in Input) string {
	if in.Container == "" {
		return "the container"
	}
	return "container " + in.Container
}

func wouldRefuse(err error, mode quota.Mode) string {
	return err.Error() + " (only said, since the mode is " + string(mode) + ")"
}

// found is what a spec says about GPUs.
type found struct {
	selectors []string
	claimed   []string // ids that count only if the kubelet gave them
	present   bool
	by        string // who chose
	traces    bool   // anything of NVIDIA's, even if it gives no GPU
	notices   []string
}

// detect looks for GPUs: what is in the spec already comes first, since nothing can take it
// back; then who asks for injection, in the order of the NVIDIA Container Toolkit.
func detect(in Input) found {
	f := found{traces: traces(in)}
	if nodes := nodes(in); len(nodes) > 0 {
		f.selectors, f.present, f.by = nodes, true, "the spec"
		return f
	}
	if f.selectors = gpuNames(in.Injected); len(f.selectors) > 0 {
		f.present, f.by = true, "CDI"
		return f
	}
	if f.selectors = gpuNames(in.CDINames); len(f.selectors) > 0 {
		f.by = "CDI"
		return f
	}
	if f.selectors = volumeMounts(in.Mounts); len(f.selectors) > 0 {
		f.by = "the device plugin"
		return f
	}
	value := lastEnv(in.Env, visible)
	ids := splitVisible(value)
	if len(ids) == 0 {
		return f
	}
	if in.Engine.Kubernetes() && slices.ContainsFunc(ids, func(id string) bool { return !isUUID(id) }) {
		// Every CUDA image says `all`: that alone is no request. A device plugin may mean it.
		if in.Sandbox {
			f.notices = append(f.notices, Unclaimed(ids))
		} else {
			f.claimed = ids
		}
		return f
	}
	f.selectors, f.by = ids, visible
	return f
}

// nodes are the GPUs that are in the spec: device nodes, bind-mounted ones, and the simulated
// GPU's.
func nodes(in Input) []string {
	var out []string
	add := func(p string) {
		p = path.Clean("/" + p)
		if isNode(p) && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	for _, d := range in.Devices {
		add(d)
	}
	for _, m := range in.Mounts {
		add(m.Destination)
	}
	if len(out) == 0 {
		return nil // capabilities are of GPUs that are there
	}
	// They say which of a GPU's MIG instances are there.
	for _, d := range in.Devices {
		if p := path.Clean("/" + d); isCapability(p) && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	for _, m := range in.Mounts {
		if p := path.Clean("/" + m.Destination); isCapability(p) && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// NodeOf is the path that a character device has on the host: what a node is called in a container says nothing of
// which GPU it opens. NVIDIA's driver always has the number 195, and its control nodes the last two of the second.
func NodeOf(name, kind string, major, minor int64) string {
	if (kind == "c" || kind == "u") && major == 195 && minor >= 0 && minor < 254 {
		return "/dev/nvidia" + strconv.FormatInt(minor, 10)
	}
	return name
}

// GPUNodes are the paths among some that are GPUs of their own, and those that say which of their MIG
// instances; other control nodes left out.
func GPUNodes(paths []string) []string { return nodes(Input{Devices: paths}) }

// GPUNames are the CDI names among some that are of GPUs.
func GPUNames(names []string) []string { return gpuNames(names) }

// isCapability says whether a path opens a MIG instance: /dev/nvidia-caps/nvidia-cap12.
func isCapability(p string) bool {
	n, ok := strings.CutPrefix(p, "/dev/nvidia-caps/nvidia-cap")
	return ok && isNumber(n)
}

// isNode says whether a path is a GPU: /dev/nvidia0, /dev/simgpu/gpu0, /dev/simgpu/gpu0.mig1.
func isNode(p string) bool {
	for _, prefix := range []string{"/dev/nvidia", "/dev/simgpu/gpu"} {
		n, ok := strings.CutPrefix(p, prefix)
		gpu, instance, mig := strings.Cut(n, ".mig")
		if ok && isNumber(gpu) && (!mig || isNumber(instance)) {
			return true
		}
	}
	return false
}

func isNumber(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// gpuNames are the CDI names that are of GPUs, each once, in their order.
func gpuNames(names []string) []string {
	var out []string
	for _, n := range names {
		if n = withoutReplica(n); isGPUKind(n) && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// withoutReplica takes off what NVIDIA's device plugin appends to a GPU that it hands out several
// times: GPU-x::3 is GPU-x.
func withoutReplica(id string) string {
	gpu, number, ok := strings.Cut(id, "::")
	if !ok || gpu == "" || !isNumber(number) {
		return id
	}
	return gpu
}

// isGPUKind says whether a CDI name is of a GPU: nvidia.com/gpu=0, and what NVIDIA's toolkit,
// MIG plugin and DRA driver call theirs.
func isGPUKind(name string) bool {
	kind, device, ok := strings.Cut(name, "=")
	if !ok || device == "" {
		return false
	}
	vendor, class, _ := strings.Cut(kind, "/")
	switch {
	case kind == "gpufence.dev/simgpu", kind == KindGPU:
		return true
	case vendor != "nvidia.com" && !strings.HasSuffix(vendor, ".nvidia.com"):
		return false
	}
	return class == "gpu" || class == "claim" || strings.HasPrefix(class, "mig-")
}

// mountRequest is what a mount of /dev/null asks NVIDIA's runtime for, read as that one reads it.
func mountRequest(m Mount) (id string, ok bool) {
	rest, ok := strings.CutPrefix(path.Clean("/"+m.Destination), requestFolder)
	id = strings.Trim(rest, "/")
	return id, ok && id != "" && path.Clean(m.Source) == "/dev/null"
}

// volumeMounts is the device plugin's way of naming GPUs by mounts of /dev/null, which takes
// rights that whoever sets an environment variable need not have.
func volumeMounts(mounts []Mount) []string {
	var out []string
	for _, m := range mounts {
		id, ok := mountRequest(m)
		if !ok || strings.HasPrefix(id, "imex/") {
			continue
		}
		if id == "void" {
			return nil
		}
		if name, cdi := strings.CutPrefix(id, "cdi/"); cdi {
			// vendor/class/device, where the last may be a = instead
			if parts := strings.SplitN(name, "/", 3); len(parts) == 3 && !strings.Contains(name, "=") {
				name = parts[0] + "/" + parts[1] + "=" + parts[2]
			}
			if id = withoutReplica(name); !isGPUKind(id) {
				continue
			}
		}
		if id = withoutReplica(id); !slices.Contains(out, id) {
			out = append(out, id)
		}
	}
	return out
}

// splitVisible reads the value of NVIDIA_VISIBLE_DEVICES; void, none and nothing give no GPU.
func splitVisible(value string) []string {
	var out []string
	for id := range strings.SplitSeq(value, ",") {
		id = withoutReplica(strings.TrimSpace(id))
		switch {
		case id == "" || id == "void" || id == "none":
		case !slices.Contains(out, id):
			out = append(out, id)
		}
	}
	return out
}

func isUUID(id string) bool { return strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-") }

// traces says whether a spec has anything of NVIDIA's that a sandbox would not have.
func traces(in Input) bool {
	nvidia := func(p string) bool {
		p = path.Clean("/" + p)
		return strings.HasPrefix(p, "/dev/nvidia") || strings.HasPrefix(p, "/dev/simgpu") || strings.HasPrefix(p, requestFolder)
	}
	return len(in.CDINames) > 0 || slices.ContainsFunc(in.Devices, nvidia) ||
		slices.ContainsFunc(in.Mounts, func(m Mount) bool { return nvidia(m.Destination) }) ||
		slices.ContainsFunc(in.Env, func(e string) bool { return strings.HasPrefix(e, visible+"=") })
}

// lastEnv is the value of a variable; of several, the last, as NVIDIA's runtime takes it.
func lastEnv(env []string, name string) string {
	for _, e := range slices.Backward(env) {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}

// Plan computes the edits. Prepared is zero for ActionAlone, and may be zero where the mode is
// not enforce.
func Plan(in Input, r Request, prep Prepared) (Edits, error) {
	enforce := r.Mode == quota.ModeEnforce
	switch r.Action {
	case ActionSkip:
		return Edits{}, nil
	case ActionAlone:
		return alone(in), nil
	case ActionPrepare:
	default:
		return Edits{}, quota.NewError(quota.CodeInternal, "no plan for the action %q", r.Action)
	}
	if len(r.Claimed) > 0 && len(prep.Grant.GPUs) == 0 {
		return withoutGPU(in, r)
	}
	e := Edits{Hooks: hooks(in, enforce)}
	if !enforce {
		return e, nil
	}
	if !r.Present {
		if len(prep.CDIDevices) == 0 {
			return Edits{}, quota.NewError(quota.CodeNoInjector, "%s asks for the GPUs %s, which nothing on this node can put into it", called(in), quota.Quote(strings.Join(r.Selectors, ","))).
				WithHint("write a CDI specification (gpufence cdi generate --output=/etc/cdi/gpufence.yaml)")
		}
		e.CDIDevices = slices.Clone(prep.CDIDevices)
	}
	e.Mounts = slices.Clone(prep.Files)
	e.UnsetEnv = quota.EnvNames()
	e.SetEnv = slices.Concat(voids(in), r.Quota.KeepEnv(prep.Grant), prep.Env)
	e.DropMounts, e.DropAnnotations = requests(in)
	return e, nil
}

// voids are the variables that would have a low-level nvidia-container-runtime add GPUs, set so that it adds none.
func voids(in Input) []string {
	out := []string{visibleVoid}
	for _, e := range in.Env {
		name, _, _ := strings.Cut(e, "=")
		if rest, ok := strings.CutPrefix(name, swarmPrefix); ok && strings.Contains(strings.ToUpper(rest), "GPU") && !slices.Contains(out, name+"=void") {
			out = append(out, name+"=void")
		}
	}
	return out
}

// requests are what else would: mounts, by their destination as the spec has it, and annotations.
func requests(in Input) (mounts, annotations []string) {
	for _, m := range in.Mounts {
		if id, ok := mountRequest(m); ok && !strings.HasPrefix(id, "imex/") && !slices.Contains(mounts, m.Destination) {
			mounts = append(mounts, m.Destination)
		}
	}
	for name := range in.Annotations {
		if strings.HasPrefix(name, cdiPrefix) {
			annotations = append(annotations, name)
		}
	}
	slices.Sort(annotations)
	return mounts, annotations
}

// alone is the plan of a container that has no GPU.
func alone(in Input) Edits {
	e := Edits{SetEnv: voids(in), UnsetEnv: quota.EnvNames(), DenyDevices: true}
	e.DropMounts, e.DropAnnotations = requests(in)
	return e
}

// withoutGPU is the plan of a container whose environment asks for GPUs that the kubelet did not
// give it.
func withoutGPU(in Input, r Request) (Edits, error) {
	switch {
	case r.Mode != quota.ModeEnforce:
		return Edits{}, nil
	case r.NoGPU != nil:
		return Edits{}, r.NoGPU
	}
	return alone(in), nil
}

// Unclaimed is the notice for a container whose environment asks for GPUs that nobody gave it.
func Unclaimed(claimed []string) string {
	return visible + "=" + quota.Quote(strings.Join(claimed, ",")) + " gives no GPU under Kubernetes, where only UUIDs count and what the kubelet lists for the container"
}

// hooks are ours at both ends of a container's life.
func hooks(in Input, enforce bool) []Hook {
	var out []Hook
	for _, stage := range []string{createRuntime, poststop} {
		args := append([]string{path.Base(in.HookPath), stage}, in.HookArgs...)
		if !enforce {
			args = append(args, ArgBestEffort)
		}
		out = append(out, Hook{Stage: stage, Path: in.HookPath, Args: args, TimeoutSeconds: hookTimeoutSeconds})
	}
	return out
}
