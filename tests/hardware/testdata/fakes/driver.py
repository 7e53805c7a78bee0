# SPDX-License-Identifier: Apache-2.0
"""What the stand-ins for PyTorch, CuPy and JAX allocate with: the driver's own interface, through ctypes."""

import ctypes

OUT_OF_MEMORY = 2
_cuda = None


class Failed(Exception):
    pass


class OutOfMemory(Failed):
    pass


def check(result, call):
    if result == OUT_OF_MEMORY:
        raise OutOfMemory("%s: out of memory" % call)
    if result != 0:
        raise Failed("%s: %d" % (call, result))


def start():
    global _cuda
    if _cuda is None:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        check(cuda.cuInit(0), "cuInit")
        check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        _cuda = cuda
    return _cuda


def info():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(start().cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
    return free.value, total.value


class Block:
    """Memory of cuMemAlloc, or of the default pool."""

    def __init__(self, size, pooled=False):
        self.pointer, self.pooled = ctypes.c_uint64(), pooled
        cuda = start()
        if pooled:
            check(cuda.cuMemAllocAsync(ctypes.byref(self.pointer), ctypes.c_size_t(size), None), "cuMemAllocAsync")
        else:
            check(cuda.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(size)), "cuMemAlloc")

    def __del__(self):
        if not self.pointer.value:
            return
        if self.pooled:
            start().cuMemFreeAsync(self.pointer, None)
        else:
            start().cuMemFree_v2(self.pointer)

    def block_until_ready(self):
        return self


def synchronize():
    check(start().cuCtxSynchronize(), "cuCtxSynchronize")
