"""What a World runs on: NVSHMEM on GPUs, or the emulator. Both have the same interface."""
