// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/agnivade/levenshtein"
	"go.yaml.in/yaml/v3"
)

// The keys of a user, without domain.
const (
	KeyMemoryMax     = "memory.max"
	KeyMemoryHigh    = "memory.high"
	KeyMemoryMin     = "memory.min"
	KeyMemorySwapMax = "memory.swap.max"
	KeyOOMGroup      = "memory.oom.group"
	KeyComputeWeight = "compute.weight"
	KeyComputeMax    = "compute.max"
	KeyRequire       = "require"
	KeyGPU           = "gpu"
)

const (
	// Domain is the prefix of our annotations.
	Domain = "gpufence.dev/"
	// envPrefix begins the environment form of the memory keys: GPUFENCE_MEMORY_SWAP_MAX.
	envPrefix = "GPUFENCE_MEMORY_"

	keyConfig       = "config"
	containerPrefix = "container."
	statusPrefix    = "status"
	freePrefix      = "x-"

	maxConfigLen = 64 << 10 // of the full form; annotations together may have 256 KiB
)

// keyInfo is everything about a key but its meaning.
type keyInfo struct {
	name string
	// parse reads a value into a level; where names the value in messages.
	parse func(l *level, where, text string) *Error
	// unbuilt says why a value that parsed is not enforced by this version, or "". A key
	// that is enforced has none: later work takes the entry away.
	unbuilt func(l *level) string
}

// keys is the one table of keys: what is known, how it is read, what is not enforced yet.
var keys = []keyInfo{
	{name: KeyMemoryMax, parse: amountParser(KeyMemoryMax)},
	{name: KeyMemoryMin, parse: amountParser(KeyMemoryMin)},
	{name: KeyMemoryHigh, parse: amountParser(KeyMemoryHigh)},
	{name: KeyMemorySwapMax, parse: amountParser(KeyMemorySwapMax)},
	{name: KeyOOMGroup, parse: parseOOMGroup},
	{name: KeyComputeWeight, parse: parseWeight, unbuilt: func(*level) string { return "shares of GPU time" }},
	{name: KeyComputeMax, parse: parseComputeMax, unbuilt: func(*level) string { return "shares of GPU time" }},
	{name: KeyRequire, parse: parseRequire},
	{name: KeyGPU, parse: parseGPU},
}

// level is what was written for the pod or for one container.
type level struct {
	amounts  map[string]listAmount
	oomGroup *bool
	require  Level
	gpu      []string
	given    []string // names of every key that was given, for messages
}

// listAmount is the value of a memory key: one amount, or one per GPU.
type listAmount struct {
	where string // as the user named it
	text  string
	env   bool // from the environment, which an image can write
	all   Amount
	list  []listed
	rest  Amount // of GPUs that are not in list; only an alias has it
}

type listed struct {
	position int    // in the container's own list; -1 if uuid is set
	uuid     string // GPU-..., MIG-...
	amount   Amount
}

func (v listAmount) given() bool { return v.where != "" }

// only says whether every amount of v satisfies f.
func (v listAmount) only(f func(Amount) bool) bool {
	if len(v.list) == 0 {
		return f(v.all)
	}
	return !slices.ContainsFunc(v.list, func(e listed) bool { return !f(e.amount) })
}

// on is the amount that v gives to a GPU; KindNone if the GPU is not in the list. A GPU that is
// named twice, by position and by UUID, is an error.
func (v listAmount) on(g GPU, position int) (Amount, *Error) {
	if len(v.list) == 0 {
		return v.all, nil
	}
	var found Amount
	for _, e := range v.list {
		if e.position != position && (e.uuid == "" || !strings.EqualFold(e.uuid, g.UUID)) {
			continue
		}
		if found.Kind != KindNone {
			return Amount{}, NewError(CodeBadList, "%s %s names GPU %d twice, it is %s", v.where, Quote(v.text), position, g.UUID).
				WithHint("name it once")
		}
		found = e.amount
	}
	if found.Kind == KindNone {
		return v.rest, nil
	}
	return found, nil
}

func lookup(name string) (keyInfo, bool) {
	i := slices.IndexFunc(keys, func(k keyInfo) bool { return k.name == name })
	if i < 0 {
		return keyInfo{}, false
	}
	return keys[i], true
}

// set reads one value of a level.
func (l *level) set(k keyInfo, where, text string, env bool) *Error {
	if len(text) > maxValueLen {
		return NewError(CodeTooBig, "%s has a value of %d characters", where, len(text)).WithHint("write at most %d", maxValueLen)
	}
	if err := k.parse(l, where, strings.TrimSpace(text)); err != nil {
		return err
	}
	if v, ok := l.amounts[k.name]; ok {
		v.env = env
		l.amounts[k.name] = v
	}
	l.given = append(l.given, where)
	if k.unbuilt == nil {
		return nil
	}
	if what := k.unbuilt(l); what != "" {
		return NewError(CodeNotEnforced, "%s %s is not enforced by this version of gpufence, which has no %s yet", where, Quote(text), what).
			WithHint("remove it")
	}
	return nil
}

// at puts the name of a value before an error of its text.
func at(where string, err *Error) *Error {
	c := *err
	c.Message = where + " " + err.Message
	return &c
}

func amountParser(name string) func(*level, string, string) *Error {
	return func(l *level, where, text string) *Error {
		v, err := parseList(where, text)
		if err != nil {
			return err
		}
		if l.amounts == nil {
			l.amounts = map[string]listAmount{}
		}
		l.amounts[name] = v
		return nil
	}
}

// parseList reads an amount, or a per-GPU list of them.
func parseList(where, text string) (listAmount, *Error) {
	v := listAmount{where: where, text: text}
	if !strings.ContainsAny(text, "=,") {
		a, err := parseAmount(text, false)
		if err != nil {
			return v, at(where, err)
		}
		v.all = a
		return v, nil
	}
	seen := map[string]bool{}
	for item := range strings.SplitSeq(text, ",") {
		sel, val, ok := strings.Cut(strings.TrimSpace(item), "=")
		sel = strings.TrimSpace(sel)
		e := listed{position: -1}
		switch {
		case !ok:
			return v, NewError(CodeBadList, "%s %s has the item %s without a GPU", where, Quote(text), Quote(item)).
				WithHint("write one amount for all GPUs, or a list such as 0=4Gi,1=8Gi")
		case isUUID(sel):
			e.uuid = sel
		default:
			n, err := strconv.ParseUint(sel, 10, 10)
			if err != nil {
				return v, NewError(CodeBadList, "%s %s names the GPU %s, which is neither a position nor a UUID", where, Quote(text), Quote(sel)).
					WithHint("write a list such as 0=4Gi,1=8Gi, or GPU-<uuid>=8Gi")
			}
			e.position = int(n)
			sel = strconv.FormatUint(n, 10)
		}
		if id := strings.ToLower(sel); seen[id] {
			return v, NewError(CodeBadList, "%s %s names GPU %s twice", where, Quote(text), Quote(sel)).WithHint("name it once")
		} else {
			seen[id] = true
		}
		a, err := parseAmount(val, false)
		if err != nil {
			return v, at(where+" of GPU "+cut(sel), err)
		}
		e.amount = a
		v.list = append(v.list, e)
	}
	return v, nil
}

// cut keeps a name that a user chose from pushing the rest of a sentence out of sight, or from
// breaking its line.
func cut(s string) string {
	if len(s) <= 63 && strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f }) < 0 {
		return s
	}
	return Quote(s)
}

// isUUID says whether s has the form of an identifier of a GPU or a MIG instance.
func isUUID(s string) bool {
	rest, ok := strings.CutPrefix(s, "GPU-")
	if !ok {
		if rest, ok = strings.CutPrefix(s, "MIG-"); !ok {
			return false
		}
		// MIG-GPU-<uuid>/<gi>/<ci> is the form of drivers before R470.
		rest = strings.TrimPrefix(rest, "GPU-")
	}
	return rest != "" && len(rest) <= 64 && strings.Trim(rest, "0123456789abcdefABCDEF-/") == ""
}

func parseOOMGroup(l *level, where, text string) *Error {
	switch text {
	case "true", "false":
		v := text == "true"
		l.oomGroup = &v
		return nil
	}
	hint := "write true or false"
	switch strings.ToLower(text) {
	case "1", "yes", "on", "y", "true":
		hint = "write true"
	case "0", "no", "off", "n", "false":
		hint = "write false"
	}
	return NewError(CodeBadBool, "%s %s is neither true nor false", where, Quote(text)).WithHint("%s", hint)
}

func parseRequire(l *level, where, text string) *Error {
	switch Level(text) {
	case LevelHard, LevelReactive:
		l.require = Level(text)
		return nil
	}
	return NewError(CodeBadRequire, "%s %s is not a level that can be required", where, Quote(text)).WithHint("write hard or reactive")
}

func parseWeight(_ *level, where, text string) *Error {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n < 1 || n > 10000 {
		return NewError(CodeBadQuantity, "%s %s is not a weight", where, Quote(text)).WithHint("write a number from 1 to 10000")
	}
	return nil
}

func parseComputeMax(_ *level, where, text string) *Error {
	a, err := parsePercent(text)
	if err != nil || !strings.HasSuffix(text, "%") || a.Num == 0 {
		return NewError(CodeBadPercent, "%s %s is not a share of GPU time", where, Quote(text)).WithHint("write one such as 30%%")
	}
	return nil
}

// parseGPU reads which GPUs a container wants. A count becomes any=<n>, since a bare number is
// an index elsewhere.
func parseGPU(l *level, where, text string) *Error {
	bad := NewError(CodeBadGPUSelector, "%s %s names no GPU", where, Quote(text)).
		WithHint("write any, a count such as 2, all, or UUIDs such as GPU-<uuid>")
	switch text {
	case "any", "all":
		l.gpu = []string{text}
		return nil
	}
	if n, err := strconv.ParseUint(text, 10, 7); err == nil && n > 0 && text[0] != '0' {
		l.gpu = []string{"any=" + text}
		return nil
	}
	var ids []string
	for id := range strings.SplitSeq(text, ",") {
		id = strings.TrimSpace(id)
		if !isUUID(id) || slices.Contains(ids, id) {
			return bad
		}
		ids = append(ids, id)
	}
	l.gpu = ids
	return nil
}

// scopes are all levels that a set of annotations speaks of. The pod's name is "".
type scopes map[string]*level

func (s scopes) of(container string) *level {
	if s[container] == nil {
		s[container] = &level{}
	}
	return s[container]
}

// entry is one value as written, in either form.
type entry struct {
	container string // "" for the pod
	key       string
	text      string
	source    string // annotation, for messages about naming twice
}

func (e entry) where() string {
	if e.container == "" {
		return e.key
	}
	return containerPrefix + cut(e.container) + "." + e.key
}

// parseAnnotations reads our domain. Every value is read, also those of other containers, so
// that all containers of a wrong pod say the same.
func parseAnnotations(annotations map[string]string) (scopes, *Error) {
	var entries []entry
	// In the order of names, so that the first error is always the same one.
	for _, name := range slices.Sorted(maps.Keys(annotations)) {
		key, ok := strings.CutPrefix(name, Domain)
		if !ok {
			if meant := misspelt(name); meant != "" {
				return nil, NewError(CodeUnknownKey, "%s is not a key of gpufence", cut(name)).WithHint("write %s", cut(meant))
			}
			continue
		}
		switch {
		case strings.HasPrefix(key, freePrefix):
		case key == keyConfig:
			es, err := parseConfig(name, annotations[name])
			if err != nil {
				return nil, err
			}
			entries = append(entries, es...)
		default:
			e, err := parseName(name, key)
			if err != nil {
				return nil, err
			}
			e.text = annotations[name]
			entries = append(entries, e)
		}
	}
	out := scopes{}
	from := map[[2]string]string{}
	for _, e := range entries {
		id := [2]string{e.container, e.key}
		if other, twice := from[id]; twice {
			return nil, NewError(CodeDuplicateKey, "%s is given twice, by %s and by %s", e.where(), cut(other), cut(e.source)).WithHint("remove one")
		}
		from[id] = e.source
		k, _ := lookup(e.key) // both forms refuse what is not in the table
		if err := out.of(e.container).set(k, e.where(), e.text, false); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// misspelt is what was meant by an annotation that is not in our domain and was surely meant to be: its limit would
// be nobody's, and where nothing is denied the container would run without any.
func misspelt(name string) string {
	c := strings.ToLower(strings.TrimSpace(name))
	if strings.HasPrefix(c, Domain) {
		return c
	}
	product, _, _ := strings.Cut(Domain, ".")
	if !strings.HasPrefix(c, product) {
		return "" // another's
	}
	for _, k := range keys {
		if strings.HasPrefix(k.name, "memory.") && strings.HasSuffix(c, k.name) {
			return Domain + k.name
		}
	}
	return ""
}

// parseName reads the name of a dotted annotation, without the domain.
func parseName(annotation, key string) (entry, *Error) {
	if key == statusPrefix || strings.HasPrefix(key, statusPrefix+".") {
		return entry{}, NewError(CodeStatusKey, "%s cannot be set, it is where gpufence reports", cut(annotation)).WithHint("remove it")
	}
	e := entry{key: key, source: annotation}
	prefix := ""
	if rest, ok := strings.CutPrefix(key, containerPrefix); ok {
		name, k, dotted := strings.Cut(rest, ".")
		if !dotted || name == "" {
			return e, NewError(CodeUnknownKey, "%s names no key of a container", cut(annotation)).
				WithHint("write %scontainer.<name>.%s", Domain, KeyMemoryMax)
		}
		e.container, e.key = name, k
		prefix = containerPrefix + name + "."
	}
	if _, ok := lookup(e.key); !ok {
		return e, unknownKey(cut(annotation), Domain+prefix, e.key)
	}
	return e, nil
}

// unknownKey names the nearest key that exists.
func unknownKey(where, prefix, key string) *Error {
	err := NewError(CodeUnknownKey, "%s is not a key of gpufence", where)
	if n := Nearest(key, keyNames()); n != "" {
		return err.WithHint("write %s%s", cut(prefix), n)
	}
	return err.WithHint("the keys are %s", strings.Join(keyNames(), ", "))
}

func keyNames() []string {
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
	}
	return names
}

// Nearest is the name that was probably meant by a wrong one, or "" if none is near.
func Nearest(wrong string, names []string) string {
	if len(wrong) > 64 {
		return "" // levenshtein is quadratic, and nobody's typing error is that long
	}
	canonical := func(s string) string {
		return strings.NewReplacer("_", ".", "-", ".").Replace(strings.ToLower(s))
	}
	best, least := "", 1<<30
	for _, n := range names {
		d := levenshtein.ComputeDistance(canonical(wrong), canonical(n))
		if d < least {
			best, least = n, d
		}
	}
	if least > max(1, len(best)/3) {
		return ""
	}
	return best
}

// parseConfig reads the full form. It walks YAML's nodes itself: the text of a scalar counts,
// not what YAML makes of it (0x10, 1e3, yes), and anchors are refused, which can make a short
// text huge.
func parseConfig(annotation, text string) ([]entry, *Error) {
	bad := func(line int, format string, args ...any) *Error {
		err := NewError(CodeBadConfigYAML, format, args...)
		if line > 0 {
			err.Message = annotation + " line " + strconv.Itoa(line) + " " + err.Message
		} else {
			err.Message = annotation + " " + err.Message
		}
		return err.WithHint("write YAML such as pod: {memory.max: 4Gi}")
	}
	if len(text) > maxConfigLen {
		return nil, NewError(CodeTooBig, "%s has %d characters", annotation, len(text)).WithHint("write at most %d", maxConfigLen)
	}
	dec := yaml.NewDecoder(strings.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		return nil, bad(0, "is not YAML (%s)", firstLine(err.Error()))
	}
	if err := dec.Decode(&yaml.Node{}); err == nil {
		return nil, bad(0, "has more than one document")
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil, bad(0, "is empty")
	}
	var entries []entry
	section := func(container string, node *yaml.Node) *Error {
		return eachPair(node, annotation, bad, func(key string, kn, vn *yaml.Node) *Error {
			if strings.HasPrefix(key, freePrefix) {
				return nil
			}
			e := entry{container: container, key: key, source: annotation}
			if _, ok := lookup(key); !ok {
				return unknownKey(annotation+" line "+strconv.Itoa(kn.Line)+": "+cut(key), "", key)
			}
			if vn.Kind != yaml.ScalarNode || vn.Tag == "!!null" {
				return bad(vn.Line, "gives %s no plain value", e.where())
			}
			e.text = vn.Value
			entries = append(entries, e)
			return nil
		})
	}
	err := eachPair(doc.Content[0], annotation, bad, func(key string, kn, vn *yaml.Node) *Error {
		switch {
		case strings.HasPrefix(key, freePrefix):
			return nil
		case key == "pod":
			return section("", vn)
		case key == "containers":
			return eachPair(vn, annotation, bad, func(name string, nn, cn *yaml.Node) *Error {
				if name == "" {
					return bad(nn.Line, "names a container \"\"")
				}
				return section(name, cn)
			})
		}
		where := annotation + " line " + strconv.Itoa(kn.Line) + ": " + cut(key)
		unknown := NewError(CodeUnknownKey, "%s is neither pod nor containers", where)
		if _, ok := lookup(key); ok {
			return unknown.WithHint("write pod: {%s: …}", key)
		}
		if n := Nearest(key, []string{"pod", "containers"}); n != "" {
			return unknown.WithHint("write %s", n)
		}
		return unknown.WithHint("write pod: {memory.max: 4Gi}")
	})
	if err != nil {
		return nil, err
	}
	return entries, nil
}

// eachPair calls f for the pairs of a mapping, whose keys are plain and different.
func eachPair(node *yaml.Node, annotation string, bad func(int, string, ...any) *Error, f func(string, *yaml.Node, *yaml.Node) *Error) *Error {
	if node.Kind != yaml.MappingNode || node.Anchor != "" {
		return bad(node.Line, "is not a mapping of keys to values")
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		k, v := node.Content[i], node.Content[i+1]
		if k.Kind != yaml.ScalarNode || k.Tag == "!!merge" {
			return bad(k.Line, "has a key that is not plain text")
		}
		if v.Kind == yaml.AliasNode || v.Anchor != "" || k.Anchor != "" {
			return bad(v.Line, "uses anchors, which are not read here")
		}
		if seen[k.Value] {
			return NewError(CodeDuplicateKey, "%s line %d names %s twice", annotation, k.Line, cut(k.Value)).WithHint("remove one")
		}
		seen[k.Value] = true
		if err := f(k.Value, k, v); err != nil {
			return err
		}
	}
	return nil
}

// firstLine keeps a library's message inside our sentence.
func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	if q := strconv.Quote(s); len(s) > 100 || q != `"`+s+`"` {
		return Quote(s)
	}
	return s
}
