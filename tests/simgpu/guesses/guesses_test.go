// SPDX-License-Identifier: Apache-2.0

package guesses

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	document = "../../../docs/simulated-gpu.md"
	heading  = "\n## How each guess is checked on hardware\n"
)

func all(t *testing.T) []Guess {
	t.Helper()
	list, err := All()
	if err != nil {
		t.Fatal(err)
	}
	if len(list) < 30 {
		t.Fatalf("only %d guesses", len(list))
	}
	return list
}

// split gives the document before its table of checks, and the rows of that.
func split(t *testing.T) (before string, rows [][]string) {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, after, ok := strings.Cut(string(text), heading)
	if !ok {
		t.Fatalf("%s has no%q", document, heading)
	}
	after, _, _ = strings.Cut(after, "\n## ")
	for line := range strings.Lines(after) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if strings.HasPrefix(line, "| `") {
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			rows = append(rows, cells)
		}
	}
	return before, rows
}

// TestDocumentHasTheList: the table of checks is the list.
func TestDocumentHasTheList(t *testing.T) {
	var want [][]string
	for _, g := range all(t) {
		needs := g.Needs
		if needs == "" {
			needs = "-"
		}
		want = append(want, []string{"`" + g.ID + "`", g.Here, g.Check, needs})
	}
	if _, rows := split(t); !cmp.Equal(want, rows) {
		var text strings.Builder
		for _, r := range want {
			text.WriteString("| " + strings.Join(r, " | ") + " |\n")
		}
		t.Errorf("the table of checks is not the list (-list +document):\n%s\nit should be:\n%s", cmp.Diff(want, rows), text.String())
	}
}

// marked is where the document calls something a guess, with what it names it.
var marked = regexp.MustCompile("(?i)guess(?:es)?\\b(: `[a-z0-9-]+`(?:, `[a-z0-9-]+`)*)?")

// TestEveryGuessIsNamed: whatever the document calls a guess is one of the list, and each of the list is
// called so where the document says what is modelled.
func TestEveryGuessIsNamed(t *testing.T) {
	known, named := map[string]bool{}, map[string]bool{}
	for _, g := range all(t) {
		known[g.ID] = true
	}
	before, _ := split(t)
	// The introduction says what the word means.
	_, body, ok := strings.Cut(before, "\n## What it models\n")
	if !ok {
		t.Fatalf("%s does not say what is modelled", document)
	}
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "- ") {
			continue
		}
		for _, m := range marked.FindAllStringSubmatch(line, -1) {
			if m[1] == "" {
				t.Errorf("a guess without its id: %s", line)
			}
			for _, id := range regexp.MustCompile("`([a-z0-9-]+)`").FindAllStringSubmatch(m[1], -1) {
				if !known[id[1]] {
					t.Errorf("%s is in no list: %s", id[1], line)
				}
				named[id[1]] = true
			}
		}
	}
	for id := range known {
		if !named[id] {
			t.Errorf("%s is in the list, and nothing that is modelled is marked with it", id)
		}
	}
}

// TestEveryGuessHasAProbe: what runs on hardware names each, so that none is only documented.
func TestEveryGuessHasAProbe(t *testing.T) {
	var sources []byte
	for _, glob := range []string{"../../hardware/*.go", "../../hardware/probe/*.c"} {
		files, err := filepath.Glob(glob)
		if err != nil || len(files) == 0 {
			t.Fatalf("find %s: %v %v", glob, files, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			sources = append(sources, text...)
		}
	}
	for _, g := range all(t) {
		if !bytes.Contains(sources, []byte(`"`+g.ID+`"`)) {
			t.Errorf("%s: nothing in tests/hardware answers it", g.ID)
		}
	}
}

func TestBrokenLists(t *testing.T) {
	for name, tt := range map[string]struct{ text, want string }{
		"not TOML":      {"[[guess", "read the list of guesses"},
		"unknown field": {"[[guess]]\nid = \"a\"\nhere = \"b\"\ncheck = \"c\"\nneed = \"d\"\n", "read the list of guesses"},
		"no id":         {"[[guess]]\nhere = \"b\"\ncheck = \"c\"\n", `number 1: id ""`},
		"odd id":        {"[[guess]]\nid = \"A b\"\nhere = \"b\"\ncheck = \"c\"\n", `id "A b"`},
		"no check":      {"[[guess]]\nid = \"a\"\nhere = \"b\"\n", "a: what is done here, or how to check it, is missing"},
		"twice":         {"[[guess]]\nid = \"a\"\nhere = \"b\"\ncheck = \"c\"\n[[guess]]\nid = \"a\"\nhere = \"b\"\ncheck = \"c\"\n", "a is there twice"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parse([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}
