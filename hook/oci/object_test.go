// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

func TestObjectKeepsBytes(t *testing.T) {
	const text = `{ "z" : 1.0e3 , "a":[1, 2 ,3],
		"big": 123456789012345678901234567890, "neg":-0, "tiny":1E-400,
		"text":"\u00e9\/<&>", "k\u0065y": true, "nested": { "x" :  null }, "empty":{}}`
	o, err := parseDocument([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	nested, err := o.child("nested")
	if err != nil {
		t.Fatal(err)
	}
	nested.set("y", quote("a<b"))
	got := string(o.bytes())
	want := `{"z":1.0e3,"a":[1, 2 ,3],"big":123456789012345678901234567890,"neg":-0,"tiny":1E-400,` +
		`"text":"\u00e9\/<&>","k\u0065y":true,"nested":{"x":null,"y":"a<b"},"empty":{}}`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestObjectChildAppearsWhenSet(t *testing.T) {
	o, err := parseDocument([]byte(`{"a":1}`))
	if err != nil {
		t.Fatal(err)
	}
	linux, err := o.child("linux")
	if err != nil {
		t.Fatal(err)
	}
	resources, err := linux.child("resources")
	if err != nil {
		t.Fatal(err)
	}
	if got := string(o.bytes()); got != `{"a":1}` {
		t.Errorf("reading changed the document: %s", got)
	}
	resources.setList("devices", []json.RawMessage{quote("d")})
	linux.set("b", quote("c"))
	if got := string(o.bytes()); got != `{"a":1,"linux":{"resources":{"devices":["d"]},"b":"c"}}` {
		t.Error(got)
	}
}

func TestParseDocumentRefuses(t *testing.T) {
	tests := []struct{ text, want string }{
		{``, "ends in the middle"},
		{`{`, "ends in the middle"},
		{`{"a":`, "ends in the middle"},
		{`{"a":[1,2`, "ends in the middle"},
		{`{"a":"b`, "ends in the middle"},
		{`[]`, "is not a JSON object"},
		{`null`, "is not a JSON object"},
		{`"x"`, "is not a JSON object"},
		{`7`, "is not a JSON object"},
		{`{} x`, "is not JSON"},
		{`{}{}`, "is not JSON"},
		{`{'a':1}`, "is not JSON"},
		{"\x00\x01", "is not JSON"},
		{`{"a":1,}`, "is not JSON"},
		{`{"a":1,"a":2}`, `names "a" twice`},
		{`{"mounts":[],"Mounts":[]}`, `names "mounts" twice ("Mounts")`},
		{"{\"linu\u03c3\":1,\"linu\u03c2\":2}", "twice"}, // sigma and final sigma fold together
		{`{"pro\u017fess":1,"pro\u0073ess":2}`, "twice"}, // long s
	}
	for _, test := range tests {
		_, err := parseDocument([]byte(test.text))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v, want %q", test.text, err, test.want)
		}
	}
}

func TestParseMapMindsCase(t *testing.T) {
	if _, err := parseMap([]byte(`{"a":"1","A":"2"}`)); err != nil {
		t.Error(err)
	}
	if _, err := parseMap([]byte(`{"a":"1","\u0061":"2"}`)); err == nil {
		t.Error("the same name in two spellings is taken for two")
	}
}

func TestListOfWrongKind(t *testing.T) {
	o, err := parseDocument([]byte(`{"a":{}, "b":null, "c":[]}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.list("a"); err == nil || !strings.Contains(err.Error(), "a is not a JSON array") {
		t.Error(err)
	}
	for _, name := range []string{"b", "c", "d"} {
		if l, err := o.list(name); err != nil || len(l) != 0 {
			t.Errorf("%s: %v %v", name, l, err)
		}
	}
	if _, err := o.child("c"); err == nil || !strings.Contains(err.Error(), "c is not a JSON object") {
		t.Error(err)
	}
}

// Whatever is accepted comes out as JSON of the same meaning, and again as itself.
func FuzzDocument(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"a":1}`, `{"a":{"b":[{"c":1.50}]},"d":"\ud800"}`, `{"process":{"env":["A=1"]},"Process":null}`,
		`{"a":1,"a":2}`, `{"\u0061":1,"b":2}`, ` { "a" : 1 , "b" : 2 } `, "{\"\xff\":1}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		o, err := parseDocument(text)
		if err != nil {
			return
		}
		out := o.bytes()
		var before, after any
		if err := json.Unmarshal(text, &before); err != nil {
			t.Fatalf("accepted %q, which is not JSON: %v", text, err)
		}
		if err := json.Unmarshal(out, &after); err != nil {
			t.Fatalf("%q became %q, which is not JSON: %v", text, out, err)
		}
		b, _ := json.Marshal(before)
		a, _ := json.Marshal(after)
		if !bytes.Equal(a, b) {
			t.Fatalf("%q became %q", text, out)
		}
		again, err := parseDocument(out)
		if err != nil || !bytes.Equal(again.bytes(), out) {
			t.Fatalf("%q is not stable: %v", out, err)
		}
	})
}
