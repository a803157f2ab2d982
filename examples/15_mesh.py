"""A mesh of ranks: a training step that is tensor parallel in rows and data parallel in columns.

    ./mpi_launch.sh -n 4 examples/15_mesh.py

A two-layer MLP, y = relu(x @ w1) @ w2. The ranks form rows of `--tensor` ranks:

                    column 0                        column 1
    row 0   half 0 of the batch             half 0 of the batch
            columns 0 of w1, rows 0 of w2   columns 1 of w1, rows 1 of w2
    row 1   half 1 of the batch             half 1 of the batch
            columns 0 of w1, rows 0 of w2   columns 1 of w1, rows 1 of w2

  forward   each rank multiplies by its part of the weights; an all-reduce in the row adds up y
  backward  each rank has the gradients of its part of the weights, for its half of the batch; an all-reduce
            in the column adds them up

``world.split`` makes the groups, and collectives take them instead of the World. All ranks call them in the
same order: so the rows' and the columns' never wait for each other in a circle.

Each step is checked against one rank that has the whole batch and all weights. On the emulator it prints

    4 ranks (emulator): a mesh of 2 by 2, batch 8, 12 in, 16 inside
    step 0: loss 4.4911, passed
    step 1: loss 4.3581, passed
    step 2: loss 4.2391, passed

On GPUs the losses may differ in the last digits.
"""

import argparse

import numpy as np

import shmemkit as sk

RATE = 0.01


def given(batch, size, inside):
    """-> x, what y shall be, w1, w2: all of them, equal on all ranks"""
    rng = np.random.default_rng(0)
    shapes = (batch, size), (batch, size), (size, inside), (inside, size)
    return [rng.standard_normal(shape, "float32") / np.float32(4) for shape in shapes]


def forward(x, w1, w2):
    """-> what is inside, and y"""
    inside = (x @ w1).clip(0)
    return inside, inside @ w2


def backward(x, inside, w2, dy):
    """-> the gradients of w1 and w2, for that of y"""
    of_inside = (dy @ w2.T) * (inside > 0)
    return x.T @ of_inside, inside.T @ dy


def part(array, axis, number, of):
    """Part `number` of `of` equal ones along `axis`."""
    size = array.shape[axis] // of
    return np.take(array, range(number * size, (number + 1) * size), axis)


def main():
    parser = argparse.ArgumentParser(description="A training step on a mesh of ranks.")
    parser.add_argument("--tensor", type=int, help="ranks of a row (default: half of them)")
    parser.add_argument("--batch", type=int, help="of all ranks (8 on the emulator, else 4096)")
    parser.add_argument("--size", type=int, help="of a sample (12 on the emulator, else 1024)")
    parser.add_argument("--inside", type=int, help="(16 on the emulator, else 4096)")
    options = parser.parse_args()

    with sk.init() as world:
        n, xp, emulated = world.n_ranks, world.xp, world.backend.name == "emulator"
        tensor = options.tensor or max(1, n // 2)
        batch = options.batch or (8 if emulated else 4096)
        size, inside = (
            options.size or (12 if emulated else 1024),
            options.inside or (16 if emulated else 4096),
        )
        if n % tensor or batch % (n // tensor) or inside % tensor:
            raise SystemExit(
                f"--tensor is {tensor}, --batch is {batch} and --inside is {inside}, on {n} ranks; the ranks "
                "and --inside must be multiples of --tensor, and --batch of the number of rows"
            )
        row, column = world.split(world.rank // tensor), world.split(world.rank % tensor)
        mesh = f"a mesh of {column.n_ranks} by {row.n_ranks}, batch {batch}, {size} in, {inside} inside"
        world.print(f"{n} ranks ({world.backend.name}): {mesh}", ranks=0)

        all_x, all_wanted, all_w1, all_w2 = given(batch, size, inside)
        mine = [part(array, 0, column.rank, column.n_ranks) for array in (all_x, all_wanted)]
        weights = part(all_w1, 1, row.rank, row.n_ranks), part(all_w2, 0, row.rank, row.n_ranks)
        x, wanted, w1, w2 = (xp.asarray(np.ascontiguousarray(array)) for array in (*mine, *weights))
        add_y = sk.AllReduce(row, wanted.nbytes)
        add_gradients = [sk.AllReduce(column, w.nbytes) for w in (w1, w2)]

        for step in range(3):
            within, y = forward(x, w1, w2)
            y = add_y(y)  # of all parts of the weights
            dy = y - wanted
            gradients = backward(x, within, w2, dy)
            gradients = [
                add(g) for add, g in zip(add_gradients, gradients, strict=True)
            ]  # of the whole batch
            for w, gradient in zip((w1, w2), gradients, strict=True):
                w -= RATE * gradient
            loss = sum(column.host_allgather(float((world.asnumpy(dy) ** 2).sum()))) / 2

            of_all = forward(all_x, all_w1, all_w2)
            error = of_all[1] - all_wanted
            for w, gradient in zip((all_w1, all_w2), backward(all_x, of_all[0], all_w2, error), strict=True):
                w -= RATE * gradient
            right = (
                np.isclose(loss, (error**2).sum() / 2, rtol=1e-4),
                np.allclose(world.asnumpy(w1), part(all_w1, 1, row.rank, row.n_ranks), atol=1e-4),
                np.allclose(world.asnumpy(w2), part(all_w2, 0, row.rank, row.n_ranks), atol=1e-4),
            )
            passed = all(world.host_allgather(all(right)))
            world.print(f"step {step}: loss {loss:.4f}, {'passed' if passed else 'FAILED'}", ranks=0)
        for collective in (add_y, *add_gradients):
            collective.free()
        row.finalize()
        column.finalize()


if __name__ == "__main__":
    main()
