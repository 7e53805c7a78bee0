// SPDX-License-Identifier: Apache-2.0

package jsontext

import (
	"encoding/json"
	"testing"
)

func TestSetAndDelete(t *testing.T) {
	runtime := map[string]any{"path": "/x"}
	for _, tt := range []struct{ name, before, after, deleted string }{
		{"empty object", "{}", "{\n    \"runtimes\": {\n        \"gpufence\": {\n            \"path\": \"/x\"\n        }\n    }\n}", "{\n    \"runtimes\": {}\n}"},
		{"two spaces", "{\n  \"a\": [1, \"}\"]\n}\n", "{\n  \"a\": [1, \"}\"],\n  \"runtimes\": {\n    \"gpufence\": {\n      \"path\": \"/x\"\n    }\n  }\n}\n", "{\n  \"a\": [1, \"}\"],\n  \"runtimes\": {}\n}\n"},
		{"tabs, existing runtimes", "{\n\t\"runtimes\": {\n\t\t\"nvidia\": {\"path\": \"n\"}\n\t}\n}\n", "{\n\t\"runtimes\": {\n\t\t\"nvidia\": {\"path\": \"n\"},\n\t\t\"gpufence\": {\n\t\t\t\"path\": \"/x\"\n\t\t}\n\t}\n}\n", "{\n\t\"runtimes\": {\n\t\t\"nvidia\": {\"path\": \"n\"}\n\t}\n}\n"},
		{"one line", `{"a": {"b": "\""}, "c": 1.50}`, `{"a": {"b": "\""}, "c": 1.50, "runtimes": {"gpufence":{"path":"/x"}}}`, `{"a": {"b": "\""}, "c": 1.50, "runtimes": {}}`},
		{"CRLF", "{\r\n  \"a\": 1\r\n}\r\n", "{\r\n  \"a\": 1,\r\n  \"runtimes\": {\r\n    \"gpufence\": {\r\n      \"path\": \"/x\"\r\n    }\r\n  }\r\n}\r\n", "{\r\n  \"a\": 1,\r\n  \"runtimes\": {}\r\n}\r\n"},
		{"same value, written otherwise", `{"runtimes":{"gpufence":{ "path" : "\/x" }}}`, `{"runtimes":{"gpufence":{ "path" : "\/x" }}}`, `{"runtimes":{}}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			after, err := Set([]byte(tt.before), runtime, "runtimes", "gpufence")
			if err != nil || string(after) != tt.after {
				t.Fatalf("got\n%s\n%q, %v\nwant\n%q", after, after, err, tt.after)
			}
			again, err := Set(after, runtime, "runtimes", "gpufence")
			if err != nil || string(again) != string(after) {
				t.Errorf("a second time: %q, %v", again, err)
			}
			deleted, err := Delete(after, "runtimes", "gpufence")
			if err != nil || string(deleted) != tt.deleted {
				t.Errorf("deleted: %q, %v", deleted, err)
			}
		})
	}
	for _, bad := range []string{"", "[]", "null x", `{"runtimes": 3}`, `{"runtimes": [}`, `{"a":1,}`, "// c\n{}"} {
		if out, err := Set([]byte(bad), runtime, "runtimes", "gpufence"); err == nil {
			t.Errorf("%q became %q", bad, out)
		}
	}
}

// FuzzSet: the result is JSON, has the value, and everything else means the same.
func FuzzSet(f *testing.F) {
	f.Add(`{"a":{"b":[{"c":"d"}]}, "runtimes":{}}`)
	f.Add("{\n\t\"runtimes\" : { \"x\":{} } , \"y\":null}\n")
	f.Fuzz(func(t *testing.T, text string) {
		after, err := Set([]byte(text), "v", "runtimes", "gpufence")
		if err != nil {
			return
		}
		var before, now map[string]any
		if err := json.Unmarshal([]byte(text), &before); err != nil {
			t.Fatalf("%q was taken", text)
		}
		if err := json.Unmarshal(after, &now); err != nil {
			t.Fatalf("%q became %q: %v", text, after, err)
		}
		deleted, err := Delete(after, "runtimes", "gpufence")
		if err != nil {
			t.Fatal(err)
		}
		if got := Get(deleted, "runtimes", "gpufence"); got != nil && len(before) > 0 {
			// A name twice: the first one was set, the last one counts.
			return
		}
		if string(Get(after, "runtimes", "gpufence")) != `"v"` && Get([]byte(text), "runtimes") == nil {
			t.Fatalf("%q became %q", text, after)
		}
	})
}
