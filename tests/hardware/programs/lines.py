# SPDX-License-Identifier: Apache-2.0
"""What the programs of make test-gpu have in common: JSON lines, one word to go on.

`PROGRAM see` says whether the library can use this GPU, `PROGRAM run ... LIMIT` takes memory until it is
refused, says "full", waits for a line, frees, takes half of it again, and says "done".
"""

import json
import sys
import time


def say(op, ok=True, **fields):
    line = {"op": op, "ok": ok, "mono_ns": time.monotonic_ns()}
    line.update(fields)
    print(json.dumps(line), flush=True)


def wait():
    sys.stdin.readline()


def fill(take, refused, step, limit):
    """Takes in steps until `refused` is raised; gives what was taken and the refusal's name."""
    held = []
    while len(held) * step < 4 * limit:
        try:
            held.append(take(step))
        except refused as error:
            return held, type(error).__name__ + ": " + str(error).split("\n")[0][:160]
    return held, ""


def play(take, refused, forget, total, limit, step=64 << 20):
    """The whole of it. `forget` gives back what the library keeps of freed memory."""
    held, refusal = fill(take, refused, step, limit)
    granted = len(held) * step
    if not refusal:
        say("full", False, why="nothing was refused up to four times the limit", granted_bytes=granted)
        return 1
    say("full", total_bytes=total, granted_bytes=granted, result_name=refusal)
    wait()
    half = max(1, len(held) // 2)
    del held
    forget()
    # The error must not stick: what was freed can be had again.
    again = [take(step) for _ in range(half)]
    say("done", free_bytes=len(again) * step)
    return 0


def main(see, run):
    if sys.argv[1] == "see":
        try:
            say("see", version=see())
        except BaseException as error:  # whatever a library ends with where it has no GPU
            say("see", False, why=type(error).__name__ + ": " + str(error).split("\n")[0][:200])
        return 0
    try:
        return run(sys.argv[2:-1], int(sys.argv[-1]))
    except Exception as error:
        say("failed", False, why=type(error).__name__ + ": " + str(error)[:400])
        return 1
