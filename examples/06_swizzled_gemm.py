"""Threadblock swizzles: the order in which a GEMM computes its tiles, as pictures, and what it costs.

    ./mpi_launch.sh -n 1 examples/06_swizzled_gemm.py [--plot orders.png]

The tiles of a result are independent, so a GEMM may compute them in any order. It matters all the same. Those
under way at a time share the rows of A and the columns of B that they need, in the L2 cache: best if they are
a square (grouped), and not a stripe (row major). And where other ranks are involved, the order says who waits
for whom: behind an all-gather a rank begins with the rows that it has itself (rank rotated), in front of a
reduce-scatter with those of the next rank, so that all send at once, each to another one, and its own, which
need not be sent, come last.

For 8 by 5 tiles, a letter for each place in the order, in groups of two rows, and as rank 1 of 4, on the
emulator it prints

    row_major      grouped        rank_rotated   reduce_scatter
    abcde          acegi          EGIKM          uwyAC
    fghij          bdfhj          FHJLN          vxzBD
    klmno          kmoqs          acegi          EGIKM
    pqrst          lnprt          bdfhj          FHJLN
    uvwxy          uwyAC          kmoqs          acegi
    zABCD          vxzBD          lnprt          bdfhj
    EFGHI          EGIKM          uwyAC          kmoqs
    JKLMN          FHJLN          vxzBD          lnprt
    products of 128x128x128 in 4 orders: passed

and on GPUs how long a product takes in each of these orders, too. With --plot, and matplotlib, it draws them.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device.swizzle import grouped, order_of, rank_rotated, reduce_scatter, row_major
from shmemkit.kernels.gemm import Sm80, gpu_of
from shmemkit.kernels.gemm.problem import Problem
from shmemkit.kernels.gemm.sm80 import Tile

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def orders(rank, n_ranks, group):
    """-> name: function (place, n_m, n_n) -> (m, n), for the host and, as a device function, for kernels."""

    def by_group(place, n_m, n_n):
        return grouped(place, n_m, n_n, group)

    def behind_all_gather(place, n_m, n_n):
        m, n = grouped(place, n_m, n_n, group)
        return rank_rotated(m, n_m, rank, n_ranks, n_ranks), n

    def before_reduce_scatter(place, n_m, n_n):
        m, n = grouped(place, n_m, n_n, group)
        return reduce_scatter(m, n_m, rank, n_ranks, n_ranks), n

    return {
        "row_major": row_major,
        "grouped": by_group,
        "rank_rotated": behind_all_gather,
        "reduce_scatter": before_reduce_scatter,
    }


def in_letters(turns):
    return ["".join(LETTERS[turn % len(LETTERS)] for turn in row) for row in turns]


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
    parser.add_argument("--ranks", type=int, default=4, help="of which the result has a part each (4)")
    parser.add_argument("--rank", type=int, default=1, help="whose orders are shown (1)")
    parser.add_argument("--size", type=int, help="M, N and K of the product (8192; 128 on the emulator)")
    parser.add_argument("--plot", metavar="FILE", help="draw the orders")
    options = parser.parse_args()

    pictures = {
        name: order_of(lambda place, order=order: order(place, 8, 5), 8, 5)
        for name, order in orders(options.rank, options.ranks, 2).items()
    }
    for cells in zip(*([name, *in_letters(turns)] for name, turns in pictures.items()), strict=True):
        print(" ".join(f"{cell:14}" for cell in cells).rstrip())
    if options.plot:
        draw(pictures, options.plot)

    with sk.init() as world:
        emulated, xp = world.backend.name == "emulator", world.xp
        size = options.size or (128 if emulated else 8192)
        tile = Tile(64, 64, 32, 3, 2, 2) if emulated else Tile(128, 256, 64, 4, 2, 4)
        rng, timer, gpu = xp.random.default_rng(world.rank), sk.Timer(world), gpu_of(world)
        a, b = (rng.standard_normal((size, size), dtype="float32").astype("float16") for _ in range(2))
        expected = a[:64].astype("float32") @ b.astype("float32")
        for name, order in orders(options.rank, options.ranks, max(1, 2048 // tile.m)).items():
            out = xp.zeros((size, size), "float16")
            order = cuda.jit(device=True)(order)
            product = Sm80(Problem(a, b, out, None, None), gpu, tile, order)
            product()
            world.synchronize()
            assert float(abs(out[:64].astype("float32") - expected).max()) < 1, name
            if not emulated:
                us = timer(product, 5)
                print(f"{name:14} {us:8.1f} us, {2e-6 * size**3 / us:.0f} TFLOP/s", flush=True)
        print(f"products of {size}x{size}x{size} in {len(pictures)} orders: passed")


if __name__ == "__main__":
    main()
