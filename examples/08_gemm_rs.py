"""Matrix products that are added up over the ranks: the second layer of a tensor-parallel block.

    ./mpi_launch.sh -n 4 examples/08_gemm_rs.py

Example 07 ends with all rows of the activations on each rank, times its own columns of the weight. The second
layer's weight is cut the other way, so that each rank has what its part of the activations is multiplied by,
and the sum of all ranks' products is the result, of which each rank keeps its rows:

    rank 0   h0 @ v0 --+       +--> rows of rank 0
    rank 1   h1 @ v1 --+--> + -+--> rows of rank 1
    rank 2   h2 @ v2 --+       +--> rows of rank 2
    rank 3   h3 @ v3 --+       +--> rows of rank 3

``sk.GemmReduceScatter`` sends tiles of the product while it computes others. The order does it: a rank begins
with tiles of the next rank's rows, then of the one's after it, so that all send at once, each to another one;
its own, which are sent to nobody, come a round later, when the others' parts of them are here and can be
added before the result is rounded and stored:

    product  |x1 x2 x3|x1 x2 x3 x0|x1 x2 x3 x0|x0|    on rank 0; rank 1 computes x2 x3 x0, and so on
    send        |x1 x2 x3|x1 x2 x3   |x1 x2 x3|

Both layers together, with an activation between them, are the MLP of a transformer. With one token for each
sequence, when a model writes, there is little to scatter, and every rank wants the whole result: that is
``sk.GemmAllReduce``.

On the emulator it prints

    4 ranks (emulator): 32 tokens, 64 hidden, 256 inside, bfloat16
    two layers, GEMM + reduce-scatter one after the other: passed
    two layers, GEMM + reduce-scatter at once: passed
    4 tokens, GEMM + all-reduce: passed

and on GPUs how long each takes, too.
"""

import argparse

import ml_dtypes

import shmemkit as sk


def main():
    parser = argparse.ArgumentParser(description="Matrix products that are added up over the ranks.")
    parser.add_argument("--tokens", type=int, help="of all ranks (8192; 8 for each rank on the emulator)")
    parser.add_argument("--hidden", type=int, help="columns of the activations (4096; 64 on the emulator)")
    options = parser.parse_args()

    with sk.init() as world:
        n, me, xp, emulated = world.n_ranks, world.rank, world.xp, world.backend.name == "emulator"
        tokens = (8 * n if emulated else 8192 // n * n) if options.tokens is None else options.tokens
        hidden = options.hidden or (64 if emulated else 4096)
        if n == 1:
            raise SystemExit("1 rank: take 2 or more, as by ./mpi_launch.sh -n 2")
        if tokens < 1 or tokens % n:
            raise SystemExit(f"--tokens {tokens}: {n}, the ranks, or a multiple of it is allowed")
        inside = hidden if emulated else 14336 // n // 8 * 8  # columns of a rank between the layers
        of_all = f"{tokens} tokens, {hidden} hidden, {n * inside} inside, bfloat16"
        world.print(f"{n} ranks ({world.backend.name}): {of_all}", ranks=0)

        def random(seed, *shape):
            values = xp.random.default_rng(seed).standard_normal(shape, dtype="float32")
            return (values / shape[0] ** 0.5).astype(ml_dtypes.bfloat16)

        def check(out, wanted, name, call):
            world.synchronize()
            error = float(xp.linalg.norm(out.astype("float32") - wanted) / xp.linalg.norm(wanted))
            assert error < 2e-2, f"rank {me}: {name}: relative error {error}"
            took = "" if emulated else f", {sk.Timer(world)(call, 5):.1f} us"
            world.print(f"{name}: passed{took}", ranks=0)

        rows = slice(me * tokens // n, (me + 1) * tokens // n)
        x = random(0, tokens, hidden)
        weights = [(random(1 + 2 * r, hidden, inside), random(2 + 2 * r, inside, hidden)) for r in range(n)]
        wanted = 0  # as the ranks together compute it: what lies between the layers is rounded
        for first, second in weights:
            between = x.astype("float32") @ first.astype("float32")
            between = xp.maximum(between, 0).astype(ml_dtypes.bfloat16).astype("float32")
            wanted = wanted + between @ second.astype("float32")

        mine, (first, second) = x[rows].copy(), weights[me]
        ag_gemm = sk.AllGatherGemm(world, x.nbytes)
        between, out = xp.empty((tokens, inside), x.dtype), xp.empty((tokens // n, hidden), x.dtype)
        at_once = "fused" if world.n_nodes == 1 else "fused_2d"
        for name, method in (("one after the other", "sequential"), ("at once", at_once)):
            try:
                gemm_rs = sk.GemmReduceScatter(world, tokens, hidden, method=method)
            except ValueError as refusal:  # on all ranks, as where they are not GPUs of the Hopper generation
                world.print(f"{name}: {refusal}", ranks=0)
                continue

            def mlp(gemm_rs=gemm_rs):
                ag_gemm(mine, first, between, activation="relu")
                gemm_rs(between, second, out)

            out.fill(0)
            world.synchronize()
            mlp()
            check(out, wanted[rows], f"two layers, GEMM + reduce-scatter {name}", mlp)
            gemm_rs.free()
        ag_gemm.free()

        few = n  # tokens
        gemm_ar = sk.GemmAllReduce(world, few, hidden)
        whole, inputs = xp.zeros((few, hidden), x.dtype), between[:few].copy()
        world.synchronize()

        def decode():
            gemm_ar(inputs, second, whole)

        decode()
        check(whole, wanted[:few], f"{few} tokens, GEMM + all-reduce", decode)
        gemm_ar.free()


if __name__ == "__main__":
    main()
