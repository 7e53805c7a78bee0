# SPDX-License-Identifier: Apache-2.0
"""One rank of NCCL: its buffers come with the first collective, long after the start."""

import os
import sys
import tempfile

import lines
import torch


def see():
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    if not torch.distributed.is_nccl_available():
        raise RuntimeError("this PyTorch has no NCCL")
    torch.empty(1, device="cuda")
    return "PyTorch %s, NCCL %s" % (torch.__version__, ".".join(str(n) for n in torch.cuda.nccl.version()))


def run(_, __):
    total = torch.cuda.mem_get_info()[1]
    with tempfile.TemporaryDirectory() as meeting:
        return work(total, "file://" + os.path.join(meeting, "store"))


def work(total, meeting):
    torch.distributed.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
    one = torch.ones(1 << 20, device="cuda")
    torch.distributed.all_reduce(one)
    torch.cuda.synchronize()
    if one.sum().item() != 1 << 20:
        raise RuntimeError("the sum is wrong: %r" % one.sum().item())
    lines.say("full", total_bytes=total, granted_bytes=torch.cuda.memory_reserved(), result_name="")
    lines.wait()
    torch.distributed.destroy_process_group()
    lines.say("done", free_bytes=torch.cuda.memory_reserved())
    return 0


sys.exit(lines.main(see, run))
