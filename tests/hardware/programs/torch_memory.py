# SPDX-License-Identifier: Apache-2.0
"""PyTorch's allocator, in whichever back end the environment chooses."""

import gc
import sys

import lines
import torch


def see():
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.empty(1, device="cuda")
    return "PyTorch %s, CUDA %s, %s" % (torch.__version__, torch.version.cuda, torch.cuda.get_allocator_backend())


def run(_, limit):
    total = torch.cuda.mem_get_info()[1]

    def take(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def forget():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()

    return lines.play(take, torch.cuda.OutOfMemoryError, forget, total, limit)


sys.exit(lines.main(see, run))
