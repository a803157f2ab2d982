"""Emulated clusters (``device.cuda.clusters``): which blocks are in one, and where an array in a
block's shared memory lies in that of another."""

from .device_arrays import address
from .errors import EmulatorError
from .rendezvous import Rendezvous


def blocks_of(block):
    """The blocks of its cluster, in order."""
    launch = block.launch
    first = block.number - block.in_cluster
    return launch.blocks[first : first + launch.cluster]


def there(block, at, number):
    """Address `at` in the shared memory of `block` -> (block `number` of its cluster, the address there)."""
    blocks = blocks_of(block)
    if not 0 <= number < len(blocks):
        raise EmulatorError(f"the block is number {number}; the cluster has blocks 0 to {len(blocks) - 1}")
    for site, array in block.shared.items():
        offset = at - address(array)
        if 0 <= offset < array.nbytes:
            other = blocks[number]
            if site not in other.shared or other.alive == 0:
                raise EmulatorError(
                    f"block {number} of the cluster has not started, or has ended. Call "
                    "cluster_sync() before its shared memory is used, and again afterwards"
                )
            return other, address(other.shared[site]) + offset
    raise EmulatorError("the address is not in shared memory")


def sync(thread, frame):
    block = thread.block
    first = blocks_of(block)[0]
    rendezvous = first.rendezvous.get("cluster")
    if rendezvous is None:
        blocks = blocks_of(block)
        rendezvous = first.rendezvous["cluster"] = Rendezvous(
            block.scheduler, lambda: sum(b.alive for b in blocks), "a cluster barrier"
        )
    races = block.machine.races
    block.comes(thread, "cluster_sync", frame, rendezvous)
    rendezvous.join(thread, None, lambda values: races and races.block_barrier(blocks_of(block)))
