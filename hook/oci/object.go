// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
)

// member is one name of a JSON object with its value's own bytes.
type member struct {
	name  string
	key   json.RawMessage // as it was written, quotes included
	value json.RawMessage
}

// object is one level of a JSON document. Names keep their order and values their bytes, so
// that what is not edited comes out as it went in, numbers and unknown fields included. A level that was
// reached by child writes itself into the level above it whenever it changes.
type object struct {
	members []member
	parent  *object
	name    string // in parent
}

// errNotObject and errNotArray say what a value should have been.
var (
	errNotObject = errors.New("is not a JSON object")
	errNotArray  = errors.New("is not a JSON array")
)

// parseObject reads one level of a document whose syntax was checked. JSON null counts as an
// empty object, as it does for runc.
//
// A name that occurs twice is an error, and so is one that differs from another only in case:
// runtimes in Go match names without regard to case and merge the two, others take the first
// or the last, so that we could not know which container we are fencing.
func parseObject(raw json.RawMessage) (*object, error) {
	return parseNames(raw, fold)
}

// parseMap is parseObject for objects whose names are data (annotations): case matters.
func parseMap(raw json.RawMessage) (*object, error) {
	return parseNames(raw, func(s string) string { return s })
}

// fold maps names that Go's decoder takes for one to the same string.
func fold(name string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		return least
	}, name)
}

func parseNames(raw json.RawMessage, canonical func(string) string) (*object, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return &object{}, nil
	}
	if raw[0] != '{' {
		return nil, errNotObject
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if _, err := dec.Token(); err != nil {
		return nil, err
	}
	o := &object{}
	seen := map[string]string{}
	for dec.More() {
		start := dec.InputOffset()
		tok, err := dec.Token()
		if err != nil {
			return nil, eof(err)
		}
		name, ok := tok.(string)
		if !ok {
			return nil, fmt.Errorf("has the name %v, which is not a string", tok)
		}
		folded := canonical(name)
		if other, twice := seen[folded]; twice {
			return nil, fmt.Errorf("names %q twice (%q)", other, name)
		}
		seen[folded] = name
		key := raw[start:dec.InputOffset()]
		key = key[bytes.IndexByte(key, '"'):] // a comma and white space may precede it
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, eof(err)
		}
		o.members = append(o.members, member{name: name, key: bytes.Clone(key), value: value})
	}
	if _, err := dec.Token(); err != nil { // the closing brace
		return nil, eof(err)
	}
	return o, nil
}

// eof makes "ends too early" of the decoder's two ways to say it.
func eof(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errTruncated
	}
	return err
}

var errTruncated = errors.New("ends in the middle")

// get returns the value of a name, nil if it is not there. Names match as Go runtimes match
// them: without regard to case.
func (o *object) get(name string) json.RawMessage {
	for _, m := range o.members {
		if strings.EqualFold(m.name, name) {
			return m.value
		}
	}
	return nil
}

// set replaces the value of a name, or appends it.
func (o *object) set(name string, value json.RawMessage) {
	i := slices.IndexFunc(o.members, func(m member) bool { return strings.EqualFold(m.name, name) })
	if i < 0 {
		o.members = append(o.members, member{name: name, key: quote(name), value: value})
	} else {
		o.members[i].value = value
	}
	if o.parent != nil {
		o.parent.set(o.name, o.bytes())
	}
}

// child parses the object below a name; an absent one is empty, and appears when it is given
// a member. Two children of one name do not see each other's changes.
func (o *object) child(name string) (*object, error) {
	c, err := parseObject(o.get(name))
	if err != nil {
		return nil, fmt.Errorf("%s %w", name, err)
	}
	c.parent, c.name = o, name
	return c, nil
}

// list parses the array below a name; an absent one is empty.
func (o *object) list(name string) ([]json.RawMessage, error) {
	raw := o.get(name)
	if raw == nil {
		return nil, nil
	}
	raw = bytes.TrimSpace(raw)
	if len(raw) > 0 && raw[0] != '[' && !bytes.Equal(raw, []byte("null")) {
		return nil, fmt.Errorf("%s %w", name, errNotArray)
	}
	var elems []json.RawMessage
	if err := json.Unmarshal(raw, &elems); err != nil {
		return nil, fmt.Errorf("%s: %w", name, eof(err))
	}
	return elems, nil
}

// setList replaces the array below a name.
func (o *object) setList(name string, elems []json.RawMessage) {
	var b bytes.Buffer
	b.WriteByte('[')
	for i, e := range elems {
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(e)
	}
	b.WriteByte(']')
	o.set(name, b.Bytes())
}

// bytes writes the level back.
func (o *object) bytes() json.RawMessage {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o.members {
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(m.key)
		b.WriteByte(':')
		b.Write(m.value)
	}
	b.WriteByte('}')
	return b.Bytes()
}

// encode is json.Marshal without its escapes for HTML, which would change what people read.
func encode(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

// quote encodes a string, which cannot fail.
func quote(s string) json.RawMessage {
	b, err := encode(s)
	if err != nil {
		panic("encode a string: " + err.Error()) // json has no string that it refuses
	}
	return b
}
