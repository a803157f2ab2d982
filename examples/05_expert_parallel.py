"""Expert parallelism: a mixture-of-experts layer whose experts are spread over the ranks.

    ./mpi_launch.sh -n 4 examples/05_expert_parallel.py

A router gives each token to a few of many experts, which are small networks. The new value of the token is
the weighted sum of the experts' results. Each rank has some of the experts and some of the tokens. So tokens
go to the ranks of their experts, and come back:

    rank 0  tokens --+--> experts 0 1 --+--> tokens
    rank 1  tokens --+--> experts 2 3 --+--> tokens
    rank 2  tokens --+--> experts 4 5 --+--> tokens
    rank 3  tokens --+--> experts 6 7 --+--> tokens
                dispatch            combine

The number of tokens of an expert depends on the data, so only the GPUs know it. An ordinary all-to-all would
wait until the host knows it too. Here the ranks tell each other inside the dispatch kernel. That kernel puts
the rows of an expert one after another, and leaves their number on the GPU, where the experts' kernel reads
it. Nothing waits for the host. So a CUDA graph can capture the whole layer and replay it for any routing.

A row goes to each rank once, even if several of its token's experts are there; the rank copies it for each.
On the way back, the rank adds up the results of these experts, with the weights, and sends one row.

On the emulator it prints

    4 ranks (emulator), 12 tokens of 64 float32 each, 2 of 8 experts for a token
    tokens of each expert: 9 16 12 13 12 7 19 8
    sk.ExpertParallel: passed

On GPUs it also prints how long dispatch and combine take.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk

CALLS = 3  # one after another; the host does not wait between them


@cuda.jit
def run_experts(rows, counts, scale):
    """The experts of this rank: expert e replaces each of its rows by relu(row) * scale[e]. Blocks (b, e)."""
    r, e = cuda.blockIdx.x, cuda.blockIdx.y
    while r < counts[e]:
        for i in range(cuda.threadIdx.x, rows.shape[2], cuda.blockDim.x):
            rows[e, r, i] = max(rows[e, r, i], 0) * scale[e]
        r += cuda.gridDim.x


def route(xp, logits, topk):
    """-> the topk experts of each token, by their logits, and the experts' weights, which add up to 1."""
    experts = xp.argsort(-logits, axis=1)[:, :topk].copy()
    weights = xp.exp(xp.take_along_axis(logits, experts, axis=1))
    return experts, weights / weights.sum(axis=1, keepdims=True)


def expected(x, experts, weights, scale):
    factor = (weights * scale[experts]).sum(axis=1, keepdims=True)
    return factor * np.maximum(x, 0)


def main():
    parser = argparse.ArgumentParser(description="A mixture-of-experts layer over several ranks.")
    parser.add_argument("--tokens", type=int, default=12, help="of each rank (12)")
    parser.add_argument("--hidden", type=int, default=64, help="float32 of a token (64)")
    parser.add_argument("--experts", type=int, default=2, help="of each rank (2)")
    parser.add_argument("--topk", type=int, default=2, help="experts of a token (2)")
    options = parser.parse_args()

    with sk.init() as world:
        n, xp = world.n_ranks, world.xp
        n_experts, shape = n * options.experts, (CALLS, options.tokens, options.hidden)
        rng = np.random.default_rng(world.rank)
        x = rng.standard_normal(shape, "float32")
        logits = rng.standard_normal((CALLS, options.tokens, n_experts), "float32")
        scale = np.arange(1, n_experts + 1, dtype="float32")
        mine = xp.asarray(scale[world.rank * options.experts :][: options.experts])

        ep = sk.ExpertParallel(world, *shape[1:], n_experts, options.topk, "float32")
        rows, counts, _ = ep.received
        layer = sk.bind(run_experts, (4, options.experts), 64, (rows, counts, mine))
        world.print(
            f"{n} ranks ({world.backend.name}), {options.tokens} tokens of {options.hidden} float32 "
            f"each, {options.topk} of {n_experts} experts for a token",
            ranks=0,
        )

        inputs, outputs = xp.asarray(x), xp.empty(shape, "float32")
        routes = [route(xp, xp.asarray(of_call), options.topk) for of_call in logits]
        for call, (experts, weights) in enumerate(routes):
            ep.dispatch(inputs[call], experts, weights)
            layer()
            ep.combine(rows, outputs[call])

        results, load = world.asnumpy(outputs), np.concatenate(world.host_allgather(world.asnumpy(counts)))
        for call, of_call in enumerate(logits):
            wanted = expected(x[call], *route(np, of_call, options.topk), scale)
            np.testing.assert_allclose(results[call], wanted, rtol=1e-5, atol=1e-5)
        note = ""
        if world.backend.name != "emulator":

            def both():
                ep.dispatch(inputs[0], *routes[0])
                ep.combine(rows, outputs[0])

            note = f", {sk.Timer(world)(both):.1f} us"
        world.print("tokens of each expert:", *load, ranks=0)
        world.print(f"sk.ExpertParallel: passed{note}", ranks=0)


if __name__ == "__main__":
    main()
