"""``python -m shmemkit.bench``: how fast the operations are on this machine, and what one might use
otherwise.

    shmemkit run -n 4 -m shmemkit bench all_gather --sizes 8K:256M --vs nccl --json F --plot F.png
    shmemkit run -n 4 -m shmemkit bench p2p
    shmemkit bench launch

What is compared is measured in one run, in the same way (``shmemkit.Timer``), and checked bit for bit in that
run.

command.py   what a command says of itself: its contenders, cases and options; commands.py has all of them
cases.py     what a case says of itself: its data, the host object, and whether a result is right
measure.py   contenders, among them ours, and how they are measured
loop.py      the loop over cases and contenders
"""
