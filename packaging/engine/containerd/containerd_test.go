// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/packaging/engine"
)

// files are an engine's, in memory.
type files map[string]string

func (f files) ReadFile(path string) ([]byte, error) {
	if text, ok := f[path]; ok {
		return []byte(text), nil
	}
	return nil, fs.ErrNotExist
}

func (f files) Glob(pattern string) ([]string, error) {
	var out []string
	for path := range f {
		if ok, err := filepath.Match(pattern, path); err != nil {
			return nil, err
		} else if ok {
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out, nil
}

func (f files) apply(plan engine.Plan) {
	for _, c := range plan.Changes {
		if c.After == nil {
			delete(f, c.Path)
		} else {
			f[c.Path] = string(c.After)
		}
	}
}

// TestFolderImportedLater: ours is found where it is, though the main file has come to import another folder.
func TestFolderImportedLater(t *testing.T) {
	const config, ours = "/etc/containerd/config.toml", "/etc/containerd/conf.d/" + DropInName
	before := "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"
	f := files{config: before}
	request := engine.Request{Config: config, Handler: "gpufence", Wrapper: "/usr/bin/gpufence-runtime.cri", Major: 2}
	plan, err := Install(f, request)
	if err != nil {
		t.Fatal(err)
	}
	f.apply(plan)
	if f[ours] == "" {
		t.Fatalf("files %v", f)
	}
	f[config] = strings.Replace(before, "]", ", \"/etc/containerd/more/*.toml\"]", 1)
	if plan, err = Install(f, request); err != nil || plan.Differs() {
		t.Errorf("a second file is written: %v %+v", err, plan.Changes)
	}
	if plan, err = Uninstall(f, request); err != nil || !plan.Differs() {
		t.Fatalf("nothing is uninstalled: %v %+v", err, plan)
	}
	f.apply(plan)
	if _, there := f[ours]; there || len(f) != 1 {
		t.Errorf("files %v", f)
	}
	// A file of somebody else by that name is not taken for ours.
	f[ours] = "version = 3\n"
	if plan, err = Install(f, request); err != nil || !slices.ContainsFunc(plan.Changes, func(c engine.Change) bool { return c.Path == "/etc/containerd/more/"+DropInName }) {
		t.Errorf("%v %+v", err, plan.Changes)
	}
}
