#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""numba_layer.py OUT TOO_MUCH: takes memory through numba-cuda's layer over the driver; OUT as driver.py's."""
import ctypes
import glob
import json
import re
import sys

# It asks NVIDIA's CUDA runtime for that one's own version, which starts nothing.
for place in sys.path:
    for library in glob.glob(place + "/nvidia/*/lib/libcudart.so.*"):
        ctypes.CDLL(library)

import _numba_cuda_redirector  # noqa: F401 # what its .pth file does where it is installed
import numpy as np
from cuda.bindings import driver as cu
from numba import cuda
from numba.cuda.cudadrv import driver

MIB = 1 << 20
steps, over, views = {}, {}, {}
PTX = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n"


def attempt(log, what, call):
    assert what not in log, what
    try:
        value = call()
        log[what] = "CUDA_SUCCESS"
        return value
    except Exception as e:  # whatever the client makes of the driver's refusal
        code = re.search(r"CUDA_ERROR_[A-Z_]+", str(e))
        log[what] = code[0] if code else type(e).__name__ + ": " + str(e)
        return None


def do(what, call):
    return attempt(steps, what, call)


def same(what, yes):
    steps[what] = "right" if yes else "wrong"


def main(too_much):
    ctx = do("current_context", cuda.current_context)
    do("push, pop", lambda: (ctx.push(), ctx.pop()))
    views["devices"] = len(cuda.gpus)
    before = do("get_memory_info", ctx.get_memory_info)
    views["total"] = views["device total"] = before.total
    views["free before"] = before.free

    data = np.arange(MIB, dtype=np.uint8)
    array = do("to_device", lambda: cuda.to_device(data))
    same("contents", np.array_equal(do("copy_to_host", array.copy_to_host), data))
    other = do("device_array", lambda: cuda.device_array_like(array))
    do("copy_to_device", lambda: other.copy_to_device(array))
    same("contents of the copy", np.array_equal(other.copy_to_host(), data))
    for what, make, much in (
        ("memalloc", lambda: ctx.memalloc(16 * MIB), lambda: ctx.memalloc(too_much)),
        ("managed", lambda: ctx.memallocmanaged(16 * MIB), lambda: ctx.memallocmanaged(too_much)),
        ("device_array of 2 dimensions", lambda: cuda.device_array((16, MIB), np.uint8), lambda: cuda.device_array((too_much >> 20, MIB), np.uint8)),
    ):
        memory = do(what, make)
        do("memset " + what, lambda m=memory: driver.device_memset(m, 7, 4096))
        memory = None
        ctx.deallocations.clear()
        memory = attempt(over, what, much)
        memory = None
        ctx.deallocations.clear()
    for what, make in (("pinned", lambda: cuda.pinned_array(MIB, np.uint8)), ("mapped", lambda: cuda.mapped_array(MIB, np.uint8))):
        do(what, make)

    stream = do("stream", cuda.stream)
    late = do("to_device on a stream", lambda: cuda.to_device(data, stream=stream))
    begin, end = do("event", cuda.event), do("event, a second", cuda.event)
    do("record", lambda: begin.record(stream))
    do("record, a second", lambda: end.record(stream))
    do("wait", lambda: end.wait(stream))
    do("synchronize", stream.synchronize)
    do("elapsed", lambda: cuda.event_elapsed_time(begin, end))

    module = do("create_module_ptx", lambda: ctx.create_module_ptx(PTX))
    function = do("get_function", lambda: module.get_function("nothing"))
    same("function", function is not None)
    do("synchronize the context", ctx.synchronize)

    shared = cuda.device_array(1024, np.uint8)
    # Its own way to open a handle reads a member that CUDA's bindings 13 do not have; theirs is in driver.py.
    handle = do("get_ipc_handle", shared.get_ipc_handle)
    array = other = late = shared = handle = stream = begin = end = None
    # A context keeps its modules, whose code takes memory.
    do("unload_module", lambda: ctx.unload_module(module))
    function = module = None
    ctx.deallocations.clear()
    # Memory waits in a queue of its own: what it still holds is numba's, not the driver's.
    ctx.memory_manager.deallocations.clear()
    views["free after"] = ctx.get_memory_info().free
    same("all is given back", views["free after"] == views["free before"])
    views["driver"] = int(cu.cuDriverGetVersion()[1])


if __name__ == "__main__":
    main(int(sys.argv[2]))
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        json.dump({"steps": steps, "over": over, "views": {k: int(v) for k, v in views.items()}}, f)
