# SPDX-License-Identifier: Apache-2.0
"""Work that must succeed within the limit: products by cuBLAS, eager and replayed from a CUDA graph."""

import sys

import lines
import torch


def see():
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.empty(1, device="cuda")
    return "PyTorch %s, CUDA %s" % (torch.__version__, torch.version.cuda)


def run(_, limit):
    total = torch.cuda.mem_get_info()[1]
    a = torch.full((1024, 1024), 2.0, device="cuda")
    b = torch.eye(1024, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        a @ b
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = a @ b
    graph.replay()
    torch.cuda.synchronize()
    if c.sum().item() != 2.0 * 1024 * 1024:
        raise RuntimeError("the product is wrong: %r" % c.sum().item())
    lines.say("full", total_bytes=total, granted_bytes=torch.cuda.memory_reserved(), result_name="")
    lines.wait()
    graph.replay()
    torch.cuda.synchronize()
    lines.say("done", free_bytes=torch.cuda.memory_reserved())
    return 0


sys.exit(lines.main(see, run))
