// SPDX-License-Identifier: Apache-2.0

package tomltext

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"
)

const pattern = "/etc/containerd/conf.d/*.toml"

var texts = []struct{ name, before, after string }{
	{"empty", "", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"},
	{"comment", "# hello\n", "# hello\nversion = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"},
	{"version", "version = 3\n", "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"},
	{"version with a comment, then a table", "version = 3 # three\n[grpc]\n  address = \"x\"\n", "version = 3 # three\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n[grpc]\n  address = \"x\"\n"},
	{"no line end", "version = 3", "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]"},
	{"CRLF", "version = 3\r\nroot = \"/x\"\r\n", "version = 3\r\nimports = [\"/etc/containerd/conf.d/*.toml\"]\r\nroot = \"/x\"\r\n"},
	{"one import", "imports = [\"/a.toml\"]\nversion = 2\n", "imports = [\"/a.toml\", \"/etc/containerd/conf.d/*.toml\"]\nversion = 2\n"},
	{"literal string, trailing comma", "version = 2\nimports = [ '/a.toml', ] # why\n", "version = 2\nimports = [ '/a.toml', \"/etc/containerd/conf.d/*.toml\", ] # why\n"},
	{"several lines", "version = 2\nimports = [\n  \"/a.toml\", # ]\n  '/b.toml'\n]\n", "version = 2\nimports = [\n  \"/a.toml\", # ]\n  '/b.toml', \"/etc/containerd/conf.d/*.toml\"\n]\n"},
	{"empty list", "version = 2\nimports = [ ]\n", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\" ]\n"},
	{"quoted key", "version = 2\n\"imports\" = []\n", "version = 2\n\"imports\" = [\"/etc/containerd/conf.d/*.toml\"]\n"},
	{"imports of a table is not ours", "version = 2\n[proxy]\nimports = [\"x\"]\n", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n[proxy]\nimports = [\"x\"]\n"},
	{"no version", "root = \"/x\"\n", "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\nroot = \"/x\"\n"},
	{"import without version", "imports = [\"/a\"]\n", "version = 2\nimports = [\"/a\", \"/etc/containerd/conf.d/*.toml\"]\n"},
}

func TestAddAndRemove(t *testing.T) {
	for _, tt := range texts {
		t.Run(tt.name, func(t *testing.T) {
			after, added, err := AddImport([]byte(tt.before), pattern, 2)
			if err != nil {
				t.Fatal(err)
			}
			if string(after) != tt.after {
				t.Errorf("got\n%q\nwant\n%q", after, tt.after)
			}
			again, nothing, err := AddImport(after, pattern, 2)
			if err != nil || !bytes.Equal(again, after) || nothing != (Added{}) {
				t.Errorf("a second time: %q, %+v, %v", again, nothing, err)
			}
			back, err := RemoveImport(after, pattern, added)
			if err != nil || string(back) != tt.before {
				t.Errorf("taken out: %q, %v; want %q", back, err, tt.before)
			}
		})
	}
}

func TestSomebodyElseAddedToo(t *testing.T) {
	after, added, err := AddImport([]byte("version = 2\n"), pattern, 2)
	if err != nil {
		t.Fatal(err)
	}
	more := bytes.Replace(after, []byte("]"), []byte(", \"/theirs\"]"), 1)
	back, err := RemoveImport(more, pattern, added)
	if err != nil || string(back) != "version = 2\nimports = [\"/theirs\"]\n" {
		t.Errorf("got %q, %v", back, err)
	}
	if back, err = RemoveImport([]byte("version = 2\n"), pattern, added); err != nil || string(back) != "version = 2\n" {
		t.Errorf("already gone: %q, %v", back, err)
	}
}

func TestShapesThatAreRefused(t *testing.T) {
	for _, text := range []string{"imports = \"/a\"\n", "imports = [1]\n", "imports = [\"/\\u0041\"]\n", "imports = [\"\"\"/a\"\"\"]\n", "imports = [[\"/a\"]]\n", "x = \n"} {
		if out, _, err := AddImport([]byte(text), pattern, 2); err == nil {
			t.Errorf("%q became %q", text, out)
		}
	}
}

func TestSetImports(t *testing.T) {
	for _, tt := range texts {
		out, err := SetImports([]byte(tt.before), 2, []string{"/x", "/y"})
		if err != nil {
			t.Fatal(tt.name, err)
		}
		var tree struct {
			Version int
			Imports []string
		}
		if err := toml.Unmarshal(out, &tree); err != nil || !slices.Equal(tree.Imports, []string{"/x", "/y"}) || tree.Version < 2 {
			t.Errorf("%s: %q is %+v, %v", tt.name, out, tree, err)
		}
	}
}

// FuzzAddAndRemove: whatever TOML is there, adding and removing gives the same bytes, the result is
// TOML that means the same but for imports, or nothing is changed.
func FuzzAddAndRemove(f *testing.F) {
	for _, tt := range texts {
		f.Add(tt.before)
	}
	f.Add("a = \"\"\"\n[x]\n\"\"\"\nversion = 2\n")
	f.Add("[a]\nb = '''\nversion = 1\n'''\n")
	f.Fuzz(func(t *testing.T, text string) {
		var before map[string]any
		if toml.Unmarshal([]byte(text), &before) != nil || strings.Contains(text, pattern) {
			return
		}
		after, added, err := AddImport([]byte(text), pattern, 2)
		if err != nil {
			return
		}
		var tree map[string]any
		if err := toml.Unmarshal(after, &tree); err != nil {
			t.Fatalf("%q became %q: %v", text, after, err)
		}
		if list, _ := tree["imports"].([]any); !slices.Contains(list, any(pattern)) {
			t.Fatalf("%q became %q, without the import", text, after)
		}
		if back, err := RemoveImport(after, pattern, added); err != nil || string(back) != text {
			t.Fatalf("%q became %q and then %q, %v", text, after, back, err)
		}
	})
}
