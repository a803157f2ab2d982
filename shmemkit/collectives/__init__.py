"""Operations, a file each: the protocol, the kernels, and the host object that launches them."""
