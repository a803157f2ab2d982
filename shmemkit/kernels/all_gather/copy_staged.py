"""All-gather by copy engines into an output of private memory: to places on the peers, from which
blocks fetch each piece as it comes. For large messages.

``shmemkit.kernels.copied_pieces`` has the protocol: all ranks get x. For an output that is symmetric,
``copy_engine.py`` copies once.
"""

from shmemkit.kernels import copied_pieces


class CopyStaged(copied_pieces.StoredPieces):
    """The method "copy_staged" of ``AllGather``."""

    name, personalized = "all_gather copy_staged", False
