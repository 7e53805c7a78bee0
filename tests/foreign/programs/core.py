#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""core.py OUT TOO_MUCH: takes memory through cuda.core; OUT as driver.py's,
with frontier: what a driver that is not NVIDIA's cannot carry."""
import json
import sys

from cuda.bindings import driver as cu
from cuda.core import Device, EventOptions

MIB = 1 << 20
steps, over, views = {}, {}, {}


def attempt(log, what, call):
    try:
        value = call()
        log[what] = "CUDA_SUCCESS"
        return value
    except Exception as e:  # whatever the client makes of the driver's refusal
        text = str(e)
        log[what] = "CUDA_ERROR_OUT_OF_MEMORY" if "CUDA_ERROR_OUT_OF_MEMORY" in text else type(e).__name__ + ": " + text
        return None


too_much = int(sys.argv[2])
device = Device(0)
attempt(steps, "set_current", device.set_current)
steps["compute capability"] = str(tuple(device.compute_capability))
views["total"] = views["device total"] = cu.cuMemGetInfo()[2]
stream = attempt(steps, "create_stream", device.create_stream)
event = attempt(steps, "record", lambda: stream.record(options=EventOptions()))
attempt(steps, "wait", lambda: stream.wait(event))
a = attempt(steps, "allocate", lambda: device.allocate(8 * MIB, stream=stream))
b = attempt(steps, "allocate a second", lambda: device.allocate(8 * MIB, stream=stream))
attempt(steps, "fill", lambda: a.fill(7, stream=stream))
attempt(steps, "copy", lambda: a.copy_to(b, stream=stream))
attempt(steps, "sync", stream.sync)
for name, buffer in (("first", a), ("second", b)):
    attempt(steps, "close the " + name, buffer.close)
big = attempt(over, "allocate", lambda: device.allocate(too_much, stream=stream))
if big is not None:
    big.close()
c = attempt(steps, "allocate after a refusal", lambda: device.allocate(8 * MIB, stream=stream))
attempt(steps, "close the third", c.close)
# NVIDIA's CUDA runtime does this.
frontier = {}
attempt(frontier, "Device.sync", device.sync)
with open(sys.argv[1], "w", encoding="utf-8") as f:
    json.dump({"steps": steps, "over": over, "views": views, "frontier": frontier}, f)
