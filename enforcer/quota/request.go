// SPDX-License-Identifier: Apache-2.0

package quota

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
	HasGPU      bool
}

// Notice is one line for a person: something that is no reason to refuse.
type Notice string

// Request is a container's limits as parsed, before it is known which GPUs they are for.
type Request struct {
	subject Subject
}

// Parse reads the keys of a container. The error is an [*Error]. In observe and warn mode the
// caller turns it into a notice.
func Parse(s Subject, p Policy) (Request, []Notice, error) { return Request{subject: s}, nil, nil }

// Resolve computes the grant on the container's GPUs, in its own order. The error is an [*Error].
func (r Request) Resolve(gpus []GPU, p Policy) (Grant, []Notice, error) {
	return Grant{GPUs: gpus, Mode: p.Mode, Require: p.Require, OOMGroup: true}, nil, nil
}

// Limited says whether anything bounds the container: a key, an alias or the environment, at
// either level, other than `max`.
func (r Request) Limited() bool { return false }

// HasContainerKey says whether a key names this container.
func (r Request) HasContainerKey() bool { return false }

// Selector is the value of the gpu key in the form of api.DeviceRequest.Selectors: "any",
// "any=2", "all", a UUID; "" if there is none.
func (r Request) Selector() string { return "" }

// Change is what `gpufence set` asks for, parsed.
type Change struct {
	amounts map[string]perGPU
}

type perGPU struct{}

// ParseSet reads the values of `gpufence set`. In this version only memory.max can change
// while a container runs.
func ParseSet(values map[string]string) (Change, error) { return Change{}, nil }

// Max returns the new memory.max of a GPU (position is its place in the container's own list),
// checked against the GPU and the policy of the container's namespace; false if the change
// leaves that GPU alone.
func (c Change) Max(g GPU, position int, p Policy) (uint64, bool, error) { return 0, false, nil }

// Ours says whether an annotation is one that we read (native or alias).
func Ours(annotation string) bool { return false }

// EnvNames are the environment variables that we read where policy accepts them, and that are
// removed from a fenced container in any case; a trailing * is a prefix.
func EnvNames() []string { return nil }

// OurEnv picks the entries of env (NAME=value) that [EnvNames] covers, in order.
func OurEnv(env []string) []string { return nil }
