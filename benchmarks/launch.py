"""What a launch costs the host, and how long a kernel's first launch takes.

    ./mpi_launch.sh -n 1 benchmarks/launch.py --json launch.json

Host cost: time to enqueue an empty kernel with three array arguments, per launch; medians of batches taken in
turn. First launch: in new processes, from bind to the end of a kernel that calls put_signal; imports and
initialization are not in it. "off" is without shmemkit's cache, "cold" with an empty one, "warm" with the one
that "cold" left.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
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


@cuda.jit
def empty(a, b, c):
    pass


@cuda.jit
def send(dst, src, signals, peer):
    put_signal_block(dst, src, signals, 1, SET, peer)


def host_costs(world, batches, size):
    """-> microseconds per launch by name."""
    from cuda.bindings import driver

    arrays = [world.xp.zeros(1000, "float32") for _ in range(3)]
    numba_arrays = [cuda.as_cuda_array(array, sync=False) for array in arrays]
    bound = sk.bind(empty, 1, 32, arrays)
    configured = empty[1, 32, world.stream]
    function = driver.CUfunction(int(bound._function))
    stream = driver.CUstream(world.stream.ptr)
    table = bound._default.args[-2]  # the packed arguments

    def prepacked():
        (error,) = driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, table, 0)
        if error:
            raise RuntimeError(error)

    ways = {
        "cuLaunchKernel, arguments packed before": prepacked,
        "sk.bind: b()": bound,
        "sk.bind: b(stream=s)": lambda: bound(stream=world.stream),
        "numba: kernel[...](three CuPy arrays)": lambda: configured(*arrays),
        "numba: kernel[...](three numba arrays)": lambda: configured(*numba_arrays),
    }
    times = {name: [] for name in ways}
    for batch in range(batches + 1):
        for name, launch in ways.items():
            world.stream.synchronize()
            start = time.perf_counter()
            for _ in range(size):
                launch()
            elapsed = time.perf_counter() - start
            if batch:  # the first one warms up
                times[name].append(elapsed / size * 1e6)
    world.stream.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def first_launch():
    """In a process of its own: seconds that the first launch takes, printed."""
    with sk.init("nvshmem") as world:
        dst, src, signals = sk.zeros(1000), sk.zeros(1000), sk.signals(1)
        world.stream.synchronize()
        start = time.perf_counter()
        sk.bind(send, 1, 32, (dst, src, signals, np.int32(0)))()
        world.stream.synchronize()
        print(f"seconds {time.perf_counter() - start:.3f}")
        if signals.get()[0] != 1:
            raise RuntimeError("the signal did not arrive")


def first_launches(repeats):
    """-> seconds by state of the cache; the best of `repeats` for those that repeat."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(MPI_VARIABLES)}

    def measure(**changes):
        command = [sys.executable, os.path.abspath(__file__), "--first-launch"]
        done = subprocess.run(command, env=environment | changes, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"the process failed:\n{done.stdout}{done.stderr}")
        return float(done.stdout.split("seconds")[1].split()[0])

    with tempfile.TemporaryDirectory() as folder:
        return {
            "off": measure(SHMEMKIT_CACHE="0"),
            "cold": measure(SHMEMKIT_CACHE_DIR=folder),
            "warm": min(measure(SHMEMKIT_CACHE_DIR=folder) for _ in range(repeats)),
        }


def machine():
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    wanted = "numpy numba numba-cuda cuda-bindings cuda-core".split()
    wanted += [f"{name}-cu{major}" for name in ("nvshmem4py", "nvidia-nvshmem") for major in (12, 13)]
    versions = {}
    for name in [*wanted, "cupy-cuda12x", "cupy-cuda13x"]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "command": shlex.join(["python3", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    parser.add_argument("--batches", type=int, default=21)
    parser.add_argument("--size", type=int, default=200, help="launches per batch")
    parser.add_argument("--repeats", type=int, default=3, help="processes with a warm cache")
    parser.add_argument("--first-launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_launch:
        return first_launch()
    with sk.init("nvshmem") as world:
        if world.n_ranks != 1:
            parser.error("run it with one rank")
        costs = host_costs(world, options.batches, options.size)
        about = machine()
    base = costs["cuLaunchKernel, arguments packed before"]
    print(f"{about['gpu']}, driver {about['driver']}\n\n{'host cost of a launch':44} {'us':>8} {'ratio':>7}")
    for name, cost in costs.items():
        print(f"{name:44} {cost:8.2f} {cost / base:7.2f}")
    firsts = first_launches(options.repeats)
    print(f"\n{'first launch of a put_signal kernel, cache':44} {'s':>8}")
    for name, seconds in firsts.items():
        print(f"{name:44} {seconds:8.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": about, "host_us": costs, "first_launch_s": firsts}, file, indent=2)


if __name__ == "__main__":
    main()
