// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"debug/dwarf"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// header is one of NVIDIA's, as the compiler sees it.
type header struct {
	name     string   // "cuda 12.8"
	version  int      // as cuGetProcAddress counts
	flags    []string // for the compiler
	includes string
	dir      string // of the headers
	symbols  map[string]bool
}

// cudaVersions are those whose headers are compared.
var cudaVersions = []string{"11.8", "12.0", "12.4", "12.8", "13.0", "13.5"}

// folder is where a set of requirements/ lies.
func folder(t *testing.T, set string) string {
	t.Helper()
	dir := filepath.Join(simtest.Dist(t, "simgpu/libcuda.so.1"), "../../foreign", set)
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("find the packages of %s: %v: run make test-clients", set, err)
	}
	return dir
}

// Headers of others that cudaGL.h and cudaVDPAU.h ask for; only these types matter.
var others = map[string]string{
	"GL/gl.h":       "typedef unsigned int GLenum, GLuint;\n",
	"vdpau/vdpau.h": "#include <stdint.h>\ntypedef uint32_t VdpDevice, VdpVideoSurface, VdpOutputSurface, VdpFuncId;\ntypedef int VdpStatus;\ntypedef VdpStatus VdpGetProcAddress(VdpDevice, VdpFuncId, void **);\n",
}

func cudaHeader(t *testing.T, version string) *header {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(folder(t, "cuda-"+version), "nvidia", "*", "include"))
	if err != nil || len(found) != 1 {
		t.Fatalf("find cuda.h of %s: %v %v", version, found, err)
	}
	stub := t.TempDir()
	for name, text := range others {
		place := filepath.Join(stub, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(place), 0o755), os.WriteFile(place, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	h := &header{
		name: "cuda " + version, dir: found[0],
		flags:    []string{"-D__CUDA_API_VERSION_INTERNAL", "-I" + found[0], "-I" + stub},
		includes: "#include <cuda.h>\n#include <GL/gl.h>\n#include <vdpau/vdpau.h>\n#include <cudaGL.h>\n#include <cudaVDPAU.h>\n#include <cudaTypedefs.h>\n",
	}
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	h.version = major*1000 + minor*10
	h.read(t)
	return h
}

func nvmlHeader(t *testing.T) *header {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	// In gen it is as NVIDIA wrote it. The oldest forms are declared where unversioned names mean themselves.
	h := &header{name: "nvml", dir: filepath.Join(strings.TrimSpace(string(out)), "gen", "nvml"), includes: "#include <nvml.h>\n"}
	h.flags = []string{"-DNVML_NO_UNVERSIONED_FUNC_DEFS", "-I" + h.dir}
	h.read(t)
	return h
}

// read fills symbols: what the header declares, behind its macros.
func (h *header) read(t *testing.T) {
	t.Helper()
	text := h.compile(t, h.includes, "-E", "-P")
	h.symbols = map[string]bool{}
	for _, m := range regexp.MustCompile(`\b((?:cu|nvml)[A-Z]\w*)\s*\(`).FindAllStringSubmatch(string(text), -1) {
		h.symbols[m[1]] = true
	}
	if len(h.symbols) < 300 {
		t.Fatalf("%s declares only %d functions", h.name, len(h.symbols))
	}
}

// compile gives what the compiler makes of a text.
func (h *header) compile(t *testing.T, text string, args ...string) []byte {
	t.Helper()
	source := filepath.Join(t.TempDir(), "probe.c")
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out := strings.TrimSuffix(source, ".c") + ".out"
	cmd := exec.CommandContext(t.Context(), "gcc", append(append([]string{"-std=gnu11", "-w", "-o", out, source}, args...), h.flags...)...)
	if message, err := cmd.CombinedOutput(); err != nil {
		if len(message) > 2000 {
			message = message[:2000]
		}
		t.Fatalf("compile with %s: %v\n%s", h.name, err, message)
	}
	bytes, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// types are what an object file says about its types.
type types struct {
	named     map[string]dwarf.Type // typedefs and tags
	values    map[string]int64      // enumerators
	functions map[string]*dwarf.FuncType
	variables map[string]dwarf.Type
}

// types compiles the header with variables, each a pointer to one function.
func (h *header) types(t *testing.T, functions []string) *types {
	t.Helper()
	text := h.includes
	for _, f := range functions {
		text += "__typeof__(" + f + ") *probe_" + f + ";\n"
	}
	place := filepath.Join(t.TempDir(), "probe.o")
	if err := os.WriteFile(place, h.compile(t, text, "-c", "-g", "-fno-eliminate-unused-debug-types"), 0o600); err != nil {
		t.Fatal(err)
	}
	return readTypes(t, place, "")
}

// readTypes reads an object file or a library; units whose name ends in `without` are left out.
func readTypes(t *testing.T, place, without string) *types {
	t.Helper()
	f, err := elf.Open(place)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d, err := f.DWARF()
	if err != nil {
		t.Fatalf("read the types in %s: %v", place, err)
	}
	out := &types{named: map[string]dwarf.Type{}, values: map[string]int64{}, functions: map[string]*dwarf.FuncType{}, variables: map[string]dwarf.Type{}}
	typeOf := func(e *dwarf.Entry) dwarf.Type {
		offset, ok := e.Val(dwarf.AttrType).(dwarf.Offset)
		if !ok {
			return nil
		}
		typ, err := d.Type(offset)
		if err != nil {
			t.Fatalf("read a type in %s: %v", place, err)
		}
		return typ
	}
	var function *dwarf.FuncType
	for r := d.Reader(); ; {
		e, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if e == nil {
			return out
		}
		name, _ := e.Val(dwarf.AttrName).(string)
		switch e.Tag {
		case dwarf.TagSubroutineType:
			function = nil // what follows is its parameters
		case dwarf.TagCompileUnit:
			if without != "" && strings.HasSuffix(name, without) {
				r.SkipChildren()
			}
		case dwarf.TagTypedef, dwarf.TagStructType, dwarf.TagUnionType:
			typ, err := d.Type(e.Offset)
			if err != nil {
				t.Fatal(err)
			}
			// A tag that is only declared must not hide its definition.
			if _, known := out.named[name]; name != "" && (!known || e.Tag == dwarf.TagTypedef) && complete(typ) {
				out.named[name] = typ
			}
		case dwarf.TagEnumerator:
			if v, ok := e.Val(dwarf.AttrConstValue).(int64); ok {
				out.values[name] = v
			}
		case dwarf.TagVariable:
			if typ := typeOf(e); typ != nil {
				out.variables[name] = typ
			}
		case dwarf.TagSubprogram:
			function = nil
			if external, _ := e.Val(dwarf.AttrExternal).(bool); external && name != "" {
				function = &dwarf.FuncType{ReturnType: typeOf(e)}
				if out.functions[name] == nil {
					out.functions[name] = function
				}
			}
		case dwarf.TagFormalParameter:
			if typ := typeOf(e); function != nil && typ != nil {
				function.ParamType = append(function.ParamType, typ)
			}
		case dwarf.TagInlinedSubroutine:
			r.SkipChildren()
		}
	}
}

// bare is a type behind its names and qualifiers.
func bare(typ dwarf.Type) dwarf.Type {
	for {
		switch t := typ.(type) {
		case *dwarf.TypedefType:
			typ = t.Type
		case *dwarf.QualType:
			typ = t.Type
		default:
			return typ
		}
	}
}

func complete(typ dwarf.Type) bool {
	switch t := bare(typ).(type) {
	case *dwarf.StructType:
		return !t.Incomplete
	case nil, *dwarf.VoidType:
		return false
	}
	return true
}

// leaf is a scalar of a structure.
type leaf struct {
	offset, size int64
	pointer      bool
}

// leaves are the scalars of a type, those of all members of unions.
func leaves(typ dwarf.Type, at int64, add func(leaf)) {
	switch t := bare(typ).(type) {
	case *dwarf.StructType:
		for _, f := range t.Field {
			leaves(f.Type, at+f.ByteOffset, add)
		}
	case *dwarf.ArrayType:
		for i := range t.Count {
			leaves(t.Type, at+i*t.Type.Size(), add)
		}
	case *dwarf.PtrType:
		add(leaf{at, 8, true})
	default:
		add(leaf{at, typ.Size(), false})
	}
}

// sameLayout says where ours is not as theirs: in its size, in the place of a member of the same
// name, or in a scalar that is none of theirs.
func sameLayout(ours, theirs dwarf.Type) error {
	if ours.Size() != theirs.Size() {
		return fmt.Errorf("%d bytes, theirs has %d", ours.Size(), theirs.Size())
	}
	a, okA := bare(ours).(*dwarf.StructType)
	b, okB := bare(theirs).(*dwarf.StructType)
	if okA != okB {
		return fmt.Errorf("%s, theirs is %s", ours, theirs)
	}
	if !okA {
		return nil
	}
	have := map[leaf]bool{}
	leaves(b, 0, func(l leaf) { have[l] = true })
	var err error
	// What later versions have in bytes that older ones reserve is 0 there.
	reserved := func(l leaf) bool {
		for i := range l.size {
			if !have[leaf{l.offset + i, 1, false}] {
				return false
			}
		}
		return true
	}
	leaves(a, 0, func(l leaf) {
		if l.size > 1 && !have[l] && !reserved(l) {
			err = errors.Join(err, fmt.Errorf("no scalar of theirs is %+v", l))
		}
	})
	for _, f := range a.Field {
		for _, g := range b.Field {
			if f.Name != "" && !strings.HasPrefix(f.Name, "reserved") && f.Name == g.Name && (f.ByteOffset != g.ByteOffset || f.Type.Size() != g.Type.Size()) {
				err = errors.Join(err, fmt.Errorf("member %s at %d of %d bytes, theirs at %d of %d", f.Name, f.ByteOffset, f.Type.Size(), g.ByteOffset, g.Type.Size()))
			}
		}
	}
	return err
}

// sameValue says how a parameter or a result is passed otherwise.
func sameValue(ours, theirs dwarf.Type) error {
	if ours == nil || theirs == nil {
		if ours != theirs {
			return fmt.Errorf("%v, theirs is %v", ours, theirs)
		}
		return nil
	}
	a, okA := bare(ours).(*dwarf.PtrType)
	b, okB := bare(theirs).(*dwarf.PtrType)
	if okA != okB {
		return fmt.Errorf("%s, theirs is %s", ours, theirs)
	}
	if !okA {
		return sameLayout(ours, theirs)
	}
	for _, p := range []dwarf.Type{a.Type, b.Type} {
		// Of what is opaque here or there nothing can be said; nor of bytes.
		if _, function := bare(p).(*dwarf.FuncType); function || !complete(p) || p.Size() <= 1 {
			return nil
		}
	}
	if _, pointer := bare(a.Type).(*dwarf.PtrType); pointer {
		if _, pointer := bare(b.Type).(*dwarf.PtrType); pointer {
			return nil
		}
	}
	return sameLayout(a.Type, b.Type)
}

// samePrototype compares two functions.
func samePrototype(ours, theirs *dwarf.FuncType) error {
	if len(ours.ParamType) != len(theirs.ParamType) {
		return fmt.Errorf("%d parameters, theirs has %d", len(ours.ParamType), len(theirs.ParamType))
	}
	err := sameValue(ours.ReturnType, theirs.ReturnType)
	for i := range ours.ParamType {
		if e := sameValue(ours.ParamType[i], theirs.ParamType[i]); e != nil {
			err = errors.Join(err, fmt.Errorf("parameter %d: %w", i+1, e))
		}
	}
	return err
}

// pointed is the function that a variable of types points to.
func (ts *types) pointed(name string) *dwarf.FuncType {
	p, ok := bare(ts.variables["probe_"+name]).(*dwarf.PtrType)
	if !ok {
		return nil
	}
	f, _ := bare(p.Type).(*dwarf.FuncType)
	return f
}
