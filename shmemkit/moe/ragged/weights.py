"""A number of each row goes back to the token and expert that it is of, as the gradient of a weight.

Returned  returned[t, j], on every rank: the number of the row that the j-th expert has for the rank's token
          t. Written by that expert's rank only

  ``meet`` (plan.py)   ``send_weights``   ``meet``   ``take_weights``

The first `meet` comes after all ranks' earlier reads of `returned`, the second one after all stores to it: a
launch begins when the one before it has ended, and `meet` is a barrier of the ranks.
"""

from numba import cuda, float32, int64

from shmemkit.device import griddepcontrol_launch_dependents, griddepcontrol_wait, num_ranks, symm_at
from shmemkit.device.swizzle import quotient


@cuda.jit
def send_weights(values, top_k, tokens_of, routes, returned):
    """values     float32 (max_rows,)
    tokens_of  int32 (n_ranks,); routes: int32 (n_ranks * max_tokens * top_k,), as of ``send_rows``
    returned   float32 (max_tokens * top_k,), symmetric
    grid       any
    """
    griddepcontrol_wait()
    i, threads, of_rank = int64(cuda.grid(1)), cuda.gridsize(1), returned.size
    while i < num_ranks() * of_rank:
        k = quotient(i, of_rank)
        q = i - k * of_rank
        if q < int64(tokens_of[k]) * top_k and routes[i] >= 0:
            symm_at(returned, k)[q] = values[routes[i]]
        i += threads
    cuda.syncthreads()
    griddepcontrol_launch_dependents()


@cuda.jit
def take_weights(out, codes, place, returned):
    """out    float32 (tokens * top_k,); 0 where a token has no expert
    codes  int32, place: int32, as of plan.py. Any grid
    """
    griddepcontrol_wait()
    i, threads = int64(cuda.grid(1)), cuda.gridsize(1)
    while i < out.size:
        value, code = float32(0), codes[i]
        if code >= 0 and place[code >> 16] >= 0:
            value = returned[i]
        out[i] = value
        i += threads
    cuda.syncthreads()
    griddepcontrol_launch_dependents()


GPU_KERNELS = {"send_weights": send_weights, "take_weights": take_weights}
