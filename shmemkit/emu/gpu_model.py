"""The GPU that a program is meant for: its compute capability, and how many blocks are on it at once."""

import os
from typing import NamedTuple

from shmemkit.support.settings import listed

VARIABLE = "SHMEMKIT_EMULATED_GPU"


class Gpu(NamedTuple):
    """Its compute capability and multiprocessors (SMs), and what each SM has: threads, blocks, bytes of
    shared memory, of which every block takes `reserved`."""

    name: str
    compute_capability: tuple[int, int]
    sms: int
    threads: int = 2048
    blocks: int = 32
    shared: int = 228 << 10
    reserved: int = 1 << 10

    def fit(self, threads, shared, cluster=1):
        """-> (blocks of so many threads and bytes of shared memory that are there at once, why not more)"""
        limits = {
            f"{self.threads} threads": self.threads // (-(-threads // 32) * 32),
            f"{self.blocks} blocks": self.blocks,
            f"{self.shared >> 10} KB of shared memory": self.shared // (shared + self.reserved),
        }
        limit = min(limits, key=limits.__getitem__)
        n = limits[limit]
        return n * self.sms // cluster * cluster, f"{self.sms} SMs with {n} each, for an SM has {limit}"


NUMBERS = Gpu._fields[2:]  # that a text may change

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", (9, 0), 132),
        Gpu("H100", (9, 0), 132),
        Gpu("B200", (10, 0), 148),
        Gpu("A100", (8, 0), 108, shared=164 << 10),
        Gpu("L40S", (8, 9), 142, 1536, 24, 100 << 10),
    )
}


def gpu_of(text=None):
    """The Gpu that `text` names, or the variable SHMEMKIT_EMULATED_GPU; default H200. "H200,sms=8" is one
    with other numbers. ValueError for what is none."""
    source = "gpu"
    if text is None:
        source, text = VARIABLE, os.environ.get(VARIABLE, "").strip() or "H200"
    try:
        name, *changes = text.replace(" ", "").split(",")
        numbers = {key: int(value) for key, value in (c.split("=") for c in changes)}
        gpu = GPUS[name]._replace(**numbers)
        if numbers.keys() - NUMBERS or min(gpu[2:6]) < 1 or gpu.reserved < 0:
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{source} is {text!r}; it must be {listed(GPUS)}, and may change {listed(NUMBERS)}, as "
            "'H200,sms=8' does"
        ) from None
    return gpu
