// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"path"
	"slices"
	"strings"
)

// Policy is node policy as far as limits, keys and starts depend on it. The zero value is not
// useful; begin with [DefaultPolicy].
type Policy struct {
	Mode    Mode
	Require Level
	// Default is what a container with a GPU and without a limit gets, by engine.
	Default map[Engine]Default
	// Ceiling is the most that anybody may ask for as memory.max, on each GPU, for a pod and
	// for a container; KindNone for no ceiling.
	Ceiling Amount
	// MinTotal is the greatest sum of memory.min that the pods of one namespace may hold on
	// one GPU; KindNone for none. Only a namespace's rule sets it.
	MinTotal Amount
	// Namespaces are the rules of [Policy.For]; their order does not matter.
	Namespaces []NamespaceRule
	Accept     map[Engine]Accept
	// Overcommit makes memory.min 0 where it is not given.
	Overcommit bool
	// PrivilegedRefuse says whether a container that can switch fences off is refused, by engine.
	PrivilegedRefuse map[Engine]bool
}

// DefaultKind says what becomes of a container with a GPU and without a limit.
type DefaultKind string

// The kinds of defaults.
const (
	DefaultDeny      DefaultKind = "deny"
	DefaultUnlimited DefaultKind = "unlimited"
	DefaultAmount    DefaultKind = "amount"
)

// Default is one of deny, unlimited or an amount.
type Default struct {
	Kind   DefaultKind
	Amount Amount // of DefaultAmount
}

// String is the default as it stands in the configuration file.
func (d Default) String() string {
	if d.Kind == DefaultAmount {
		return d.Amount.String()
	}
	return string(d.Kind)
}

// ParseDefault reads deny, unlimited, a quantity, a percentage or 1/N. The error is an [*Error]
// that quotes the value.
func ParseDefault(s string) (Default, error) {
	switch strings.TrimSpace(s) {
	case "deny":
		return Default{Kind: DefaultDeny}, nil
	case "unlimited", "max":
		return Default{Kind: DefaultUnlimited}, nil
	}
	a, err := ParseAmount(s, true)
	if err != nil {
		return Default{}, err
	}
	return Default{Kind: DefaultAmount, Amount: a}, nil
}

// NamespaceRule overrides the policy for the namespaces that match Pattern (the syntax of
// path.Match). Zero fields leave the policy as it is.
type NamespaceRule struct {
	Pattern  string
	Mode     Mode
	Require  Level
	Default  *Default
	Ceiling  Amount
	MinTotal Amount
}

// Accept says what is read under an engine.
type Accept struct {
	Keys        bool // gpufence.dev/* annotations
	Aliases     bool // what others call a limit, in annotations
	Env         bool // GPUFENCE_MEMORY_*, and the aliases in the environment
	EnvMayRaise bool // the environment may exceed the node's default
	GPU         bool // the gpu key
	// ResizeByAnnotation: a changed annotation of a running pod changes its limits, without
	// anybody on the node asking for it.
	ResizeByAnnotation bool
}

// Engines are all engines, in the order in which people read them.
func Engines() []Engine {
	return []Engine{EngineCRI, EngineCRIO, EngineDocker, EnginePodman, EngineOCI}
}

// Kubernetes says whether pods, and container names, come from Kubernetes.
func (e Engine) Kubernetes() bool { return e == EngineCRI || e == EngineCRIO }

// DefaultPolicy is the policy of a node without a configuration file.
func DefaultPolicy() Policy {
	p := Policy{
		Mode:             ModeEnforce,
		Require:          LevelReactive,
		Default:          map[Engine]Default{},
		Accept:           map[Engine]Accept{},
		PrivilegedRefuse: map[Engine]bool{},
	}
	for _, e := range Engines() {
		if e.Kubernetes() {
			p.Default[e] = Default{Kind: DefaultDeny}
			p.Accept[e] = Accept{Keys: true, Aliases: true}
			p.PrivilegedRefuse[e] = true
			continue
		}
		p.Default[e] = Default{Kind: DefaultUnlimited}
		p.PrivilegedRefuse[e] = false
		p.Accept[e] = Accept{Keys: true, Aliases: true, Env: true, GPU: true}
	}
	return p
}

// For returns the policy that holds in a namespace: p with the most specific matching rule laid
// over it, and without Namespaces. Calling it again changes nothing.
func (p Policy) For(namespace string) Policy {
	rules := p.Namespaces
	p.Namespaces = nil
	if namespace == "" {
		return p // not in Kubernetes; `*` means every namespace, not everything
	}
	var best *NamespaceRule
	for i := range rules {
		if ok, err := path.Match(rules[i].Pattern, namespace); err != nil || !ok {
			continue // a pattern that is wrong was refused when policy was read
		}
		if best == nil || moreSpecific(rules[i].Pattern, best.Pattern) {
			best = &rules[i]
		}
	}
	if best == nil {
		return p
	}
	if best.Mode != "" {
		p.Mode = best.Mode
	}
	if best.Require != "" {
		p.Require = best.Require
	}
	if best.Ceiling.Kind != KindNone {
		p.Ceiling = best.Ceiling
	}
	if best.MinTotal.Kind != KindNone {
		p.MinTotal = best.MinTotal
	}
	if best.Default != nil {
		// A namespace exists in Kubernetes only, so both of its engines get the default.
		d := map[Engine]Default{}
		for e, v := range p.Default {
			d[e] = v
		}
		d[EngineCRI], d[EngineCRIO] = *best.Default, *best.Default
		p.Default = d
	}
	return p
}

// moreSpecific orders patterns: without a wildcard first, then by the length of what stands
// before the first wildcard, then by length, then by the alphabet, so that no two are equal.
func moreSpecific(a, b string) bool {
	key := func(s string) []int {
		i := strings.IndexAny(s, `*?[\`)
		if i < 0 {
			return []int{1, len(s), len(s)}
		}
		return []int{0, i, len(s)}
	}
	if c := slices.Compare(key(a), key(b)); c != 0 {
		return c > 0
	}
	return a < b
}

// ceiling is the ceiling as bytes on a GPU; `max` and none are Unlimited.
func (p Policy) ceiling(g GPU) uint64 { return p.Ceiling.On(g.AllocatableBytes) }

func (p Policy) hasCeiling() bool {
	return p.Ceiling.Kind == KindBytes || p.Ceiling.Kind == KindShare
}

// CheckNamespaceTotal refuses a grant that would take the namespace's total of memory.min on a
// GPU by wanted, above what policy p (of that namespace) allows; held is what its other pods hold there.
func (p Policy) CheckNamespaceTotal(namespace string, g GPU, held, wanted uint64) error {
	total := p.MinTotal.On(g.AllocatableBytes)
	if total == Unlimited || (held <= total && wanted <= total-held) {
		return nil
	}
	return NewError(CodeNamespaceTotal, "memory.min %s does not fit namespace %s on %s: it may hold %s there and holds %s",
		FormatBytes(wanted), cut(namespace), g.UUID, FormatBytes(total), FormatBytes(held)).
		WithHint("lower memory.min (it follows memory.max) or end another pod")
}
