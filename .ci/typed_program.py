"""What type checkers see of the library. pyright reads this file; nobody runs it."""

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from typing_extensions import assert_type

import shmemkit as sk
from shmemkit.compat import libshmem_device
from shmemkit.device import notify, rank, symm_at
from shmemkit.typing import Array

world = sk.init(comm=MPI.COMM_WORLD)
x: Array = sk.zeros((4, 4), "bfloat16")
numbers: NDArray[np.float32] = np.zeros(4, np.float32)

assert_type(world, sk.World)
assert_type(sk.current(required=True), sk.World)
assert_type(world.host_allgather("text"), list[str])
assert_type(sk.AllReduce(world, 1 << 20, op="max")(numbers), NDArray[np.float32])
assert_type(sk.emu.run(world.near, 4), list[list[bool]])
product = sk.AllGatherGemm(world, 1 << 20)
assert_type(product(numbers, numbers), NDArray[np.float32])
assert_type(product(numbers, (numbers, numbers)), tuple[NDArray[np.float32], ...])
sk.bind(notify, 1, (32, 1), (x,))(stream=world.stream)
libshmem_device.getmem_block(symm_at(x, rank()), x, 8, libshmem_device.my_pe())

# Each of these is an error; without it, the comment is.
sk.all_reduce([1, 2])  # pyright: ignore[reportArgumentType]
sk.all_reduce(x, op="median")  # pyright: ignore[reportArgumentType]
sk.AllReduce(world, 8, method="pull")  # pyright: ignore[reportArgumentType]
sk.Gemm("sm70")  # pyright: ignore[reportArgumentType]
sk.AllGatherGemm(world, 1 << 20, "pull")  # pyright: ignore[reportArgumentType]
sk.GemmReduceScatter(world, 8, 8, method="one_shot")  # pyright: ignore[reportArgumentType]
sk.GemmAllReduce(world, 8, 8, method="ll128_overlap")  # pyright: ignore[reportArgumentType]
sk.init("gpu")  # pyright: ignore[reportArgumentType]
notify(x, 1, 2, "put")  # pyright: ignore[reportArgumentType]
print(world.size, sk.allreduce)  # pyright: ignore[reportAttributeAccessIssue]
