"""The public names of shmemkit. ``__init__.py`` reads here where each of them lives."""

from . import collectives as collectives
from . import comm as comm
from . import device as device
from . import emu as emu
from . import kernels as kernels
from . import notebook as notebook
from .attention.flash_decode import FlashDecode as FlashDecode
from .collectives.all_gather import AllGather as AllGather
from .collectives.all_gather import all_gather as all_gather
from .collectives.all_reduce import AllReduce as AllReduce
from .collectives.all_reduce import all_reduce as all_reduce
from .collectives.all_reduce.rms_norm import AllReduceRMSNorm as AllReduceRMSNorm
from .collectives.all_to_all import AllToAll as AllToAll
from .collectives.all_to_all import AllToAllV as AllToAllV
from .collectives.all_to_all import all_to_all as all_to_all
from .collectives.attention_combine import AttentionCombine as AttentionCombine
from .collectives.barrier import Barrier as Barrier
from .collectives.broadcast import Broadcast as Broadcast
from .collectives.broadcast import broadcast as broadcast
from .collectives.functional import attention_combine as attention_combine
from .collectives.gather import Gather as Gather
from .collectives.gather import gather as gather
from .collectives.queue import Queue as Queue
from .collectives.reduce import Reduce as Reduce
from .collectives.reduce import reduce as reduce
from .collectives.reduce_scatter import ReduceScatter as ReduceScatter
from .collectives.reduce_scatter import reduce_scatter as reduce_scatter
from .collectives.scatter import Scatter as Scatter
from .collectives.scatter import scatter as scatter
from .gemm import Gemm as Gemm
from .gemm import matmul as matmul
from .gemm.all_gather import AllGatherGemm as AllGatherGemm
from .gemm.all_reduce import GemmAllReduce as GemmAllReduce
from .gemm.grouped import GroupedGemm as GroupedGemm
from .gemm.grouped import grouped_matmul as grouped_matmul
from .gemm.reduce_scatter import GemmReduceScatter as GemmReduceScatter
from .moe import ExpertParallel as ExpertParallel
from .moe.all_gather_gemm import AllGatherGroupedGemm as AllGatherGroupedGemm
from .moe.expert_index import ExpertIndex as ExpertIndex
from .moe.gemm_reduce_scatter import GroupedGemmReduceScatter as GroupedGemmReduceScatter
from .runtime.launch import bind as bind
from .runtime.symmetric_memory import (
    array as array,
)
from .runtime.symmetric_memory import (
    empty as empty,
)
from .runtime.symmetric_memory import (
    free as free,
)
from .runtime.symmetric_memory import (
    full as full,
)
from .runtime.symmetric_memory import (
    peer_view as peer_view,
)
from .runtime.symmetric_memory import (
    signals as signals,
)
from .runtime.symmetric_memory import (
    zeros as zeros,
)
from .runtime.timeline import Timeline as Timeline
from .runtime.timer import Timer as Timer
from .runtime.world import Group as Group
from .runtime.world import World as World
from .runtime.world import current as current
from .runtime.world import init as init
from .support.timeouts import (
    RankTimeout as RankTimeout,
)
from .support.timeouts import (
    SignalTimeout as SignalTimeout,
)
from .support.timeouts import (
    WaitRecord as WaitRecord,
)

__version__: str
