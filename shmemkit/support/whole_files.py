"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_whole(path, text):
    """Write `text` to the file `path`. Whoever reads it finds the old file or the new one."""
    path = Path(path).absolute()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
