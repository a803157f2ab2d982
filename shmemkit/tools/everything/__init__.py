"""``shmemkit bench everything``: all results of benchmarks/results that this machine's GPUs can give.

plan.py      what is measured, in which order, and about how long it takes
files.py     a file of results that is written case by case, and merged
worker.py    what the ranks run: the commands of ``shmemkit bench``, one after the other, in one process
command.py   starts the ranks, watches them, and goes on without a case that failed or hung
"""
