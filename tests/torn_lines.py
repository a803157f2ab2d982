"""LL128 as it must not be: the flag is chosen outside the instruction that stores. Of Python 3.12's bytecode,
and newer, Numba makes two stores, each by some threads of a warp; of 3.11's one. What reads machine code has
to find the two (``test_machine_code.py``)."""

from numba import cuda, types

from shmemkit.compiler.ptx import asm

_word = types.uint64
_store = asm("st.relaxed.sys.global.v2.b64 [$0], {$1, $2};", types.void, (_word, _word, _word))


@cuda.jit
def torn_line(address, words, flag):
    low, high = words[cuda.threadIdx.x], words[cuda.threadIdx.x + 32]
    cuda.syncwarp()
    _store(address, low, types.uint64(flag) if cuda.laneid & 7 == 7 else high)


GPU_KERNELS = {"torn_line": (torn_line, "void(uint64, uint64[::1], uint32)")}
