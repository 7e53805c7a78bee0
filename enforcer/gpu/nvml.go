// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Open makes NVML through go-nvml, which loads it at Init; path "" means the loader's
// libnvidia-ml.so.1.
func Open(path string) Library {
	var opts []nvml.LibraryOption
	if path != "" {
		opts = append(opts, nvml.WithLibraryPath(path))
	}
	return &library{nvml: nvml.New(opts...), path: path, calls: &calls{}}
}

type library struct {
	nvml  nvml.Interface
	path  string
	calls *calls // nil: only the binding's are used
}

// check turns a return code into an error.
func check(call string, r nvml.Return) error {
	if r == nvml.SUCCESS {
		return nil
	}
	e := &CallError{Call: call, Code: int(r), Text: r.Error()}
	switch r {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_DATA:
		e.kind = ErrNotAvailable
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_NOT_FOUND, nvml.ERROR_NOT_FOUND:
		e.kind = ErrLost
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		e.kind = ErrNoLibrary
	}
	return e
}

func (l *library) Init() error {
	path := l.path
	if path == "" {
		path = "libnvidia-ml.so.1"
	}
	if err := check("nvmlInit", l.nvml.Init()); err != nil {
		return fmt.Errorf("load %s: %w", path, err)
	}
	if l.calls != nil {
		l.calls.find(path)
	}
	return nil
}

// shutdownPatience is how long a call that is in progress is waited for.
const shutdownPatience = 5 * time.Second

func (l *library) Shutdown() error {
	if l.calls != nil {
		if err := l.calls.drop(shutdownPatience); err != nil {
			return err
		}
	}
	return check("nvmlShutdown", l.nvml.Shutdown())
}

func (l *library) Driver() (string, error) {
	v, r := l.nvml.SystemGetDriverVersion()
	return v, check("nvmlSystemGetDriverVersion", r)
}

// has says whether the library has a function. Calling one that it has not ends the program, as
// the binding resolves lazily.
func (l *library) has(names ...string) bool {
	for _, n := range names {
		if l.nvml.Extensions().LookupSymbol(n) == nil {
			return true
		}
	}
	return false
}

func (l *library) Devices() ([]Device, error) {
	n, r := l.nvml.DeviceGetCount()
	if err := check("nvmlDeviceGetCount", r); err != nil {
		return nil, err
	}
	mps := l.has("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses")
	memoryV2 := l.has("nvmlDeviceGetMemoryInfo_v2")
	limits := l.has("nvmlDeviceSetMemoryLimits_v1") && l.has("nvmlDeviceGetMemoryLimits_v1")
	var out []Device
	var errs []error
	for i := range n {
		handle, r := l.nvml.DeviceGetHandleByIndex(i)
		err := check("nvmlDeviceGetHandleByIndex", r)
		d := &device{nvml: handle, mps: mps, memoryV2: memoryV2, hasLimits: limits, instance: -1}
		if err == nil {
			err = d.describe(i)
		}
		if l.calls.has() {
			d.calls = l.calls
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("list GPU %d: %w", i, err))
			continue
		}
		out = append(out, d)
		if d.info.MIG {
			instances, err := d.instances()
			out = append(out, instances...)
			if err != nil {
				errs = append(errs, fmt.Errorf("list MIG instances of GPU %d: %w", i, err))
			}
		}
	}
	return out, errors.Join(errs...)
}

// instances are the MIG instances of a GPU in MIG mode. There may be none. Indices may have gaps.
func (d *device) instances() ([]Device, error) {
	n, r := d.nvml.GetMaxMigDeviceCount()
	if err := check("nvmlDeviceGetMaxMigDeviceCount", r); err != nil {
		return nil, err
	}
	var out []Device
	var errs []error
	for index := range n {
		handle, r := d.nvml.GetMigDeviceHandleByIndex(index)
		if r == nvml.ERROR_NOT_FOUND {
			continue
		}
		err := check("nvmlDeviceGetMigDeviceHandleByIndex", r)
		m := &device{nvml: handle, mps: d.mps, memoryV2: d.memoryV2, hasLimits: d.hasLimits, calls: d.calls}
		if err == nil {
			err = m.describeInstance(d.info, index, n)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("instance %d: %w", index, err))
			continue
		}
		out = append(out, m)
	}
	return out, errors.Join(errs...)
}

type device struct {
	nvml      nvml.Device
	mps       bool
	memoryV2  bool
	hasLimits bool // the library can limit the memory of cgroups
	info      Info
	instance  int // id of the GPU instance whose processes are meant; -1: all of them

	calls  *calls     // nil: the binding's are used only
	thread sync.Mutex // guards what follows
	asked  *asked     // nil: not yet. A list of GPUs that is only looked through starts no threads.
	unable bool       // to be asked by a thread
}

func (d *device) Info() Info { return d.info }

func (d *device) describe(index int) error {
	uuid, r := d.nvml.GetUUID()
	if err := check("nvmlDeviceGetUUID", r); err != nil {
		return err
	}
	name, r := d.nvml.GetName()
	if err := check("nvmlDeviceGetName", r); err != nil {
		return err
	}
	d.info = Info{UUID: uuid, Index: index, Minor: index, Name: name}
	// A node without minor numbers or PCI (WSL, some virtual GPUs) is still usable by UUID.
	if minor, r := d.nvml.GetMinorNumber(); r == nvml.SUCCESS {
		d.info.Minor = minor
	}
	if pci, r := d.nvml.GetPciInfo(); r == nvml.SUCCESS {
		d.info.PCI = cString(pci.BusId[:])
	}
	if mode, _, r := d.nvml.GetMigMode(); r == nvml.SUCCESS {
		d.info.MIG = mode == nvml.DEVICE_MIG_ENABLE
	}
	if d.info.MIG {
		// Nothing is granted of it, and its memory may be for the eyes of root only.
		if m, err := d.Memory(); err == nil && m.broken() == "" {
			d.info.TotalBytes, d.info.ReservedBytes = m.TotalBytes, m.ReservedBytes
		}
		return nil
	}
	return d.measure()
}

// describeInstance describes one of at most `most` instances of a GPU.
func (d *device) describeInstance(parent Info, index, most int) error {
	uuid, r := d.nvml.GetUUID()
	if err := check("nvmlDeviceGetUUID", r); err != nil {
		return err
	}
	name, r := d.nvml.GetName()
	if err := check("nvmlDeviceGetName", r); err != nil {
		return err
	}
	d.info = Info{UUID: uuid, Index: parent.Index, Minor: parent.Minor, Name: name, PCI: parent.PCI, Parent: parent.UUID, Instance: index, GI: -1, CI: -1}
	d.instance = -1
	if id, r := d.nvml.GetGpuInstanceId(); r == nvml.SUCCESS {
		d.instance, d.info.GI = id, id
	}
	if id, r := d.nvml.GetComputeInstanceId(); r == nvml.SUCCESS {
		d.info.CI = id
	}
	// A GPU has as many slices as it has room for instances.
	if a, r := d.nvml.GetAttributes(); r == nvml.SUCCESS && most > 0 {
		d.info.Share = min(float64(a.GpuInstanceSliceCount)/float64(most), 1)
	}
	return d.measure()
}

// measure asks for the sizes, without which a GPU is of no use.
func (d *device) measure() error {
	m, err := d.Memory()
	if err != nil {
		return err
	}
	if why := m.broken(); why != "" {
		return fmt.Errorf("%s: %w", why, ErrNotAvailable)
	}
	d.info.TotalBytes, d.info.ReservedBytes = m.TotalBytes, m.ReservedBytes
	return nil
}

// noInstance is what a row says that belongs to no MIG instance.
const noInstance = ^uint32(0)

func cString[T ~int8 | ~uint8](b []T) string {
	out := make([]byte, 0, len(b))
	for _, c := range b {
		if c == 0 {
			break
		}
		out = append(out, byte(c))
	}
	return string(out)
}

// Memory asks the call that keeps the driver's reserve apart, and the old one where a driver does
// not have it.
func (d *device) Memory() (Memory, error) {
	if d.memoryV2 {
		m, r := d.nvml.GetMemoryInfo_v2()
		switch r {
		case nvml.SUCCESS:
			return memoryV2(m.Total, m.Reserved, m.Free, m.Used), nil
		case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_ARGUMENT_VERSION_MISMATCH:
		default:
			return Memory{}, check("nvmlDeviceGetMemoryInfo_v2", r)
		}
	}
	m, r := d.nvml.GetMemoryInfo()
	if err := check("nvmlDeviceGetMemoryInfo", r); err != nil {
		return Memory{}, err
	}
	return Memory{TotalBytes: m.Total, UsedBytes: m.Used, FreeBytes: m.Free}, nil
}

// memoryV2 is what the second version of the call says.
func memoryV2(total, reserved, free, used uint64) Memory {
	// Some versions count the reserve as used, some do not; total = reserved + used + free tells
	// which.
	if used >= reserved && total >= free && total-free == used {
		used -= reserved
	}
	return Memory{TotalBytes: total, UsedBytes: used, FreeBytes: free, ReservedBytes: reserved}
}

// listCalls name the calls in errors.
var listCalls = map[List]string{
	ListCompute:  "nvmlDeviceGetComputeRunningProcesses",
	ListGraphics: "nvmlDeviceGetGraphicsRunningProcesses",
	ListMPS:      "nvmlDeviceGetMPSComputeRunningProcesses",
}

// listMissing says whether a GPU does not have a list (graphics on a compute-only board, MPS on an
// old driver): then it is empty. The compute list is the one that must be there.
func listMissing(list List, r nvml.Return) bool {
	return list != ListCompute && (r == nvml.ERROR_NOT_SUPPORTED || r == nvml.ERROR_FUNCTION_NOT_FOUND)
}

// Processes answers one list.
func (d *device) Processes(list List) ([]Process, error) {
	var rows []nvml.ProcessInfo
	var r nvml.Return
	switch list {
	case ListCompute:
		rows, r = d.nvml.GetComputeRunningProcesses()
	case ListGraphics:
		rows, r = d.nvml.GetGraphicsRunningProcesses()
	case ListMPS:
		if !d.mps {
			return nil, nil
		}
		rows, r = d.nvml.GetMPSComputeRunningProcesses()
	default:
		return nil, fmt.Errorf("ask NVML for processes: no list %q", list)
	}
	if listMissing(list, r) {
		return nil, nil
	}
	if err := check(listCalls[list], r); err != nil {
		return nil, err
	}
	out := make([]Process, 0, len(rows))
	for _, row := range rows {
		if p, ours := d.process(row.Pid, row.UsedGpuMemory, row.GpuInstanceId); ours {
			out = append(out, p)
		}
	}
	return out, nil
}

// process is a row of a list. A driver may answer an instance's handle with the whole GPU's list,
// and says then whose each row is.
func (d *device) process(pid uint32, used uint64, instance uint32) (p Process, ours bool) {
	if d.instance >= 0 && instance != noInstance && instance != uint32(d.instance) {
		return Process{}, false
	}
	p = Process{PID: int(pid), Bytes: used, Known: used != notAvailable}
	if !p.Known {
		p.Bytes = 0
	}
	return p, true
}
