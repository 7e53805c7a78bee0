// SPDX-License-Identifier: Apache-2.0

package quota

// Policy is node policy as far as limits, keys and starts depend on it. The zero value is not
// useful; begin with [DefaultPolicy].
type Policy struct {
	Mode    Mode
	Require Level
	// Default is what a container with a GPU and without a limit gets, by engine.
	Default map[Engine]Default
	// Ceiling is the most that anybody may ask for as memory.max, per container and GPU and
	// per pod and GPU; KindNone for no ceiling.
	Ceiling Amount
	// Namespaces are in the order of precedence: the first whose pattern matches holds.
	Namespaces []NamespaceRule
	Accept     map[Engine]Accept
	// Overcommit makes memory.min 0 where it is not given.
	Overcommit bool
	// PrivilegedRefuse says whether a container that can switch fences off is refused, by engine.
	PrivilegedRefuse map[Engine]bool
}

// DefaultKind says what becomes of a container with a GPU and without a limit.
type DefaultKind string

const (
	DefaultDeny      DefaultKind = "deny"
	DefaultUnlimited DefaultKind = "unlimited"
	DefaultAmount    DefaultKind = "amount"
)

// Default is one of deny, unlimited or an amount.
type Default struct {
	Kind   DefaultKind
	Amount Amount
}

// NamespaceRule overrides the policy for namespaces that match Pattern (path.Match syntax).
// Zero fields leave the policy as it is.
type NamespaceRule struct {
	Pattern  string
	Mode     Mode
	Require  Level
	Default  *Default
	Ceiling  Amount
	MinTotal Amount // greatest sum of memory.min per GPU
}

// Accept says what is read under an engine.
type Accept struct {
	Keys        bool // gpufence.dev/* annotations
	Aliases     bool
	Env         bool // GPUFENCE_*, and the env aliases
	EnvMayRaise bool // env may exceed the node's default
	GPU         bool // the gpu key
}

// For returns the policy that holds in a namespace: p with the first matching rule laid over
// it, and without Namespaces.
func (p Policy) For(namespace string) Policy { return p }

// DefaultPolicy is the policy of a node without a configuration file.
func DefaultPolicy() Policy { return Policy{Mode: ModeEnforce, Require: LevelReactive} }
