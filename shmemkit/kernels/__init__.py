"""Operations, one file each: the protocol in its docstring, the kernels, and the host object that owns buffers and launches them."""
