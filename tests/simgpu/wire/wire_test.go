// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fill gives every field of a struct a value of its own, as the C program below does: 1, 2, ...
// in order, text as "text<n>", bytes as n, n+1, ...
func fill(v any) {
	n := uint64(0)
	e := reflect.ValueOf(v).Elem()
	for i := range e.NumField() {
		n++
		switch f := e.Field(i); f.Kind() {
		case reflect.Uint32, reflect.Uint64:
			f.SetUint(n)
		case reflect.Int32:
			f.SetInt(int64(n))
		case reflect.String:
			f.SetString(fmt.Sprintf("text%d", n))
		case reflect.Array:
			for j := range f.Len() {
				f.Index(j).SetUint(n + uint64(j))
			}
		}
	}
}

// The structures that Go writes are byte for byte those that C writes with the header, and
// every constant has the header's value.
func TestParityWithTheHeader(t *testing.T) {
	t.Parallel()
	var program strings.Builder
	program.WriteString("#include <stdio.h>\n#include <stddef.h>\n#include <string.h>\n#include \"simgpu.h\"\n" +
		"static void dump(const char *n, const void *p, size_t z) { const unsigned char *b = p; printf(\"%s \", n); while (z--) printf(\"%02x\", *b++); puts(\"\"); }\n" +
		"int main(void)\n{\n")
	want := map[string]string{}
	constant := func(name string, value any) {
		if s, ok := value.(string); ok {
			fmt.Fprintf(&program, "\tprintf(\"%s %%s\\n\", %s);\n", name, name)
			want[name] = s
			return
		}
		fmt.Fprintf(&program, "\tprintf(\"%s %%llu\\n\", (unsigned long long)%s);\n", name, name)
		want[name] = fmt.Sprint(value)
	}
	for name, v := range map[string]any{
		"SIMGPU_MAGIC": Magic, "SIMGPU_DIR_ENV": DirEnv, "SIMGPU_DIR_DEFAULT": DirDefault, "SIMGPU_CTL": Ctl, "SIMGPU_ADMIN": Admin,
		"SIMGPU_GPU_PREFIX": GPUPrefix, "SIMGPU_PACKET_MAX": PacketMax, "SIMGPU_GPUS_MAX": GPUsMax, "SIMGPU_MIG_MAX": MIGMax, "SIMGPU_MIG_INFIX": MIGInfix, "SIMGPU_PROCS_MAX": ProcsMax,
		"SIMGPU_PAGE_BYTES": PageBytes, "SIMGPU_SMALL_BYTES": SmallBytes, "SIMGPU_ALIGN_BYTES": AlignBytes,
		"SIMGPU_OP_INFO": OpInfo, "SIMGPU_OP_CTX_CREATE": OpCtxCreate, "SIMGPU_OP_CTX_DESTROY": OpCtxDestroy, "SIMGPU_OP_ALLOC": OpAlloc,
		"SIMGPU_OP_FREE": OpFree, "SIMGPU_OP_MEMINFO": OpMemInfo, "SIMGPU_OP_LAUNCH": OpLaunch, "SIMGPU_OP_MIGRATE": OpMigrate,
		"SIMGPU_OP_EXPORT": OpExport, "SIMGPU_OP_IMPORT": OpImport, "SIMGPU_OP_CTX_RESIZE": OpCtxResize, "SIMGPU_OP_SETTINGS": OpSettings,
		"SIMGPU_CONTEXT_WHOLE": ContextWhole, "SIMGPU_CONTEXT_GREEN": ContextGreen, "SIMGPU_E_ELSEWHERE": Elsewhere,
		"SIMGPU_OP_NODE": OpNode, "SIMGPU_OP_DEVICE": OpDevice, "SIMGPU_OP_NVML_MEMORY": OpNVMLMemory, "SIMGPU_OP_NVML_PROCS": OpNVMLProcs,
		"SIMGPU_OP_NVML_UTIL": OpNVMLUtil, "SIMGPU_OP_NVML_PROC_UTIL": OpNVMLProcUtil,
		"SIMGPU_OP_LIMITS_SET": OpLimitsSet, "SIMGPU_OP_LIMITS_GET": OpLimitsGet, "SIMGPU_E_NOT_PERMITTED": NotPermitted, "SIMGPU_E_NO_CGROUP": NoCgroup,
		"SIMGPU_KIND_DEVICE": KindDevice, "SIMGPU_KIND_PHYSICAL": KindPhysical, "SIMGPU_KIND_MANAGED": KindManaged,
		"SIMGPU_LIST_COMPUTE": ListCompute, "SIMGPU_LIST_GRAPHICS": ListGraphics, "SIMGPU_LIST_MPS": ListMPS, "SIMGPU_LIST_ALL": ListAll,
		"SIMGPU_OK": OK, "SIMGPU_E_NO_MEMORY": NoMemory, "SIMGPU_E_INVALID": Invalid, "SIMGPU_E_NOT_FOUND": NotFound, "SIMGPU_E_LOST": Lost,
		"SIMGPU_E_NOT_SUPPORTED": NotSupported, "SIMGPU_E_BUSY": Busy, "SIMGPU_KERNEL_DEFAULT": KernelDefault, "SIMGPU_NOT_AVAILABLE": NotAvailable,
	} {
		constant(name, v)
	}
	structure := func(name, fields string, encoded []byte) {
		fmt.Fprintf(&program, "\t{ struct %s s; memset(&s, 0, sizeof(s)); %s dump(\"%s\", &s, sizeof(s)); }\n", name, fields, name)
		want[name] = fmt.Sprintf("%x", encoded)
	}
	var req Req
	req.Op = 1
	rep := Rep{Status: -1}
	for i := range req.Arg {
		req.Arg[i] = uint64(i) + 2
		rep.Val[i] = uint64(i) + 2
	}
	structure("simgpu_req", "s.magic = SIMGPU_MAGIC; s.op = 1; for (int i = 0; i < 7; i++) s.arg[i] = i + 2;", req.Encode())
	structure("simgpu_rep", "s.magic = SIMGPU_MAGIC; s.status = -1; for (int i = 0; i < 7; i++) s.val[i] = i + 2;", rep.Encode(nil))
	var node Node
	fill(&node)
	structure("simgpu_node", `strcpy(s.driver_version, "text1"); strcpy(s.nvml_version, "text2"); s.cuda_version = 3; s.gpu_count = 4;`, node.Encode())
	var dev Device
	fill(&dev)
	structure("simgpu_device", `for (int i = 0; i < 16; i++) s.uuid[i] = i + 1; strcpy(s.uuid_text, "text2"); strcpy(s.name, "text3"); strcpy(s.pci_bus_id, "text4");
		s.pci_domain = 5; s.pci_bus = 6; s.pci_device = 7; s.pci_device_id = 8; s.pci_subsystem_id = 9; s.minor = 10; s.cc_major = 11; s.cc_minor = 12;
		s.sm_count = 13; s.threads_per_sm = 14; s.total_bytes = 15; s.reserved_bytes = 16; s.cuda_total_bytes = 17; s.cuda_version = 18; s.backing_mib = 19;
		s.number = 20; s.mig_instances = 21; s.mig_instance = 22; s.mig_slices = 23; for (int i = 0; i < 16; i++) s.gpu_uuid[i] = i + 24;`, dev.Encode())
	structure("simgpu_proc", "s.pid = 1; s.instance = 2; s.used_bytes = 3;", EncodeProcs([]Proc{{1, 2, 3}}))
	structure("simgpu_proc_util", "s.pid = 1; s.sm_percent = 2; s.mem_percent = 3; s.time_stamp_us = 4;", EncodeProcUtils([]ProcUtil{{1, 2, 3, 4}}))
	program.WriteString("\treturn 0;\n}\n")

	dir := t.TempDir()
	source, binary := filepath.Join(dir, "parity.c"), filepath.Join(dir, "parity")
	if err := os.WriteFile(source, []byte(program.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	header, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "cc", "-std=c11", "-Wall", "-Werror", "-I", header, "-o", binary, source).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for l := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSuffix(l, "\n"), " ")
		got[name] = value
	}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("header (-) and Go (+) differ:\n%s", d)
	}
}

func TestDecodeReq(t *testing.T) {
	t.Parallel()
	r := Req{Op: OpAlloc, Arg: [7]uint64{1, 2, 3, 4, 5, 6, 7}}
	back, err := DecodeReq(r.Encode())
	if err != nil || back != r {
		t.Errorf("%+v came back as %+v, %v", r, back, err)
	}
	good := r.Encode()
	for name, b := range map[string][]byte{"empty": nil, "short": good[:63], "long": append(bytes.Clone(good), 0), "magic": append([]byte{0}, good[1:]...)} {
		if _, err := DecodeReq(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	r := Req{Op: OpAlloc}
	f.Add(r.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := DecodeReq(b); err == nil && !bytes.Equal(r.Encode(), b) {
			t.Errorf("%x came back as %x", b, r.Encode())
		}
		if r, payload, err := DecodeRep(b); err == nil && !bytes.Equal(r.Encode(payload), b) {
			t.Errorf("%x came back as %x", b, r.Encode(payload))
		}
	})
}

func TestLongTextIsCut(t *testing.T) {
	t.Parallel()
	d := Device{Name: strings.Repeat("x", 200), UUID: [16]byte{1}}
	b := d.Encode()
	if len(b) != DeviceBytes || b[0xa0-1] != 0 || b[0xa0-2] != 'x' || b[0xa0] != 0 {
		t.Errorf("long name: %x", b[0x40:0xc0])
	}
}
