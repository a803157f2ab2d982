"""Decode 64 tokens with a KV cache that is spread over the ranks, in a CUDA graph.

    ./mpi_launch.sh -n 2 examples/13_flash_decode.py

A small attention layer feeds itself: step i has a vector x, the query q = x @ Wq, the key k = x @ Wk and the
value v = x @ Wv. The attention of q to the tokens 0 to i, times Wo, makes the x of the next step.

Token i is in the cache of rank i % n, in pages that the rank's block table names. A step of the graph has
three kernels:

    append        all ranks compute q, k and v. Rank i % n stores k and v behind its last token, and counts it
                  in `lengths`
    FlashDecode   the attention to the tokens of all ranks; each rank reads its own
    project       all ranks compute the next x, and count the step

The number of the step and the lengths are in GPU memory: the host launches the same graph for each step, and
never waits. At the end each step is checked. Its result must be that of attention in float64 to the keys and
values of all steps up to it.

On the emulator it prints

    2 ranks (emulator), 64 tokens, 4 heads of q, 2 of k and v, pages of 4
    passed: all steps are as in float64
"""

import argparse
import math

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import num_ranks, rank

HEADS, KV_HEADS, HEAD_DIM, WIDTH, PAGE = 4, 2, 64, 16, 4


@cuda.jit
def append(x, weights, step, q, keys, values, k_cache, v_cache, table, lengths):
    """Block h computes head h of q, k and v, a thread for each element. The keys and values of all steps are
    kept for the check."""
    h, i, now = cuda.blockIdx.x, cuda.threadIdx.x, step[0]
    total = 0.0
    for j in range(WIDTH):
        total += x[j] * weights[j, h, i]
    at, mine = now // num_ranks(), now % num_ranks() == rank()
    page, slot = table[0, at // PAGE], at % PAGE
    if h < HEADS:
        q[0, h, i] = total
    elif h < HEADS + KV_HEADS:
        keys[now, h - HEADS, i] = total
        if mine:
            k_cache[page, slot, h - HEADS, i] = total
    else:
        values[now, h - HEADS - KV_HEADS, i] = total
        if mine:
            v_cache[page, slot, h - HEADS - KV_HEADS, i] = total
    if mine and h == 0 and i == 0:
        lengths[0] = at + 1


@cuda.jit
def project(q, out, weights, x, step, queries, outputs):
    """One block, a thread for each element of x. Queries and results are kept for the check."""
    j, now = cuda.threadIdx.x, step[0]
    total = 0.0
    for h in range(HEADS):
        for i in range(HEAD_DIM):
            total += out[0, h, i] * weights[h, i, j]
            if i % WIDTH == j:
                queries[now, h, i] = q[0, h, i]
                outputs[now, h, i] = out[0, h, i]
    x[j] = math.tanh(total)
    cuda.syncthreads()  # all threads have read the number of the step
    if j == 0:
        step[0] = now + 1


def attention(q, k, v):
    """Of one token, in float64."""
    q, k, v = (a.astype("float64") for a in (q, k, v))
    group = HEADS // KV_HEADS
    scores = np.einsum("hd,thd->ht", q, np.repeat(k, group, 1)) / math.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), np.repeat(v, group, 1))


def main():
    parser = argparse.ArgumentParser(description="Decode with a KV cache that is spread over the ranks.")
    parser.add_argument("--tokens", type=int, default=64, help="steps (64)")
    tokens = parser.parse_args().tokens

    with sk.init() as world:
        xp, n, rng = world.xp, world.n_ranks, np.random.default_rng(0)
        heads = HEADS + 2 * KV_HEADS
        w_in, w_out = (
            xp.asarray(rng.normal(0, scale, shape).astype("float32"))
            for scale, shape in ((0.5, (WIDTH, heads, HEAD_DIM)), (0.2, (HEADS, HEAD_DIM, WIDTH)))
        )
        x, step = xp.asarray(rng.standard_normal(WIDTH).astype("float32")), xp.zeros(1, "int64")
        pages = -(-tokens // (n * PAGE))
        table = xp.asarray(rng.permutation(pages).astype("int32")[None])
        k_cache, v_cache = (xp.zeros((pages, PAGE, KV_HEADS, HEAD_DIM), "float16") for _ in "kv")
        lengths = xp.zeros(1, "int32")
        q, out = (xp.empty((1, HEADS, HEAD_DIM), "float16") for _ in range(2))
        keys, values = (xp.empty((tokens, KV_HEADS, HEAD_DIM), "float16") for _ in "kv")
        queries, outputs = (xp.empty((tokens, HEADS, HEAD_DIM), "float16") for _ in range(2))

        decode = sk.FlashDecode(world, 1, HEADS, KV_HEADS, HEAD_DIM, "float16")
        cache = k_cache, v_cache, table, lengths
        first = sk.bind(append, heads, HEAD_DIM, (x, w_in, step, q, keys, values, *cache))
        last = sk.bind(project, 1, WIDTH, (q, out, w_out, x, step, queries, outputs))
        world.synchronize()

        world.stream.begin_capture()
        first()
        decode(q, k_cache, v_cache, lengths, table, out=out)
        last()
        graph = world.stream.end_capture()
        for _ in range(tokens):
            graph.launch(world.stream)

        world.print(
            f"{n} ranks ({world.backend.name}), {tokens} tokens, {HEADS} heads of q, {KV_HEADS} of k and v, "
            f"pages of {PAGE}",
            ranks=0,
        )
        found = [world.asnumpy(a) for a in (queries, keys, values, outputs)]
        for i, (query, result) in enumerate(zip(found[0], found[3], strict=True)):
            wanted = attention(query, found[1][: i + 1], found[2][: i + 1])
            error = np.linalg.norm(result - wanted) / np.linalg.norm(wanted)
            if not error < 1e-3:
                raise RuntimeError(f"step {i}: relative error {error:.1e} on rank {world.rank}")
        stored = int(world.asnumpy(lengths)[0])
        if sum(world.host_allgather(stored)) != tokens:
            raise RuntimeError(
                f"rank {world.rank} has {stored} tokens; together the ranks must have {tokens}"
            )
        world.print("passed: all steps are as in float64", ranks=0)
        decode.free()


if __name__ == "__main__":
    main()
