#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ggml.py OUT RUNTIME MAJOR LIBRARY LIMIT [CHILD]: drives the CUDA back end of ggml, as llama.cpp and whisper.cpp have it.

RUNTIME is the folder of libcudart.so.MAJOR and its kin. LIBRARY is a folder with libggml-base.so and libggml-cuda.so, or
one file that holds all. OUT becomes a JSON object: steps, what each call answered; sizes, in bytes; log, what the back
end printed when there was too little memory. With CHILD, what ends in an abort if there is only LIMIT.
"""
import ctypes
import json
import os
import subprocess
import sys

MIB = 1 << 20
F32, F16 = 0, 1
SUCCESS = 0

out, runtime, major, library, limit = *sys.argv[1:5], int(sys.argv[5])
child = len(sys.argv) > 6


def load():
    """Gives the library's general part and the back end."""
    # Found by their names from now on, whatever LD_LIBRARY_PATH says.
    for name in ("libcudart.so." + major, "libcublas.so." + major, "libnccl.so.2"):
        ctypes.CDLL(os.path.join(runtime, name), mode=ctypes.RTLD_GLOBAL)
    if os.path.isdir(library):
        base = ctypes.CDLL(os.path.join(library, "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        return base, ctypes.CDLL(os.path.join(library, "libggml-cuda.so"))
    # A module of Node.js lacks Node's functions here; they are not called, so they may stay unresolved, which
    # ctypes' own loading does not allow.
    libc = ctypes.CDLL(None)
    libc.dlopen.restype = ctypes.c_void_p
    libc.dlerror.restype = ctypes.c_char_p
    handle = libc.dlopen(library.encode(), ctypes.c_int(1))
    if not handle:
        raise OSError(libc.dlerror().decode())
    whole = ctypes.CDLL(library, handle=handle)
    return whole, whole


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


base, cuda = load()
steps, sizes, log = {}, {}, []

p, size, i64, i32, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
LOG = ctypes.CFUNCTYPE(None, i32, text, p)
for lib, prototypes in (
    (base, {
        "ggml_log_set": (None, LOG, p), "ggml_init": (p, InitParams), "ggml_free": (None, p), "ggml_new_tensor_2d": (p, p, i32, i64, i64),
        "ggml_add": (p, p, p, p), "ggml_mul_mat": (p, p, p, p), "ggml_new_graph": (p, p), "ggml_build_forward_expand": (None, p, p),
        "ggml_nbytes": (size, p), "ggml_backend_alloc_buffer": (p, p, size), "ggml_backend_alloc_ctx_tensors": (p, p, p),
        "ggml_backend_buffer_get_size": (size, p), "ggml_backend_buffer_free": (None, p), "ggml_backend_buffer_clear": (None, p, ctypes.c_uint8),
        "ggml_backend_tensor_set": (None, p, p, size, size), "ggml_backend_tensor_get": (None, p, p, size, size),
        "ggml_backend_graph_compute": (i32, p, p), "ggml_backend_free": (None, p), "ggml_backend_synchronize": (None, p),
        "ggml_backend_reg_dev_count": (size, p), "ggml_backend_reg_dev_get": (p, p, size), "ggml_backend_dev_name": (text, p),
        "ggml_backend_dev_description": (text, p), "ggml_backend_dev_memory": (None, p, p, p), "ggml_backend_dev_host_buffer_type": (p, p),
        "ggml_backend_buft_alloc_buffer": (p, p, size),
    }),
    (cuda, {"ggml_backend_cuda_init": (p, i32), "ggml_backend_cuda_reg": (p,)}),
):
    for name, (result, *arguments) in prototypes.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments

write_log = LOG(lambda level, message, user: log.append(message.decode(errors="replace")))
if not child:  # what it prints before an abort must be seen
    base.ggml_log_set(write_log, None)


def memory(device):
    free, total = size(), size()
    base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def granted(what, yes):
    steps[what] = "granted" if yes else "refused"
    return yes


def product(backend, inner, rows, columns):
    """A graph of a product and a sum, its context, its buffer and the tensors."""
    ctx = base.ggml_init(InitParams(16 * MIB, None, True))
    a = base.ggml_new_tensor_2d(ctx, F16, inner, rows)
    b = base.ggml_new_tensor_2d(ctx, F32, inner, columns)
    c = base.ggml_new_tensor_2d(ctx, F32, rows, columns)
    sum_ = base.ggml_add(ctx, base.ggml_mul_mat(ctx, a, b), c)
    graph = base.ggml_new_graph(ctx)
    base.ggml_build_forward_expand(graph, sum_)
    return ctx, graph, base.ggml_backend_alloc_ctx_tensors(ctx, backend), c


def report():
    with open(out, "w", encoding="utf-8") as f:
        json.dump({"steps": steps, "sizes": sizes, "log": "".join(log)}, f)


def in_child():
    """The pool grows beyond the limit: the back end prints and aborts."""
    backend = cuda.ggml_backend_cuda_init(0)
    # The operands take five eighths, the copy that the product makes of the larger one half of that once more.
    _, graph, buffer, _ = product(backend, 32768, 256, limit // 8 * 5 // 32768 // 4)
    granted("operands", buffer)
    steps["compute"] = str(base.ggml_backend_graph_compute(backend, graph))
    report()


def main():
    registry = cuda.ggml_backend_cuda_reg()
    sizes["devices"] = base.ggml_backend_reg_dev_count(registry)
    device = base.ggml_backend_reg_dev_get(registry, 0)
    steps["name"] = base.ggml_backend_dev_name(device).decode()
    steps["description"] = base.ggml_backend_dev_description(device).decode()
    backend = cuda.ggml_backend_cuda_init(0)
    granted("backend", backend)
    sizes["free before"], sizes["total"] = memory(device)

    # Buffers are cudaMalloc's.
    buffer = base.ggml_backend_alloc_buffer(backend, 64 * MIB)
    if granted("buffer", buffer):
        base.ggml_backend_buffer_clear(buffer, 0)
        sizes["buffer takes"] = sizes["free before"] - memory(device)[0]
        base.ggml_backend_buffer_free(buffer)
    pinned = base.ggml_backend_buft_alloc_buffer(base.ggml_backend_dev_host_buffer_type(device), 8 * MIB)
    if granted("pinned buffer", pinned):
        base.ggml_backend_buffer_free(pinned)

    # The product's temporary copies come from the pool of mapped memory.
    ctx, graph, buffer, tensor = product(backend, 4096, 4096, 1024)
    granted("tensors", buffer)
    data = os.urandom(base.ggml_nbytes(tensor))
    base.ggml_backend_tensor_set(tensor, data, 0, len(data))
    back = ctypes.create_string_buffer(len(data))
    base.ggml_backend_tensor_get(tensor, back, 0, len(data))
    steps["contents"] = "right" if back.raw == data else "wrong"
    before = memory(device)[0]
    # The back end records a graph once it has seen the same one twice.
    for i in range(5):
        steps["compute %d" % i] = str(base.ggml_backend_graph_compute(backend, graph))
    sizes["computing takes"] = before - memory(device)[0]

    # Its own path when there is no memory: a null buffer and a line of log.
    del log[:]
    big = base.ggml_backend_alloc_buffer(backend, 2 * limit)
    if granted("too large a buffer", big):
        base.ggml_backend_buffer_free(big)
    said = "".join(log)
    small = base.ggml_backend_alloc_buffer(backend, 64 * MIB)
    if granted("buffer after that", small):
        base.ggml_backend_buffer_free(small)
    steps["compute after that"] = str(base.ggml_backend_graph_compute(backend, graph))

    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(ctx)
    base.ggml_backend_free(backend)
    sizes["free after"] = memory(device)[0]
    del log[:]
    log.append(said)

    # In a process of its own: it ends there.
    done = subprocess.run([sys.executable, __file__, out + ".child", runtime, major, library, str(limit), "child"],
                          capture_output=True, text=True, check=False, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
    steps["pool beyond the limit"] = "aborted" if done.returncode == -6 else "exit %d" % done.returncode
    log.append("".join(line + "\n" for line in done.stderr.splitlines() if "error" in line or "memory" in line))
    report()


in_child() if child else main()
