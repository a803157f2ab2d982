"""``nvshmem.core.device.numba`` and ``nvshmem.bindings.device.numba``: the primitives of ``shmemkit.device``,
under the names that nvshmem4py has."""

from shmemkit import device
from shmemkit.emu.stand_in_modules import StandIn, Whole, not_served

_BY_ANY_GROUP = (
    "alltoall barrier barrier_all broadcast fcollect get get_nbi put put_nbi put_signal put_signal_nbi "
    "reduce reducescatter sync sync_all"
).split()
_OTHERS = (
    "SmemAmount ask_smem atomic_add atomic_and atomic_compare_swap atomic_fetch atomic_fetch_add "
    "atomic_fetch_and atomic_fetch_inc atomic_fetch_or atomic_fetch_xor atomic_inc atomic_or atomic_set "
    "atomic_swap atomic_xor g get_multicast_array get_peer_array give_smem my_pe n_pes p release_smem "
    "signal_op signal_wait team_my_pe team_n_pes"
).split()
NAMES = [*_OTHERS, *(name + group for name in _BY_ANY_GROUP for group in ("", "_warp", "_block"))]
# The bindings take pointers; these need none.
_BINDINGS = (
    "barrier barrier_all barrier_all_block barrier_all_warp barrier_block barrier_warp fence my_pe n_pes "
    "quiet release_smem sync_all sync_all_block sync_all_warp team_my_pe team_n_pes"
).split()
_ELSEWHERE = {
    **{name: f"shmemkit.device.{name}" for name in device.__all__},
    **{name: f"nvshmem.bindings.device.numba.{name}" for name in _BINDINGS},
    **{name: f"nvshmem.core.{name}" for name in ("ComparisonType", "SignalOp", "Teams")},
    "signal_wait_until": "nvshmem.core.device.numba.signal_wait",
}


class _Functions(Whole):
    def why(self, name):
        return f"; {_ELSEWHERE[name]} is there" if name in _ELSEWHERE else ""


class _Bindings(StandIn):
    def __getattr__(self, name):
        if name in NAMES:
            raise not_served(
                f"{self.__name__}.{name}, which takes pointers,",
                f"Use nvshmem.core.device.numba.{name}, which takes arrays",
            )
        return super().__getattr__(name)


def modules():
    """-> the stand-ins, by name"""
    return {
        name: kind(name, {n: getattr(device, n) for n in names})
        for name, kind, names in (
            ("nvshmem.core.device.numba", _Functions, NAMES),
            ("nvshmem.bindings.device.numba", _Bindings, _BINDINGS),
        )
    }
