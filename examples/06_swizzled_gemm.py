"""Threadblock swizzles: the order in which a GEMM computes its tiles, and what the order costs.

    ./mpi_launch.sh -n 1 examples/06_swizzled_gemm.py [--plot orders.png]

The tiles of a result are independent, so a GEMM may compute them in any order. The order still matters, for
two reasons. Tiles that are computed at the same time share rows of A and columns of B in the L2 cache. They
share most if they form a square (grouped), not a stripe (row_major). And where other ranks take part, the
order decides which rank waits for which. After an all-gather, a rank begins with the rows that it has itself
(rank_rotated). Before a reduce-scatter, it begins with the rows of the next rank, so that all ranks send at
once, each to a different one; its own rows, which it sends to no one, come last (reduce_scatter).

For a result of 8 by 5 tiles, as rank 1 of 4 and in groups of two tile rows, the table shows when the turn of
each tile comes. The example then computes products in these orders. On the emulator it prints

    row_major        grouped          rank_rotated     reduce_scatter
     0  1  2  3  4    0  2  4  6  8   30 32 34 36 38   20 22 24 26 28
     5  6  7  8  9    1  3  5  7  9   31 33 35 37 39   21 23 25 27 29
    10 11 12 13 14   10 12 14 16 18    0  2  4  6  8   30 32 34 36 38
    15 16 17 18 19   11 13 15 17 19    1  3  5  7  9   31 33 35 37 39
    20 21 22 23 24   20 22 24 26 28   10 12 14 16 18    0  2  4  6  8
    25 26 27 28 29   21 23 25 27 29   11 13 15 17 19    1  3  5  7  9
    30 31 32 33 34   30 32 34 36 38   20 22 24 26 28   10 12 14 16 18
    35 36 37 38 39   31 33 35 37 39   21 23 25 27 29   11 13 15 17 19
    passed           passed           passed           passed

On GPUs the table also has the time of a product in each order. --plot FILE draws the orders, by matplotlib.
"""

import argparse

import numpy as np

import shmemkit as sk
from shmemkit.device.swizzle import grouped, order_of, rank_rotated, reduce_scatter, row_major


def orders(rank, n_ranks, group):
    """-> name: function (turn, n_m, n_n) -> (m, n), for the host and for kernels. `group` in tile rows."""

    def in_groups(turn, n_m, n_n):
        return grouped(turn, n_m, n_n, group)

    def after_all_gather(turn, n_m, n_n):
        m, n = grouped(turn, n_m, n_n, group)
        return rank_rotated(m, n_m, rank, n_ranks, n_ranks), n

    def before_reduce_scatter(turn, n_m, n_n):
        m, n = grouped(turn, n_m, n_n, group)
        return reduce_scatter(m, n_m, rank, n_ranks, n_ranks), n

    return {
        "row_major": row_major,
        "grouped": in_groups,
        "rank_rotated": after_all_gather,
        "reduce_scatter": before_reduce_scatter,
    }


def draw(pictures, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(pictures), 4), layout="constrained")
    for axes, (name, turns) in zip(figure.subplots(1, len(pictures)), pictures.items(), strict=True):
        axes.imshow(turns, cmap="viridis")
        axes.set(title=name, xlabel="tile column", ylabel="tile row")
        for (m, n), turn in np.ndenumerate(turns):
            axes.text(n, m, turn, ha="center", va="center", color="white", fontsize="x-small")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description="The orders of a GEMM's tiles.")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the result (4)")
    parser.add_argument("--rank", type=int, default=1, help="the rank whose orders are shown (1)")
    parser.add_argument("--size", type=int, help="M, N and K of the product (8192; 128 on the emulator)")
    parser.add_argument("--plot", metavar="FILE", help="draw the orders into this file")
    options = parser.parse_args()
    pictures = {
        name: order_of(lambda turn, order=order: order(turn, 8, 5), 8, 5)
        for name, order in orders(options.rank, options.ranks, 2).items()
    }

    with sk.init() as world:
        emulated, xp = world.backend.name == "emulator", world.xp
        size = options.size or (128 if emulated else 8192)
        rng, timer = xp.random.default_rng(world.rank), sk.Timer(world)
        a, b = (rng.standard_normal((size, size), dtype="float32").astype("float16") for _ in range(2))
        expected = a.astype("float32") @ b.astype("float32")
        table = []
        for name, order in orders(options.rank, options.ranks, 16).items():
            gemm, out = sk.Gemm(order=order), xp.zeros((size, size), "float16")
            gemm(a, b, out)
            world.synchronize()
            assert float(abs(out.astype("float32") - expected).max()) < 1, name
            column = [name, *(" ".join(f"{turn:2}" for turn in row) for row in pictures[name]), "passed"]
            if not emulated:
                us = timer(lambda gemm=gemm, out=out: gemm(a, b, out), 5)
                column += [f"{us:.1f} us", f"{2e-6 * size**3 / us:.0f} TFLOP/s"]
            table.append(column)
        for row in zip(*table, strict=True):
            world.print("   ".join(f"{cell:14}" for cell in row).rstrip(), ranks=0)
        if options.plot and world.rank == 0:
            draw(pictures, options.plot)


if __name__ == "__main__":
    main()
