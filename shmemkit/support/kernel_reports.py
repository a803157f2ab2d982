"""What kernels report to the host program, which raises it where it looks for waits that have expired: when
it synchronizes, and before a bound launch."""

CHECKS = []
"""Functions that raise what a kernel of this process has reported, if one has."""


def check():
    """Raise what kernels have reported, one at a time."""
    for raise_reported in CHECKS:
        raise_reported()
