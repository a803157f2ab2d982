"""``shmemkit check``: whether the library is right on this machine, with these GPUs and this Python.

subjects.py     what a case runs: an operation, numbers that tell whose they are, the exact result
collectives.py, layers.py    the subjects of the package's operations
trials.py       the ways that a subject is run, and what is wrong with a result
plan.py         the cases, made from the package's own tables, by risk
records.py      what a check leaves in the user's cache folder
command.py      the command
"""
