// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Programs of a package, without cgo and with it. The agent is in the image alone.
var (
	static  = []string{"gpufence", "gpufence-runtime", "gpufence-hook", "gpufence-nri", "kubectl-gpufence"}
	dynamic = []string{"gpufenced"}
)

const agent = "gpufence-agent"

// triplets name the cross compilers and libraries of an architecture.
var triplets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// Options of [Build].
type Options struct {
	Source  string // the work tree
	Out     string // what is made lies there, and nothing else
	Work    string // what is made on the way
	Version string // as git describe says it
	Time    time.Time
	NFPM    string // the program
	Arches  []string
	Formats []string // of [Formats]
	Log     io.Writer
}

// Formats are what can be made.
var Formats = []string{"deb", "rpm", "tar", "chart", "image", "bundle"}

type builder struct {
	Options
	v         Version
	goVersion string
	goRoot    string
	goSums    map[string]string
	modules   map[string]*Module // by path@version
	pages     string             // folder of manual pages
	complete  string             // folder of completions
}

// target is what was built for one architecture.
type target struct {
	arch    string
	bin     string
	lib     string
	shipped []Shipped // of the package
	agent   Shipped
	glibc   string // the oldest that it runs on
}

func (b *builder) say(format string, args ...any) {
	fmt.Fprintf(b.Log, "package: "+format+"\n", args...)
}

// Build makes what is asked for.
func Build(ctx context.Context, o Options) error {
	v, err := ParseVersion(o.Version, o.Time)
	if err != nil {
		return err
	}
	b := &builder{Options: o, v: v, modules: map[string]*Module{}}
	for _, arch := range o.Arches {
		if triplets[arch] == "" {
			return fmt.Errorf("build packages: architecture %q is none of %s", arch, strings.Join(slices.Sorted(maps.Keys(triplets)), ", "))
		}
	}
	for _, f := range o.Formats {
		if !slices.Contains(Formats, f) {
			return fmt.Errorf("build packages: format %q is none of %s", f, strings.Join(Formats, ", "))
		}
	}
	// Whose programs write the manual pages comes first.
	slices.SortFunc(b.Arches, func(x, y string) int {
		return cmp.Or(cmp.Compare(btoi(y == runtime.GOARCH), btoi(x == runtime.GOARCH)), cmp.Compare(x, y))
	})
	if len(b.Arches) == 0 || b.Arches[0] != runtime.GOARCH {
		return fmt.Errorf("build packages: %s is not among the architectures %q, and its programs write the manual pages", runtime.GOARCH, b.Arches)
	}
	if err := b.facts(ctx); err != nil {
		return err
	}
	var targets []target
	for _, arch := range b.Arches {
		t, err := b.compile(ctx, arch)
		if err != nil {
			return fmt.Errorf("build packages for %s: %w", arch, err)
		}
		targets = append(targets, t)
	}
	if err := b.generate(ctx, targets[0]); err != nil {
		return err
	}
	return b.assemble(ctx, targets)
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// facts asks the toolchain for what the builds have in common.
func (b *builder) facts(ctx context.Context) error {
	out, err := b.output(ctx, nil, "go", "env", "GOVERSION", "GOROOT")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 2 {
		return fmt.Errorf("ask go for its version: it said %q", out)
	}
	b.goVersion, b.goRoot = lines[0], lines[1]
	sums, err := os.ReadFile(filepath.Join(b.Source, "go.sum"))
	if err != nil {
		return fmt.Errorf("read checksums of modules: %w", err)
	}
	b.goSums = map[string]string{}
	for line := range strings.Lines(string(sums)) {
		if f := strings.Fields(line); len(f) == 3 {
			b.goSums[f[0]+"@"+f[1]] = f[2]
		}
	}
	std := &Module{Path: "std", Version: strings.TrimPrefix(strings.Fields(b.goVersion)[0], "go"), Root: b.goRoot}
	if err := std.find(); err != nil {
		return err
	}
	b.modules["std"] = std
	return nil
}

// environment is the caller's without what would change what is built.
func environment(extra ...string) []string {
	var env []string
	for _, kv := range os.Environ() {
		k, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(k, "CGO_") || slices.Contains([]string{
			"GOFLAGS", "GOOS", "GOARCH", "GOAMD64", "GOARM64", "GOEXPERIMENT", "GO386", "GOFIPS140", "GOWORK", "CC", "CXX", "CFLAGS", "LDFLAGS", "CPPFLAGS",
			"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "LC_ALL", "LANG", "TZ", "SOURCE_DATE_EPOCH",
		}, k) {
			continue
		}
		env = append(env, kv)
	}
	return append(append(env, "GOWORK=off", "GOTOOLCHAIN=local", "LC_ALL=C", "TZ=UTC"), extra...)
}

func (b *builder) output(ctx context.Context, env []string, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = b.Source, environment(env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		said := stdout.String() + stderr.String()
		if len(said) > 4096 {
			said = said[len(said)-4096:]
		}
		return nil, fmt.Errorf("run %s: %w\n%s", strings.Join(argv[:min(4, len(argv))], " "), err, said)
	}
	return stdout.Bytes(), nil
}

// compiler is the C compiler for an architecture.
func compiler(arch string) string {
	if arch == runtime.GOARCH {
		return "gcc"
	}
	return triplets[arch] + "-gcc"
}

func strip(arch string) string {
	if arch == runtime.GOARCH {
		return "strip"
	}
	return triplets[arch] + "-strip"
}

func (b *builder) compile(ctx context.Context, arch string) (target, error) {
	start := time.Now()
	t := target{arch: arch, bin: filepath.Join(b.Work, arch, "bin"), lib: filepath.Join(b.Work, arch, "lib")}
	for _, dir := range []string{t.bin, t.lib} {
		if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
			return t, err
		}
	}
	flags := "-s -w -buildid= -X github.com/gpufence/gpufence/enforcer/api.BuildVersion=" + b.v.Build
	common := []string{"GOOS=linux", "GOARCH=" + arch, "GOAMD64=v1", "GOARM64=v8.0"}
	for _, set := range []struct {
		env   string
		flags string
		names []string
	}{{"CGO_ENABLED=0", flags, append(slices.Clone(static), agent)}, {"CGO_ENABLED=1", flags + " -extldflags=-Wl,--build-id=none", dynamic}} {
		env := append(slices.Clone(common), set.env, "CC="+compiler(arch), "CGO_CFLAGS=-O2 -g")
		argv := []string{"go", "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", set.flags, "-o", t.bin + "/"}
		var packages []string
		for _, name := range set.names {
			packages = append(packages, "./cmd/"+name)
		}
		if _, err := b.output(ctx, env, append(argv, packages...)...); err != nil {
			return t, err
		}
		if err := b.list(ctx, env, packages); err != nil {
			return t, err
		}
	}
	b.say("%s: programs, %.0f s", arch, time.Since(start).Seconds())
	start = time.Now()
	if err := b.shim(ctx, &t); err != nil {
		return t, err
	}
	b.say("%s: libraries, %.0f s", arch, time.Since(start).Seconds())
	for _, name := range slices.Concat(static, dynamic) {
		s := Shipped{Name: "/usr/bin/" + name, File: filepath.Join(t.bin, name)}
		var err error
		if s.Modules, err = b.linked(s.File); err != nil {
			return t, err
		}
		t.shipped = append(t.shipped, s)
	}
	t.agent = Shipped{Name: "/usr/bin/" + agent, File: filepath.Join(t.bin, agent)}
	var err error
	if t.agent.Modules, err = b.linked(t.agent.File); err != nil {
		return t, err
	}
	t.glibc, err = glibc(filepath.Join(t.bin, dynamic[0]))
	return t, err
}

// shim builds the libraries into the target's lib, without what only debuggers read.
func (b *builder) shim(ctx context.Context, t *target) error {
	out := filepath.Join(b.Work, t.arch, "shim")
	// Debug information names folders; it is stripped, but the build id is made over it.
	cc := fmt.Sprintf("%s -ffile-prefix-map=%s=. -ffile-prefix-map=%s=.", compiler(t.arch), b.Source, out)
	goals := []string{filepath.Join(out, "lib/libgpufence.so"), "stubs"}
	files := []string{"libgpufence.so"}
	if t.arch == "amd64" {
		goals, files = append(goals, filepath.Join(out, "lib/libgpufence32.so")), append(files, "libgpufence32.so")
	}
	if _, err := b.output(ctx, nil, append([]string{"make", "-C", filepath.Join(b.Source, "shim"), "-j2", "CC=" + cc, "OUT=" + out}, goals...)...); err != nil {
		return err
	}
	for _, place := range []string{"dev", "run"} {
		for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
			files = append(files, filepath.Join("gpufence-stub", place, name))
		}
	}
	for _, name := range files {
		to := filepath.Join(t.lib, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if _, err := b.output(ctx, nil, strip(t.arch), "--strip-unneeded", "-R", ".comment", "-o", to, filepath.Join(out, "lib", name)); err != nil {
			return err
		}
		t.shipped = append(t.shipped, Shipped{Name: "/usr/lib/gpufence/" + b.v.Build + "/" + name, File: to, Library: true})
	}
	return nil
}

// list notes where the modules lie that the packages are built of.
func (b *builder) list(ctx context.Context, env, packages []string) error {
	out, err := b.output(ctx, env, append([]string{"go", "list", "-deps", "-json=Dir,Module"}, packages...)...)
	if err != nil {
		return err
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Dir    string
			Module *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read go list: %w", err)
		}
		if p.Module == nil || p.Module.Main {
			continue
		}
		key := p.Module.Path + "@" + p.Module.Version
		m := b.modules[key]
		if m == nil {
			m = &Module{Path: p.Module.Path, Version: p.Module.Version, Root: p.Module.Dir, Sum: b.goSums[key]}
			b.modules[key] = m
		}
		if !slices.Contains(m.Packages, p.Dir) {
			m.Packages = append(m.Packages, p.Dir)
		}
	}
}

// linked are the modules that a program says it is made of.
func (b *builder) linked(program string) ([]Module, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, fmt.Errorf("read what %s is made of: %w", program, err)
	}
	out := []Module{*b.modules["std"]}
	for _, dep := range info.Deps {
		if dep.Replace != nil {
			return nil, fmt.Errorf("read what %s is made of: %s is replaced, and nobody could tell from its version", program, dep.Path)
		}
		m := b.modules[dep.Path+"@"+dep.Version]
		if m == nil {
			return nil, fmt.Errorf("read what %s is made of: go list does not know %s %s", program, dep.Path, dep.Version)
		}
		if m.Licences == nil {
			if err := m.find(); err != nil {
				return nil, err
			}
		}
		out = append(out, *m)
	}
	return out, nil
}

// modulesOf are the modules of several programs, each once, by path.
func modulesOf(all []Shipped) []Module {
	seen := map[string]Module{}
	for _, s := range all {
		for _, m := range s.Modules {
			seen[m.Path+"@"+m.Version] = m
		}
	}
	var out []Module
	for _, key := range slices.Sorted(maps.Keys(seen)) {
		out = append(out, seen[key])
	}
	return out
}

// glibc is the oldest version of it that a program runs with.
func glibc(program string) (string, error) {
	f, err := elf.Open(program)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", program, err)
	}
	symbols, err := f.ImportedSymbols()
	if err = errors.Join(err, f.Close()); err != nil {
		return "", fmt.Errorf("read what %s needs: %w", program, err)
	}
	newest := []int{0}
	for _, s := range symbols {
		version, ok := strings.CutPrefix(s.Version, "GLIBC_")
		if !ok {
			continue
		}
		var parts []int
		for part := range strings.SplitSeq(version, ".") {
			n, err := strconv.Atoi(part)
			if err != nil {
				return "", fmt.Errorf("read what %s needs: symbol %s of %s", program, s.Name, s.Version)
			}
			parts = append(parts, n)
		}
		if slices.Compare(parts, newest) > 0 {
			newest = parts
		}
	}
	if len(newest) < 2 {
		return "", fmt.Errorf("read what %s needs: it names no version of glibc", program)
	}
	text := make([]string, len(newest))
	for i, n := range newest {
		text[i] = strconv.Itoa(n)
	}
	return strings.Join(text, "."), nil
}

// generate has the programs write their manual pages and completions.
func (b *builder) generate(ctx context.Context, native target) error {
	b.pages, b.complete = filepath.Join(b.Work, "man"), filepath.Join(b.Work, "completion")
	for _, dir := range []string{b.pages, b.complete} {
		if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
			return fmt.Errorf("write manual pages: %w", err)
		}
	}
	for _, name := range []string{"gpufence", "gpufenced", "gpufence-nri", "kubectl-gpufence"} {
		if _, err := b.output(ctx, nil, filepath.Join(native.bin, name), "man", b.pages); err != nil {
			return err
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		text, err := b.output(ctx, nil, filepath.Join(native.bin, "gpufence"), "completion", shell)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(b.complete, shell), text, 0o644); err != nil {
			return fmt.Errorf("write completions: %w", err)
		}
	}
	return nil
}
