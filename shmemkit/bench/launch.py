"""``bench launch``: what a launch costs the host, and what a kernel costs in a CUDA graph.

An empty kernel with three array arguments, and an AllGather's call. Host cost: the time to enqueue a launch;
the median over batches, which the ways take in turn, then the maximum over ranks.
"""

import statistics
import time

from numba import cuda

import shmemkit as sk
from shmemkit.runtime.launch import bind

from . import first_launch, measure
from .command import Command
from .options import number
from .refusal import Refused, agreed
from .results import DRIVER

IN_GRAPH = 20  # kernels
GATHERED = 8192  # bytes
GATHER = "AllGather(method='ll'), 8 KB: gather(x, out)"
METHOD = (
    "launch: time to enqueue, per launch, the median over batches that the ways take in turn, then the "
    "maximum over ranks; graph: kernels in one CUDA graph, replayed between CUDA events; first_launch: from "
    "bind to the end of a kernel that calls put_signal, in a new process"
)


@cuda.jit
def empty_kernel(a, b, c):
    pass


def ways_of(world):
    """-> (the first one that is ours, name: function without arguments that enqueues one launch)."""
    arrays = [world.xp.zeros(1000, "float32") for _ in range(3)]
    bound, configured = bind(empty_kernel, 1, 32, arrays), empty_kernel[1, 32, world.stream]
    ways = {
        "sk.bind: b()": bound,
        "sk.bind: b(stream=s)": lambda: bound(stream=world.stream),
        "numba: kernel[...](three arrays of the World)": lambda: configured(*arrays),
    }
    if world.backend.name == "emulator":
        return bound, ways
    numba_arrays = [cuda.as_cuda_array(array, sync=False) for array in arrays]
    ways["numba: kernel[...](three numba arrays)"] = lambda: configured(*numba_arrays)
    return bound, {DRIVER: _prepacked(bound, world.stream), **ways}


def _prepacked(bound, stream):
    """The yardstick: nothing but the driver's call, its arguments and handles made before."""
    from cuda.bindings import driver

    function, handle = driver.CUfunction(int(bound._function)), driver.CUstream(stream.ptr)
    table = bound._default.args[-2]  # addresses of the packed arguments

    def launch():
        (error,) = driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, handle, table, 0)
        if error:
            raise RuntimeError(f"cuLaunchKernel: {error!r}")

    return launch


def host_costs(world, ways, batches, size, step):
    """-> name: microseconds per launch."""
    times = {name: [] for name in ways}
    for batch in range(batches + 1):
        step(f"host, batch {batch} of {batches}")
        for name, launch in ways.items():
            world.stream.synchronize()
            start = time.perf_counter()
            for _ in range(size):
                launch()
            elapsed = time.perf_counter() - start
            if batch:  # the first one warms up
                times[name].append(elapsed / size * 1e6)
    world.stream.synchronize()
    return {name: max(world.host_allgather(statistics.median(values))) for name, values in times.items()}


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    if options.first and world.n_ranks > 1:
        raise SystemExit(
            "--first: there are several ranks; it needs one, as in shmemkit run -m shmemkit bench "
            "launch --first"
        )
    timer = sk.Timer(world, IN_GRAPH, options.replays)
    if not timer.emulated:
        results.method = METHOD
    bound, ways = ways_of(world)
    replay = timer.capture(bound, IN_GRAPH)
    in_graph = f"CUDA graph of {IN_GRAPH}, per kernel"
    if not timer.emulated:
        ways[in_graph] = replay
    gather, about = None, {}  # what its row has besides
    try:
        gather = agreed(world, lambda: sk.AllGather(world, GATHERED, "ll"))
    except Refused as reason:
        about["note"] = f"refused: {reason}"
    else:
        n = world.n_ranks
        x = world.xp.zeros(GATHERED // n // 16 * 16, "uint8")
        out = world.xp.zeros(n * x.size, "uint8")
        ways[GATHER] = lambda: gather(x, out)
        with measure.noting(world) as launches:  # not while it is timed
            gather(x, out)
            about["rooms"] = launches and launches.take()
    with progress(options.batches + 2 + 3 * options.first) as step:
        for name, us in host_costs(world, ways, options.batches, options.batch_size, step).items():
            us, more = us / IN_GRAPH if name == in_graph else us, about if name == GATHER else {}
            results.add("launch", name, us=us, **more)
        if gather is None:
            results.add("launch", GATHER, **about)
        else:
            gather.free()
        step("in a CUDA graph")
        results.add("graph", in_graph, us=timer.time(replay, IN_GRAPH))
        if options.first:
            for cache, us in first_launch.times(step).items():
                results.add("first_launch", f"cache {cache}", us=us)


_first = "the first launch in a new process, too, by the state of shmemkit's cache; with one rank"
COMMANDS = [
    Command(
        "launch",
        "what a launch costs the host, and a kernel in a CUDA graph",
        run=run,
        options=[
            ("--batches", number("batches", 21)),
            ("--batch-size", number("launches per batch", 200)),
            ("--first", {"action": "store_true", "help": _first}),
        ],
        emulated={"batches": 3, "batch_size": 5},
    )
]
