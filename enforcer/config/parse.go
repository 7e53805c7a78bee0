// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// setting is one key of the file. Its name has `*` for the name of an engine or a namespace.
type setting struct {
	name string
	set  func(c *Config, star string, v any) error
}

// settings is the one table of keys: what is known, and how it is read and checked.
var settings = []setting{
	{"mode", func(c *Config, _ string, v any) error { return setMode(&c.Policy.Mode, v) }},
	{"require", func(c *Config, _ string, v any) error { return setRequire(&c.Policy.Require, v) }},
	{"overcommit", func(c *Config, _ string, v any) error { return setBool(&c.Policy.Overcommit, v) }},
	{"unmanaged", func(c *Config, _ string, v any) error {
		return setWord(&c.Unmanaged, v, []string{"allow", "warn", "deny", "kill"})
	}},
	{"unmanaged-exempt", func(c *Config, _ string, v any) error { return setExempt(&c.UnmanagedExempt, v) }},
	{"shim-missing", func(c *Config, _ string, v any) error {
		return setWord(&c.ShimMissing, v, []string{"report", "kill"})
	}},
	{"fail-open", func(c *Config, _ string, v any) error { return setBool(&c.FailOpen, v) }},
	{"admit", func(c *Config, _ string, v any) error {
		return setWord(&c.Admit, v, []string{"free", "kill-over-min"})
	}},
	{"placement", func(c *Config, _ string, v any) error {
		return setWord(&c.Placement, v, []string{"spread", "binpack"})
	}},
	{"throttle", func(c *Config, _ string, v any) error {
		return setWord(&c.Throttle, v, []string{"shim", "freeze", "off"})
	}},
	{"freeze-slice", func(c *Config, _ string, v any) error {
		return setTime(&c.FreezeSlice, v, time.Millisecond, 50*time.Millisecond)
	}},
	{"freeze-share", func(c *Config, _ string, v any) error {
		var share float64
		if err := setShare(&share, v); err != nil {
			return err
		}
		if share <= 0 || share > 0.5 {
			return wrong{what: quota.Quote(fmt.Sprint(v)) + " is not above 0% and at most 50%", hint: "write one such as 25%", code: quota.CodeBadPolicy}
		}
		c.FreezeShare = share
		return nil
	}},
	{"gate", func(c *Config, _ string, v any) error {
		return setWord(&c.Gate, v, []string{"auto", "enforce", "audit", "off"})
	}},
	{"gate-strict", func(c *Config, _ string, v any) error { return setBool(&c.GateStrict, v) }},
	{"gate-pins", func(c *Config, _ string, v any) error { return setPath(&c.GatePins, v, false) }},
	{"gate-managed", func(c *Config, _ string, v any) error {
		return setWord(&c.GateManaged, v, []string{"audit", "enforce"})
	}},
	{"kill-mps", func(c *Config, _ string, v any) error { return setBool(&c.KillMPS, v) }},

	{"socket", func(c *Config, _ string, v any) error { return setPath(&c.Socket, v, false) }},
	{"metrics-address", func(c *Config, _ string, v any) error { return setAddress(&c.MetricsAddress, v) }},
	{"run-dir", func(c *Config, _ string, v any) error { return setPath(&c.RunDir, v, false) }},
	{"state-dir", func(c *Config, _ string, v any) error { return setPath(&c.StateDir, v, false) }},
	{"runtimes", func(c *Config, _ string, v any) error {
		return setList(&c.Runtimes, v, func(s string) string {
			if strings.Contains(s, "/") && !filepath.IsAbs(s) {
				return "is neither a name nor an absolute path"
			}
			return ""
		})
	}},
	{"hook-path", func(c *Config, _ string, v any) error { return setPath(&c.HookPath, v, true) }},
	{"shim-delivery", func(c *Config, _ string, v any) error {
		return setWord(&c.ShimDelivery, v, []string{"preload", "stub", "off"})
	}},
	{"shim-library", func(c *Config, _ string, v any) error { return setPath(&c.ShimLibrary, v, true) }},
	{"shim-library-32", func(c *Config, _ string, v any) error { return setPath(&c.ShimLibrary32, v, true) }},
	{"cdi-spec-dirs", func(c *Config, _ string, v any) error {
		return setList(&c.CDISpecDirs, v, func(s string) string {
			if !filepath.IsAbs(s) {
				return "is not an absolute path"
			}
			return ""
		})
	}},
	{"cdi-kinds", func(c *Config, _ string, v any) error {
		return setList(&c.CDIKinds, v, func(s string) string {
			if vendor, class, ok := strings.Cut(s, "/"); !ok || vendor == "" || class == "" || strings.ContainsAny(s, "= ") || strings.Contains(class, "/") {
				return "is not a kind such as nvidia.com/gpu"
			}
			return ""
		})
	}},
	{"nvml-library", func(c *Config, _ string, v any) error { return setPath(&c.NVMLLibrary, v, true) }},
	{"dmem-dir", func(c *Config, _ string, v any) error { return setPath(&c.DmemDir, v, true) }},

	{"sample", func(c *Config, _ string, v any) error { return setTime(&c.Sample, v, 10*time.Millisecond, time.Minute) }},
	{"sample-idle", func(c *Config, _ string, v any) error {
		return setTime(&c.SampleIdle, v, 10*time.Millisecond, time.Hour)
	}},
	{"sample-deadline", func(c *Config, _ string, v any) error {
		return setTime(&c.SampleDeadline, v, 100*time.Millisecond, time.Minute)
	}},
	{"settle", func(c *Config, _ string, v any) error { return setTime(&c.Settle, v, 0, time.Minute) }},
	{"stuck-after", func(c *Config, _ string, v any) error { return setTime(&c.StuckAfter, v, time.Second, time.Hour) }},
	{"kill-slack", func(c *Config, _ string, v any) error { return setBytes(&c.KillSlackBytes, v) }},
	{"kill-slack-share", func(c *Config, _ string, v any) error { return setShare(&c.KillSlackShare, v) }},
	{"kill-interval", func(c *Config, _ string, v any) error {
		return setTime(&c.KillInterval, v, time.Millisecond, 10*time.Second)
	}},
	{"reserve", func(c *Config, _ string, v any) error { return setBytes(&c.ReserveBytes, v) }},
	{"reserve-share", func(c *Config, _ string, v any) error { return setShare(&c.ReserveShare, v) }},
	{"module", func(c *Config, _ string, v any) error { return setBytes(&c.ModuleBytes, v) }},
	{"context", func(c *Config, _ string, v any) error { return setBytes(&c.ContextBytes, v) }},
	{"prepare-hold", func(c *Config, _ string, v any) error { return setTime(&c.PrepareHold, v, time.Second, time.Hour) }},
	{"pages-hold", func(c *Config, _ string, v any) error {
		return setTime(&c.PagesHold, v, time.Second, 7*24*time.Hour)
	}},
	{"resize-deadline", func(c *Config, _ string, v any) error {
		return setTime(&c.ResizeDeadline, v, 100*time.Millisecond, time.Hour)
	}},
	{"ended-keep", func(c *Config, _ string, v any) error { return setTime(&c.EndedKeep, v, 0, 7*24*time.Hour) }},
	// The hook gives up after 9 s, before the engine ends it.
	{"wait-socket", func(c *Config, _ string, v any) error { return setTime(&c.WaitSocket, v, 0, 8*time.Second) }},

	{"default.*", func(c *Config, engine string, v any) error {
		return setEngine(c.Policy.Default, engine, v, setDefault)
	}},
	{"privileged.*", func(c *Config, engine string, v any) error {
		return setEngine(c.Policy.PrivilegedRefuse, engine, v, func(refuse *bool, v any) error {
			var word string
			err := setWord(&word, v, []string{"refuse", "report"})
			*refuse = word == "refuse"
			return err
		})
	}},
	{"ceiling.max", func(c *Config, _ string, v any) error { return setCeiling(&c.Policy.Ceiling, v) }},

	{"accept.*.keys", acceptBool(func(a *quota.Accept) *bool { return &a.Keys })},
	{"accept.*.aliases", acceptBool(func(a *quota.Accept) *bool { return &a.Aliases })},
	{"accept.*.env", acceptBool(func(a *quota.Accept) *bool { return &a.Env })},
	{"accept.*.env-may-raise", acceptBool(func(a *quota.Accept) *bool { return &a.EnvMayRaise })},
	{"accept.*.gpu", acceptBool(func(a *quota.Accept) *bool { return &a.GPU })},
	{"accept.*.resize-by-annotation", acceptBool(func(a *quota.Accept) *bool { return &a.ResizeByAnnotation })},

	{"namespace.*.mode", func(c *Config, ns string, v any) error { return setMode(&rule(c, ns).Mode, v) }},
	{"namespace.*.require", func(c *Config, ns string, v any) error { return setRequire(&rule(c, ns).Require, v) }},
	{"namespace.*.default", func(c *Config, ns string, v any) error {
		var d quota.Default
		err := setDefault(&d, v)
		rule(c, ns).Default = &d
		return err
	}},
	{"namespace.*.max", func(c *Config, ns string, v any) error { return setCeiling(&rule(c, ns).Ceiling, v) }},
	{"namespace.*.min-total", func(c *Config, ns string, v any) error { return setAmount(&rule(c, ns).MinTotal, v) }},
}

// Keys lists every key of the file, with `*` for an engine or a namespace.
func Keys() []string {
	names := make([]string, len(settings))
	for i, s := range settings {
		names[i] = s.name
	}
	return names
}

// wrong is a value that cannot be taken: what it is, and what to write. The key is put before.
type wrong struct {
	what, hint string
	code       quota.Code
}

func (w wrong) Error() string { return w.what }

func notOf(v any, want string) error {
	return wrong{what: quota.Quote(fmt.Sprint(v)) + " is not " + want, code: quota.CodeBadPolicy}
}

// fromQuota keeps what an error about a value says, and drops its code: in this file the key's
// place matters more.
func fromQuota(err error) error {
	if e := (*quota.Error)(nil); errors.As(err, &e) {
		return wrong{what: e.Message, hint: e.Hint, code: quota.CodeBadPolicy}
	}
	return err
}

func text(v any, want string) (string, error) {
	s, ok := v.(string)
	if !ok {
		return "", wrong{what: fmt.Sprint(v) + " is not " + want, hint: "put it in quotes", code: quota.CodeBadPolicy}
	}
	return s, nil
}

func setBool(to *bool, v any) error {
	b, ok := v.(bool)
	if !ok {
		return wrong{what: quota.Quote(fmt.Sprint(v)) + " is neither true nor false", hint: "write one of them, without quotes", code: quota.CodeBadPolicy}
	}
	*to = b
	return nil
}

// setWord takes one of several words.
func setWord(to *string, v any, words []string) error {
	s, err := text(v, "one of "+strings.Join(words, ", "))
	if err != nil {
		return err
	}
	if !slices.Contains(words, s) {
		w := wrong{what: quota.Quote(s) + " is not one of " + strings.Join(words, ", "), code: quota.CodeBadPolicy}
		if near := quota.Nearest(s, words); near != "" {
			w.hint = "write " + near
		}
		return w
	}
	*to = s
	return nil
}

func setMode(to *quota.Mode, v any) error {
	var s string
	err := setWord(&s, v, []string{string(quota.ModeEnforce), string(quota.ModeWarn), string(quota.ModeObserve)})
	*to = quota.Mode(s)
	return err
}

func setRequire(to *quota.Level, v any) error {
	var s string
	err := setWord(&s, v, []string{string(quota.LevelReactive), string(quota.LevelHard)})
	*to = quota.Level(s)
	return err
}

func setPath(to *string, v any, mayBeEmpty bool) error {
	s, err := text(v, "a path")
	if err != nil {
		return err
	}
	if s == "" && mayBeEmpty {
		*to = ""
		return nil
	}
	if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
		return notOf(s, "an absolute path")
	}
	*to = filepath.Clean(s)
	return nil
}

func setList(to *[]string, v any, check func(string) string) error {
	items, ok := v.([]any)
	if !ok {
		return wrong{what: quota.Quote(fmt.Sprint(v)) + " is not a list", hint: `write one such as ["a", "b"]`, code: quota.CodeBadPolicy}
	}
	if len(items) == 0 {
		return wrong{what: "is empty", hint: "remove the line for the default", code: quota.CodeBadPolicy}
	}
	var list []string
	for _, item := range items {
		s, err := text(item, "a text")
		if err != nil {
			return err
		}
		why := check(s)
		if s == "" {
			why = "is empty"
		}
		if why == "" && slices.Contains(list, s) {
			why = "is there twice"
		}
		if why != "" {
			return wrong{what: "has the item " + quota.Quote(s) + ", which " + why, code: quota.CodeBadPolicy}
		}
		list = append(list, s)
	}
	*to = list
	return nil
}

func setExempt(to *[]Exempt, v any) error {
	if items, ok := v.([]any); ok && len(items) == 0 {
		*to = nil // nothing is exempt
		return nil
	}
	var texts []string
	if err := setList(&texts, v, func(s string) string { _, why := parseExempt(s); return why }); err != nil {
		return err
	}
	*to = nil
	for _, s := range texts {
		e, _ := parseExempt(s) // was checked just now
		*to = append(*to, e)
	}
	return nil
}

// setAddress takes the address of a TCP listener, or "" for none.
func setAddress(to *string, v any) error {
	const want = "an address such as \"127.0.0.1:9836\""
	s, err := text(v, want)
	if err != nil {
		return err
	}
	if s != "" {
		host, port, err := net.SplitHostPort(s)
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host != "" && host != "localhost" && net.ParseIP(host) == nil {
			return notOf(s, want)
		}
	}
	*to = s
	return nil
}

func setTime(to *time.Duration, v any, least, most time.Duration) error {
	const want = "a time such as \"100ms\", \"5s\" or \"10m\""
	s, err := text(v, want)
	if err != nil {
		return err
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return notOf(s, want)
	}
	if d < least || d > most {
		return wrong{what: fmt.Sprintf("%s is not between %s and %s", quota.Quote(s), least, most), code: quota.CodeBadPolicy}
	}
	*to = d
	return nil
}

func setBytes(to *uint64, v any) error {
	s, err := amountText(v)
	if err != nil {
		return err
	}
	n, err := quota.ParseQuantity(s)
	if err != nil {
		return fromQuota(err)
	}
	*to = n
	return nil
}

// amountText lets 0 stand without quotes, as it stands without a unit.
func amountText(v any) (string, error) {
	if n, ok := v.(int64); ok && n == 0 {
		return "0", nil
	}
	return text(v, "a quantity such as \"4Gi\"")
}

func setShare(to *float64, v any) error {
	s, err := text(v, "a percentage such as \"3%\"")
	if err != nil {
		return err
	}
	if !strings.HasSuffix(s, "%") {
		return notOf(s, "a percentage such as \"3%\"")
	}
	a, err := quota.ParseAmount(s, true)
	if err != nil {
		return fromQuota(err)
	}
	if a.Num == a.Den {
		return wrong{what: quota.Quote(s) + " leaves nothing", hint: "write less than 100%", code: quota.CodeBadPolicy}
	}
	*to = float64(a.Num) / float64(a.Den)
	return nil
}

func setAmount(to *quota.Amount, v any) error {
	s, err := amountText(v)
	if err != nil {
		return err
	}
	a, err := quota.ParseAmount(s, true)
	if err != nil {
		return fromQuota(err)
	}
	*to = a
	return nil
}

// setCeiling takes an amount; max is how to say that there is none.
func setCeiling(to *quota.Amount, v any) error {
	var a quota.Amount
	if err := setAmount(&a, v); err != nil {
		return err
	}
	if a.On(1<<62) == 0 {
		return wrong{what: "is 0, so that no container could start", hint: "write max for no ceiling", code: quota.CodeBadPolicy}
	}
	*to = a
	return nil
}

func setDefault(to *quota.Default, v any) error {
	s, err := text(v, "deny, unlimited, or an amount such as \"4Gi\", \"25%\" or \"1/4\"")
	if err != nil {
		return err
	}
	d, err := quota.ParseDefault(s)
	if err != nil {
		w := wrong{}
		errors.As(fromQuota(err), &w)
		if errors.Is(err, quota.CodeBadQuantity) {
			w.hint = "write deny, unlimited, or an amount such as 4Gi"
		}
		if near := quota.Nearest(s, []string{"deny", "unlimited"}); near != "" {
			w.hint = "write " + near
		}
		return w
	}
	if d.Kind == quota.DefaultAmount && d.Amount.On(1<<62) == 0 {
		return wrong{what: quota.Quote(s) + " is no memory at all", hint: "write deny", code: quota.CodeBadPolicy}
	}
	*to = d
	return nil
}

// setEngine changes one engine's value.
func setEngine[T any](m map[quota.Engine]T, engine string, v any, set func(*T, any) error) error {
	value, known := m[quota.Engine(engine)]
	if !known {
		var names []string
		for _, e := range quota.Engines() {
			names = append(names, string(e))
		}
		w := wrong{what: "is of no engine that exists", hint: "the engines are " + strings.Join(names, ", "), code: quota.CodeBadPolicy}
		if near := quota.Nearest(engine, names); near != "" {
			w.hint = "write " + near
		}
		return w
	}
	if err := set(&value, v); err != nil {
		return err
	}
	m[quota.Engine(engine)] = value
	return nil
}

func acceptBool(field func(*quota.Accept) *bool) func(*Config, string, any) error {
	return func(c *Config, engine string, v any) error {
		return setEngine(c.Policy.Accept, engine, v, func(a *quota.Accept, v any) error { return setBool(field(a), v) })
	}
}

// rule finds the rule of a pattern, or makes it.
func rule(c *Config, pattern string) *quota.NamespaceRule {
	for i := range c.Policy.Namespaces {
		if c.Policy.Namespaces[i].Pattern == pattern {
			return &c.Policy.Namespaces[i]
		}
	}
	c.Policy.Namespaces = append(c.Policy.Namespaces, quota.NamespaceRule{Pattern: pattern})
	return &c.Policy.Namespaces[len(c.Policy.Namespaces)-1]
}

// Parse reads the text of a configuration file; name is for messages. The error is a
// [*quota.Error] with the line.
func Parse(name string, source []byte) (Config, error) {
	var tree map[string]any
	if err := toml.Unmarshal(source, &tree); err != nil {
		var e *toml.DecodeError
		if errors.As(err, &e) {
			row, col := e.Position()
			return Config{}, quota.NewError(quota.CodeBadPolicy, "%s line %d column %d is not TOML: %s", name, row, col, strings.TrimPrefix(e.Error(), "toml: "))
		}
		return Config{}, quota.NewError(quota.CodeBadPolicy, "%s is not TOML: %w", name, err)
	}
	p := parser{name: name, lines: lines(source), config: Default()}
	if err := p.walk(tree, nil); err != nil {
		return Config{}, err
	}
	if err := p.together(); err != nil {
		return Config{}, err
	}
	return p.config, nil
}

type parser struct {
	name   string
	lines  map[string]int // by key path, joined by NUL
	config Config
}

// walk takes the tree in the order of names, so that the first error is always the same one.
func (p *parser) walk(tree map[string]any, at []string) error {
	for _, key := range slices.Sorted(maps.Keys(tree)) {
		where := append(slices.Clone(at), key)
		s, star, leaf, known := find(where)
		switch v := tree[key].(type) {
		case map[string]any:
			if !known {
				return p.unknown(where)
			}
			if leaf {
				return p.fail(where, wrong{what: "is a table", hint: "write " + key + " = …", code: quota.CodeBadPolicy})
			}
			if len(where) == 2 && where[0] == "namespace" {
				if err := checkPattern(key); err != nil {
					return p.fail(where, err)
				}
				rule(&p.config, key)
			}
			if err := p.walk(v, where); err != nil {
				return err
			}
		default:
			if !known {
				return p.unknown(where)
			}
			if !leaf {
				return p.fail(where, wrong{what: "is not a table", hint: "write [" + dotted(where) + "]", code: quota.CodeBadPolicy})
			}
			if err := s.set(&p.config, star, v); err != nil {
				return p.fail(where, err)
			}
		}
	}
	return nil
}

func checkPattern(pattern string) error {
	if _, err := path.Match(pattern, "x"); err != nil || pattern == "" || strings.Contains(pattern, "/") {
		return wrong{what: "is not a pattern of namespaces", hint: `write one such as [namespace."team-*"]`, code: quota.CodeBadPolicy}
	}
	return nil
}

// find looks a key path up: the setting if the path ends there, or whether something lies below.
func find(at []string) (s setting, star string, leaf, known bool) {
	for _, s := range settings {
		parts := strings.Split(s.name, ".")
		if len(parts) < len(at) {
			continue
		}
		star, match := "", true
		for i, k := range at {
			if parts[i] == "*" {
				star = k
			} else if parts[i] != k {
				match = false
			}
		}
		if match {
			return s, star, len(parts) == len(at), true
		}
	}
	return setting{}, "", false, false
}

func (p *parser) unknown(at []string) error {
	// What could stand there: names below the same parent.
	var names []string
	for _, s := range settings {
		parts := strings.Split(s.name, ".")
		if len(parts) < len(at) || parts[len(at)-1] == "*" {
			continue
		}
		same := true
		for i := range at[:len(at)-1] {
			same = same && (parts[i] == "*" || parts[i] == at[i])
		}
		if n := parts[len(at)-1]; same && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	w := wrong{what: "is not a key of this file", code: quota.CodeBadPolicy}
	if near := quota.Nearest(at[len(at)-1], names); near != "" {
		w.hint = "write " + near
	} else {
		w.hint = "the keys there are " + strings.Join(names, ", ")
	}
	return p.fail(at, w)
}

// fail says where a value is wrong, and how.
func (p *parser) fail(at []string, err error) error {
	line := 0
	for i := len(at); i > 0 && line == 0; i-- {
		line = p.lines[strings.Join(at[:i], "\x00")]
	}
	where := p.name
	if line > 0 {
		where = fmt.Sprintf("%s line %d", p.name, line)
	}
	w := wrong{what: err.Error(), code: quota.CodeBadPolicy}
	errors.As(err, &w)
	e := quota.NewError(w.code, "%s: %s %s", where, dotted(at), w.what)
	if w.hint != "" {
		e = e.WithHint("%s", w.hint)
	}
	return e
}

// dotted is a key path as it could stand in the file.
func dotted(at []string) string {
	parts := make([]string, len(at))
	for i, k := range at {
		parts[i] = k
		if k == "" || strings.Trim(k, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" || len(k) > 63 {
			parts[i] = quota.Quote(k)
		}
	}
	return strings.Join(parts, ".")
}

// together checks what only several keys say.
func (p *parser) together() error {
	c := &p.config
	bad := func(what, hint string, at ...string) error {
		return p.fail(at, wrong{what: what, hint: hint, code: quota.CodeBadPolicy})
	}
	if c.SampleIdle < c.Sample {
		return bad(fmt.Sprintf("is %s, less than sample, which is %s", c.SampleIdle, c.Sample), "write at least that", "sample-idle")
	}
	if c.StuckAfter < c.Settle {
		return bad(fmt.Sprintf("is %s, less than settle, which is %s", c.StuckAfter, c.Settle), "write at least that", "stuck-after")
	}
	if c.PagesHold < c.PrepareHold {
		return bad(fmt.Sprintf("is %s, less than prepare-hold, which is %s", c.PagesHold, c.PrepareHold), "write at least that", "pages-hold")
	}
	above := func(d quota.Default, ceiling quota.Amount) bool {
		return d.Kind == quota.DefaultAmount && d.Amount.Kind == ceiling.Kind && ceiling.Kind != quota.KindUnlimited &&
			d.Amount.On(1<<62) > ceiling.On(1<<62)
	}
	for _, e := range quota.Engines() {
		if d := c.Policy.Default[e]; above(d, c.Policy.Ceiling) {
			return bad(fmt.Sprintf("is %s, above ceiling.max, which is %s", d, c.Policy.Ceiling), "write at most that", "default", string(e))
		}
	}
	for _, r := range c.Policy.Namespaces {
		ceiling := r.Ceiling
		if ceiling.Kind == quota.KindNone {
			ceiling = c.Policy.Ceiling
		}
		if r.Default != nil && above(*r.Default, ceiling) {
			return bad(fmt.Sprintf("is %s, above the ceiling there, which is %s", *r.Default, ceiling), "write at most that", "namespace", r.Pattern, "default")
		}
	}
	return nil
}

// lines maps every key of a file that is valid TOML to its line.
func lines(source []byte) map[string]int {
	out := map[string]int{}
	var table []string
	p := unstable.Parser{}
	p.Reset(source)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind != unstable.Table && e.Kind != unstable.ArrayTable && e.Kind != unstable.KeyValue {
			continue
		}
		var key []string
		line := 0
		for it := e.Key(); it.Next(); {
			n := it.Node()
			key = append(key, string(n.Data))
			if line == 0 {
				line = p.Shape(n.Raw).Start.Line
			}
		}
		if e.Kind != unstable.KeyValue {
			table = key
		} else {
			key = append(slices.Clone(table), key...)
		}
		if id := strings.Join(key, "\x00"); out[id] == 0 {
			out[id] = line
		}
	}
	return out
}
