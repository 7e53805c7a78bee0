// SPDX-License-Identifier: Apache-2.0

// Package tomltext changes the list `imports` at the top of a TOML file and leaves every other
// byte as it is. AddImport and RemoveImport are each other's inverse. The text must be valid TOML
// already: what is not is refused.
package tomltext

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
)

// ErrShape is a list that cannot be edited as text: not a list of strings.
var ErrShape = errors.New("imports is not a list of strings")

// span is a half-open range of the text.
type span struct{ from, to int }

// layout is where the interesting parts lie.
type layout struct {
	version    *span // the whole line of the key, with its line end
	imports    *span // from the key to the closing bracket
	line       span  // the lines of imports, with the line end
	open       int   // the opening bracket
	strings    []span
	values     []string
	firstTable int // where the first table or key begins; len(text) if there is none
}

// parse finds the top-level keys version and imports.
func parse(text []byte) (layout, error) {
	l := layout{firstTable: -1}
	var p unstable.Parser
	p.Reset(text)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind == unstable.Table || e.Kind == unstable.ArrayTable {
			break
		}
		if e.Kind != unstable.KeyValue {
			continue
		}
		keys := e.Key()
		if !keys.Next() {
			continue
		}
		first := keys.Node()
		name, at := string(first.Data), int(first.Raw.Offset)
		if l.firstTable < 0 {
			l.firstTable = lineStart(text, at)
		}
		if keys.Next() || name != "version" && name != "imports" {
			continue // a dotted key, or not ours to look at
		}
		if name == "version" {
			l.version = &span{lineStart(text, at), lineEnd(text, at)}
			continue
		}
		equal := bytes.IndexByte(text[at:], '=')
		if equal < 0 {
			return l, ErrShape
		}
		if err := l.list(text, at, at+equal+1); err != nil {
			return l, err
		}
	}
	if err := p.Error(); err != nil {
		return l, fmt.Errorf("parse TOML: %w", err)
	}
	if l.firstTable < 0 {
		l.firstTable = firstTable(text)
	}
	return l, nil
}

// firstTable is where the first table header begins.
func firstTable(text []byte) int {
	at := 0
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(bytes.TrimLeft(line, " \t"), []byte("[")) {
			return at
		}
		at += len(line)
	}
	return len(text)
}

// list reads the list of strings that begins behind the equals sign.
func (l *layout) list(text []byte, key, at int) error {
	for at < len(text) && (text[at] == ' ' || text[at] == '\t') {
		at++
	}
	if at >= len(text) || text[at] != '[' {
		return ErrShape
	}
	l.open = at
	for at++; at < len(text); {
		switch c := text[at]; c {
		case ' ', '\t', '\r', '\n', ',':
			at++
		case '#':
			at = lineEnd(text, at)
		case ']':
			l.imports = &span{key, at + 1}
			l.line = span{lineStart(text, key), lineEnd(text, at)}
			return nil
		case '"', '\'':
			end, value, err := quoted(text, at)
			if err != nil {
				return err
			}
			l.strings, l.values = append(l.strings, span{at, end}), append(l.values, value)
			at = end
		default:
			return ErrShape
		}
	}
	return ErrShape
}

// quoted reads a one-line string.
func quoted(text []byte, at int) (int, string, error) {
	quote := text[at]
	if bytes.HasPrefix(text[at:], bytes.Repeat([]byte{quote}, 3)) {
		return 0, "", ErrShape // nobody writes a path on several lines
	}
	for i := at + 1; i < len(text); i++ {
		switch {
		case text[i] == '\n':
			return 0, "", ErrShape
		case quote == '"' && text[i] == '\\':
			return 0, "", ErrShape // a path with an escape: not worth a decoder of our own
		case text[i] == quote:
			return i + 1, string(text[at+1 : i]), nil
		}
	}
	return 0, "", ErrShape
}

func lineStart(text []byte, at int) int { return bytes.LastIndexByte(text[:at], '\n') + 1 }

// lineEnd is behind the line end, or the end of the text.
func lineEnd(text []byte, at int) int {
	if i := bytes.IndexByte(text[at:], '\n'); i >= 0 {
		return at + i + 1
	}
	return len(text)
}

// newline is the file's own line end.
func newline(text []byte) string {
	if i := bytes.IndexByte(text, '\n'); i > 0 && text[i-1] == '\r' {
		return "\r\n"
	}
	return "\n"
}

// Added says what AddImport put in, so that RemoveImport can take out exactly that.
type Added struct {
	Element bool // the list's element
	List    bool // the list itself
	Version bool // the line with the version
}

// AddImport makes the text import a pattern. Where the text has no version it gets one.
func AddImport(text []byte, pattern string, version int) ([]byte, Added, error) {
	l, err := parse(text)
	if err != nil {
		return nil, Added{}, err
	}
	if slices.Contains(l.values, pattern) {
		return text, Added{}, nil
	}
	if l.imports != nil {
		added := Added{Element: true}
		at, element := l.open+1, quote(pattern)
		if n := len(l.strings); n > 0 {
			at, element = l.strings[n-1].to, ", "+element
		}
		out := splice(text, span{at, at}, element)
		if l.version == nil {
			added.Version = true
			out = splice(out, span{l.line.from, l.line.from}, versionLine(text, version))
		}
		return out, added, nil
	}
	added, nl := Added{Element: true, List: true}, newline(text)
	lines, at := "imports = ["+quote(pattern)+"]"+nl, l.firstTable
	if l.version != nil {
		at = l.version.to
	} else {
		added.Version = true
		lines = versionLine(text, version) + lines
	}
	if at > 0 && text[at-1] != '\n' {
		// The last line has no end: give it ours, and take ours off.
		lines = nl + strings.TrimSuffix(lines, nl)
	}
	return splice(text, span{at, at}, lines), added, nil
}

// AddVersion makes the text say its version; one that does already stays as it is.
func AddVersion(text []byte, version int) ([]byte, error) {
	l, err := parse(text)
	if err != nil || l.version != nil {
		return text, err
	}
	at := l.firstTable
	if l.imports != nil {
		at = min(at, l.line.from)
	}
	return splice(text, span{at, at}, versionLine(text, version)), nil
}

func versionLine(text []byte, version int) string {
	return fmt.Sprintf("version = %d%s", version, newline(text))
}

func quote(s string) string { return `"` + s + `"` }

// RemoveImport takes out what AddImport put in, as far as it is still there.
func RemoveImport(text []byte, pattern string, added Added) ([]byte, error) {
	l, err := parse(text)
	if err != nil {
		return nil, err
	}
	i := slices.Index(l.values, pattern)
	var cuts []span
	switch {
	case i < 0 || !added.Element:
	case added.List && len(l.values) == 1:
		cuts = append(cuts, l.line)
	case i > 0:
		cuts = append(cuts, span{l.strings[i-1].to, l.strings[i].to})
	case len(l.strings) > 1:
		cuts = append(cuts, span{l.strings[0].from, l.strings[1].from})
	default:
		cuts = append(cuts, l.strings[0])
	}
	if added.Version && l.version != nil {
		cuts = append(cuts, *l.version)
	}
	slices.SortFunc(cuts, func(a, b span) int { return b.from - a.from })
	out, atEnd := text, false
	for _, c := range cuts {
		// A last line that had no end got ours in front of it.
		if c.to == len(out) && c.from > 0 && out[len(out)-1] != '\n' && c.to > c.from && out[c.from-1] == '\n' {
			atEnd = true
		}
		out = splice(out, c, "")
	}
	if atEnd && bytes.HasSuffix(out, []byte("\n")) {
		out = bytes.TrimSuffix(bytes.TrimSuffix(out, []byte("\n")), []byte("\r"))
	}
	return out, nil
}

// SetImports gives the text this list of imports and no other, for a check by the engine.
func SetImports(text []byte, version int, paths []string) ([]byte, error) {
	l, err := parse(text)
	if err != nil {
		return nil, err
	}
	quoted := make([]string, len(paths))
	for i, p := range paths {
		quoted[i] = quote(p)
	}
	list := "imports = [" + strings.Join(quoted, ", ") + "]"
	if l.imports != nil {
		out := splice(text, *l.imports, list)
		if l.version == nil && version > 0 {
			out = splice(out, span{l.line.from, l.line.from}, versionLine(text, version))
		}
		return out, nil
	}
	list += newline(text)
	at := l.firstTable
	if l.version != nil {
		at = l.version.to
	} else if version > 0 {
		list = versionLine(text, version) + list
	}
	if at > 0 && text[at-1] != '\n' {
		list = newline(text) + list
	}
	return splice(text, span{at, at}, list), nil
}

func splice(text []byte, s span, by string) []byte {
	return slices.Concat(text[:s.from], []byte(by), text[s.to:])
}
