// SPDX-License-Identifier: Apache-2.0

// Package wire is simgpu.h in Go: the packets between simgpud and its clients. Every constant
// and offset here has its twin there; a test of this package compiles the header and compares.
// The structures are encoded by hand in little-endian, so that nothing depends on how Go lays
// out a struct.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Magic starts every packet.
const Magic uint32 = 0x31475253

// Names of the sockets in simgpud's folder, and where clients look for it.
const (
	DirEnv     = "SIMGPU_DIR"
	DirDefault = "/dev/simgpu"
	Ctl        = "ctl"
	Admin      = "admin"
	GPUPrefix  = "gpu"
	MIGInfix   = ".mig"
)

// Bounds.
const (
	PacketMax = 65536
	GPUsMax   = 64
	MIGMax    = 7
	ProcsMax  = 950
)

// Granules, in bytes.
const (
	PageBytes  uint64 = 2 << 20
	SmallBytes uint64 = 1 << 20
	AlignBytes uint64 = 512
)

// Op is what a request asks for.
type Op uint32

// Operations on a gpuN socket, then those on ctl.
const (
	OpInfo       Op = 1
	OpCtxCreate  Op = 2
	OpCtxDestroy Op = 3
	OpAlloc      Op = 4
	OpFree       Op = 5
	OpMemInfo    Op = 6
	OpLaunch     Op = 7
	OpMigrate    Op = 8
	OpExport     Op = 9
	OpImport     Op = 10
	OpCtxResize  Op = 11
	OpSettings   Op = 12

	OpNode         Op = 64
	OpDevice       Op = 65
	OpNVMLMemory   Op = 66
	OpNVMLProcs    Op = 67
	OpNVMLUtil     Op = 68
	OpNVMLProcUtil Op = 69
	OpLimitsSet    Op = 70
	OpLimitsGet    Op = 71
)

// Kind is what an allocation is.
type Kind uint64

// Kinds of memory.
const (
	KindDevice   Kind = 0
	KindPhysical Kind = 1
	KindManaged  Kind = 2
)

// ContextKind is what a context is.
type ContextKind uint64

// Kinds of contexts.
const (
	ContextWhole ContextKind = 0
	ContextGreen ContextKind = 1
)

// List is one of NVML's lists of processes.
type List uint64

// NVML's lists.
const (
	ListCompute  List = 0
	ListGraphics List = 1
	ListMPS      List = 2
	ListAll      List = 3 // whoever is in any of them, once; only to ask for
)

// Status is how a request ended.
type Status int32

// Statuses.
const (
	OK           Status = 0
	NoMemory     Status = 1
	Invalid      Status = 2
	NotFound     Status = 3
	Lost         Status = 4
	NotSupported Status = 5
	Busy         Status = 6
	Elsewhere    Status = 7
	NotPermitted Status = 8
	NoCgroup     Status = 9
)

// KernelDefault asks for the time that simgpud is set to; NotAvailable is a size nobody knows.
const (
	KernelDefault = ^uint64(0)
	NotAvailable  = ^uint64(0)
)

// Sizes of the encoded structures.
const (
	ReqBytes      = 64
	RepBytes      = 64
	NodeBytes     = 0xa8
	DeviceBytes   = 0x128
	ProcBytes     = 16
	ProcUtilBytes = 24
)

// ErrMalformed is what a packet that is not ours gives.
var ErrMalformed = errors.New("malformed packet")

// Req is a request.
type Req struct {
	Op  Op
	Arg [7]uint64
}

// Rep is an answer, without its payload.
type Rep struct {
	Status Status
	Val    [7]uint64
}

// Encode is the packet of r.
func (r *Req) Encode() []byte {
	b := make([]byte, ReqBytes)
	binary.LittleEndian.PutUint32(b, Magic)
	binary.LittleEndian.PutUint32(b[4:], uint32(r.Op))
	for i, v := range r.Arg {
		binary.LittleEndian.PutUint64(b[8+8*i:], v)
	}
	return b
}

// DecodeReq reads a request; a packet of any other size or magic is malformed.
func DecodeReq(b []byte) (Req, error) {
	var r Req
	if len(b) != ReqBytes || binary.LittleEndian.Uint32(b) != Magic {
		return r, fmt.Errorf("decode request of %d bytes: %w", len(b), ErrMalformed)
	}
	r.Op = Op(binary.LittleEndian.Uint32(b[4:]))
	for i := range r.Arg {
		r.Arg[i] = binary.LittleEndian.Uint64(b[8+8*i:])
	}
	return r, nil
}

// Encode is the packet of r with a payload behind it.
func (r *Rep) Encode(payload []byte) []byte {
	b := make([]byte, RepBytes, RepBytes+len(payload))
	binary.LittleEndian.PutUint32(b, Magic)
	binary.LittleEndian.PutUint32(b[4:], uint32(r.Status))
	for i, v := range r.Val {
		binary.LittleEndian.PutUint64(b[8+8*i:], v)
	}
	return append(b, payload...)
}

// DecodeRep reads an answer and hands back its payload, which is a part of b.
func DecodeRep(b []byte) (Rep, []byte, error) {
	var r Rep
	if len(b) < RepBytes || binary.LittleEndian.Uint32(b) != Magic {
		return r, nil, fmt.Errorf("decode answer of %d bytes: %w", len(b), ErrMalformed)
	}
	r.Status = Status(binary.LittleEndian.Uint32(b[4:]))
	for i := range r.Val {
		r.Val[i] = binary.LittleEndian.Uint64(b[8+8*i:])
	}
	return r, b[RepBytes:], nil
}

// Node describes the driver.
type Node struct {
	DriverVersion string
	NVMLVersion   string
	CUDAVersion   uint32
	GPUCount      uint32
}

// Encode lays n out as struct simgpu_node.
func (n *Node) Encode() []byte {
	b := make([]byte, NodeBytes)
	putString(b[0x00:0x50], n.DriverVersion)
	putString(b[0x50:0xa0], n.NVMLVersion)
	binary.LittleEndian.PutUint32(b[0xa0:], n.CUDAVersion)
	binary.LittleEndian.PutUint32(b[0xa4:], n.GPUCount)
	return b
}

// Device describes one GPU.
type Device struct {
	UUID           [16]byte
	UUIDText       string
	Name           string
	PCIBusID       string
	PCIDomain      uint32
	PCIBus         uint32
	PCIDevice      uint32
	PCIDeviceID    uint32
	PCISubsystemID uint32
	Minor          uint32
	CCMajor        uint32
	CCMinor        uint32
	SMCount        uint32
	ThreadsPerSM   uint32
	TotalBytes     uint64
	ReservedBytes  uint64
	CUDATotalBytes uint64
	CUDAVersion    uint32
	BackingMiB     uint32
	Number         uint32
	MIGInstances   uint32
	MIGInstance    uint32
	MIGSlices      uint32
	GPUUUID        [16]byte
}

// Encode lays d out as struct simgpu_device.
func (d *Device) Encode() []byte {
	b := make([]byte, DeviceBytes)
	copy(b, d.UUID[:])
	putString(b[0x10:0x40], d.UUIDText)
	putString(b[0x40:0xa0], d.Name)
	putString(b[0xa0:0xc0], d.PCIBusID)
	for i, v := range []uint32{d.PCIDomain, d.PCIBus, d.PCIDevice, d.PCIDeviceID, d.PCISubsystemID, d.Minor, d.CCMajor, d.CCMinor, d.SMCount, d.ThreadsPerSM} {
		binary.LittleEndian.PutUint32(b[0xc0+4*i:], v)
	}
	for i, v := range []uint64{d.TotalBytes, d.ReservedBytes, d.CUDATotalBytes} {
		binary.LittleEndian.PutUint64(b[0xe8+8*i:], v)
	}
	binary.LittleEndian.PutUint32(b[0x100:], d.CUDAVersion)
	binary.LittleEndian.PutUint32(b[0x104:], d.BackingMiB)
	for i, v := range []uint32{d.Number, d.MIGInstances, d.MIGInstance, d.MIGSlices} {
		binary.LittleEndian.PutUint32(b[0x108+4*i:], v)
	}
	copy(b[0x118:], d.GPUUUID[:])
	return b
}

// Proc is one row of a process list.
type Proc struct {
	PID       uint32
	Instance  uint32 // of MIG; 0: none
	UsedBytes uint64
}

// EncodeProcs lays rows out as an array of struct simgpu_proc.
func EncodeProcs(rows []Proc) []byte {
	b := make([]byte, 0, len(rows)*ProcBytes)
	for _, r := range rows {
		b = binary.LittleEndian.AppendUint32(b, r.PID)
		b = binary.LittleEndian.AppendUint32(b, r.Instance)
		b = binary.LittleEndian.AppendUint64(b, r.UsedBytes)
	}
	return b
}

// ProcUtil is how much of the GPU one process used.
type ProcUtil struct {
	PID         uint32
	SMPercent   uint32
	MemPercent  uint32
	TimeStampUS uint64
}

// EncodeProcUtils lays rows out as an array of struct simgpu_proc_util.
func EncodeProcUtils(rows []ProcUtil) []byte {
	b := make([]byte, 0, len(rows)*ProcUtilBytes)
	for _, r := range rows {
		b = binary.LittleEndian.AppendUint32(b, r.PID)
		b = binary.LittleEndian.AppendUint32(b, r.SMPercent)
		b = binary.LittleEndian.AppendUint32(b, r.MemPercent)
		b = binary.LittleEndian.AppendUint32(b, 0)
		b = binary.LittleEndian.AppendUint64(b, r.TimeStampUS)
	}
	return b
}

// putString copies s and leaves at least one 0 at the end.
func putString(to []byte, s string) { copy(to[:len(to)-1], s) }
