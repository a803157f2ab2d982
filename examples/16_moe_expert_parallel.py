"""A mixture-of-experts layer whose experts are spread over the ranks, for many tokens: a prefill.

    ./mpi_launch.sh -n 4 examples/16_moe_expert_parallel.py

Each rank has some of the experts, whole, and some of the tokens. Tokens go to the ranks of their experts, and
come back:

    rank 0  tokens --+--> rows of experts 0 1: @ w1[e] -> SwiGLU -> @ w2[e] --+--> tokens
    rank 1  tokens --+--> rows of experts 2 3: @ w1[e] -> SwiGLU -> @ w2[e] --+--> tokens
               dispatch                                                     combine

``sk.ExpertParallel`` with `max_rows` puts the rows of all experts of a rank into one buffer without gaps,
which ``sk.grouped_matmul`` takes as it is. Only the GPU knows how many rows an expert has. So the whole layer
is one CUDA graph, no host waits, and the graph is right for the next batch, too.

`max_rows` bounds the memory. If a routing brings more rows to any rank, nothing is sent on any, and all raise
ValueError. Here a rank has room for twice the rows that each has if all experts are equally busy.

On the emulator it prints

    4 ranks (emulator), 6 tokens of 16 float16 each, 2 of 8 experts for a token, 32 inside
    first batch: passed
    next batch, the same graph: passed
    8 to 18 rows on a rank, of 24

On GPUs it also prints how long the layer takes.
"""

import argparse
import math

import numpy as np
from numba import cuda, float32

import shmemkit as sk


@cuda.jit
def swiglu(h, counts, out):
    """out[r, c] = silu(h[r, c]) * h[r, width + c], of rows of 2 * width and of width elements: of as many as
    counts add up to."""
    rows, width, i = 0, out.shape[1], cuda.grid(1)
    for e in range(counts.size):
        rows += counts[e]
    while i < rows * width:
        r, c = i // width, i % width
        gate, up = float32(h[r, c]), float32(h[r, width + c])
        out[r, c] = gate / (float32(1) + math.exp(-gate)) * up
        i += cuda.gridsize(1)


def batch(seed, rank, tokens, topk, n_experts, hidden):
    """-> tokens of a rank, their experts, and the experts' weights"""
    rng = np.random.default_rng([seed, rank])
    x = rng.standard_normal((tokens, hidden), "float32").astype("float16")
    experts = rng.random((tokens, n_experts)).argsort(axis=1)[:, :topk].astype("int32")
    return x, experts, rng.dirichlet(np.ones(topk), tokens).astype("float32")


def weights_of(xp, expert, hidden, inside):
    """-> those of an expert: gates and ups (2 * inside, hidden), downs (hidden, inside)"""
    rng = xp.random.default_rng(expert)
    w1 = rng.standard_normal((2 * inside, hidden), "float32") / hidden**0.5
    w2 = rng.standard_normal((hidden, inside), "float32") / inside**0.5
    return w1.astype("float16"), w2.astype("float16")


def expected(xp, x, experts, weights, inside):
    """What a token must get, in float32."""
    row, total = xp.asarray(x.astype("float32")), 0
    for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
        w1, w2 = weights_of(xp, expert, x.size, inside)
        gate, up = (w1.astype("float32") @ row).reshape(2, -1)
        total = total + weight * (w2.astype("float32") @ (gate / (1 + xp.exp(-gate)) * up))
    return total


def main():
    parser = argparse.ArgumentParser(description="An expert-parallel mixture of experts.")
    parser.add_argument("--tokens", type=int, help="of each rank (4096; 6 on the emulator)")
    parser.add_argument("--hidden", type=int, help="elements of a token (7168; 16 on the emulator)")
    parser.add_argument("--inside", type=int, help="of an expert (2048; 32 on the emulator)")
    parser.add_argument("--experts", type=int, help="of each rank (8; 2 on the emulator)")
    parser.add_argument("--topk", type=int, help="experts of a token (8; 2 on the emulator)")
    parser.add_argument("--max-rows", type=int, help="of a rank (2 * tokens * topk)")
    options = parser.parse_args()

    with sk.init() as world:
        n, me, xp, emulated = world.n_ranks, world.rank, world.xp, world.backend.name == "emulator"
        tokens, hidden = (
            options.tokens or (6 if emulated else 4096),
            options.hidden or (16 if emulated else 7168),
        )
        n_local, inside = (
            options.experts or (2 if emulated else 8),
            options.inside or (32 if emulated else 2048),
        )
        topk = options.topk or (2 if emulated else 8)
        max_rows = options.max_rows or 2 * tokens * topk
        world.print(
            f"{n} ranks ({world.backend.name}), {tokens} tokens of {hidden} float16 each, {topk} of "
            f"{n * n_local} experts for a token, {inside} inside",
            ranks=0,
        )

        ep = sk.ExpertParallel(world, tokens, hidden, n * n_local, topk, "float16", max_rows=max_rows)
        of_experts = [weights_of(xp, me * n_local + e, hidden, inside) for e in range(n_local)]
        w1, w2 = (xp.stack(of_all) for of_all in zip(*of_experts, strict=True))
        x, y = xp.empty((tokens, hidden), "float16"), xp.empty((tokens, hidden), "float16")
        experts, weights = xp.empty((tokens, topk), "int32"), xp.empty((tokens, topk), "float32")
        h, active = xp.empty((max_rows, 2 * inside), "float16"), xp.empty((max_rows, inside), "float16")
        down = xp.empty((max_rows, hidden), "float16")
        rows, counts = ep.received.rows, ep.received.counts
        activate = sk.bind(swiglu, 8 if emulated else 1024, 32 if emulated else 256, (h, counts, active))

        def layer():
            ep.dispatch(x, experts, weights)
            sk.grouped_matmul(rows, w1, counts, h)
            activate()
            sk.grouped_matmul(active, w2, counts, down)
            ep.combine(down, y)

        graph, came = None, []
        for seed, what in enumerate(("first batch", "next batch, the same graph")):
            of_batch = batch(seed, me, tokens, topk, n * n_local, hidden)
            x[:], experts[:], weights[:] = map(xp.asarray, of_batch)
            world.synchronize()
            if graph is None:
                layer()  # compiles
                world.stream.begin_capture()
                layer()
                graph = world.stream.end_capture()
            y[:] = xp.nan
            world.synchronize()
            world.host_barrier()
            graph.launch(world.stream)
            world.synchronize()
            passed = True
            for t in np.linspace(0, tokens - 1, min(tokens, 8)).astype(int):
                wanted = expected(xp, *(array[t] for array in of_batch), inside)
                passed &= bool(abs(y[t].astype("float32") - wanted).max() < 0.05)
            passed = all(world.host_allgather(passed))
            came += world.host_allgather(int(world.asnumpy(counts).sum()))
            world.print(f"{what}: {'passed' if passed else 'FAILED'}", ranks=0)
        world.print(f"{min(came)} to {max(came)} rows on a rank, of {max_rows}", ranks=0)
        if not emulated:
            world.print(f"the layer: {sk.Timer(world)(layer, 5):.0f} us", ranks=0)
        ep.free()


if __name__ == "__main__":
    main()
