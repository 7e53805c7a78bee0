#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""llama.py OUT RUNTIME MAJOR LIBRARY LIMIT: loads a model into llama.cpp, all of it on the GPU, and decodes with it.

RUNTIME is the folder of libcudart.so.MAJOR and its kin, LIBRARY the one of llama.cpp's libraries. The model is written here:
four layers of zeros. OUT becomes a JSON object: steps, what each call answered; sizes, in bytes; log, what llama.cpp
printed when there was too little memory.
"""
import ctypes
import glob
import json
import os
import struct
import sys

MIB = 1 << 20
WIDTH, LAYERS, HEADS, VOCABULARY = 512, 4, 8, 256
F32, F16 = 0, 1

os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # or it would spread the layers
out, runtime, major, library, limit = *sys.argv[1:5], int(sys.argv[5])


def write_model(path):
    """A model of llama's architecture in the format GGUF, without a vocabulary."""
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    def entry(key, kind, value):
        kinds = {"u32": (4, "<I"), "f32": (6, "<f")}
        if kind == "string":
            return text(key) + struct.pack("<I", 8) + text(value)
        number, form = kinds[kind]
        return text(key) + struct.pack("<I", number) + struct.pack(form, value)

    entries = [
        entry("general.architecture", "string", "llama"), entry("llama.context_length", "u32", 4096),
        entry("llama.embedding_length", "u32", WIDTH), entry("llama.block_count", "u32", LAYERS),
        entry("llama.feed_forward_length", "u32", WIDTH), entry("llama.attention.head_count", "u32", HEADS),
        entry("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5), entry("llama.vocab_size", "u32", VOCABULARY),
        entry("tokenizer.ggml.model", "string", "no_vocab"),
    ]
    tensors = [("token_embd.weight", (WIDTH, VOCABULARY), F16), ("output.weight", (WIDTH, VOCABULARY), F16), ("output_norm.weight", (WIDTH,), F32)]
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up"):
            tensors.append(("blk.%d.%s.weight" % (layer, name), (WIDTH, WIDTH), F16))
        for name in ("attn_norm", "ffn_norm"):
            tensors.append(("blk.%d.%s.weight" % (layer, name), (WIDTH,), F32))
    head, at = b"".join(entries), 0
    for name, shape, kind in tensors:
        head += text(name) + struct.pack("<I%dQIQ" % len(shape), len(shape), *shape, kind, at)
        bytes_ = (4 if kind == F32 else 2) * shape[0] * (shape[1] if len(shape) > 1 else 1)
        at += (bytes_ + 31) // 32 * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + head
    head += bytes(-len(head) % 32)
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(len(head) + at)
    return at


for name in ("libcudart.so." + major, "libcublas.so." + major):
    ctypes.CDLL(os.path.join(runtime, name), mode=ctypes.RTLD_GLOBAL)
base = ctypes.CDLL(os.path.join(library, "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
ggml = ctypes.CDLL(glob.glob(os.path.join(library, "libggml.cuda.*.so"))[0], mode=ctypes.RTLD_GLOBAL)
llama = ctypes.CDLL(glob.glob(os.path.join(library, "libllama.cuda.*.so"))[0])


class Parameters(ctypes.Structure):
    """Larger than any of llama.cpp's: only the first number is set, the rest is as the library gives it."""
    _fields_ = [("first", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 255)]


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("pointers", ctypes.c_void_p * 6)]


p, i32, size, string = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
LOG = ctypes.CFUNCTYPE(None, i32, string, p)
for lib, prototypes in (
    (ggml, {"ggml_backend_load": (p, string), "ggml_backend_dev_by_name": (p, string)}),
    (base, {"ggml_backend_dev_memory": (None, p, p, p)}),
    (llama, {
        "llama_log_set": (None, LOG, p), "llama_model_default_params": (Parameters,), "llama_context_default_params": (Parameters,),
        "llama_model_load_from_file": (p, string, Parameters), "llama_model_free": (None, p), "llama_init_from_model": (p, p, Parameters),
        "llama_free": (None, p), "llama_batch_get_one": (Batch, p, i32), "llama_decode": (i32, p, Batch), "llama_get_logits": (p, p),
        "llama_synchronize": (None, p),
    }),
):
    for name, (result, *arguments) in prototypes.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments

steps, sizes, log = {}, {}, []
WARNING = 3
write_log = LOG(lambda level, message, user: log.append(message.decode(errors="replace")) if level >= WARNING else None)


def granted(what, yes):
    steps[what] = "granted" if yes else "refused"
    return yes


def free_memory():
    free, total = size(), size()
    base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


def decode(what, context, tokens):
    ids = (i32 * tokens)(*[n % VOCABULARY for n in range(tokens)])
    steps[what] = str(llama.llama_decode(context, llama.llama_batch_get_one(ids, tokens)))
    llama.llama_synchronize(context)
    granted("logits of " + what, llama.llama_get_logits(context))


llama.llama_log_set(write_log, None)
granted("CUDA", ggml.ggml_backend_load(os.path.join(library, "libggml-cuda.so").encode()))
granted("CPU", ggml.ggml_backend_load(os.path.join(library, "libggml-cpu-x64.so").encode()))
device = ggml.ggml_backend_dev_by_name(b"CUDA0")
path = out + ".gguf"
sizes["weights"] = write_model(path)
sizes["free before"] = free_memory()
model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
if not granted("model", model):
    print("".join(log))
sizes["model takes"] = sizes["free before"] - free_memory()
os.unlink(path)

parameters = llama.llama_context_default_params()
parameters.first = 512  # tokens
context = llama.llama_init_from_model(model, parameters)
granted("context", context)
decode("a prompt", context, 32)
for i in range(4):
    decode("token %d" % i, context, 1)

# Twice the limit of keys and values.
del log[:]
parameters.first = 2 * limit // (2 * LAYERS * WIDTH * 2)
large = llama.llama_init_from_model(model, parameters)
said = "".join(log)
if granted("too large a context", large):
    llama.llama_free(large)
decode("a token after that", context, 1)
llama.llama_free(context)
llama.llama_model_free(model)
sizes["free after"] = free_memory()
with open(out, "w", encoding="utf-8") as f:
    json.dump({"steps": steps, "sizes": sizes, "log": said}, f)
