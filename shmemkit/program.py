"""What a command line calls itself."""

import os
import sys


def name_of(module):
    """-> the console script that this program was started by, or ``python -m module``"""
    name = os.path.basename(sys.argv[0])
    return name if name.startswith("shmemkit") else f"python -m {module}"
