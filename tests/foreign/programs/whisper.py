#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""whisper.py OUT RUNTIME MAJOR LIBRARY LIMIT: loads a model into whisper.cpp, all of it on the GPU, encodes a second of
silence and decodes.

RUNTIME is the folder of libcudart.so.MAJOR and its kin, LIBRARY the file of whisper.cpp. The model is written here: zeros in
the shape of its smallest. OUT becomes a JSON object: steps, what each call answered; sizes, in bytes; log, what
whisper.cpp printed when there was too little memory.
"""
import ctypes
import json
import os
import struct
import sys

MIB = 1 << 20
WIDTH, HEADS, LAYERS, AUDIO, TEXT, VOCABULARY, MELS, SPECTRUM = 64, 1, 4, 1500, 448, 51864, 80, 201
F32, F16, WARNING = 0, 1, 3

out, runtime, major, library, limit = *sys.argv[1:5], int(sys.argv[5])


def tensors():
    def linear(name, rows, columns, bias=True):
        yield name + ".weight", (rows, columns), F16
        if bias:
            yield name + ".bias", (columns,), F32

    def norm(name):
        yield name + ".weight", (WIDTH,), F32
        yield name + ".bias", (WIDTH,), F32

    def attention(name):
        yield from norm(name + "_ln")
        for part in ("query", "key", "value", "out"):
            yield from linear(name + "." + part, WIDTH, WIDTH, part != "key")

    yield "encoder.positional_embedding", (WIDTH, AUDIO), F32
    for name, channels in (("conv1", MELS), ("conv2", WIDTH)):
        yield "encoder.%s.weight" % name, (3, channels, WIDTH), F16
        yield "encoder.%s.bias" % name, (1, WIDTH), F32
    yield from norm("encoder.ln_post")
    yield "decoder.positional_embedding", (WIDTH, TEXT), F32
    yield "decoder.token_embedding.weight", (WIDTH, VOCABULARY), F16
    yield from norm("decoder.ln")
    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            block = "%s.blocks.%d." % (side, layer)
            yield from norm(block + "mlp_ln")
            yield from linear(block + "mlp.0", WIDTH, 4 * WIDTH)
            yield from linear(block + "mlp.2", 4 * WIDTH, WIDTH)
            yield from attention(block + "attn")
            if side == "decoder":
                yield from attention(block + "cross_attn")


def write_model(path):
    total = 0
    with open(path, "wb") as f:
        f.write(struct.pack("<I11i", 0x67676D6C, VOCABULARY, AUDIO, WIDTH, HEADS, LAYERS, TEXT, WIDTH, HEADS, LAYERS, MELS, F16))
        f.write(struct.pack("<2i", MELS, SPECTRUM) + bytes(4 * MELS * SPECTRUM))
        f.write(struct.pack("<i", 0))  # words: it makes up names for all
        for name, shape, kind in tensors():
            f.write(struct.pack("<3i%di" % len(shape), len(shape), len(name), kind, *shape) + name.encode())
            size_ = 4 if kind == F32 else 2
            for n in shape:
                size_ *= n
            f.write(bytes(size_))
            total += size_
    return total


for name in ("libcudart.so." + major, "libcublas.so." + major, "libnccl.so.2"):
    ctypes.CDLL(os.path.join(runtime, name), mode=ctypes.RTLD_GLOBAL)
# Lazily: Node's functions, which are not called, are not there.
libc = ctypes.CDLL(None)
libc.dlopen.restype, libc.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
handle = libc.dlopen(library.encode(), ctypes.c_int(1))
if not handle:
    raise OSError(libc.dlerror().decode())
whisper = ctypes.CDLL(library, handle=handle)

p, i32, size, string = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
LOG = ctypes.CFUNCTYPE(None, i32, string, p)
for name, (result, *arguments) in {
    "whisper_log_set": (None, LOG, p), "whisper_init_from_file": (p, string), "whisper_free": (None, p), "ggml_log_set": (None, LOG, p),
    "whisper_pcm_to_mel": (i32, p, p, i32, i32), "whisper_encode": (i32, p, i32, i32), "whisper_decode": (i32, p, p, i32, i32, i32),
    "whisper_get_logits": (p, p), "ggml_backend_cuda_init": (p, i32), "ggml_backend_alloc_buffer": (p, p, size),
    "ggml_backend_buffer_free": (None, p), "ggml_backend_free": (None, p), "ggml_backend_cuda_get_device_memory": (None, i32, p, p),
}.items():
    function = getattr(whisper, name)
    function.restype, function.argtypes = result, arguments

steps, sizes, log = {}, {}, []
write_log = LOG(lambda level, message, user: log.append(message.decode(errors="replace")) if level >= WARNING else None)


def granted(what, yes):
    steps[what] = "granted" if yes else "refused"
    return yes


def free_memory():
    free, total = size(), size()
    whisper.ggml_backend_cuda_get_device_memory(0, ctypes.byref(free), ctypes.byref(total))
    return free.value


def listen(what, context):
    silence = (ctypes.c_float * 16000)()
    steps[what + ", spectrum"] = str(whisper.whisper_pcm_to_mel(context, silence, len(silence), 1))
    steps[what + ", encoded"] = str(whisper.whisper_encode(context, 0, 1))
    for n in range(3):
        steps[what + ", token %d" % n] = str(whisper.whisper_decode(context, (i32 * 1)(n), 1, n, 1))
    granted(what + ", logits", whisper.whisper_get_logits(context))


whisper.whisper_log_set(write_log, None)
whisper.ggml_log_set(write_log, None)
path = out + ".bin"
sizes["weights"] = write_model(path)
sizes["free before"] = free_memory()
context = whisper.whisper_init_from_file(path.encode())
if granted("model", context):
    sizes["model takes"] = sizes["free before"] - free_memory()
    listen("a second", context)

# What is left of the limit holds a second one's weights and not its keys and values. Where there is no room for the
# weights whisper.cpp ends in an assertion, and where there is none for what it computes in by a null pointer.
backend = whisper.ggml_backend_cuda_init(0)
weights = -(-sizes["weights"] // (2 * MIB)) * 2 * MIB
rest = free_memory() - weights if free_memory() < limit else limit
full = whisper.ggml_backend_alloc_buffer(backend, rest)
granted("a buffer of most", full)
del log[:]
second = whisper.whisper_init_from_file(path.encode())
said = "".join(log)
if granted("a second model", second):
    whisper.whisper_free(second)
listen("after that", context)
whisper.ggml_backend_buffer_free(full)
whisper.ggml_backend_free(backend)
third = whisper.whisper_init_from_file(path.encode())
if granted("a model when there is room again", third):
    whisper.whisper_free(third)
whisper.whisper_free(context)
sizes["free after"] = free_memory()
os.unlink(path)
with open(out, "w", encoding="utf-8") as f:
    json.dump({"steps": steps, "sizes": sizes, "log": said}, f)
