"""Matrix product and reduce-scatter at once: the second layer of a tensor-parallel block.

    ./mpi_launch.sh -n 4 examples/08_gemm_rs.py

After example 07, each rank has all rows of the activations, for its own columns of the first weight. The
second weight is cut by rows, so that each rank has the rows that match its columns of the activations. The
result is the sum of the products of all ranks, and each rank keeps its own rows of it:

    rank 0   h0 @ v0 --+       +--> rows of rank 0
    rank 1   h1 @ v1 --+--> + -+--> rows of rank 1
    rank 2   h2 @ v2 --+       +--> rows of rank 2
    rank 3   h3 @ v3 --+       +--> rows of rank 3

``sk.GemmReduceScatter`` sends tiles of the product while it computes others. A rank begins with tiles of the
next rank's rows, then of the rank after that, and so on: all ranks send at once, each to a different one. Its
own rows are sent to no one. It computes them a round later, when the other ranks' parts of them have arrived.
So it can add these parts before it rounds and stores the result:

    product  |x1 x2 x3|x1 x2 x3 x0|x1 x2 x3 x0|x0|    on rank 0; rank 1 computes x2 x3 x0, and so on
    send        |x1 x2 x3|x1 x2 x3   |x1 x2 x3|

Both layers together, with an activation between them, are the MLP of a transformer. When a model generates
text, each sequence adds one token at a time. Then there are few rows to scatter, and every rank needs the
whole result: ``sk.GemmAllReduce``.

On the emulator it prints

    4 ranks (emulator): 32 tokens, 64 hidden, 256 inside, bfloat16
    two layers, GEMM + reduce-scatter one after the other: passed
    two layers, GEMM + reduce-scatter at once: passed
    4 tokens, GEMM + all-reduce: passed

On GPUs it also prints how long each takes.
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
            raise SystemExit("1 rank: this example needs 2 or more, as with ./mpi_launch.sh -n 2")
        if tokens < 1 or tokens % n:
            raise SystemExit(f"--tokens is {tokens}; it must be a multiple of {n}, the number of ranks")
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
        wanted = 0  # as the ranks compute it: the activations between the layers are rounded
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
            except ValueError as refusal:  # on all ranks, on other GPUs than the Hopper generation
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
