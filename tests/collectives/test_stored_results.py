"""Reductions give the bits that they gave when stored_results.json was written, before methods were made of
schedules and transports: each method, of random numbers whose sum depends on the order.

    python tests/collectives/test_stored_results.py > tests/collectives/stored_results.json
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

STORED = Path(__file__).with_name("stored_results.json")
KINDS = {"AllReduce": sk.AllReduce, "ReduceScatter": sk.ReduceScatter}
WAYS = [(kind, method) for kind, made in KINDS.items() for method in made.methods if "multimem" not in method]
N_RANKS, SIZE = 4, 4 * 151


def digest(kind, method, op, dtype):
    """Of the results of all ranks. Their arrays are not aligned to 8 bytes."""
    dtype = as_dtype(dtype)

    def main():
        world = sk.init()
        collective = KINDS[kind](world, SIZE * dtype.itemsize, op, method)
        room = np.zeros(SIZE + 1, dtype)
        x = room[1:]
        x[:] = np.random.default_rng(world.rank).standard_normal(SIZE).astype(dtype)
        out = collective(x)
        world.synchronize()
        collective.free()
        return out.tobytes()

    return hashlib.sha256(b"".join(sk.emu.run(main, N_RANKS))).hexdigest()[:16]


CASES = [(*way, op, dtype) for way in WAYS for op, dtype in (("sum", "float32"), ("avg", "bfloat16"))]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_bits_are_those_of_before(case):
    assert digest(*case) == json.loads(STORED.read_text())["-".join(case)]


if __name__ == "__main__":
    json.dump({"-".join(case): digest(*case) for case in CASES}, sys.stdout, indent=1)
