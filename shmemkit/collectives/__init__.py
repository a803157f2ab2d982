"""Collectives: operations of all ranks on arrays. An object for each, and functions that keep such objects.

The rules of all of them, where a docstring does not say otherwise:

calls    All ranks make the same calls in the same order, with arrays of the same size and dtype. A call
         enqueues one operation and returns; the host waits for nothing. The emulator raises ValueError on a
         rank whose call differs. GPUs do not check: results are wrong, or ranks wait forever
arrays   C-contiguous: CuPy's (on the emulator NumPy's), PyTorch tensors, or others on this GPU that have
         __cuda_array_interface__ or DLPack. A new result is a tensor if x is one, else CuPy's. The caller
         keeps the arrays alive until the stream has run the call
out      in private or symmetric memory. Some methods write straight into a symmetric `out`, which saves a
         copy. Then it must be the same part of the same symmetric array on all ranks, as ``output()`` gives
         it. The emulator checks that, GPUs do not
stream   of CuPy, Numba, cuda.core or PyTorch, or its address. Default: PyTorch's current stream if any array
         is a tensor on a GPU, else the World's. A call does not wait for other streams that write x: the
         program orders these
order    The calls of all collectives, of `Barrier`, `ExpertParallel` and the products over ranks run one
         after another, in the order in which the host makes them, whatever their streams. Their kernels wait
         for other ranks and may fill the GPU: two at once could wait forever for each other
graphs   CUDA graphs may capture calls, which are then ordered within their capture only. The program orders
         the launches of graphs with all other calls, alike on all ranks, on one stream or by events
memory   When the stream has run a call, later work on that stream sees all of `out`, and x may be written
         again. A call is not a barrier: it orders no other accesses of the ranks
method   "auto" takes for each size what was measured as the fastest (docs/tuning.md). ``methods`` are the
         names, ``method_for`` tells the choice, and `refused`, {method: why}, what cannot run here.
         docs/methods.md says how much symmetric memory each takes, and what it needs
sms      a budget of multiprocessors, the same on all ranks: no kernel has more blocks, and no two run at
         once. ValueError where a method needs more, with the least that works; "auto" takes one that needs
         less. docs/overlap.md says what it costs
errors   All ranks make an object together, or none. TypeError or ValueError, on all ranks: an argument is
         wrong on one, the ranks' arguments differ, or the method cannot run on one. MemoryError, on all: the
         symmetric heap is full. A call that raises enqueues nothing: TypeError or ValueError for wrong
         arrays, RuntimeError after ``free`` or ``World.finalize``
"""
