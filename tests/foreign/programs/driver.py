#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""driver.py OUT TOO_MUCH: takes memory in every form through cuda.bindings.driver, then TOO_MUCH bytes of each.

OUT becomes a JSON object: steps, what each call answered; over, what it answered to too much; views, the sizes that
were told.
"""
import ctypes
import json
import os
import subprocess
import sys
import time

from cuda.bindings import driver as cu

MIB = 1 << 20
steps, over, views = {}, {}, {}


def name(result):
    return getattr(result, "name", None) or cu.CUresult(int(result)).name


def take(log, what, answer):
    """Notes what a call answered, and gives its values."""
    assert what not in log, what
    log[what] = name(answer[0])
    values = answer[1:]
    return values[0] if len(values) == 1 else values


def do(what, answer):
    return take(steps, what, answer)


def beyond(call, answer, back):
    """Notes what a call answered to too much, and gives back what it granted."""
    take(over, call, answer)
    if int(answer[0]) == 0:
        assert int(back(answer[1])[0]) == 0, call


def same(what, yes):
    steps[what] = "right" if yes else "wrong"


def main_thread(too_much):
    do("cuInit", cu.cuInit(0))
    views["driver"] = do("cuDriverGetVersion", cu.cuDriverGetVersion())
    views["devices"] = do("cuDeviceGetCount", cu.cuDeviceGetCount())
    dev = do("cuDeviceGet", cu.cuDeviceGet(0))
    do("cuDeviceGetName", cu.cuDeviceGetName(64, dev))
    do("cuDeviceGetUuid", cu.cuDeviceGetUuid(dev))
    views["device total"] = do("cuDeviceTotalMem", cu.cuDeviceTotalMem(dev))
    A = cu.CUdevice_attribute
    for a in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "UNIFIED_ADDRESSING", "MEMORY_POOLS_SUPPORTED", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        steps["attribute " + a] = str(do("cuDeviceGetAttribute " + a, cu.cuDeviceGetAttribute(getattr(A, "CU_DEVICE_ATTRIBUTE_" + a), dev)))

    ctx = do("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(dev))
    do("cuCtxSetCurrent", cu.cuCtxSetCurrent(ctx))
    if hasattr(cu, "CUctxCreateParams") and int(cu.CUDA_VERSION) >= 13000:
        second = do("cuCtxCreate", cu.cuCtxCreate(None, 0, dev))
    else:
        second = do("cuCtxCreate", cu.cuCtxCreate(0, dev))
    do("cuCtxPopCurrent", cu.cuCtxPopCurrent())
    do("cuCtxDestroy", cu.cuCtxDestroy(second))
    do("cuCtxSetCurrent again", cu.cuCtxSetCurrent(ctx))
    before = views["free before"], views["total"] = do("cuMemGetInfo", cu.cuMemGetInfo())

    plain(too_much)
    stream = do("cuStreamCreate", cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
    pools(dev, stream, too_much)
    vmm(too_much)
    graphs(stream, too_much)
    events(stream)
    modules(stream)
    ipc()
    do("cuStreamDestroy", cu.cuStreamDestroy(stream))
    do("cuDeviceGraphMemTrim", cu.cuDeviceGraphMemTrim(dev))
    do("cuCtxSynchronize", cu.cuCtxSynchronize())
    do("cuMemGetInfo after all", cu.cuMemGetInfo())
    # What the second process held counts until its end was seen.
    until = time.monotonic() + 20
    while (after := cu.cuMemGetInfo()[1:]) != before and time.monotonic() < until:
        time.sleep(0.05)
    views["free after"] = after[0]
    same("all is given back", after == before)
    do("cuDevicePrimaryCtxRelease", cu.cuDevicePrimaryCtxRelease(dev))


def plain(too_much):
    for call, args in (("cuMemAlloc", ()), ("cuMemAllocManaged", (cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value,))):
        p = do(call, getattr(cu, call)(16 * MIB, *args))
        data, back = bytearray(os.urandom(4096)), bytearray(4096)
        do("cuMemcpyHtoD " + call, cu.cuMemcpyHtoD(int(p) + 4096, bytes(data), 4096))
        do("cuMemcpyDtoH " + call, cu.cuMemcpyDtoH(back, int(p) + 4096, 4096))
        same("contents of " + call, data == back)
        do("cuMemsetD8 " + call, cu.cuMemsetD8(p, 7, 4096))
        do("cuPointerGetAttribute " + call, cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p))
        base = do("cuMemGetAddressRange " + call, cu.cuMemGetAddressRange(int(p) + 5))
        same("range of " + call, (int(base[0]), base[1]) == (int(p), 16 * MIB))
        do("cuMemFree " + call, cu.cuMemFree(p))
        beyond(call, getattr(cu, call)(too_much, *args), cu.cuMemFree)
    p, pitch = do("cuMemAllocPitch", cu.cuMemAllocPitch(1000, 64, 4))
    same("pitch", pitch >= 1000)
    do("cuMemFree pitch", cu.cuMemFree(p))
    beyond("cuMemAllocPitch", cu.cuMemAllocPitch(1 << 16, too_much >> 16, 4), cu.cuMemFree)
    h = do("cuMemHostAlloc", cu.cuMemHostAlloc(MIB, 0))
    do("cuMemFreeHost", cu.cuMemFreeHost(h))
    d = cu.CUDA_ARRAY_DESCRIPTOR()
    d.Width, d.Height, d.Format, d.NumChannels = 1024, 1024, cu.CUarray_format.CU_AD_FORMAT_FLOAT, 4
    a = do("cuArrayCreate", cu.cuArrayCreate(d))
    do("cuArrayDestroy", cu.cuArrayDestroy(a))
    d.Width, d.Height = 1 << 16, too_much >> 20
    beyond("cuArrayCreate", cu.cuArrayCreate(d), cu.cuArrayDestroy)
    p = do("cuMemAlloc after a refusal", cu.cuMemAlloc(MIB))
    do("cuMemFree after a refusal", cu.cuMemFree(p))


def pools(dev, stream, too_much):
    p = do("cuMemAllocAsync", cu.cuMemAllocAsync(8 * MIB, stream))
    do("cuMemFreeAsync", cu.cuMemFreeAsync(p, stream))
    beyond("cuMemAllocAsync", cu.cuMemAllocAsync(too_much, stream), lambda p: cu.cuMemFreeAsync(p, stream))
    props = cu.CUmemPoolProps()
    props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type, props.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    pool = do("cuMemPoolCreate", cu.cuMemPoolCreate(props))
    at = cu.CUmemPool_attribute
    do("cuMemPoolSetAttribute", cu.cuMemPoolSetAttribute(pool, at.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(64 * MIB)))
    p = do("cuMemAllocFromPoolAsync", cu.cuMemAllocFromPoolAsync(40 * MIB, pool, stream))
    used = do("cuMemPoolGetAttribute", cu.cuMemPoolGetAttribute(pool, at.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
    same("used of the pool", int(used) == 40 * MIB)
    beyond("cuMemAllocFromPoolAsync", cu.cuMemAllocFromPoolAsync(too_much, pool, stream), lambda p: cu.cuMemFreeAsync(p, stream))
    do("cuMemFreeAsync pool", cu.cuMemFreeAsync(p, stream))
    do("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
    do("cuMemPoolTrimTo", cu.cuMemPoolTrimTo(pool, 0))
    do("cuMemPoolDestroy", cu.cuMemPoolDestroy(pool))
    do("cuDeviceGetDefaultMemPool", cu.cuDeviceGetDefaultMemPool(dev))


def vmm(too_much):
    fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    prop.requestedHandleTypes = fd_type
    granule = do("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(prop, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
    size = 4 * granule
    at = do("cuMemAddressReserve", cu.cuMemAddressReserve(32 << 30, 0, cu.CUdeviceptr(0), 0))
    h = do("cuMemCreate", cu.cuMemCreate(size, prop, 0))
    do("cuMemMap", cu.cuMemMap(at, size, 0, h, 0))
    access = cu.CUmemAccessDesc()
    access.location.type, access.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    do("cuMemSetAccess", cu.cuMemSetAccess(at, size, [access], 1))
    do("cuMemsetD32", cu.cuMemsetD32(at, 1, 1024))
    fd = do("cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(h, fd_type, 0))
    again = do("cuMemImportFromShareableHandle", cu.cuMemImportFromShareableHandle(int(fd), fd_type))
    os.close(int(fd))
    do("cuMemRelease imported", cu.cuMemRelease(again))
    do("cuMemUnmap", cu.cuMemUnmap(at, size))
    do("cuMemRelease", cu.cuMemRelease(h))
    do("cuMemAddressFree", cu.cuMemAddressFree(at, 32 << 30))
    beyond("cuMemCreate", cu.cuMemCreate(too_much, prop, 0), cu.cuMemRelease)


def graphs(stream, too_much):
    do("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    p = do("cuMemAllocAsync captured", cu.cuMemAllocAsync(8 * MIB, stream))
    do("cuMemFreeAsync captured", cu.cuMemFreeAsync(p, stream))
    graph = do("cuStreamEndCapture", cu.cuStreamEndCapture(stream))
    run = do("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
    for i in range(2):
        do("cuGraphLaunch %d" % i, cu.cuGraphLaunch(run, stream))
    do("cuStreamSynchronize graph", cu.cuStreamSynchronize(stream))
    do("cuGraphExecDestroy", cu.cuGraphExecDestroy(run))
    do("cuGraphDestroy", cu.cuGraphDestroy(graph))
    # What is too much shows when the graph is run, not when it is made.
    do("cuStreamBeginCapture big", cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    p = do("cuMemAllocAsync captured big", cu.cuMemAllocAsync(too_much, stream))
    do("cuMemFreeAsync captured big", cu.cuMemFreeAsync(p, stream))
    graph = do("cuStreamEndCapture big", cu.cuStreamEndCapture(stream))
    run = do("cuGraphInstantiate big", cu.cuGraphInstantiate(graph, 0))
    take(over, "cuGraphLaunch", cu.cuGraphLaunch(run, stream))
    do("cuStreamSynchronize big", cu.cuStreamSynchronize(stream))
    do("cuGraphExecDestroy big", cu.cuGraphExecDestroy(run))
    do("cuGraphDestroy big", cu.cuGraphDestroy(graph))


def events(stream):
    a, b = do("cuEventCreate", cu.cuEventCreate(0)), do("cuEventCreate second", cu.cuEventCreate(0))
    do("cuEventRecord", cu.cuEventRecord(a, stream))
    do("cuEventRecord second", cu.cuEventRecord(b, stream))
    do("cuStreamWaitEvent", cu.cuStreamWaitEvent(stream, a, 0))
    do("cuEventSynchronize", cu.cuEventSynchronize(b))
    do("cuEventElapsedTime", cu.cuEventElapsedTime(a, b))
    do("cuEventDestroy", cu.cuEventDestroy(a))
    do("cuEventDestroy second", cu.cuEventDestroy(b))
    do("cuStreamQuery", cu.cuStreamQuery(stream))


def modules(stream):
    text = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"
    m = do("cuModuleLoadData", cu.cuModuleLoadData(text))
    f = do("cuModuleGetFunction", cu.cuModuleGetFunction(m, b"nothing"))
    do("cuLaunchKernel", cu.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
    do("cuStreamSynchronize kernel", cu.cuStreamSynchronize(stream))
    do("cuModuleUnload", cu.cuModuleUnload(m))


def ipc():
    p = do("cuMemAlloc ipc", cu.cuMemAlloc(4 * MIB))
    handle = do("cuIpcGetMemHandle", cu.cuIpcGetMemHandle(p))
    raw = bytes(ctypes.string_at(handle.getPtr(), 64))
    child = subprocess.run([sys.executable, sys.argv[0], "--open", raw.hex()], capture_output=True, text=True, check=False)
    steps["a second process opens it"] = child.stdout.strip() or child.stderr.strip()[-300:]
    do("cuMemFree ipc", cu.cuMemFree(p))


def opener(raw):
    cu.cuInit(0)
    ctx = cu.cuDevicePrimaryCtxRetain(0)[1]
    cu.cuCtxSetCurrent(ctx)
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), raw, 64)
    r = cu.cuIpcOpenMemHandle(handle, cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)
    print(name(r[0]), name(cu.cuIpcCloseMemHandle(r[1])[0]) if int(r[0]) == 0 else "")


if sys.argv[1] == "--open":
    opener(bytes.fromhex(sys.argv[2]))
else:
    main_thread(int(sys.argv[2]))
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        json.dump({"steps": steps, "over": over, "views": {k: int(v) for k, v in views.items()}}, f)
