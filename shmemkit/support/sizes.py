"""Numbers of bytes, in words."""

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_text(n_bytes):
    """8192 -> "8K"; 8160 -> "7.97K"."""
    for unit in "GMK":
        if n_bytes >= UNITS[unit]:
            return f"{n_bytes / UNITS[unit]:.4g}".removesuffix(".0") + unit
    return f"{n_bytes}"
