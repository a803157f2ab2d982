"""Other projects' names for kernels, so that their listings can be typed over."""
