// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"errors"
	"math"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"
)

// mockDevice is a T4 that a test may change.
func mockDevice() *mock.Device {
	return &mock.Device{
		GetUUIDFunc:        func() (string, nvml.Return) { return "GPU-1", nvml.SUCCESS },
		GetNameFunc:        func() (string, nvml.Return) { return "Tesla T4", nvml.SUCCESS },
		GetMinorNumberFunc: func() (int, nvml.Return) { return 3, nvml.SUCCESS },
		GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) {
			var p nvml.PciInfo
			for i, c := range "0000:03:00.0" {
				p.BusId[i] = int8(c)
			}
			return p, nvml.SUCCESS
		},
		GetMigModeFunc: func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED },
		GetMemoryInfo_v2Func: func() (nvml.Memory_v2, nvml.Return) {
			return nvml.Memory_v2{Total: 16 * gib, Reserved: gib, Free: 13 * gib, Used: 2 * gib}, nvml.SUCCESS
		},
		GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) {
			return nvml.Memory{Total: 16 * gib, Free: 13 * gib, Used: 3 * gib}, nvml.SUCCESS
		},
		GetComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) {
			return []nvml.ProcessInfo{{Pid: 7, UsedGpuMemory: gib}, {Pid: 8, UsedGpuMemory: math.MaxUint64}}, nvml.SUCCESS
		},
		GetGraphicsRunningProcessesFunc:   func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED },
		GetMPSComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS },
	}
}

func mockLibrary(devices []nvml.Device, symbols ...string) *library {
	has := map[string]bool{}
	for _, s := range symbols {
		has[s] = true
	}
	m := &mock.Interface{
		InitFunc:                   func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:               func() nvml.Return { return nvml.SUCCESS },
		SystemGetDriverVersionFunc: func() (string, nvml.Return) { return "570.86", nvml.SUCCESS },
		DeviceGetCountFunc:         func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			if devices[i] == nil {
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			return devices[i], nvml.SUCCESS
		},
	}
	m.ExtensionsFunc = func() nvml.ExtendedInterface {
		return &mock.ExtendedInterface{LookupSymbolFunc: func(s string) error {
			if has[s] {
				return nil
			}
			return errors.New("no symbol")
		}}
	}
	return &library{nvml: m}
}

const (
	mpsSymbol    = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
	memorySymbol = "nvmlDeviceGetMemoryInfo_v2"
)

func TestDevices(t *testing.T) {
	l := mockLibrary([]nvml.Device{mockDevice()}, mpsSymbol, memorySymbol)
	if err := l.Init(); err != nil {
		t.Fatal(err)
	}
	if v, err := l.Driver(); v != "570.86" || err != nil {
		t.Errorf("driver %q, %v", v, err)
	}
	devices, err := l.Devices()
	if err != nil || len(devices) != 1 {
		t.Fatal(devices, err)
	}
	want := Info{UUID: "GPU-1", Minor: 3, Name: "Tesla T4", PCI: "0000:03:00.0", TotalBytes: 16 * gib, ReservedBytes: gib}
	if diff := cmp.Diff(want, devices[0].Info()); diff != "" {
		t.Error(diff)
	}
	rows, err := devices[0].Processes(ListCompute)
	if err != nil || !cmp.Equal(rows, []Process{{7, gib, true}, {8, 0, false}}) {
		t.Errorf("%v, %v", rows, err)
	}
	for _, list := range []List{ListGraphics, ListMPS} {
		if rows, err := devices[0].Processes(list); err != nil || len(rows) != 0 {
			t.Errorf("%s: %v, %v", list, rows, err)
		}
	}
	if _, err := devices[0].Processes("other"); err == nil {
		t.Error("a list that is none was answered")
	}
	if err := l.Shutdown(); err != nil {
		t.Error(err)
	}
}

func TestMemoryVersions(t *testing.T) {
	for name, c := range map[string]struct {
		v2   nvml.Memory_v2
		ret  nvml.Return
		has  bool
		want Memory
		err  error
	}{
		"v2, reserve apart":    {nvml.Memory_v2{Total: 16, Reserved: 1, Free: 13, Used: 2}, nvml.SUCCESS, true, Memory{16, 2, 13, 1}, nil},
		"v2, reserve counted":  {nvml.Memory_v2{Total: 16, Reserved: 1, Free: 13, Used: 3}, nvml.SUCCESS, true, Memory{16, 2, 13, 1}, nil},
		"v2 not supported":     {nvml.Memory_v2{}, nvml.ERROR_NOT_SUPPORTED, true, Memory{16 * gib, 3 * gib, 13 * gib, 0}, nil},
		"v2 not in the driver": {nvml.Memory_v2{Total: 9}, nvml.SUCCESS, false, Memory{16 * gib, 3 * gib, 13 * gib, 0}, nil},
		"lost":                 {nvml.Memory_v2{}, nvml.ERROR_GPU_IS_LOST, true, Memory{}, ErrLost},
	} {
		m := mockDevice()
		m.GetMemoryInfo_v2Func = func() (nvml.Memory_v2, nvml.Return) { return c.v2, c.ret }
		d := &device{nvml: m, memoryV2: c.has}
		got, err := d.Memory()
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	m := mockDevice()
	m.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_NOT_SUPPORTED }
	if _, err := (&device{nvml: m}).Memory(); !errors.Is(err, ErrNotAvailable) {
		t.Errorf("neither call: %v", err)
	}
}

func TestListErrors(t *testing.T) {
	m := mockDevice()
	m.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED }
	m.GetGraphicsRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }
	m.GetMPSComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { panic("not in this driver") }
	d := &device{nvml: m, mps: false}
	_, err := d.Processes(ListCompute)
	var call *CallError
	if !errors.As(err, &call) || !errors.Is(err, ErrNotAvailable) || call.Code != int(nvml.ERROR_NOT_SUPPORTED) || call.Call == "" || call.Error() == "" {
		t.Errorf("the compute list must be answered: %v", err)
	}
	if _, err := d.Processes(ListGraphics); err == nil {
		t.Error("an unknown error is an empty list")
	}
	if rows, err := d.Processes(ListMPS); rows != nil || err != nil {
		t.Errorf("a driver without MPS lists: %v, %v", rows, err)
	}
}

func TestDevicesErrors(t *testing.T) {
	broken := func(change func(*mock.Device)) []nvml.Device {
		m := mockDevice()
		change(m)
		return []nvml.Device{m}
	}
	for name, devices := range map[string][]nvml.Device{
		"lost":    {nil},
		"no uuid": broken(func(m *mock.Device) { m.GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN } }),
		"no name": broken(func(m *mock.Device) { m.GetNameFunc = func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN } }),
		"no memory": broken(func(m *mock.Device) {
			m.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_UNKNOWN }
		}),
		"no total": broken(func(m *mock.Device) {
			m.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.SUCCESS }
		}),
	} {
		if d, err := mockLibrary(devices).Devices(); err == nil || d != nil {
			t.Errorf("%s: %v, %v", name, d, err)
		}
	}
	l := mockLibrary(nil)
	l.nvml.(*mock.Interface).DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNINITIALIZED }
	if _, err := l.Devices(); err == nil {
		t.Error("no count: no error")
	}
	// Without a minor number, PCI address or MIG mode a GPU is still one.
	devices, err := mockLibrary(broken(func(m *mock.Device) {
		m.GetMinorNumberFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
		m.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED }
	})).Devices()
	if err != nil || devices[0].Info().Minor != 0 || devices[0].Info().PCI != "" || devices[0].Info().MIG {
		t.Errorf("%+v, %v", devices, err)
	}
}

func TestNoLibrary(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	err := Open(path).Init()
	if !errors.Is(err, ErrNoLibrary) {
		t.Errorf("%v", err)
	}
	if err := Open("").Shutdown(); err == nil {
		t.Error("shut down what was never loaded")
	}
}

func TestInstances(t *testing.T) {
	row := func(pid, instance uint32) nvml.ProcessInfo {
		return nvml.ProcessInfo{Pid: pid, UsedGpuMemory: gib, GpuInstanceId: instance}
	}
	instance := mockDevice()
	instance.GetUUIDFunc = func() (string, nvml.Return) { return "MIG-1", nvml.SUCCESS }
	instance.GetNameFunc = func() (string, nvml.Return) { return "NVIDIA A30 MIG 2g.12gb", nvml.SUCCESS }
	instance.GetGpuInstanceIdFunc = func() (int, nvml.Return) { return 5, nvml.SUCCESS }
	instance.GetComputeInstanceIdFunc = func() (int, nvml.Return) { return 3, nvml.SUCCESS }
	instance.GetAttributesFunc = func() (nvml.DeviceAttributes, nvml.Return) {
		return nvml.DeviceAttributes{GpuInstanceSliceCount: 2}, nvml.SUCCESS
	}
	instance.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{row(1, 5), row(2, 6), row(3, math.MaxUint32)}, nvml.SUCCESS
	}
	// What may be missing: the id, the attributes.
	bare := mockDevice()
	bare.GetUUIDFunc = func() (string, nvml.Return) { return "MIG-2", nvml.SUCCESS }
	bare.GetGpuInstanceIdFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	bare.GetComputeInstanceIdFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	bare.GetAttributesFunc = func() (nvml.DeviceAttributes, nvml.Return) {
		return nvml.DeviceAttributes{}, nvml.ERROR_NOT_SUPPORTED
	}
	bare.GetComputeRunningProcessesFunc = instance.GetComputeRunningProcessesFunc
	split := mockDevice()
	split.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_ENABLE, 0, nvml.SUCCESS }
	split.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 4, nvml.SUCCESS }
	split.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		switch i {
		case 1:
			return instance, nvml.SUCCESS
		case 2:
			return bare, nvml.SUCCESS
		case 3:
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return nil, nvml.ERROR_NOT_FOUND
	}
	// Nobody but root may know its memory; it is not needed.
	split.GetMemoryInfo_v2Func = func() (nvml.Memory_v2, nvml.Return) { return nvml.Memory_v2{}, nvml.ERROR_NO_PERMISSION }
	devices, err := mockLibrary([]nvml.Device{split}, mpsSymbol, memorySymbol).Devices()
	if !errors.Is(err, ErrLost) || len(devices) != 3 {
		t.Fatalf("%v, %v", devices, err)
	}
	for i, want := range []Info{
		{UUID: "GPU-1", Minor: 3, Name: "Tesla T4", PCI: "0000:03:00.0", MIG: true},
		{
			UUID: "MIG-1", Minor: 3, Name: "NVIDIA A30 MIG 2g.12gb", PCI: "0000:03:00.0", TotalBytes: 16 * gib, ReservedBytes: gib,
			Parent: "GPU-1", Instance: 1, Share: 0.5, GI: 5, CI: 3,
		},
		{
			UUID: "MIG-2", Minor: 3, Name: "Tesla T4", PCI: "0000:03:00.0", TotalBytes: 16 * gib, ReservedBytes: gib,
			Parent: "GPU-1", Instance: 2, GI: -1, CI: -1,
		},
	} {
		if diff := cmp.Diff(want, devices[i].Info()); diff != "" {
			t.Error(diff)
		}
	}
	for i, want := range map[int][]Process{1: {{1, gib, true}, {3, gib, true}}, 2: {{1, gib, true}, {2, gib, true}, {3, gib, true}}} {
		if rows, err := devices[i].Processes(ListCompute); err != nil || !cmp.Equal(rows, want) {
			t.Errorf("processes of %d: %v, %v", i, rows, err)
		}
	}
	split.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
	if devices, err := mockLibrary([]nvml.Device{split}, memorySymbol).Devices(); err == nil || len(devices) != 1 {
		t.Errorf("no count: %v, %v", devices, err)
	}
	for name, change := range map[string]func(*mock.Device){
		"uuid": func(m *mock.Device) { m.GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN } },
		"name": func(m *mock.Device) { m.GetNameFunc = func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN } },
		"memory": func(m *mock.Device) {
			m.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_UNKNOWN }
		},
	} {
		instance := mockDevice()
		instance.GetGpuInstanceIdFunc, instance.GetAttributesFunc = bare.GetGpuInstanceIdFunc, bare.GetAttributesFunc
		instance.GetComputeInstanceIdFunc = bare.GetComputeInstanceIdFunc
		change(instance)
		split.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 1, nvml.SUCCESS }
		split.GetMigDeviceHandleByIndexFunc = func(int) (nvml.Device, nvml.Return) { return instance, nvml.SUCCESS }
		if devices, err := mockLibrary([]nvml.Device{split}).Devices(); err == nil || len(devices) != 1 {
			t.Errorf("an instance without %s: %v, %v", name, devices, err)
		}
	}
}

func TestInstanceContext(t *testing.T) {
	const a100 = 444 * miB
	for share, want := range map[float64]uint64{0: a100, 1: a100, 2: a100, -1: a100, math.NaN(): a100, 1.0 / 7: 96 * miB, 3.0 / 7: 224 * miB, 0.99: a100} {
		if got := instanceContextBytes(a100, share); got != want {
			t.Errorf("share %v: %d MiB, want %d", share, got/miB, want/miB)
		}
	}
	i := Info{Name: "NVIDIA A100-SXM4-40GB MIG 1g.5gb", TotalBytes: 5 * gib, Share: 1.0 / 7}
	if q := Quota(i, Reserve{}, 0); q.ContextBytes != 96*miB {
		t.Errorf("%+v", q)
	}
	if q := Quota(i, Reserve{}, 7); q.ContextBytes != 7 {
		t.Errorf("with an override: %+v", q)
	}
}
