// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/gpufence/gpufence/packaging/engine"
)

var update = flag.Bool("update", false, "write what install says into testdata/install")

// form is one real-world form of an engine's configuration: testdata/install/NAME.txtar has the
// files, the flags ("args"), what else is done to the files ("setup"), what --dry-run prints
// ("want") and says ("stderr"). ROOT stands for the folder that is their root.
type form struct {
	name    string
	archive *txtar.Archive
	root    string
	args    []string
}

func (f *form) section(name string) string {
	for _, file := range f.archive.Files {
		if file.Name == name {
			return string(file.Data)
		}
	}
	return ""
}

var formSections = []string{"args", "setup", "want", "stderr"}

func loadForms(t *testing.T) []*form {
	t.Helper()
	paths, err := filepath.Glob("testdata/install/*.txtar")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no forms: %v", err)
	}
	var forms []*form
	for _, path := range paths {
		archive, err := txtar.ParseFile(path)
		if err != nil {
			t.Fatal(err)
		}
		forms = append(forms, &form{name: strings.TrimSuffix(filepath.Base(path), ".txtar"), archive: archive})
	}
	return forms
}

// unpack writes the files below a folder.
func (f *form) unpack(t *testing.T) {
	t.Helper()
	check := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	f.root = t.TempDir()
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		// Every write is synced; in memory that costs nothing.
		f.root, err = os.MkdirTemp("/dev/shm", "gpufence-form-")
		check(err)
		t.Cleanup(func() { check(os.RemoveAll(f.root)) })
	}
	for _, file := range f.archive.Files {
		if slices.Contains(formSections, file.Name) {
			continue
		}
		path := filepath.Join(f.root, file.Name)
		check(os.MkdirAll(filepath.Dir(path), 0o755))
		check(os.WriteFile(path, bytes.ReplaceAll(file.Data, []byte("/ROOT/"), []byte(f.root+"/")), 0o644))
	}
	for line := range strings.Lines(f.section("setup")) {
		word := strings.Fields(line)
		path := filepath.Join(f.root, word[1])
		text, err := os.ReadFile(path)
		switch word[0] {
		case "crlf":
			check(err)
			check(os.WriteFile(path, bytes.ReplaceAll(text, []byte("\n"), []byte("\r\n")), 0o644))
		case "bom":
			check(err)
			check(os.WriteFile(path, append([]byte("\xef\xbb\xbf"), text...), 0o644))
		case "chop":
			check(err)
			check(os.WriteFile(path, bytes.TrimRight(text, "\r\n"), 0o644))
		case "empty":
			check(os.MkdirAll(filepath.Dir(path), 0o755))
			check(os.WriteFile(path, nil, 0o644))
		case "chmod":
			check(os.Chmod(path, 0o400))
		case "link":
			check(os.MkdirAll(filepath.Dir(path), 0o755))
			check(os.Symlink(filepath.Join(f.root, word[2]), path))
		default:
			t.Fatalf("setup %q", line)
		}
	}
	wrapper := filepath.Join(f.root, "opt/gpufence-runtime")
	check(os.MkdirAll(filepath.Dir(wrapper), 0o755))
	check(os.WriteFile(wrapper, []byte("#!/bin/sh\n"), 0o755))
	check(os.WriteFile(filepath.Join(f.root, "opt/gpufence-hook"), []byte("#!/bin/sh\n"), 0o755))
	f.args = nil
	for _, arg := range strings.Fields(f.section("args")) {
		f.args = append(f.args, strings.ReplaceAll(arg, "/ROOT/", f.root+"/"))
	}
	f.args = append(f.args, "--runtime-path", wrapper)
}

func (f *form) run(t *testing.T, command string, more ...string) (stdout, stderr string, status int) {
	t.Helper()
	args := slices.Concat([]string{command}, f.args, more)
	if command == "uninstall" {
		args = slices.DeleteFunc(args, func(a string) bool { return a == "--set-as-default" || a == "--cdi.enabled" || a == "--hooks" })
		for i := slices.Index(args, "--wrap"); i >= 0; i = slices.Index(args, "--wrap") {
			args = slices.Delete(args, i, i+2)
		}
	}
	var out, errOut bytes.Buffer
	status = Run(t.Context(), args, func(string) string { return "" }, &out, &errOut)
	return strings.ReplaceAll(out.String(), f.root+"/", "/ROOT/"), strings.ReplaceAll(errOut.String(), f.root+"/", "/ROOT/"), status
}

// tree is every file below the root with its mode, its inode's kind and its bytes.
func (f *form) tree(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(f.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			out[path], err = os.Readlink(path)
			return err
		}
		text, err := os.ReadFile(path)
		out[path] = fmt.Sprintf("%s %s", info.Mode(), text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func difference(a, b map[string]string) string {
	var out []string
	for path := range a {
		if _, ok := b[path]; !ok {
			out = append(out, "gone: "+path)
		}
	}
	for path, text := range b {
		if a[path] != text {
			out = append(out, fmt.Sprintf("%s: %q, was %q", path, text, a[path]))
		}
	}
	return strings.Join(out, "\n")
}

// TestForms: for every form the right patch or one sentence with a code, nothing changed by
// --dry-run, the same by a real installation, nothing by a second one, and after uninstall every
// byte as it was.
func TestForms(t *testing.T) {
	forms := loadForms(t)
	if len(forms) < 25 {
		t.Errorf("%d forms, want at least 25", len(forms))
	}
	for _, f := range forms {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel() // most of it waits for the disk
			f.unpack(t)
			before := f.tree(t)
			stdout, stderr, status := f.run(t, "install", "--dry-run", "--validate", "never")
			if d := difference(before, f.tree(t)); d != "" {
				t.Errorf("--dry-run changed\n%s", d)
			}
			if *update {
				f.write(t, stdout, stderr)
				return
			}
			if want := f.section("want"); unCR(stdout) != want {
				t.Errorf("--dry-run prints\n%s\nwant\n%s", stdout, want)
			}
			if want := f.section("stderr"); stderr != want {
				t.Errorf("--dry-run says\n%s\nwant\n%s", stderr, want)
			}
			if refused := regexp.MustCompile(`(?m)^gpufence: E1[0-9]{3} .+: .+$`).MatchString(stderr); (status == 1) != refused || status > 1 {
				t.Fatalf("status %d with %q", status, stderr)
			}
			_, installErr, installStatus := f.run(t, "install", "--validate", "never")
			if installStatus != status {
				t.Fatalf("install: %d %s; --dry-run: %d", installStatus, installErr, status)
			}
			if status != exitOK {
				if d := difference(before, f.tree(t)); d != "" {
					t.Errorf("the refused installation changed\n%s", d)
				}
				return
			}
			installed := f.tree(t)
			if out, _, status := f.run(t, "install", "--validate", "never"); status != exitOK || out != "nothing to change\n" {
				t.Errorf("a second time: %d %s", status, out)
			}
			if d := difference(installed, f.tree(t)); d != "" {
				t.Errorf("the second installation changed\n%s", d)
			}
			if _, stderr, status := f.run(t, "uninstall", "--validate", "never"); status != exitOK {
				t.Fatalf("uninstall: %d %s", status, stderr)
			}
			if d := difference(before, f.tree(t)); d != "" {
				t.Errorf("after uninstall\n%s", d)
			}
			if out, _, status := f.run(t, "uninstall", "--validate", "never"); status != exitOK || out != "nothing to change\n" {
				t.Errorf("uninstall a second time: %d %s", status, out)
			}
		})
	}
}

// unCR: what is in testdata has no CR, so that no tool changes its line ends.
func unCR(s string) string { return strings.ReplaceAll(s, "\r", "") }

func (f *form) write(t *testing.T, stdout, stderr string) {
	t.Helper()
	f.archive.Files = slices.DeleteFunc(f.archive.Files, func(x txtar.File) bool { return x.Name == "want" || x.Name == "stderr" })
	for name, text := range map[string]string{"want": unCR(stdout), "stderr": stderr} {
		if text != "" {
			f.archive.Files = append(f.archive.Files, txtar.File{Name: name, Data: []byte(text)})
		}
	}
	slices.SortStableFunc(f.archive.Files, func(a, b txtar.File) int {
		return slices.Index([]string{"want", "stderr"}, a.Name) - slices.Index([]string{"want", "stderr"}, b.Name)
	})
	if err := os.WriteFile(filepath.Join("testdata/install", f.name+".txtar"), txtar.Format(f.archive), 0o644); err != nil {
		t.Fatal(err)
	}
}

// engineProgram is a program of tests/programs. Where it is not built yet the test says so; with
// GPUFENCE_ENGINES=1, as in make test-engines, that is a failure.
func engineProgram(t *testing.T, set string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "../../../tests/programs/build", "--path", set)
	out, err := cmd.Output()
	path := filepath.Join(strings.TrimSpace(string(out)), "containerd")
	if env := os.Getenv("GPUFENCE_TEST_" + strings.ToUpper(set)); env != "" {
		path, err = env, nil
	}
	if _, statErr := os.Stat(path); err != nil || statErr != nil {
		if os.Getenv("GPUFENCE_ENGINES") == "1" {
			t.Fatalf("%s is not built: %v %v", set, err, statErr)
		}
		t.Skipf("SKIPPED: %s is not built, so its loader was not asked: run tests/programs/build %s, or make test-engines", set, set)
	}
	return path
}

// TestLoaders: what install makes of every form of containerd's configuration is taken by the
// loader of real containerd, which then knows our runtime with the cgroup driver of runc, and
// everything else that it knew before.
func TestLoaders(t *testing.T) {
	for set, version := range map[string]string{"containerd1": "1.7.35", "containerd": "2.4.2"} {
		t.Run(version, func(t *testing.T) {
			program := engineProgram(t, set)
			asked := 0
			for _, f := range loadForms(t) {
				args := f.section("args")
				if !strings.Contains(args, "--runtime containerd") || strings.Contains(f.section("stderr"), "gpufence: E1") {
					continue
				}
				if newer := regexp.MustCompile(`(?m)^version = [34]`); set == "containerd1" && slices.ContainsFunc(f.archive.Files, func(x txtar.File) bool {
					return !slices.Contains(formSections, x.Name) && newer.Match(x.Data)
				}) {
					continue // containerd 1.7 does not know these versions
				}
				t.Run(f.name, func(t *testing.T) {
					f.unpack(t)
					if i := slices.Index(f.args, "--engine-version"); i >= 0 {
						f.args = slices.Delete(f.args, i, i+2)
					}
					f.args = append(f.args, "--executable-path", program)
					config := filepath.Join(f.root, "etc/containerd/config.toml")
					if i := slices.Index(f.args, "--config"); i >= 0 {
						config = f.args[i+1]
					}
					before, err := dump(t, program, config)
					if err != nil {
						t.Fatalf("containerd %s does not take this form as it is: %v", version, err)
					}
					text := fmt.Sprint(before)
					if _, stderr, status := f.run(t, "install", "--validate", "always"); status != exitOK {
						t.Fatalf("install: %s", stderr)
					}
					after, err := dump(t, program, config)
					if err != nil {
						t.Fatal(err)
					}
					asked++
					compareDumps(t, before, after, f)
					if _, stderr, status := f.run(t, "uninstall", "--validate", "always"); status != exitOK {
						t.Fatalf("uninstall: %s", stderr)
					}
					if again, err := dump(t, program, config); err != nil || fmt.Sprint(again) != text {
						t.Errorf("after uninstall containerd reads something else: %v", err)
					}
				})
			}
			t.Logf("containerd %s was asked about %d results", version, asked)
			if asked < 10 {
				t.Errorf("only %d forms reached the loader of containerd %s", asked, version)
			}
		})
	}
}

func dump(t *testing.T, program, config string) (map[string]any, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, "--config", config, "config", "dump")
	if _, err := os.Stat(config); err != nil {
		cmd = exec.CommandContext(t.Context(), program, "config", "default")
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, stderr.String())
	}
	var tree map[string]any
	if err := toml.Unmarshal(out, &tree); err != nil {
		t.Fatal(err)
	}
	delete(tree, "imports")
	return tree, nil
}

func compareDumps(t *testing.T, before, after map[string]any, f *form) {
	t.Helper()
	wrapper := filepath.Join(f.root, "opt/gpufence-runtime")
	runtimesOf := func(tree map[string]any) map[string]any {
		for _, plugin := range []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"} {
			if r := engine.Table(tree, "plugins", plugin, "containerd", "runtimes"); r != nil {
				return r
			}
		}
		return nil
	}
	was, is := runtimesOf(before), runtimesOf(after)
	ours := engine.Table(is, "gpufence")
	if got := engine.Table(ours, "options")["BinaryName"]; got != wrapper {
		t.Fatalf("the runtime's program is %v", got)
	}
	if got := engine.Strings(ours["pod_annotations"]); !slices.Contains(got, "gpufence.dev/*") {
		t.Errorf("pod_annotations are %v", got)
	}
	base := "runc"
	if was["nvidia"] != nil {
		base = "nvidia"
	}
	if got, want := engine.Table(ours, "options")["SystemdCgroup"] == true, engine.Table(was, base, "options")["SystemdCgroup"] == true; got != want {
		t.Errorf("SystemdCgroup is %v, and that of %s %v", got, base, want)
	}
	if is["runc"] == nil {
		t.Error("runc is gone")
	} else if !strings.Contains(string(txtar.Format(&txtar.Archive{Files: sources(f)})), "runtimes.runc") {
		// What containerd had by default is in a file now, and the rest of its fields are zero.
		if got := engine.Table(is, "runc")["runtime_type"]; got != "io.containerd.runc.v2" {
			t.Errorf("runc is of type %v", got)
		}
		delete(is, "runc")
		delete(was, "runc")
	}
	// Everything but what was asked for is as it was.
	delete(is, "gpufence")
	if i := slices.Index(f.args, "--wrap"); i >= 0 {
		name := f.args[i+1]
		if got := engine.Table(is, name, "options")["BinaryName"]; got != wrapper {
			t.Errorf("the wrapped runtime's program is %v", got)
		}
		delete(is, name)
		delete(was, name)
	}
	lines := func(tree map[string]any) []string {
		out, err := toml.Marshal(tree)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(string(out), "\n")
	}
	a, b := lines(before), lines(after)
	for _, line := range b {
		allowed := slices.Contains(f.args, "--set-as-default") && strings.Contains(line, "default_runtime_name") || slices.Contains(f.args, "--cdi.enabled") && strings.Contains(line, "enable_cdi")
		if !slices.Contains(a, line) && !allowed {
			t.Errorf("new: %s", line)
		}
	}
	for _, line := range a {
		allowed := slices.Contains(f.args, "--set-as-default") && strings.Contains(line, "default_runtime_name") || slices.Contains(f.args, "--cdi.enabled") && strings.Contains(line, "enable_cdi")
		if !slices.Contains(b, line) && !allowed {
			t.Errorf("lost: %s", line)
		}
	}
}

// sources are the engine's files of a form.
func sources(f *form) []txtar.File {
	return slices.DeleteFunc(slices.Clone(f.archive.Files), func(x txtar.File) bool { return slices.Contains(formSections, x.Name) })
}
