"""How long the first launch of a kernel that calls NVSHMEM's put_signal takes, in a new process.

From ``bind`` to the end of the kernel; imports and initialization are not in it. This is the program of that
process, too: ``python -m shmemkit.bench.first_launch`` prints the seconds.
"""

import os
import subprocess
import sys
import tempfile
import time

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import SignalOp, put_signal_block

SET = SignalOp.SIGNAL_SET
MPI_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDRA_", "SLURM_")
OFF, COLD, WARM = "off", "cold", "warm"  # shmemkit's cache


@cuda.jit
def send(dst, src, signals, peer):
    put_signal_block(dst, src, signals, 1, SET, peer)


def measure(cache):
    """-> microseconds. `cache`: the folder of shmemkit's cache, or None for none. RuntimeError if the process
    fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(MPI_VARIABLES)}
    environment |= {"SHMEMKIT_CACHE": "0"} if cache is None else {"SHMEMKIT_CACHE_DIR": cache}
    command = [sys.executable, "-m", "shmemkit.bench.first_launch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the process failed:\n{done.stdout}{done.stderr}")
    return float(done.stdout.split()[-1]) * 1e6


def times(step):
    """-> {what the cache was: microseconds}; of those with a warm cache the best of three."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, where, repeats in ((OFF, None, 1), (COLD, folder, 1), (WARM, folder, 3)):
            step(f"first launch, cache {name}")
            found[name] = min(measure(where) for _ in range(repeats))
        return found


def main():
    with sk.init():
        dst, src, signals = sk.zeros(1000), sk.zeros(1000), sk.signals(1)
        world = sk.current(required=True)
        world.stream.synchronize()
        start = time.perf_counter()
        sk.bind(send, 1, 32, (dst, src, signals, np.int32(0)))()
        world.stream.synchronize()
        print(f"{time.perf_counter() - start:.3f}")
        if int(signals[0]) != 1:
            raise RuntimeError("the signal did not arrive")


if __name__ == "__main__":
    main()
