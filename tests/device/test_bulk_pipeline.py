"""The order of a bulk copy's steps (shmemkit/device/shmem/bulk_copies.py), with a TMA that completes nothing
before it is waited for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_in_python import Gpu

from shmemkit.device.shmem import bulk_copies

START, SIGNAL, PEER = 7, "signal", 3


class Tma(Gpu):
    """Bulk stores in groups, as `cp.async.bulk`: what has been written, and what the stages hold."""

    def __init__(self, patch):
        super().__init__(patch)
        self.groups, self.written, self.held, self.told, self.unread = [], 0, {}, [], []

    def run(self, ptx, *given):
        if "cvta.to.shared" in ptx:
            return 0
        if ptx.startswith(("mbarrier.init", "mbarrier.inval", "fence.proxy.async")):
            return None
        if "expect_tx" in ptx:
            return self.bulk_load(*given)
        if "try_wait" in ptx:
            return 1
        if "commit_group" in ptx:
            return self.bulk_store(*given)
        kind, number = re.fullmatch(r"cp\.async\.bulk\.wait_group(\.read)? (\d+);", ptx).groups()
        return (self.read if kind else self.complete)(int(number))

    def bulk_load(self, piece, src, length, barrier):
        assert int(piece) not in self.unread, "the stage is still being stored"
        self.held[int(piece)] = int(src), int(length)

    def bulk_store(self, dst, piece, length):
        assert self.held[int(piece)] == (int(dst), int(length)), "the stage holds another piece"
        self.unread.append(int(piece))
        self.groups.append(int(length))

    def read(self, but):
        del self.unread[: len(self.unread) - but]

    def complete(self, but):
        done = max(0, len(self.groups) - but)
        self.written += sum(self.groups[:done])
        del self.groups[:done]

    def tell(self, signal, peer, value):
        self.told.append((int(value), self.written))


@given(n_bytes=st.integers(0, 60 * bulk_copies.CHUNK // 16).map(lambda n: 16 * n), chunks=st.integers(1, 40))
def test_steps_are_announced_when_they_are_written(n_bytes, chunks):
    step = chunks * bulk_copies.CHUNK
    last = START + max(1, -(-n_bytes // step))
    with pytest.MonkeyPatch.context() as patch:
        tma = Tma(patch)
        bulk_copies._pipeline(tma.tell)(0, 0, n_bytes, 0, SIGNAL, START, last, step, PEER)
    values = [value for value, _ in tma.told]
    assert values == sorted(set(values)) and values[-1] == last and tma.written == n_bytes
    for value, written in tma.told:
        assert written >= min(n_bytes, (value - START) * step)
