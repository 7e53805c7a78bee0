// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

const (
	mib = uint64(1) << 20
	gib = uint64(1) << 30
)

// Config is what a GPU is for its whole life.
type Config struct {
	Name           string
	UUID           [16]byte
	Minor          int
	TotalBytes     uint64
	ReservedBytes  uint64 // the driver's own; 0: one per cent of the total
	ContextBytes   uint64 // of a context, unless the knob says otherwise
	SMCount        int
	ThreadsPerSM   int
	CCMajor        int
	CCMinor        int
	PCIDeviceID    uint32
	CUDAVersion    uint32
	BackingMiB     uint32 // host memory that a client may spend on contents
	PCISubsystemID uint32
	Number         int      // in requests and in State: the minor of a GPU; instances come after all GPUs
	Instances      int      // into which the GPU is split; 0: it is not
	Instance       int      // id of a MIG instance, its index + 1; 0: a GPU
	Slices         int      // of wire.MIGMax that an instance has
	GPUUUID        [16]byte // of an instance: its GPU's
}

// Models are the GPUs that simgpud can play, by the name of its --model flag. Context sizes
// are measured where somebody published one, else fitted: docs/simulated-gpu.md says which.
var models = map[string]Config{
	"t4":   {Name: "NVIDIA T4 (simulated)", TotalBytes: 16 * gib, ContextBytes: 104 * mib, SMCount: 40, ThreadsPerSM: 1024, CCMajor: 7, CCMinor: 5, PCIDeviceID: 0x1eb810de},
	"v100": {Name: "NVIDIA V100 (simulated)", TotalBytes: 32 * gib, ContextBytes: 306 * mib, SMCount: 80, ThreadsPerSM: 2048, CCMajor: 7, CCMinor: 0, PCIDeviceID: 0x1db610de},
	"a10":  {Name: "NVIDIA A10 (simulated)", TotalBytes: 24 * gib, ContextBytes: 226 * mib, SMCount: 72, ThreadsPerSM: 1536, CCMajor: 8, CCMinor: 6, PCIDeviceID: 0x223610de},
	"a100": {Name: "NVIDIA A100 (simulated)", TotalBytes: 80 * gib, ContextBytes: 420 * mib, SMCount: 108, ThreadsPerSM: 2048, CCMajor: 8, CCMinor: 0, PCIDeviceID: 0x20b210de},
	"l4":   {Name: "NVIDIA L4 (simulated)", TotalBytes: 24 * gib, ContextBytes: 184 * mib, SMCount: 58, ThreadsPerSM: 1536, CCMajor: 8, CCMinor: 9, PCIDeviceID: 0x27b810de},
	"l40s": {Name: "NVIDIA L40S (simulated)", TotalBytes: 48 * gib, ContextBytes: 426 * mib, SMCount: 142, ThreadsPerSM: 1536, CCMajor: 8, CCMinor: 9, PCIDeviceID: 0x26b910de},
	"h100": {Name: "NVIDIA H100 (simulated)", TotalBytes: 80 * gib, ContextBytes: 530 * mib, SMCount: 132, ThreadsPerSM: 2048, CCMajor: 9, CCMinor: 0, PCIDeviceID: 0x233010de},
	"h200": {Name: "NVIDIA H200 (simulated)", TotalBytes: 141 * gib, ContextBytes: 530 * mib, SMCount: 132, ThreadsPerSM: 2048, CCMajor: 9, CCMinor: 0, PCIDeviceID: 0x233510de},
	"b200": {Name: "NVIDIA B200 (simulated)", TotalBytes: 180 * gib, ContextBytes: 612 * mib, SMCount: 148, ThreadsPerSM: 2048, CCMajor: 10, CCMinor: 0, PCIDeviceID: 0x290110de},
}

// Model is the configuration of a known GPU, without UUID and minor.
func Model(name string) (Config, error) {
	c, ok := models[strings.ToLower(name)]
	if !ok {
		known := make([]string, 0, len(models))
		for n := range models {
			known = append(known, n)
		}
		sort.Strings(known)
		return Config{}, fmt.Errorf("no GPU model %q: write one of %s", name, strings.Join(known, ", "))
	}
	return c, nil
}

// SeededUUID is the UUID of GPU minor under seed: the same ones on every machine.
func SeededUUID(seed string, minor int) [16]byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(seed+"\x00"), uint64(minor)))
	var u [16]byte
	copy(u[:], sum[:])
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// Split gives the equal MIG instances of a GPU: each has its part of the memory, and of the
// processors as many sevenths as there are whole ones.
func (c Config) Split() []Config {
	var all []Config
	for i := range c.Instances {
		m := c
		m.Instance, m.Instances, m.GPUUUID = i+1, 0, c.UUID
		m.Slices = wire.MIGMax / c.Instances
		m.UUID = SeededUUID(hex.EncodeToString(c.UUID[:]), i)
		m.TotalBytes = c.TotalBytes / uint64(c.Instances) / wire.PageBytes * wire.PageBytes
		m.ReservedBytes = c.ReservedBytes / uint64(c.Instances) / wire.PageBytes * wire.PageBytes
		m.SMCount = max(1, c.SMCount*m.Slices/wire.MIGMax)
		m.ContextBytes = roundUp(c.ContextBytes*uint64(m.Slices)/wire.MIGMax, wire.PageBytes)
		m.Name = fmt.Sprintf("%s MIG %dg.%dgb", c.Name, m.Slices, m.TotalBytes/gib)
		all = append(all, m)
	}
	return all
}

// Socket is the name of the device file.
func (c Config) Socket() string {
	if c.Instance > 0 {
		return wire.GPUPrefix + strconv.Itoa(c.Minor) + wire.MIGInfix + strconv.Itoa(c.Instance-1)
	}
	return wire.GPUPrefix + strconv.Itoa(c.Minor)
}

// UUIDText is its UUID as every NVIDIA tool prints it.
func (c Config) UUIDText() string {
	if c.Instance > 0 {
		return "MIG-" + strings.TrimPrefix(UUIDText(c.UUID), "GPU-")
	}
	return UUIDText(c.UUID)
}

// UUIDText is GPU-01234567-89ab-..., as every NVIDIA tool prints it.
func UUIDText(u [16]byte) string {
	h := hex.EncodeToString(u[:])
	return "GPU-" + strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

// ParseUUID reads what UUIDText writes.
func ParseUUID(s string) ([16]byte, error) {
	var u [16]byte
	raw, err := hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(s, "GPU-"), "-", ""))
	if err != nil || len(raw) != len(u) || !strings.EqualFold(UUIDText([16]byte(raw)), s) {
		return u, fmt.Errorf("read UUID %q: write it as nvidia-smi -L prints it, GPU- and 36 characters", s)
	}
	return [16]byte(raw), nil
}

// Device is what clients are told about the GPU.
func (g *GPU) Device() wire.Device {
	c := g.cfg
	whole := c.GPUUUID
	if c.Instance == 0 {
		whole = c.UUID
	}
	return wire.Device{
		UUID: c.UUID, UUIDText: c.UUIDText(), Name: c.Name,
		PCIBusID: fmt.Sprintf("%08X:%02X:%02X.0", 0, c.Minor+1, 0), PCIBus: uint32(c.Minor + 1),
		PCIDeviceID: c.PCIDeviceID, PCISubsystemID: c.PCISubsystemID, Minor: uint32(c.Minor),
		CCMajor: uint32(c.CCMajor), CCMinor: uint32(c.CCMinor), SMCount: uint32(c.SMCount), ThreadsPerSM: uint32(c.ThreadsPerSM),
		TotalBytes: c.TotalBytes, ReservedBytes: c.ReservedBytes, CUDATotalBytes: c.TotalBytes - c.ReservedBytes,
		CUDAVersion: c.CUDAVersion, BackingMiB: c.BackingMiB,
		Number: uint32(c.Number), MIGInstances: uint32(c.Instances), MIGInstance: uint32(c.Instance), MIGSlices: uint32(c.Slices), GPUUUID: whole,
	}
}
