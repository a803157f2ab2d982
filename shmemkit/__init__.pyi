"""The public names of shmemkit. ``__init__.py`` reads here where each of them lives."""

from . import device as device
from . import emu as emu
from . import kernels as kernels
from .kernels.ag_gemm import AllGatherGemm as AllGatherGemm
from .kernels.all_gather import AllGather as AllGather
from .kernels.all_reduce import AllReduce as AllReduce
from .kernels.all_to_all import AllToAll as AllToAll
from .kernels.all_to_all import AllToAllV as AllToAllV
from .kernels.barrier import Barrier as Barrier
from .kernels.broadcast import Broadcast as Broadcast
from .kernels.expert_parallel import ExpertParallel as ExpertParallel
from .kernels.functional import all_gather as all_gather
from .kernels.functional import all_reduce as all_reduce
from .kernels.functional import all_to_all as all_to_all
from .kernels.functional import broadcast as broadcast
from .kernels.functional import gather as gather
from .kernels.functional import reduce_scatter as reduce_scatter
from .kernels.gather import Gather as Gather
from .kernels.gemm import Gemm as Gemm
from .kernels.gemm import matmul as matmul
from .kernels.gemm_ar import GemmAllReduce as GemmAllReduce
from .kernels.gemm_rs import GemmReduceScatter as GemmReduceScatter
from .kernels.queue import Queue as Queue
from .kernels.reduce_scatter import ReduceScatter as ReduceScatter
from .launch import bind as bind
from .memory import array as array
from .memory import empty as empty
from .memory import free as free
from .memory import full as full
from .memory import peer_view as peer_view
from .memory import signals as signals
from .memory import zeros as zeros
from .timeouts import RankTimeout as RankTimeout
from .timeouts import SignalTimeout as SignalTimeout
from .timeouts import WaitRecord as WaitRecord
from .timer import Timer as Timer
from .world import World as World
from .world import current as current
from .world import init as init

__version__: str
