"""``python -m shmemkit.bench``: how fast the operations are on this machine, and what one might use
otherwise.

    shmemkit run -n 4 -m shmemkit bench all_gather --sizes 8K:256M --vs nccl --json F --plot F.png
    shmemkit run -n 4 -m shmemkit bench p2p
    shmemkit bench launch

What is compared is measured in one run, in the same way (``shmemkit.Timer``), and checked bit for bit in that
run.
"""
