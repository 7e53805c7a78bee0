// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The table has every constant, in order, once.
func TestCodesTable(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "codes.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var constants []Code
	ast.Inspect(file, func(n ast.Node) bool {
		if s, ok := n.(*ast.ValueSpec); ok && len(s.Values) == 1 {
			if lit, ok := s.Values[0].(*ast.BasicLit); ok {
				v, err := strconv.Unquote(lit.Value)
				if err != nil {
					t.Fatal(err)
				}
				constants = append(constants, Code(v))
			}
		}
		return true
	})
	var table []Code
	for _, c := range Codes() {
		table = append(table, c.Code)
		if !regexp.MustCompile(`^E1[0-8][0-9][0-9]$`).MatchString(string(c.Code)) || c.Title == "" {
			t.Errorf("code %q, title %q", c.Code, c.Title)
		}
	}
	if !slices.Equal(constants, table) {
		t.Errorf("constants %v\ntable %v", constants, table)
	}
	if !slices.IsSorted(table) || len(slices.Compact(slices.Clone(table))) != len(table) {
		t.Errorf("not in order, or twice: %v", table)
	}
}

func TestCodesAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[Code]string{}
	sections := regexp.MustCompile(`(?m)^### `).Split(string(text), -1)[1:]
	for _, s := range sections {
		head, body, _ := strings.Cut(s, "\n")
		code, title, ok := strings.Cut(head, ": ")
		if !ok || documented[Code(code)] != "" {
			t.Errorf("heading %q", head)
		}
		documented[Code(code)] = title
		body, _, _ = strings.Cut(body, "\n## ")
		if len(strings.TrimSpace(body)) < 30 {
			t.Errorf("%s says too little: %q", code, body)
		}
	}
	for _, c := range Codes() {
		if documented[c.Code] != c.Title {
			t.Errorf("%s is %q in the table and %q in docs/errors.md", c.Code, c.Title, documented[c.Code])
		}
		delete(documented, c.Code)
	}
	for c := range documented {
		t.Errorf("docs/errors.md has %s, which does not exist", c)
	}
}

// A code that nothing gives must not be in the table, nor in the documentation.
func TestCodesAreUsed(t *testing.T) {
	used := map[string]bool{}
	for _, root := range []string{"../../cmd", "../../enforcer", "../../hook", "../../packaging"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || filepath.Base(path) == "codes.go" {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range regexp.MustCompile(`\bCode[A-Z]\w*`).FindAllString(string(text), -1) {
				used[m] = true
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile("codes.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^\t(Code\w+)\s+Code = `).FindAllStringSubmatch(string(text), -1) {
		if !used[m[1]] {
			t.Errorf("nothing gives %s", m[1])
		}
	}
}

func TestError(t *testing.T) {
	inner := errors.New("no space left")
	err := NewError(CodePages, "cannot make the pages: %w", inner).WithHint("make room in %s", "/run")
	if got, want := err.Error(), "E1706 cannot make the pages: no space left: make room in /run"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := err.Sentence(), "cannot make the pages: no space left: make room in /run"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	wrapped := fmt.Errorf("prepare: %w", err)
	if !errors.Is(wrapped, CodePages) || errors.Is(wrapped, CodeNoUnit) || !errors.Is(wrapped, inner) || CodeOf(wrapped) != CodePages {
		t.Errorf("%v is not what it is", wrapped)
	}
	if CodeOf(inner) != "" || CodeOf(nil) != "" || CodePages.Error() != "E1706" {
		t.Error("a code where there is none")
	}
	plain := NewError(CodeInternal, "x")
	if plain.Error() != "E1099 x" || plain.Unwrap() != nil {
		t.Errorf("got %q", plain)
	}
}
