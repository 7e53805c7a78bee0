// SPDX-License-Identifier: Apache-2.0

// Package jsontext sets and deletes members of a JSON object in its text, and leaves every other
// byte, its order and its indentation as they are.
package jsontext

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrShape is a text in which the path leads through something that is no object.
var ErrShape = errors.New("not an object")

// maxDepth bounds recursion on hostile nesting.
const maxDepth = 100

type member struct {
	name               string
	key, from, to, end int // key to end of value; end is behind a comma, if there is one
}

type object struct {
	open, close int // the braces
	members     []member
}

func space(text []byte, at int) int {
	for at < len(text) && strings.IndexByte(" \t\r\n", text[at]) >= 0 {
		at++
	}
	return at
}

// skip returns the end of the value that begins at at. The text is valid JSON.
func skip(text []byte, at int) int {
	switch text[at] {
	case '"':
		for at++; text[at] != '"'; at++ {
			if text[at] == '\\' {
				at++
			}
		}
		return at + 1
	case '{', '[':
		depth := 0
		for ; at < len(text); at++ {
			switch text[at] {
			case '"':
				at = skip(text, at) - 1
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return at + 1
				}
			}
		}
	}
	for at < len(text) && strings.IndexByte(" \t\r\n,}]", text[at]) < 0 {
		at++
	}
	return at
}

// read lists the members of the object that begins at at.
func read(text []byte, at int) (object, error) {
	at = space(text, at)
	if at >= len(text) || text[at] != '{' {
		return object{}, ErrShape
	}
	o := object{open: at}
	for at = space(text, at+1); text[at] != '}'; at = space(text, at) {
		m := member{key: at}
		end := skip(text, at)
		if err := json.Unmarshal(text[at:end], &m.name); err != nil {
			return o, fmt.Errorf("read key: %w", err)
		}
		m.from = space(text, space(text, end)+1)
		m.to = skip(text, m.from)
		at = space(text, m.to)
		m.end = m.to
		if text[at] == ',' {
			at++
			m.end = at
		}
		o.members = append(o.members, m)
	}
	o.close = at
	return o, nil
}

func (o object) find(name string) int {
	return slices.IndexFunc(o.members, func(m member) bool { return m.name == name })
}

// check refuses what is not one JSON object without names twice on the path.
func check(text []byte) error {
	if err := json.Unmarshal(text, &map[string]json.RawMessage{}); err != nil {
		return fmt.Errorf("parse JSON: %w", err)
	}
	return nil
}

// Get returns the text of a member's value; nil if it is not there.
func Get(text []byte, path ...string) []byte {
	if check(text) != nil {
		return nil
	}
	at := 0
	for i, name := range path {
		o, err := read(text, at)
		if err != nil {
			return nil
		}
		m := o.find(name)
		if m < 0 {
			return nil
		}
		if at = o.members[m].from; i == len(path)-1 {
			return text[at:o.members[m].to]
		}
	}
	return nil
}

// Set gives a member this value and makes the objects on the way. An equal value stays as it is
// written.
func Set(text []byte, value any, path ...string) ([]byte, error) {
	if err := check(text); err != nil {
		return nil, err
	}
	if len(path) == 0 || len(path) > maxDepth {
		return nil, ErrShape
	}
	at := 0
	for depth, name := range path {
		o, err := read(text, at)
		if err != nil {
			return nil, err
		}
		m := o.find(name)
		if m < 0 {
			for _, outer := range slices.Backward(path[depth+1:]) {
				value = map[string]any{outer: value}
			}
			return insert(text, o, name, value, depth)
		}
		at = o.members[m].from
		if depth < len(path)-1 {
			continue
		}
		old := text[at:o.members[m].to]
		fresh, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("write JSON: %w", err)
		}
		if equal(old, fresh) {
			return text, nil
		}
		style := styleOf(text, o, depth)
		fresh, err = style.render(value)
		if err != nil {
			return nil, err
		}
		return slices.Concat(text[:at], fresh, text[o.members[m].to:]), nil
	}
	return text, nil
}

func equal(a, b []byte) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	ca, errA := json.Marshal(x)
	cb, errB := json.Marshal(y)
	return errA == nil && errB == nil && bytes.Equal(ca, cb)
}

// style is how an object's members are set.
type style struct {
	lead string // before each member, with the line end; "" on one line
	unit string
}

func styleOf(text []byte, o object, depth int) style {
	s := style{unit: "    "}
	nl := "\n"
	if bytes.Contains(text, []byte("\r\n")) {
		nl = "\r\n"
	}
	// The unit is what the outermost object's first member is indented by.
	if top, err := read(text, 0); err == nil && len(top.members) > 0 {
		gap := string(text[top.open+1 : top.members[0].key])
		if i := strings.LastIndexByte(gap, '\n'); i >= 0 && i+1 < len(gap) {
			s.unit = gap[i+1:]
		} else if i < 0 && len(o.members) > 0 {
			return s
		}
	}
	if n := len(o.members); n > 0 {
		gap := string(text[o.open+1 : o.members[0].key])
		i := strings.LastIndexByte(gap, '\n')
		if i < 0 {
			return s
		}
		s.lead = nl + gap[i+1:]
		return s
	}
	s.lead = nl + strings.Repeat(s.unit, depth+1)
	return s
}

func (s style) render(value any) ([]byte, error) {
	var out []byte
	var err error
	if s.lead == "" {
		out, err = json.Marshal(value)
	} else {
		nl := s.lead[:strings.IndexByte(s.lead, '\n')+1]
		out, err = json.MarshalIndent(value, s.lead[len(nl):], s.unit)
		out = bytes.ReplaceAll(out, []byte("\n"), []byte(nl))
	}
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return out, nil
}

// insert appends a member.
func insert(text []byte, o object, name string, value any, depth int) ([]byte, error) {
	s := styleOf(text, o, depth)
	rendered, err := s.render(value)
	if err != nil {
		return nil, err
	}
	key, err := json.Marshal(name)
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	pair := slices.Concat(key, []byte(": "), rendered)
	if n := len(o.members); n > 0 {
		lead := s.lead
		if lead == "" {
			lead = " "
		}
		at := o.members[n-1].to
		return slices.Concat(text[:at], []byte(","+lead), pair, text[at:]), nil
	}
	closing := ""
	if i := strings.IndexByte(s.lead, '\n'); i >= 0 {
		closing = s.lead[:i+1] + strings.TrimSuffix(s.lead[i+1:], s.unit)
	}
	return slices.Concat(text[:o.open+1], []byte(s.lead), pair, []byte(closing), text[o.close:]), nil
}

// Delete takes a member out; the objects that it leaves empty stay.
func Delete(text []byte, path ...string) ([]byte, error) {
	if err := check(text); err != nil {
		return nil, err
	}
	at := 0
	for depth, name := range path {
		o, err := read(text, at)
		if err != nil {
			return nil, err
		}
		i := o.find(name)
		if i < 0 {
			return text, nil
		}
		if depth < len(path)-1 {
			at = o.members[i].from
			continue
		}
		switch {
		case i > 0:
			return slices.Concat(text[:o.members[i-1].to], text[o.members[i].to:]), nil
		case len(o.members) > 1:
			return slices.Concat(text[:o.members[0].key], text[o.members[1].key:]), nil
		}
		return slices.Concat(text[:o.open+1], text[o.close:]), nil
	}
	return text, nil
}
