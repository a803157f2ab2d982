"""A mixture-of-experts layer that is cut by columns and rows: tensor parallelism.

    ./mpi_launch.sh -n 4 examples/14_moe_tensor_parallel.py

Each token goes to a few of the experts. Here every rank has a part of every expert: some columns of its first
weights, and the rows of its second weight that match. So no expert is busier on one rank than on another,
whatever the routing:

    rank 0   x0 --+      +--> h = all x @ columns 0 of w1[e] -> SwiGLU -> @ rows 0 of w2[e] --+      +--> y0
    rank 1   x1 --+------+--> h = all x @ columns 1 of w1[e] -> SwiGLU -> @ rows 1 of w2[e] --+- + --+--> y1

``sk.AllGatherGroupedGemm`` multiplies this rank's tokens while those of the others arrive.
``sk.GroupedGemmReduceScatter`` weighs and adds up the rows of each token's experts, and sends the first
columns of the sums while it computes the next. Both use one ``sk.ExpertIndex``, which a kernel makes of the
experts' numbers: no host needs to know how many tokens an expert has. So the whole layer is one CUDA graph,
which is right for the next batch, too.

On the emulator it prints

    4 ranks (emulator): 16 tokens, 2 of 3 experts, 16 hidden, 32 inside, float16
    first batch: passed
    next batch, the same graph: passed

On GPUs it also prints how long the layer takes.
"""

import argparse
import math

import numpy as np
from numba import cuda, float32

import shmemkit as sk


@cuda.jit
def swiglu(h, out):
    """out[r, c] = silu(h[r, c]) * h[r, width + c], of rows of 2 * width and of width elements"""
    width, i = out.shape[1], cuda.grid(1)
    while i < out.size:
        r, c = i // width, i % width
        gate, up = float32(h[r, c]), float32(h[r, width + c])
        out[r, c] = gate / (float32(1) + math.exp(-gate)) * up
        i += cuda.gridsize(1)


def batch(seed, tokens, topk, n_experts, hidden):
    """-> tokens of all ranks, their experts, and the experts' weights"""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden), "float32").astype("float16")
    ids = rng.random((tokens, n_experts)).argsort(axis=1)[:, :topk].astype("int32")
    return x, ids, rng.dirichlet(np.ones(topk), tokens).astype("float32")


def weights_of(world, n_experts, hidden, inside):
    """-> this rank's part of the experts: gates and ups (2 * inside, hidden), downs (hidden, inside)"""
    rng = world.xp.random.default_rng(world.rank)
    w1 = rng.standard_normal((n_experts, 2 * inside, hidden), "float32") / hidden**0.5
    w2 = rng.standard_normal((n_experts, hidden, inside), "float32") / inside**0.5
    return w1.astype("float16"), w2.astype("float16")


def expected(world, x, ids, weights, w1, w2, some):
    """What `some` tokens must get, computed one by one, in float32."""
    mine = np.zeros((len(some), x.shape[1]), "float32")
    for i, token in enumerate(some):
        row = world.xp.asarray(x[token].astype("float32"))
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (w1[expert].astype("float32") @ row).reshape(2, -1)
            down = w2[expert].astype("float32") @ (gate / (1 + world.xp.exp(-gate)) * up)
            mine[i] += weight * world.asnumpy(down)
    return np.sum(world.host_allgather(mine), axis=0)


def main():
    parser = argparse.ArgumentParser(description="A tensor-parallel mixture of experts.")
    parser.add_argument("--tokens", type=int, help="of all ranks (8192; 4 for each rank on the emulator)")
    parser.add_argument("--hidden", type=int, help="elements of a token (4096; 16 on the emulator)")
    parser.add_argument("--experts", type=int, help="(32; 3 on the emulator)")
    parser.add_argument("--topk", type=int, help="experts of a token (4; 2 on the emulator)")
    options = parser.parse_args()

    with sk.init() as world:
        n, me, xp, emulated = world.n_ranks, world.rank, world.xp, world.backend.name == "emulator"
        tokens = options.tokens or (4 * n if emulated else 8192 // n * n)
        hidden = options.hidden or (16 if emulated else 4096)
        n_experts, topk = options.experts or (3 if emulated else 32), options.topk or (2 if emulated else 4)
        inside = 8 if emulated else 4096 // n // 8 * 8  # of a rank
        if tokens % n or topk > n_experts:
            raise SystemExit(
                f"--tokens is {tokens}, --topk is {topk} and --experts is {n_experts}; --tokens must be a "
                f"multiple of {n}, the number of ranks, and --topk must be --experts at most"
            )
        of_all = f"{tokens} tokens, {topk} of {n_experts} experts, {hidden} hidden, {n * inside} inside"
        world.print(f"{n} ranks ({world.backend.name}): {of_all}, float16", ranks=0)

        w1, w2 = weights_of(world, n_experts, hidden, inside)
        x, ids = xp.empty((tokens // n, hidden), "float16"), xp.empty((tokens, topk), "int32")
        weights, y = xp.empty((tokens, topk), "float32"), xp.empty((tokens // n, hidden), "float16")
        h = xp.empty((tokens * topk, 2 * inside), "float16")
        active = xp.empty((tokens * topk, inside), "float16")
        first = sk.AllGatherGroupedGemm(world, n * x.nbytes)
        second = sk.GroupedGemmReduceScatter(world, tokens, topk, hidden, "float16")
        index = sk.ExpertIndex(world, ids, n_experts)
        activate = sk.bind(swiglu, 8 if emulated else 1024, 32 if emulated else 256, (h, active))

        def layer():
            index.update()
            first(x, w1, index, h)
            activate()
            second(active, w2, index, weights, y)

        graph = None
        for seed, what in enumerate(("first batch", "next batch, the same graph")):
            of_batch = batch(seed, tokens, topk, n_experts, hidden)
            x[:] = xp.asarray(of_batch[0][me * tokens // n :][: tokens // n])
            ids[:], weights[:] = xp.asarray(of_batch[1]), xp.asarray(of_batch[2])
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
            some = np.linspace(0, tokens - 1, min(tokens, 16)).astype(int)  # tokens of several ranks
            want = expected(world, *of_batch, w1, w2, some)
            got = {t: world.asnumpy(y[t - me * tokens // n]) for t in some if t * n // tokens == me}
            wrong = [abs(got[t].astype("float32") - want[i]).max() for i, t in enumerate(some) if t in got]
            passed = all(world.host_allgather(all(difference < 0.05 for difference in wrong)))
            world.print(f"{what}: {'passed' if passed else 'FAILED'}", ranks=0)
        if not emulated:
            world.print(f"the layer: {sk.Timer(world)(layer, 5):.0f} us", ranks=0)
        first.free()
        second.free()


if __name__ == "__main__":
    main()
