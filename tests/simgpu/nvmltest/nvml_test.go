// SPDX-License-Identifier: Apache-2.0

// Package nvmltest drives the simulated libnvidia-ml.so.1 with a client that we did not
// write, NVIDIA's Go bindings, and compares its layouts with the header they carry.
package nvmltest

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpufence/gpufence/tests/simgpu/server"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

const mib = 1 << 20

// The library reads $SIMGPU_DIR of the process, so the tests of this package do not run side
// by side.
func open(t *testing.T, flags ...string) (nvml.Interface, *server.Server, string) {
	t.Helper()
	dir, s := simtest.Start(t, flags...)
	t.Setenv(wire.DirEnv, dir)
	lib := nvml.New(nvml.WithLibraryPath(simtest.Dist(t, "simgpu/libnvidia-ml.so.1")))
	must(t, "init", lib.Init())
	t.Cleanup(func() { must(t, "shutdown", lib.Shutdown()) })
	return lib, s, dir
}

func must(t *testing.T, what string, ret nvml.Return) {
	t.Helper()
	if ret != nvml.SUCCESS {
		t.Fatalf("%s: %v", what, ret)
	}
}

func device(t *testing.T, lib nvml.Interface, index int) nvml.Device {
	t.Helper()
	d, ret := lib.DeviceGetHandleByIndex(index)
	must(t, "handle", ret)
	return d
}

// use allocates as a process would that speaks to the device itself: this one.
func use(t *testing.T, dir, gpu string, list wire.List, bytes uint64) {
	t.Helper()
	conn, err := net.Dial("unixpacket", filepath.Join(dir, gpu))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	for _, r := range []wire.Req{{Op: wire.OpCtxCreate, Arg: [7]uint64{uint64(list)}}, {Op: wire.OpAlloc, Arg: [7]uint64{0, bytes}}} {
		buf := make([]byte, wire.PacketMax)
		if _, err := conn.Write(r.Encode()); err != nil {
			t.Fatal(err)
		}
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if rep, _, err := wire.DecodeRep(buf[:n]); err != nil || rep.Status != wire.OK {
			t.Fatalf("operation %d: %+v, %v", r.Op, rep, err)
		}
	}
}

func TestSystemAndDevices(t *testing.T) {
	lib, s, _ := open(t, "--gpus", "2", "--driver-version", "570.99", "--cuda-version", "12.7")
	if v, ret := lib.SystemGetDriverVersion(); ret != nvml.SUCCESS || v != "570.99" {
		t.Errorf("driver %q, %v", v, ret)
	}
	if v, ret := lib.SystemGetNVMLVersion(); ret != nvml.SUCCESS || v != "12.570.99" {
		t.Errorf("NVML %q, %v", v, ret)
	}
	if v, ret := lib.SystemGetCudaDriverVersion_v2(); ret != nvml.SUCCESS || v != 12070 {
		t.Errorf("CUDA %d, %v", v, ret)
	}
	if v, ret := lib.SystemGetCudaDriverVersion(); ret != nvml.SUCCESS || v != 12070 {
		t.Errorf("CUDA %d, %v", v, ret)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if name, ret := lib.SystemGetProcessName(os.Getpid()); ret != nvml.SUCCESS || filepath.Base(name) != filepath.Base(self) {
		t.Errorf("process name %q, %v", name, ret)
	}
	if _, ret := lib.SystemGetProcessName(1 << 30); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("name of no process: %v", ret)
	}
	if n, ret := lib.DeviceGetCount(); ret != nvml.SUCCESS || n != 2 {
		t.Errorf("%d devices, %v", n, ret)
	}
	if _, ret := lib.DeviceGetHandleByIndex(2); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("third device: %v", ret)
	}
	d := device(t, lib, 1)
	uuid, ret := d.GetUUID()
	if ret != nvml.SUCCESS || uuid != s.State().GPUs[1].UUID {
		t.Errorf("UUID %q, %v", uuid, ret)
	}
	pci, ret := d.GetPciInfo()
	must(t, "PCI", ret)
	if id := text(pci.BusId[:]); id != "00000000:02:00.0" || text(pci.BusIdLegacy[:]) != "0000:02:00.0" || pci.PciDeviceId != 0x1eb810de {
		t.Errorf("PCI: %q, %+v", id, pci)
	}
	for what, find := range map[string]func() (nvml.Device, nvml.Return){
		"UUID": func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByUUID(uuid) },
		"PCI":  func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId("00000000:02:00.0") },
	} {
		found, ret := find()
		must(t, what, ret)
		if i, ret := found.GetIndex(); ret != nvml.SUCCESS || i != 1 {
			t.Errorf("by %s: index %d, %v", what, i, ret)
		}
	}
	if _, ret := lib.DeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000"); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("unknown UUID: %v", ret)
	}
	if name, ret := d.GetName(); ret != nvml.SUCCESS || name != "NVIDIA T4 (simulated)" {
		t.Errorf("name %q, %v", name, ret)
	}
	if n, ret := d.GetMinorNumber(); ret != nvml.SUCCESS || n != 1 {
		t.Errorf("minor %d, %v", n, ret)
	}
	if major, minor, ret := d.GetCudaComputeCapability(); ret != nvml.SUCCESS || major != 7 || minor != 5 {
		t.Errorf("compute capability %d.%d, %v", major, minor, ret)
	}
	if m, ret := d.GetPersistenceMode(); ret != nvml.SUCCESS || m != nvml.FEATURE_ENABLED {
		t.Errorf("persistence %v, %v", m, ret)
	}
	if _, _, ret := d.GetMigMode(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("MIG mode: %v", ret)
	}
	if is, ret := d.IsMigDeviceHandle(); ret != nvml.SUCCESS || is {
		t.Errorf("MIG handle %v, %v", is, ret)
	}
	if lib.ErrorString(nvml.ERROR_GPU_IS_LOST) != "GPU is lost" {
		t.Errorf("error text %q", lib.ErrorString(nvml.ERROR_GPU_IS_LOST))
	}
	for _, symbol := range []string{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"} {
		if lib.Extensions().LookupSymbol(symbol) == nil {
			t.Errorf("a driver of branch 570 has %s", symbol)
		}
	}
}

func text[C int8 | uint8](b []C) string {
	var s strings.Builder
	for _, c := range b {
		if c == 0 {
			break
		}
		s.WriteByte(byte(c))
	}
	return s.String()
}

func TestMemory(t *testing.T) {
	lib, _, dir := open(t, "--used-by-others", "1GiB")
	use(t, dir, "gpu0", wire.ListCompute, 100*mib)
	d := device(t, lib, 0)
	const total, reserved, used = 16384 * mib, 164 * mib, (1024 + 104 + 100) * mib
	v1, ret := d.GetMemoryInfo()
	must(t, "memory", ret)
	if v1.Total != total || v1.Used != used+reserved || v1.Free != total-used-reserved {
		t.Errorf("v1: %+v", v1)
	}
	v2, ret := d.GetMemoryInfo_v2()
	must(t, "memory v2", ret)
	if v2.Total != total || v2.Reserved != reserved || v2.Used != used || v2.Free != total-used-reserved {
		t.Errorf("v2: %+v", v2)
	}
}

func TestProcessLists(t *testing.T) {
	lib, _, dir := open(t)
	d := device(t, lib, 0)
	for name, get := range map[string]func() ([]nvml.ProcessInfo, nvml.Return){
		"compute": d.GetComputeRunningProcesses, "graphics": d.GetGraphicsRunningProcesses, "MPS": d.GetMPSComputeRunningProcesses,
	} {
		if rows, ret := get(); ret != nvml.SUCCESS || len(rows) != 0 {
			t.Errorf("%s, nobody there: %v, %v", name, rows, ret)
		}
	}
	use(t, dir, "gpu0", wire.ListMPS, 100*mib)
	rows, ret := d.GetMPSComputeRunningProcesses()
	must(t, "MPS", ret)
	want := nvml.ProcessInfo{Pid: uint32(os.Getpid()), UsedGpuMemory: 204 * mib, GpuInstanceId: 0xffffffff, ComputeInstanceId: 0xffffffff}
	if len(rows) != 1 || rows[0] != want {
		t.Errorf("MPS: %+v, want %+v", rows, want)
	}
	if rows, ret := d.GetComputeRunningProcesses(); ret != nvml.SUCCESS || len(rows) != 0 {
		t.Errorf("compute: %v, %v", rows, ret)
	}
}

// The modes, counts and versions of this call are in ctest: the bindings ask for compute processes only.
func TestDetailList(t *testing.T) {
	lib, s, dir := open(t, "--gpus", "2", "--model", "h100", "--mig", "0,2")
	use(t, dir, "gpu0", wire.ListCompute, 100*mib)
	use(t, dir, "gpu1.mig1", wire.ListCompute, 100*mib)
	whole := device(t, lib, 0)
	instance, ret := device(t, lib, 1).GetMigDeviceHandleByIndex(1)
	must(t, "handle of an instance", ret)
	for name, d := range map[string]nvml.Device{"GPU": whole, "instance": instance} {
		rows, ret := d.GetComputeRunningProcesses()
		must(t, name, ret)
		list, ret := d.GetRunningProcessDetailList()
		must(t, name, ret)
		if len(rows) != 1 || list.NumProcArrayEntries != 1 {
			t.Fatalf("%s: %d rows, %d with details", name, len(rows), list.NumProcArrayEntries)
		}
		want := nvml.ProcessDetail_v1{
			Pid: uint32(os.Getpid()), UsedGpuMemory: rows[0].UsedGpuMemory,
			GpuInstanceId: rows[0].GpuInstanceId, ComputeInstanceId: rows[0].ComputeInstanceId,
		}
		if name == "instance" {
			want.UsedGpuCcProtectedMemory = ^uint64(0)
		}
		if *list.ProcArray != want {
			t.Errorf("%s: %+v, want %+v", name, *list.ProcArray, want)
		}
	}
	set(t, s, "nvml-lag", "30s")
	if list, ret := whole.GetRunningProcessDetailList(); ret != nvml.SUCCESS || list.NumProcArrayEntries != 0 {
		t.Errorf("before there was anybody: %+v, %v", list, ret)
	}
	set(t, s, "nvml-lag", "0s")
	set(t, s, "lost", "1")
	if list, ret := whole.GetRunningProcessDetailList(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("details of a lost GPU: %+v, %v", list, ret)
	}
}

func TestUnknownLostAndIdle(t *testing.T) {
	lib, s, dir := open(t)
	use(t, dir, "gpu0", wire.ListCompute, 100*mib)
	d := device(t, lib, 0)
	if _, ret := d.GetProcessUtilization(0); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("utilisation of idle processes: %v", ret)
	}
	if u, ret := d.GetUtilizationRates(); ret != nvml.SUCCESS || u.Gpu != 0 {
		t.Errorf("utilisation: %+v, %v", u, ret)
	}
	set(t, s, "unknown", "all")
	if rows, ret := d.GetComputeRunningProcesses(); ret != nvml.SUCCESS || rows[0].UsedGpuMemory != ^uint64(0) {
		t.Errorf("size that nobody knows: %+v, %v", rows, ret)
	}
	if _, ret := d.GetMemoryInfo(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("device that does not say: %v", ret)
	}
	set(t, s, "unknown", "0")
	set(t, s, "lost", "1")
	if _, ret := d.GetMemoryInfo_v2(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("memory of a lost GPU: %v", ret)
	}
	if _, ret := d.GetComputeRunningProcesses(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("processes of a lost GPU: %v", ret)
	}
}

func set(t *testing.T, s *server.Server, knob, value string) {
	t.Helper()
	if err := s.Set(server.Settings{Knobs: map[string]string{knob: value}}); err != nil {
		t.Fatal(err)
	}
}

func TestHungCallHoldsUpNoOther(t *testing.T) {
	lib, s, _ := open(t, "--gpus", "2")
	zero := 0
	if err := s.Set(server.Settings{GPU: &zero, Knobs: map[string]string{"hang": "1"}}); err != nil {
		t.Fatal(err)
	}
	hung, fine := device(t, lib, 0), device(t, lib, 1)
	done := make(chan nvml.Return, 1)
	go func() {
		_, ret := hung.GetMemoryInfo()
		done <- ret
	}()
	for range 10 {
		if _, ret := fine.GetMemoryInfo(); ret != nvml.SUCCESS {
			t.Errorf("the other GPU: %v", ret)
		}
		time.Sleep(2 * time.Millisecond) // the hung call is under way for most of these
	}
	select {
	case ret := <-done:
		t.Fatalf("the hung call came back: %v", ret)
	default:
	}
	set(t, s, "hang", "0")
	if ret := <-done; ret != nvml.SUCCESS {
		t.Errorf("after the hang: %v", ret)
	}
}

// In a folder without gpu0, as a container gets it, only the other GPU exists.
func TestOnlyGPUsWithASocketExist(t *testing.T) {
	dir, s := simtest.Start(t, "--gpus", "2")
	inside := t.TempDir()
	for _, name := range []string{"ctl", "gpu1"} {
		if err := os.Symlink(filepath.Join(dir, name), filepath.Join(inside, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(wire.DirEnv, inside)
	lib := nvml.New(nvml.WithLibraryPath(simtest.Dist(t, "simgpu/libnvidia-ml.so.1")))
	must(t, "init", lib.Init())
	defer func() { must(t, "shutdown", lib.Shutdown()) }()
	if n, ret := lib.DeviceGetCount(); ret != nvml.SUCCESS || n != 1 {
		t.Errorf("%d devices, %v", n, ret)
	}
	d := device(t, lib, 0)
	if uuid, ret := d.GetUUID(); ret != nvml.SUCCESS || uuid != s.State().GPUs[1].UUID {
		t.Errorf("UUID %q, %v", uuid, ret)
	}
	if minor, ret := d.GetMinorNumber(); ret != nvml.SUCCESS || minor != 1 {
		t.Errorf("minor %d, %v", minor, ret)
	}
}

func TestNoDriver(t *testing.T) {
	t.Setenv(wire.DirEnv, t.TempDir())
	lib := nvml.New(nvml.WithLibraryPath(simtest.Dist(t, "simgpu/libnvidia-ml.so.1")))
	if ret := lib.Init(); ret != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("init without a driver: %v", ret)
	}
}

// The C side of the calls that the Go bindings do not reach: oldest versions, sizes, counts.
func TestOldVersions(t *testing.T) {
	for _, model := range []string{"t4", "h100"} {
		t.Run(model, func(t *testing.T) {
			dir, _ := simtest.Start(t, "--model", model, "--context-bytes", "104MiB")
			use(t, dir, "gpu0", wire.ListCompute, 100*mib)
			cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/nvml_test"), simtest.Dist(t, "simgpu/libnvidia-ml.so.1"))
			cmd.Env = append(os.Environ(), wire.DirEnv+"="+dir)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// Our structures have the layouts of the header that NVIDIA publishes with its bindings.
func TestLayoutsAgainstTheHeader(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	include := filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml")
	ours, err := os.ReadFile(filepath.Join("..", "libnvml", "nvml_abi.h"))
	if err != nil {
		t.Fatal(err)
	}
	// Only the structures: the header has the return codes and the handle's type itself.
	structs := regexp.MustCompile(`(?s)\nstruct nvml_.*?\n};`).FindAllString(string(ours), -1)
	if len(structs) != 12 {
		t.Fatalf("found %d structures", len(structs))
	}
	program := "#include <stddef.h>\n#include <nvml.h>\n" + strings.Join(structs, "\n") + "\n" + `
#define SAME_SIZE(a, b) _Static_assert(sizeof(struct a) == sizeof(b), #a)
#define SAME(a, f, b, g) _Static_assert(offsetof(struct a, f) == offsetof(b, g) && sizeof(((struct a *)0)->f) == sizeof(((b *)0)->g), #a "." #f)
SAME_SIZE(nvml_memory, nvmlMemory_t);
SAME(nvml_memory, total, nvmlMemory_t, total);
SAME(nvml_memory, free, nvmlMemory_t, free);
SAME(nvml_memory, used, nvmlMemory_t, used);
SAME_SIZE(nvml_memory_v2, nvmlMemory_v2_t);
SAME(nvml_memory_v2, version, nvmlMemory_v2_t, version);
SAME(nvml_memory_v2, total, nvmlMemory_v2_t, total);
SAME(nvml_memory_v2, reserved, nvmlMemory_v2_t, reserved);
SAME(nvml_memory_v2, free, nvmlMemory_v2_t, free);
SAME(nvml_memory_v2, used, nvmlMemory_v2_t, used);
_Static_assert(((unsigned int)sizeof(struct nvml_memory_v2) | 2u << 24) == nvmlMemory_v2, "version");
SAME_SIZE(nvml_process_v1, nvmlProcessInfo_v1_t);
SAME(nvml_process_v1, used_gpu_memory, nvmlProcessInfo_v1_t, usedGpuMemory);
SAME_SIZE(nvml_process_v2, nvmlProcessInfo_t);
SAME_SIZE(nvml_process_v2, nvmlProcessInfo_v2_t);
SAME(nvml_process_v2, pid, nvmlProcessInfo_t, pid);
SAME(nvml_process_v2, used_gpu_memory, nvmlProcessInfo_t, usedGpuMemory);
SAME(nvml_process_v2, gpu_instance_id, nvmlProcessInfo_t, gpuInstanceId);
SAME(nvml_process_v2, compute_instance_id, nvmlProcessInfo_t, computeInstanceId);
SAME_SIZE(nvml_process_detail, nvmlProcessDetail_v1_t);
SAME(nvml_process_detail, used_gpu_memory, nvmlProcessDetail_v1_t, usedGpuMemory);
SAME(nvml_process_detail, gpu_instance_id, nvmlProcessDetail_v1_t, gpuInstanceId);
SAME(nvml_process_detail, compute_instance_id, nvmlProcessDetail_v1_t, computeInstanceId);
SAME(nvml_process_detail, used_protected_memory, nvmlProcessDetail_v1_t, usedGpuCcProtectedMemory);
SAME_SIZE(nvml_process_detail_list, nvmlProcessDetailList_v1_t);
SAME(nvml_process_detail_list, version, nvmlProcessDetailList_v1_t, version);
SAME(nvml_process_detail_list, mode, nvmlProcessDetailList_v1_t, mode);
SAME(nvml_process_detail_list, count, nvmlProcessDetailList_v1_t, numProcArrayEntries);
SAME(nvml_process_detail_list, rows, nvmlProcessDetailList_v1_t, procArray);
_Static_assert(((unsigned int)sizeof(struct nvml_process_detail_list) | 1u << 24) == nvmlProcessDetailList_v1, "version");
SAME_SIZE(nvml_process_utilization, nvmlProcessUtilizationSample_t);
SAME(nvml_process_utilization, time_stamp, nvmlProcessUtilizationSample_t, timeStamp);
SAME(nvml_process_utilization, sm_util, nvmlProcessUtilizationSample_t, smUtil);
SAME(nvml_process_utilization, dec_util, nvmlProcessUtilizationSample_t, decUtil);
SAME_SIZE(nvml_pci_info, nvmlPciInfo_t);
SAME(nvml_pci_info, bus_id_legacy, nvmlPciInfo_t, busIdLegacy);
SAME(nvml_pci_info, domain, nvmlPciInfo_t, domain);
SAME(nvml_pci_info, bus, nvmlPciInfo_t, bus);
SAME(nvml_pci_info, device, nvmlPciInfo_t, device);
SAME(nvml_pci_info, device_id, nvmlPciInfo_t, pciDeviceId);
SAME(nvml_pci_info, subsystem_id, nvmlPciInfo_t, pciSubSystemId);
SAME(nvml_pci_info, bus_id, nvmlPciInfo_t, busId);
SAME_SIZE(nvml_attributes, nvmlDeviceAttributes_t);
SAME(nvml_attributes, multiprocessors, nvmlDeviceAttributes_t, multiprocessorCount);
SAME(nvml_attributes, gpu_slices, nvmlDeviceAttributes_t, gpuInstanceSliceCount);
SAME(nvml_attributes, compute_slices, nvmlDeviceAttributes_t, computeInstanceSliceCount);
SAME(nvml_attributes, memory_mb, nvmlDeviceAttributes_t, memorySizeMB);
SAME_SIZE(nvml_set_limits, nvmlSetMemoryLimits_v1_t);
SAME(nvml_set_limits, name_space, nvmlSetMemoryLimits_v1_t, nameSpace);
SAME(nvml_set_limits, soft, nvmlSetMemoryLimits_v1_t, softLimit);
SAME(nvml_set_limits, hard, nvmlSetMemoryLimits_v1_t, hardLimit);
SAME_SIZE(nvml_get_limits, nvmlGetMemoryLimits_v1_t);
SAME(nvml_get_limits, soft, nvmlGetMemoryLimits_v1_t, softLimit);
SAME(nvml_get_limits, hard, nvmlGetMemoryLimits_v1_t, hardLimit);
SAME(nvml_get_limits, used, nvmlGetMemoryLimits_v1_t, currentUsed);
SAME_SIZE(nvml_utilization, nvmlUtilization_t);
SAME(nvml_utilization, memory, nvmlUtilization_t, memory);
`
	source := filepath.Join(t.TempDir(), "layout.c")
	if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "cc", "-std=c11", "-I", include, "-fsyntax-only", source).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestInstances(t *testing.T) {
	lib, s, dir := open(t, "--gpus", "2", "--model", "a100", "--mig", "0,3")
	use(t, dir, "gpu1.mig2", wire.ListCompute, 64*mib)
	use(t, dir, "gpu1.mig1", wire.ListGraphics, 32*mib)
	if n, ret := lib.DeviceGetCount(); ret != nvml.SUCCESS || n != 2 {
		t.Errorf("%d devices, %v: instances are not among them", n, ret)
	}
	plain, gpu := device(t, lib, 0), device(t, lib, 1)
	if _, _, ret := plain.GetMigMode(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("MIG mode of a whole GPU: %v", ret)
	}
	if _, ret := plain.GetMigDeviceHandleByIndex(0); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("instance of a whole GPU: %v", ret)
	}
	if now, next, ret := gpu.GetMigMode(); ret != nvml.SUCCESS || now != nvml.DEVICE_MIG_ENABLE || next != nvml.DEVICE_MIG_ENABLE {
		t.Errorf("MIG mode %d, %d, %v", now, next, ret)
	}
	if n, ret := gpu.GetMaxMigDeviceCount(); ret != nvml.SUCCESS || n != 7 {
		t.Errorf("at most %d instances, %v", n, ret)
	}
	if _, ret := gpu.GetMigDeviceHandleByIndex(3); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("an instance that is not there: %v", ret)
	}
	if _, ret := gpu.GetMigDeviceHandleByIndex(7); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("an instance that cannot be: %v", ret)
	}
	if _, ret := gpu.GetGpuInstanceId(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("instance id of a GPU: %v", ret)
	}
	m, ret := gpu.GetMigDeviceHandleByIndex(2)
	must(t, "handle of an instance", ret)
	uuid, ret := m.GetUUID()
	if ret != nvml.SUCCESS || uuid != s.State().GPUs[4].UUID || !strings.HasPrefix(uuid, "MIG-") {
		t.Errorf("UUID %q, %v", uuid, ret)
	}
	if name, ret := m.GetName(); ret != nvml.SUCCESS || name != "NVIDIA A100 (simulated) MIG 2g.26gb" {
		t.Errorf("name %q, %v", name, ret)
	}
	if again, ret := lib.DeviceGetHandleByUUID(uuid); ret != nvml.SUCCESS {
		t.Errorf("by UUID: %v", ret)
	} else if is, ret := again.IsMigDeviceHandle(); ret != nvml.SUCCESS || !is {
		t.Errorf("MIG handle %v, %v", is, ret)
	}
	back, ret := m.GetDeviceHandleFromMigDeviceHandle()
	must(t, "GPU of an instance", ret)
	if id, ret := back.GetUUID(); ret != nvml.SUCCESS || id != s.State().GPUs[1].UUID {
		t.Errorf("the GPU of an instance is %q, %v", id, ret)
	}
	if _, ret := gpu.GetDeviceHandleFromMigDeviceHandle(); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("the GPU of a GPU: %v", ret)
	}
	if id, ret := m.GetGpuInstanceId(); ret != nvml.SUCCESS || id != 3 {
		t.Errorf("GPU instance %d, %v", id, ret)
	}
	if id, ret := m.GetComputeInstanceId(); ret != nvml.SUCCESS || id != 0 {
		t.Errorf("compute instance %d, %v", id, ret)
	}
	if a, ret := m.GetAttributes(); ret != nvml.SUCCESS || a.GpuInstanceSliceCount != 2 || a.MultiprocessorCount != 30 || a.MemorySizeMB != 27306 {
		t.Errorf("attributes %+v, %v", a, ret)
	}
	if _, ret := m.GetMinorNumber(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("minor of an instance: %v", ret)
	}
	if _, ret := m.GetUtilizationRates(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("utilization of an instance: %v", ret)
	}
	// A context has two of seven parts of 420 MiB.
	const held = (120 + 64) * mib
	v1, ret := m.GetMemoryInfo()
	must(t, "memory", ret)
	v2, ret := m.GetMemoryInfo_v2()
	must(t, "memory v2", ret)
	if v2.Total != 27306*mib || v2.Used != held || v1.Used != held+v2.Reserved || v2.Total != v2.Used+v2.Reserved+v2.Free {
		t.Errorf("memory %+v, %+v", v1, v2)
	}
	pid := uint32(os.Getpid())
	if rows, ret := m.GetComputeRunningProcesses(); ret != nvml.SUCCESS || len(rows) != 1 ||
		rows[0] != (nvml.ProcessInfo{Pid: pid, UsedGpuMemory: held, GpuInstanceId: 3, ComputeInstanceId: 0}) {
		t.Errorf("compute processes %+v, %v", rows, ret)
	}
	for _, list := range []func() ([]nvml.ProcessInfo, nvml.Return){m.GetGraphicsRunningProcesses, m.GetMPSComputeRunningProcesses} {
		if rows, ret := list(); ret != nvml.SUCCESS || len(rows) != 0 {
			t.Errorf("another list: %+v, %v", rows, ret)
		}
	}
	if rows, ret := gpu.GetGraphicsRunningProcesses(); ret != nvml.SUCCESS || len(rows) != 1 || rows[0].GpuInstanceId != 2 {
		t.Errorf("the GPU's list: %+v, %v", rows, ret)
	}
	if all, ret := gpu.GetMemoryInfo_v2(); ret != nvml.SUCCESS || all.Total != 80<<30 || all.Used != held+(120+32)*mib {
		t.Errorf("the GPU's memory: %+v, %v", all, ret)
	}
}

func TestOnlyInstancesWithASocketExist(t *testing.T) {
	dir, s := simtest.Start(t, "--gpus", "2", "--mig", "2")
	inside := t.TempDir()
	for _, name := range []string{"ctl", "gpu1.mig1"} {
		if err := os.Symlink(filepath.Join(dir, name), filepath.Join(inside, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(wire.DirEnv, inside)
	lib := nvml.New(nvml.WithLibraryPath(simtest.Dist(t, "simgpu/libnvidia-ml.so.1")))
	must(t, "init", lib.Init())
	defer func() { must(t, "shutdown", lib.Shutdown()) }()
	if n, ret := lib.DeviceGetCount(); ret != nvml.SUCCESS || n != 1 {
		t.Errorf("%d devices, %v", n, ret)
	}
	gpu := device(t, lib, 0)
	if _, ret := gpu.GetMigDeviceHandleByIndex(0); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("an instance without a socket: %v", ret)
	}
	m, ret := gpu.GetMigDeviceHandleByIndex(1)
	must(t, "handle of an instance", ret)
	if uuid, ret := m.GetUUID(); ret != nvml.SUCCESS || uuid != s.State().GPUs[5].UUID {
		t.Errorf("UUID %q, %v", uuid, ret)
	}
}
