"""Shapes on the command line."""


def parse_shapes(text, names="MxNxK"):
    """ "MxNxK,MxNxK" -> [(m, n, k), ...]; likewise with other `names`"""
    shapes = []
    for part in text.split(","):
        sizes = part.lower().split("x")
        known = all(size.strip().isdecimal() and int(size) for size in sizes)
        if len(sizes) != len(names.split("x")) or not known:
            raise ValueError(f"it has {part!r}; it must be {names}, of integers of 1 or more")
        shapes.append(tuple(map(int, sizes)))
    return shapes


def text_of(shape):
    return "x".join(map(str, shape))


def parse_tiles(text):
    """ "MxN,MxN" -> [(m, n), ...]"""
    tiles = []
    for part in text.split(",") if text else []:
        sizes = part.strip().lower().split("x")
        known = len(sizes) == 2 and all(map(str.isdecimal, sizes))
        rows, columns = map(int, sizes) if known else (0, 0)
        if rows not in (64, 128) or columns not in range(16, 257, 16):
            raise ValueError(f"it has {part!r}; it must be MxN, 64 or 128 rows by a multiple of 16 up to 256")
        tiles.append((rows, columns))
    return tiles
