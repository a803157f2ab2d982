"""The World, its symmetric memory, and launches of kernels."""
