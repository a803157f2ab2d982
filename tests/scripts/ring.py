"""A ring all-reduce with NVSHMEM alone: each block passes its chunks on, and counts them in one signal.

With several chunks per block this is right only where messages arrive in order: the signals of two chunks
add to one word, so the second chunk may be counted before the first is there.

    python -m shmemkit.emu -n 4 ring.py [chunks per block]
"""

import sys

import nvshmem.core as nvshmem
from cuda.core import Device, system
from mpi4py import MPI
from numba import cuda, uint64
from nvshmem.core import ComparisonType, SignalOp
from nvshmem.core.device.numba import my_pe, n_pes, put_signal_nbi, signal_wait


@cuda.jit
def all_reduce(total, mine, arrived, done, n_chunks, size):
    """Chunk by chunk, the sum goes from PE 0 to the last one, and from there to all."""
    me, last = my_pe(), n_pes() - 1
    block = cuda.blockIdx.x
    for chunk in range(n_chunks):
        begin = (block * n_chunks + chunk) * size
        part = total[begin : begin + size]
        if me > 0:
            if cuda.threadIdx.x == 0:
                signal_wait(arrived[block:], ComparisonType.CMP_GE, chunk + 1)
            cuda.syncthreads()
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            part[i] += mine[begin + i]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            if me < last:
                put_signal_nbi(part, part, arrived[block:], uint64(1), SignalOp.SIGNAL_ADD, me + 1)
            else:
                for pe in range(last):
                    put_signal_nbi(part, part, done[block:], uint64(1), SignalOp.SIGNAL_ADD, pe)
    if me < last and cuda.threadIdx.x == 0:
        signal_wait(done[block:], ComparisonType.CMP_EQ, n_chunks)


def main():
    comm = MPI.COMM_WORLD
    device = Device(comm.Get_rank() % system.num_devices)
    device.set_current()
    nvshmem.init(device=device, mpi_comm=comm, initializer_method="mpi")
    n_chunks, n_blocks, size = int(sys.argv[1]) if len(sys.argv) > 1 else 1, 2, 4
    n = n_blocks * n_chunks * size
    mine = nvshmem.array((n,), dtype="int32")
    total = nvshmem.array((n,), dtype="int32")
    arrived = nvshmem.array((n_blocks,), dtype="uint64")
    done = nvshmem.array((n_blocks,), dtype="uint64")
    mine[:] = comm.rank + 1
    total[:] = arrived[:] = done[:] = 0
    stream = device.create_stream()
    nvshmem.barrier(nvshmem.Teams.TEAM_WORLD, stream=stream)
    all_reduce[n_blocks, 4, int(stream.handle)](total, mine, arrived, done, n_chunks, size)
    nvshmem.barrier(nvshmem.Teams.TEAM_WORLD, stream=stream)
    device.sync()
    expected = sum(range(1, comm.size + 1))
    assert (total == expected).all(), f"PE {comm.rank}: {total}, expected {expected}"
    for array in (mine, total, arrived, done):
        nvshmem.free_array(array)
    nvshmem.finalize()


main()
if MPI.COMM_WORLD.rank == 0:
    print("passed")
