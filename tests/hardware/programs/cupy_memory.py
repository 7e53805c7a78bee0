# SPDX-License-Identifier: Apache-2.0
"""CuPy's pool, or the driver's through it."""

import gc
import sys

import cupy
import lines


def see():
    if cupy.cuda.runtime.getDeviceCount() < 1:
        raise RuntimeError("CuPy sees no GPU")
    cupy.cuda.alloc(1)
    return "CuPy %s, CUDA %s" % (cupy.__version__, cupy.cuda.runtime.runtimeGetVersion())


def run(args, limit):
    total = cupy.cuda.runtime.memGetInfo()[1]
    pool = cupy.cuda.MemoryAsyncPool() if args == ["async"] else cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)

    def forget():
        gc.collect()
        cupy.cuda.runtime.deviceSynchronize()
        pool.free_all_blocks()

    return lines.play(cupy.cuda.alloc, cupy.cuda.memory.OutOfMemoryError, forget, total, limit)


sys.exit(lines.main(see, run))
