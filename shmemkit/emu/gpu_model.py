"""The GPU that a program is meant for: how many blocks of a grid are on it at once."""

import os
from typing import NamedTuple

from shmemkit.support.settings import listed

VARIABLE = "SHMEMKIT_EMULATED_GPU"


class Gpu(NamedTuple):
    """Multiprocessors (SMs), and what each has: threads, blocks, bytes of shared memory, of which every block
    takes `reserved`."""

    name: str
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
        limit = min(limits, key=limits.get)
        n = limits[limit]
        return n * self.sms // cluster * cluster, f"{self.sms} SMs with {n} each, for an SM has {limit}"


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 132),
        Gpu("H100", 132),
        Gpu("B200", 148),
        Gpu("A100", 108, shared=164 << 10),
        Gpu("L40S", 142, 1536, 24, 100 << 10),
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
        if "name" in numbers or min(gpu[1:5]) < 1 or gpu.reserved < 0:
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{source} is {text!r}; it must be {listed(GPUS)}, and may change {listed(Gpu._fields[1:])}, as "
            "'H200,sms=8' does"
        ) from None
    return gpu
