"""What packets need of PTX: one access that keeps them whole, and operands that no instruction overwrites."""

import re

import pytest
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, machine_code
from ptx_code import Code

from shmemkit import device as sk
from shmemkit.compiler.ptx import asm

words = types.Array(types.uint64, 1, "C")


def send(lines, x, low, high):
    sk.lamport_store(lines, 1, (x[0], x[1]), low, high, 0)


def receive(lines, x, low, high):
    ((x[0], x[1]),) = sk.lamport_load(lines, (1,), low, high)


@pytest.mark.slow
@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize(("kernel", "stores", "loads"), [(send, 1, 0), (receive, 1, 1)])
def test_lamport_packets_are_whole(kernel, stores, loads, cc):
    """PTX keeps a scalar of 128 bits whole, a vector not: docs/machine_code.md, whole packet."""
    ptx = compile_ptx(kernel, (words, words, types.uint64, types.uint64), cc)
    code, sass = Code(ptx), machine_code(ptx, cc)
    for access, opcode, count in ("st", "STG", stores), ("ld", "LDG", loads):
        assert len(code.all(rf"\b{access}\.relaxed\.sys\.global\.b128 ")) == count
        assert len(re.findall(rf"\b{opcode}\.E\.128\.STRONG\.SYS", sass)) == count
    assert len(re.findall(r"STRONG\.SYS", sass)) == stores + loads, "nothing else is stored or polled"


def test_results_of_a_snippet_overwrite_no_argument():
    """The second instruction reads what it was given, not the first one's result."""
    both = asm("add.u64 $0, $2, 1; add.u64 $1, $3, 1;", types.UniTuple(types.uint64, 2), (types.uint64,) * 2)

    def kernel(out, n):
        a, b = out[0], out[1]
        while n > 0:
            b, a = both(a, b)
            n -= 1
        out[0], out[1] = a, b

    ptx = compile_ptx(kernel, (words, types.int64))
    found = re.findall(r"add\.u64 (%rd\d+), (%rd\d+), 1; add\.u64 (%rd\d+), (%rd\d+), 1;", ptx)
    assert found and all(first != second for first, _, _, second in found), found
