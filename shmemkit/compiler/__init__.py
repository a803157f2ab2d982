"""What shmemkit takes from inside numba-cuda, and changes there: intrinsics as PTX, the JIT cache,
kernels with bounded waits."""
