#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nvml.py OUT: what nvidia-ml-py, nvitop and gpustat see of the first GPU, as JSON in OUT."""
import json
import sys


def ml_py():
    import pynvml

    pynvml.nvmlInit()
    d = pynvml.nvmlDeviceGetHandleByIndex(0)
    m, m2 = pynvml.nvmlDeviceGetMemoryInfo(d), pynvml.nvmlDeviceGetMemoryInfo(d, version=pynvml.nvmlMemory_v2)
    rows = pynvml.nvmlDeviceGetComputeRunningProcesses(d)
    out = {
        "total": m.total, "used": m.used, "free": m.free, "total_v2": m2.total,
        "processes": {str(p.pid): p.usedGpuMemory for p in rows},
        "count": pynvml.nvmlDeviceGetCount(), "driver": pynvml.nvmlSystemGetDriverVersion(),
        "uuid": pynvml.nvmlDeviceGetUUID(d), "name": pynvml.nvmlDeviceGetName(d),
    }
    # What this GPU cannot say must not look like a driver that is too old.
    for call in ("nvmlDeviceGetFanSpeed", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetEncoderUtilization"):
        try:
            getattr(pynvml, call)(d)
            out[call] = "answered"
        except pynvml.NVMLError as e:
            out[call] = type(e).__name__
    pynvml.nvmlShutdown()
    return out


def nvitop():
    from nvitop import Device

    d = Device.all()[0]
    return {
        "total": d.memory_total(), "used": d.memory_used(), "free": d.memory_free(), "total_v2": d.memory_total(),
        "processes": {str(pid): p.gpu_memory() for pid, p in d.processes().items()},
    }


def gpustat():
    from gpustat import GPUStatCollection

    g = GPUStatCollection.new_query().gpus[0]
    return {
        "total": g.memory_total << 20, "used": g.memory_used << 20, "free": g.memory_free << 20, "total_v2": g.memory_total << 20,
        "processes": {str(p["pid"]): p["gpu_memory_usage"] << 20 for p in g.processes},
    }


with open(sys.argv[1], "w", encoding="utf-8") as f:
    json.dump({"nvidia-ml-py": ml_py(), "nvitop": nvitop(), "gpustat": gpustat()}, f)
