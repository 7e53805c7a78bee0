// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// mirror is every number of shim/abi.h that this package repeats, by the C expression that it
// must equal.
var mirror = map[string]uint64{
	"GPUFENCE_ABI_MAJOR": ABIMajor, "GPUFENCE_ABI_MINOR": ABIMinor,
	"GPUFENCE_LIMITS_MAGIC": LimitsMagic, "GPUFENCE_LEDGER_MAGIC": LedgerMagic,
	"GPUFENCE_GPUS": GPUs, "GPUFENCE_SLOTS": Slots, "GPUFENCE_UNLIMITED": Unlimited,
	"GPUFENCE_UNIT_BYTES": UnitBytes, "GPUFENCE_STALE_NS": uint64(StaleAfter),
	"GPUFENCE_GPU_PRESENT": gpuPresent, "GPUFENCE_GPU_FENCED": gpuFenced,
	"GPUFENCE_UNITS_BITS": unitsBits, "GPUFENCE_UNITS_MASK": unitsMask,
	"GPUFENCE_GENERATION_MASK": generationMask,
	"GPUFENCE_SLOT_FREE":       uint64(SlotFree), "GPUFENCE_SLOT_LIVE": uint64(SlotLive), "GPUFENCE_SLOT_DYING": uint64(SlotDying),
	"GPUFENCE_LEDGER_LOCK_OFFSET": ledgerLockOffset, "GPUFENCE_LEDGER_HEADER_BYTES": ledgerHeaderBytes,

	"limits_gpu.uuid": limitsGPUUUID, "limits_gpu.flags": limitsGPUFlags, "limits_gpu.total_bytes": limitsGPUTotal,
	"limits_gpu.context_bytes": limitsGPUContext, "limits_gpu.max_bytes": limitsGPUMax, "limits_gpu.high_bytes": limitsGPUHigh,
	"limits_gpu.swap_max_bytes": limitsGPUSwapMax, "limits_gpu.pod_max_bytes": limitsGPUPodMax,
	"limits_gpu.pod_high_bytes": limitsGPUPodHigh, "limits_gpu.pod_swap_max_bytes": limitsGPUPodSwapMax,
	"limits_gpu.excess_bytes": limitsGPUExcess, "limits_gpu.pod_excess_bytes": limitsGPUPodExcess,
	"limits_gpu.module_bytes": limitsGPUModule, "limits_gpu.reserved": limitsGPUReserved, "limits_gpu": limitsGPUBytes,

	"limits_copy.generation": limitsCopyGeneration, "limits_copy.gpu_count": limitsCopyGPUCount,
	"limits_copy.crc32c": limitsCopyCRC, "limits_copy.gpu": limitsCopyGPU, "limits_copy": limitsCopyBytes,

	"limits.magic": limitsMagic, "limits.abi_major": limitsMajor, "limits.abi_minor": limitsMinor,
	"limits.header_bytes": limitsHeaderBytes, "limits.total_bytes": limitsTotalBytes,
	"limits.container_index": limitsContainerIndex, "limits.gpu_bytes": limitsGPUSize, "limits.copy_bytes": limitsCopySize,
	"limits.reserved0": limitsReserved0, "limits.boot_id": limitsBootID, "limits.reserved1": limitsReserved1,
	"limits.latch": limitsLatch, "limits.writer_epoch": limitsWriterEpoch, "limits.heartbeat": limitsHeartbeat,
	"limits.sample": limitsSample, "limits.reserved2": limitsReserved2, "limits.copies": limitsCopies, "limits": limitsBytes,

	"slot_gpu.device": slotGPUDevice, "slot_gpu.managed": slotGPUManaged, "slot_gpu.swap": slotGPUSwap,
	"slot_gpu.peak": slotGPUPeak, "slot_gpu.events_max": slotGPUEventsMax, "slot_gpu.events_device": slotGPUEventsDevice,
	"slot_gpu.events_high": slotGPUEventsHigh, "slot_gpu": slotGPUBytes,

	"slot.owner": slotOwner, "slot.pidns_inode": slotPidnsInode, "slot.start_ticks": slotStartTicks,
	"slot.container_index": slotContainerIndex, "slot.shim_abi": slotShimABI, "slot.flags": slotFlags,
	"slot.allocs": slotAllocs, "slot.frees": slotFrees, "slot.throttled_ms": slotThrottled, "slot.imports": slotImports, "slot.gpu": slotGPU, "slot": slotBytes,

	"ledger.magic": headerMagic, "ledger.abi_major": headerMajor, "ledger.abi_minor": headerMinor,
	"ledger.header_bytes": headerHeaderBytes, "ledger.total_bytes": headerTotalBytes, "ledger.slot_count": headerSlotCount,
	"ledger.slot_bytes": headerSlotBytes, "ledger.gpu_count_max": headerGPUCountMax, "ledger.reserved0": headerReserved0,
	"ledger.high_slot": headerHighSlot, "ledger.reclaim_request": headerReclaimRequest, "ledger.pressed": headerPressed,
	"ledger": headerBytes,
}

var mirrorStrings = map[string]string{
	"GPUFENCE_LIMITS_NAME": LimitsName, "GPUFENCE_LEDGER_NAME": LedgerName, "GPUFENCE_DIR": ContainerDir,
}

// TestLayoutIsTheHeaders asks the C compiler for every offset, size and constant of abi.h.
func TestLayoutIsTheHeaders(t *testing.T) {
	header, err := filepath.Abs("../../shim/abi.h")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(header)
	if err != nil {
		t.Fatal(err)
	}
	var program strings.Builder
	fmt.Fprintf(&program, "#include %q\n#include <stdio.h>\nint main(void) {\n", header)
	for name := range mirror {
		expression := name
		if structure, field, ok := strings.Cut(name, "."); ok {
			expression = fmt.Sprintf("offsetof(struct gpufence_%s, %s)", structure, field)
		} else if name == strings.ToLower(name) {
			expression = fmt.Sprintf("sizeof(struct gpufence_%s)", name)
		}
		fmt.Fprintf(&program, "\tprintf(\"%s %%llu\\n\", (unsigned long long)(%s));\n", name, expression)
	}
	for name := range mirrorStrings {
		fmt.Fprintf(&program, "\tprintf(\"%s %%s\\n\", %s);\n", name, name)
	}
	program.WriteString("\treturn 0;\n}\n")
	dir := t.TempDir()
	source, binary := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(source, []byte(program.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", binary, source).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		seen++
		if want, ok := mirrorStrings[name]; ok {
			if value != want {
				t.Errorf("%s is %q in C, %q in Go", name, value, want)
			}
			continue
		}
		c, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if c != mirror[name] {
			t.Errorf("%s is %#x in C, %#x in Go", name, c, mirror[name])
		}
	}
	if seen != len(mirror)+len(mirrorStrings) {
		t.Errorf("C said %d numbers of %d", seen, len(mirror)+len(mirrorStrings))
	}
	// Nothing of the header may be missing above: its fields, constants and enumerators.
	for _, name := range declared(string(text)) {
		if _, ok := mirror[name]; !ok {
			if _, ok := mirrorStrings[name]; !ok {
				t.Errorf("abi.h declares %s, which layout.go does not mirror", name)
			}
		}
	}
}

// declared lists what the header declares: "structure", "structure.field", macros, enumerators.
func declared(header string) []string {
	var names []string
	structure := ""
	for line := range strings.Lines(header) {
		line = strings.TrimSpace(line)
		code, _, _ := strings.Cut(line, "/*")
		code = strings.TrimSpace(code)
		switch f := strings.Fields(code); {
		case len(f) >= 3 && f[0] == "#define" && !strings.Contains(f[1], "("):
			names = append(names, f[1])
		case strings.HasPrefix(code, "struct gpufence_") && strings.HasSuffix(code, "{"):
			structure = strings.TrimPrefix(f[1], "gpufence_")
			names = append(names, structure)
		case strings.HasPrefix(code, "enum") || strings.HasPrefix(code, "}"):
			structure = ""
		case strings.HasPrefix(code, "GPUFENCE_SLOT_"):
			names = append(names, f[0])
		case structure != "" && strings.HasSuffix(code, ";"):
			field := strings.TrimSuffix(f[len(f)-1], ";")
			field, _, _ = strings.Cut(field, "[")
			names = append(names, structure+"."+field)
		}
	}
	return names
}

func TestDeclaredFindsEverything(t *testing.T) {
	names := declared("#define A_B 1u /* x */\n#define F(x) x\nstruct gpufence_s {\n\tuint64_t a;  /* 0 */\n\tuint8_t b[16];\n\tstruct gpufence_t c[GPUS];\n};\nenum e {\n\tGPUFENCE_SLOT_X = 1,\n};\n")
	if got, want := strings.Join(names, " "), "A_B s s.a s.b s.c GPUFENCE_SLOT_X"; got != want {
		t.Errorf("declared = %q, want %q", got, want)
	}
}

func TestOwnerWord(t *testing.T) {
	o := Owner{Generation: 0xabcdef, State: SlotDying, PID: 0x12345678}
	if w := o.pack(); w != 0xabcdef0212345678 || unpackOwner(w) != o {
		t.Errorf("pack = %#x, back %+v", w, unpackOwner(w))
	}
	if g := nextGeneration(0xffffff); g != 0 {
		t.Errorf("generation after the last is %d", g)
	}
}
