"""All-gather and matrix product at once: the first layer of a tensor-parallel block.

    ./mpi_launch.sh -n 4 examples/07_ag_gemm.py

In a tensor-parallel model with sequence parallelism, each rank has some rows of the activations x, one row
for each token, and some columns of each weight. The layer multiplies all rows by the rank's own columns:

    rank 0   x0 --+                      +--> [x0 x1 x2 x3] @ w0
    rank 1   x1 --+--> all rows, on all -+--> [x0 x1 x2 x3] @ w1
    rank 2   x2 --+                      +--> [x0 x1 x2 x3] @ w2
    rank 3   x3 --+                      +--> [x0 x1 x2 x3] @ w3

If the product follows the gather, the tensor cores wait for the links, and then the links for the tensor
cores:

    gather   |x1 x2 x3|
    product           |x0 x1 x2 x3|

But the tiles of a product do not depend on each other, and the tiles of the rank's own rows need no data from
other ranks. So ``sk.AllGatherGemm`` computes these first, while the other rows arrive in the order in which
the product takes them. A few blocks of the kernel itself store them ("push"), or copy engines bring them
("overlap"). The kernel waits for each segment just before the first tile that needs it:

    gather   |x1 x2 x3|
    product  |x0 x1 x2 x3|                            on rank 0; rank 1 takes x1 x2 x3 x0, and so on

Attention has three weights: q, k and v. They share the gathered rows, so one gather is enough.

On the emulator it prints

    4 ranks (emulator), 16 rows of 64 bfloat16 each, q, k and v of 32, 16 and 16 columns each
    push: passed
    overlap: passed
    sequential: passed

On GPUs it also prints how long each method takes.
"""

import argparse

import ml_dtypes
import numpy as np

import shmemkit as sk


def main():
    parser = argparse.ArgumentParser(description="All-gather and matrix product at once.")
    parser.add_argument("--rows", type=int, help="of each rank, at least 1 (2048; 16 on the emulator)")
    parser.add_argument("--hidden", type=int, help="columns of x, a multiple of 8 (4096; 64 on the emulator)")
    options = parser.parse_args()
    for name, size, unit in (("rows", options.rows, 1), ("hidden", options.hidden, 8)):
        if size is not None and (size < unit or size % unit):
            parser.error(f"--{name} is {size}; it must be a multiple of {unit}, and at least {unit}")

    with sk.init() as world:
        n, xp, emulated = world.n_ranks, world.xp, world.backend.name == "emulator"
        rows = options.rows or (16 if emulated else 2048)
        hidden = options.hidden or (64 if emulated else 4096)
        columns = hidden // 2, hidden // 4, hidden // 4  # of a rank; k and v have fewer, as in Llama 3
        world.print(
            f"{n} ranks ({world.backend.name}), {rows} rows of {hidden} bfloat16 each,",
            "q, k and v of {}, {} and {} columns each".format(*columns),
            ranks=0,
        )

        def random(seed, *shape):
            values = xp.random.default_rng(seed).standard_normal(shape, dtype="float32")
            return values.astype(ml_dtypes.bfloat16)

        x = random(world.rank, rows, hidden)
        weights = tuple(random(n + 3 * world.rank + i, hidden, c) for i, c in enumerate(columns))
        everyone = xp.concatenate([random(rank, rows, hidden) for rank in range(n)]).astype("float32")
        wanted = [everyone @ weight.astype("float32") for weight in weights]

        for method in sk.AllGatherGemm.methods_for(world.n_nodes):
            try:
                ag_gemm = sk.AllGatherGemm(world, n * x.nbytes, method)
            except ValueError as refusal:  # on all ranks: two methods need GPUs of the Hopper generation
                world.print(f"{method}: {refusal}", ranks=0)
                continue
            outs = tuple(xp.full((n * rows, c), np.nan, ml_dtypes.bfloat16) for c in columns)
            world.synchronize()

            def call(ag_gemm=ag_gemm, outs=outs):
                ag_gemm(x, weights, outs)

            call()
            world.synchronize()
            for out, want in zip(outs, wanted, strict=True):
                error = float(xp.linalg.norm(out.astype("float32") - want) / xp.linalg.norm(want))
                assert error < 1e-2, f"rank {world.rank}: relative error {error}"
            took = "" if emulated else f", {sk.Timer(world)(call, 5):.1f} us"
            world.print(f"{method}: passed{took}", ranks=0)
            ag_gemm.free()


if __name__ == "__main__":
    main()
