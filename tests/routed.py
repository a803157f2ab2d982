"""What the tests of layers of a mixture of experts share: routings, operands, NumPy's results."""

import numpy as np

from shmemkit.runtime.symmetric_memory import as_dtype

BF16 = as_dtype("bfloat16")
POISON = 77


def routing(kind, tokens, topk, experts, seed=0):
    """-> int32 (tokens, topk)"""
    rng = np.random.default_rng([seed, tokens])
    shape = tokens, topk
    ids = {
        "random": lambda: rng.integers(0, experts, shape),
        "some have none": lambda: rng.integers(-1, experts + 1, shape),
        "one expert": lambda: np.full(shape, experts - 1),
        "an expert without tokens": lambda: rng.integers(1, experts, shape),
        "all experts": lambda: rng.permuted(np.tile(np.arange(topk), (tokens, 1)), axis=1),
        "none": lambda: np.full(shape, -1),
    }[kind]()
    return ids.astype("int32")


def integers(seed, *shape, dtype=BF16):
    """Small ones, of which products are exact."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def products(x, w, ids, rows_of):
    """-> float32 (ids.size, N), of dtype's precision: each pair's row of x times its expert's weight; POISON
    where there is no expert. rows_of: pairs of a row of x"""
    out = np.full((ids.size, w.shape[1]), POISON, "float32")
    x, weights = x.astype("float32"), w.astype("float32")
    for pair, expert in enumerate(ids.reshape(-1)):
        if 0 <= expert < len(w):
            out[pair] = (x[pair // rows_of] @ weights[expert].T).astype(w.dtype)
    return out


def sums(x, w, ids, weights):
    """-> float32 (tokens, N): the weighted sums of the products of each token, rounded to x's dtype"""
    found = products(x, w, ids, 1).reshape(*ids.shape, -1)
    valid = (0 <= ids) & (ids < len(w))
    total = np.zeros((len(ids), w.shape[1]), "float32")
    for j in range(ids.shape[1]):
        total += np.where(valid[:, j, None], weights[:, j, None] * found[:, j], 0)
    return total.astype(x.dtype).astype("float32")


def words(array):
    return array.reshape(-1).view(f"uint{8 * array.itemsize}")
