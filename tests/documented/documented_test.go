// SPDX-License-Identifier: Apache-2.0

package documented

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestEveryCommandIsRun: whoever adds a page with commands, or a command, says by whom it is run.
func TestEveryCommandIsRun(t *testing.T) {
	pages, err := Pages()
	if err != nil {
		t.Fatal(err)
	}
	found, withCommands := map[string]bool{}, map[string]bool{}
	count := map[string]int{}
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join(Root, page))
		if err != nil {
			t.Fatal(err)
		}
		commands, err := parse(page, string(text))
		if err != nil {
			t.Error(err)
		}
		for _, c := range commands {
			found[c.Text], withCommands[page] = true, true
			suite, why := owner(c)
			if suite == "" && why == "" {
				t.Errorf("%s:%d: nobody runs %q: name the suite that does", page, c.Line, c.Text)
			}
			count[suite]++
		}
	}
	for page := range suites {
		if !withCommands[page] {
			t.Errorf("%s has no command, or is not there", page)
		}
	}
	for _, list := range []map[string]string{others, notRun} {
		for command := range list {
			if !found[command] {
				t.Errorf("no page has the command %q", command)
			}
		}
	}
	for suite := range count {
		if suite != "" {
			runs(t, suite)
		}
	}
	for _, suite := range slices.Sorted(maps.Keys(count)) {
		t.Logf("%3d commands: %s", count[suite], map[bool]string{true: "not run", false: suite}[suite == ""])
	}
}

// runs looks whether the tests of a package ask for its share.
func runs(t *testing.T, suite string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(Root, suite, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), fmt.Sprintf("documented.Run(t, %q,", suite)) {
			return
		}
	}
	t.Errorf("no test of %s calls documented.Run for it", suite)
}

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		text string
		want []string
		err  string
	}{
		{"```console\n# one   # a remark\n  what it prints\n# two \\\n    three\n$ four\n```\n", []string{"one", "two three", "four"}, ""},
		{"```yaml\n# one\n```\n# A heading\n```text\n# two\n```\n", nil, ""},
		{"- a list\n    that goes on\n\n```console\n# one#two\n```\n", []string{"one#two"}, ""},
		{"Words:\n\n    gpufence ps\n", nil, "page.md:3: an indented block"},
		{"```\ngpufence ps\n```\n", nil, `page.md:1: a block of kind ""`},
		{"```sh\ngpufence ps\n```\n", nil, `page.md:1: a block of kind "sh"`},
	} {
		got, err := parse("page.md", tt.text)
		var texts []string
		for _, c := range got {
			texts = append(texts, c.Text)
		}
		if !slices.Equal(texts, tt.want) {
			t.Errorf("%q: %q, want %q", tt.text, texts, tt.want)
		}
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.err)
		}
	}
}
