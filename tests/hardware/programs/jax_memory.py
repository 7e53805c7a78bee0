# SPDX-License-Identifier: Apache-2.0
"""JAX, which takes three quarters of what it sees at its start, and gives arrays out of it."""

import ctypes
import gc
import sys

import jax
import jax.numpy
import lines


def see():
    devices = [d for d in jax.devices() if d.platform in ("gpu", "cuda")]
    if not devices:
        raise RuntimeError("JAX sees no GPU")
    return "JAX %s, %s" % (jax.__version__, devices[0].device_kind)


def seen():
    """cuMemGetInfo, as the library asks it."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device = ctypes.c_void_p(), ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)
    if cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) != 0:
        raise RuntimeError("cuMemGetInfo failed")
    return total.value


def run(_, limit):
    zeros = jax.numpy.zeros

    def take(size):
        return zeros(size, dtype=jax.numpy.uint8).block_until_ready()

    take(1)
    return lines.play(take, Exception, gc.collect, seen(), limit)


sys.exit(lines.main(see, run))
