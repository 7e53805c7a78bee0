#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print what functions a CUDA driver has, read from NVIDIA's headers.

usage: functions.py DIR...                (each DIR holds cuda.h and cudaTypedefs.h of one CUDA version)
       functions.py --entries LIST        (what the former printed, as the table of the simulated libcuda)

One line a variant, separated by tabs:
    base name    what cuGetProcAddress is asked for
    symbol       what libcuda.so.1 exports
    version      the CUDA version that brought the variant, as cuGetProcAddress counts: 3020 is 3.2
    stream       ptds or ptsz for variants with per-thread default streams, else -

The names and numbers come from cudaTypedefs.h, which names a pointer type PFN_<base>_v<version>[_ptds|_ptsz]
for each variant; the symbols from cuda.h. The n-th version of a base is the n-th of its symbols: that is
how NVIDIA names them. Where that does not hold, and EXCEPTIONS does not say how it is, this fails.
"""
import os
import re
import sys

HEADERS = ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h", "cudaProfiler.h")
TYPEDEFS = ("cudaTypedefs.h", "cudaGLTypedefs.h", "cudaEGLTypedefs.h", "cudaVDPAUTypedefs.h", "cudaProfilerTypedefs.h")

# What the headers do not say: {(base, stream): versions} by the order of the symbols.
EXCEPTIONS = {
    ("cuGetProcAddress", "ptsz"): [11030, 12000],
}
# Windows only.
ABSENT = ("cuWGLGetDevice",)


def read(folder, name):
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as f:
            text = f.read()
    except FileNotFoundError:
        return ""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def declared(text):
    """The symbols that a header declares, behind its macros, per-thread variants among them."""
    symbols = set()
    macros = {}
    for name, thread, target in re.findall(
        r"#\s*define\s+(cu\w+)\s+(?:__CUDA_API_(PTDS|PTSZ)\()?(cu\w+)\)?", text
    ):
        macros[name] = target
        symbols.add(target)
        if thread:
            symbols.add(target + "_" + thread.lower())
    # Past the #undefs a name means itself: that is where the old variants are.
    parts = re.split(r"#\s*undef\s+cu", text, maxsplit=1)
    for i, part in enumerate(parts):
        for name in re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", part):
            symbols.add(macros.get(name, name) if i == 0 else name)
    return symbols


def split(symbol):
    """(base, number, stream) of cuFoo_v2_ptsz."""
    base, number, stream = re.fullmatch(r"(\w+?)(?:_v(\d+))?(?:_(ptds|ptsz))?", symbol).groups()
    return base, int(number or 1), stream or "-"


def main(folders):
    symbols = {}  # symbol: version of the first header that has it
    types = set()  # (base, version, stream)
    numbers = []
    for folder in folders:
        text = read(folder, "cuda.h")
        if not text:
            sys.exit("no cuda.h in " + folder)
        version = int(re.search(r"#\s*define\s+CUDA_VERSION\s+(\d+)", text).group(1))
        numbers.append(version)
        for name in HEADERS:
            for symbol in declared(read(folder, name)):
                symbols[symbol] = min(symbols.get(symbol, version), version)
        for name in TYPEDEFS:
            for base, v, stream in re.findall(
                r"CUDAAPI\s*\*\s*PFN_(\w+?)_v(\d+)(?:_(ptds|ptsz))?\)", read(folder, name)
            ):
                types.add((base, int(v), stream or "-"))

    by_base = {}
    for symbol in symbols:
        base, number, stream = split(symbol)
        by_base.setdefault((base, stream), []).append((number, symbol))
    versions = {}
    for base, v, stream in types:
        versions.setdefault((base, stream), []).append(v)

    rows, odd = [], []
    for key in sorted(set(by_base) | set(versions)):
        base, stream = key
        if base in ABSENT:
            continue
        have = [s for _, s in sorted(by_base.get(key, []))]
        want = EXCEPTIONS.get(key, sorted(versions.get(key, [])))
        if not have and len(want) == 1:  # cuProfiler.h is not in all packages, its typedefs are
            have = [base if stream == "-" else base + "_" + stream]
        if len(have) != len(want):
            odd.append("%s %s: symbols %s, versions %s" % (base, stream, have, want))
        rows += [(base, v, stream, s) for s, v in zip(have, want)]
    if odd:
        sys.exit("\n".join(odd))
    first, last = min(numbers), max(numbers)
    print("# SPDX-License-Identifier: Apache-2.0")
    print("# What functions the CUDA driver has had: base name, exported symbol, CUDA version, default stream.")
    print("# Written by tests/simgpu/headers/functions.py from the headers %d to %d; do not edit." % (first, last))
    for base, v, stream, symbol in sorted(rows):
        print("%s\t%s\t%d\t%s" % (base, symbol, v, stream))


ENTRIES = """\
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * entry.def: every entry point that CUDA drivers have had, for cuGetProcAddress, for those that
 * the simulated libcuda.so.1 does not act on (unsupported.c), and for the tests. One line a variant:
 *
 *   ENTRY(name that is asked for, CUDA version that brought the variant, default stream,
 *         symbol)
 *
 * LEGACY variants take the null stream as the legacy default stream, or have none; PER_THREAD
 * ones are what a program built for per-thread default streams gets. Variants of a name stand
 * together, older ones first. Written by headers/functions.py from shim/cuda-functions.tsv.
 */
"""


def entries(path):
    sys.stdout.write(ENTRIES)
    with open(path, encoding="ascii") as f:
        for line in f:
            if not line.startswith("#"):
                base, symbol, version, stream = line.rstrip("\n").split("\t")
                print("ENTRY(%s, %s, %s, %s)" % (base, version, "LEGACY" if stream == "-" else "PER_THREAD", symbol))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--entries":
        entries(sys.argv[2])
        sys.exit(0)
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
