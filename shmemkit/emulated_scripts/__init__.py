"""Scripts that know nothing of shmemkit, on the emulator: ``python -m shmemkit.emu -n 4 script.py``.

While ``runner.py`` runs a script, the libraries that it imports are stand-ins: mpi4py (``mpi.py``),
nvshmem4py (``nvshmem_core.py``), CuPy (``cupy.py``) and cuda.core (``cuda_core.py``). What they do not serve
raises NotImplementedError.
"""
