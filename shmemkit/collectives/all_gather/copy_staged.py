"""All-gather by copy engines into an output of private memory: into slots on the peers, from which blocks
take each packet as it arrives. For large messages.

``collectives.copy_engine_exchange`` has the protocol: all ranks get x. Into a symmetric output,
``copy_engine.py`` copies once.
"""

from .. import copy_engine_exchange


class CopyStaged(copy_engine_exchange.StoredExchange):
    """The method "copy_staged" of ``AllGather``."""

    name, personalized = "all_gather copy_staged", False
