"""What kernels, and the search for races, cost on the emulator.

    python benchmarks/emulator.py --json benchmarks/results/emulator.json

Processor seconds for one launch on 4 ranks (elementwise: on one), with and without races=True, in turn; the
smallest of several.
"""

import argparse
import datetime
import json
import platform
import shlex
import sys
import time

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import SignalOp, num_ranks, put_signal_nbi, quiet, rank, wait


@cuda.jit
def ring(total, part, flags):
    """A ring all-reduce with a signal per step: block b has elements b, b + gridDim.x, ... in one piece."""
    me, n, t = rank(), num_ranks(), cuda.threadIdx.x
    size = total.shape[0] // cuda.gridDim.x
    first = cuda.blockIdx.x * size
    mine, theirs = total[first : first + size], part[first : first + size]
    flag = flags[cuda.blockIdx.x :]
    if me > 0:
        if t == 0:
            wait(flag, 1, "sys", "acquire", 1)
        cuda.syncthreads()
    for i in range(t, size, cuda.blockDim.x):
        mine[i] = mine[i] + theirs[i]
    cuda.syncthreads()
    if t == 0:
        if me < n - 1:
            put_signal_nbi(mine, mine, flag, 1, SignalOp.SIGNAL_SET, me + 1)
        quiet()


def run_ring(n, grid, block):
    world = sk.init()
    arrays = sk.zeros(n, "float32"), np.ones(n, "float32"), sk.signals(grid)
    start = time.process_time()
    ring[grid, block](*arrays)
    return time.process_time() - start if world.rank == 0 else 0


def run_queue(items, size):
    world = sk.init()
    queue, inputs = sk.Queue(world, 32, size), np.ones((items, size), "float32")
    start = time.process_time()
    queue(inputs)
    return time.process_time() - start


@cuda.jit
def add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def run_elementwise(n):
    world = sk.init()
    arrays = np.ones(n, "float32"), np.ones(n, "float32"), np.empty(n, "float32")
    start = time.process_time()
    add[-(-n // 256), 256](*arrays)
    return time.process_time() - start if world.rank == 0 else 0


def run_gemm(size):
    world = sk.init()
    a, gemm = np.ones((size, size), "float32"), sk.Gemm(method="simt")
    start = time.process_time()
    gemm(a, a)
    world.stream.synchronize()
    return time.process_time() - start


PROGRAMS = {
    "elementwise, 1 rank, 1000000 elements in blocks of 256": (run_elementwise, (1_000_000,)),
    "sk.Gemm, 128 x 128 x 128, float32": (run_gemm, (128,)),
    "ring, 65536 elements, 32 blocks of 32 threads": (run_ring, (65536, 32, 32)),
    "ring, 65536 elements, 32 blocks of 128 threads": (run_ring, (65536, 32, 128)),
    "ring, 1024 elements, 32 blocks of 32 threads": (run_ring, (1024, 32, 32)),
    "sk.Queue, 256 items of 128, 20 blocks of 128 threads": (run_queue, (256, 128)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    seconds = {}
    for name, (program, args) in PROGRAMS.items():
        times = {"without": [], "with": []}
        for _ in range(options.repeats):
            for label, races in (("without", False), ("with", True)):
                ranks = 1 if program is run_elementwise else 4
                times[label].append(max(sk.emu.run(program, ranks, args, races=races)))
        seconds[name] = {label: min(t) for label, t in times.items()}
        print(f"{name}: " + ", ".join(f"{label} {t:.3f} s" for label, t in seconds[name].items()), flush=True)
    if options.json:
        machine = {
            "gpu": None,
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "races_s": seconds}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
