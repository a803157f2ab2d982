"""The calls of an ExpertParallel: their arrays, and what they have to do with the last dispatch."""

from dataclasses import dataclass

from shmemkit.operations.operation import Declared, Given
from shmemkit.operations.plans import plans_of
from shmemkit.support.settings import array_text


@dataclass
class Last:
    """What the host knows of the last dispatch.

    tokens    of this rank; None before it
    captured  whether a dispatch was ever captured: the host does not see those that graphs make
    """

    tokens: int | None = None
    captured: bool = False


class Call(Declared):
    """One of them.

    bind    binds it to arrays as its kernels take them
    handle  of the dispatch that the next call belongs to; None: the last one
    """

    LIMITS = {"tokens": ("max_tokens", "tokens")}
    ROWS = "out"  # the array with a row for each token of this rank
    is_first = False  # whether other calls follow it, with as many tokens
    columns = "hidden"  # of a new array
    _name: str

    def __init__(self, of, bind):
        self.of, self.bind, self.handle, self._plans = of, bind, None, plans_of(of.world)
        self.world, self._who, self._order, self.last = of.world, of._who, of._order, of.last
        vars(self).update(of.sizes._asdict())

    def free(self):
        self._plans.clear()
        self._parts = None

    def _check_alive(self):
        self.of._check_alive()

    def _is_empty(self, sizes):
        return False  # others wait for a rank without tokens

    def _new_shape(self, name, arrays):
        known = self.last.tokens if self.handle is None else self.handle.tokens
        if known is None:
            raise ValueError(f"{self._name}(): out is None before any dispatch; call dispatch, or give out")
        return known, getattr(self, self.columns)

    def _in_order(self, stream, arrays):
        handle, last, tokens = self.handle, self.last, arrays[self.ROWS].shape[0]
        known = last.tokens if handle is None else handle.tokens
        if tokens != known and not (known is None or handle is None and (self.is_first or last.captured)):
            of = "the last dispatch" if handle is None else "the handle"
            raise ValueError(f"{self._who}: {self.ROWS} has {tokens} tokens; it must have {known}, as {of}")
        self._order.before(stream, self._name)
        if handle is not None:
            self.handle, last.tokens = None, tokens
            handle.restore(stream)


RECEIVED = "Received.rows", "Received.counts", "Received.scales", "Received.weights"


class DispatchCall(Call):
    ARRAYS = {
        "x": Given("tokens hidden"),
        "topk_ids": Given("tokens topk", dtype=None, align=0),
        "weights": Given("tokens topk", "float32", align=0, optional=True),
        "scales": Given("tokens n_scales", "float32", align=0),
        **dict.fromkeys(RECEIVED, Given(dtype=None, align=0, written=True)),
    }
    ROWS = "x"
    is_first = True
    _name = "ExpertParallel.dispatch"

    def __init__(self, of, bind, ones):
        super().__init__(of, bind)
        self.dtype, self.ones = of.sizes.dispatch_dtype, ones
        self.received = dict(zip(RECEIVED, of.received, strict=False))
        self._optional += () if of.sizes.n_scales else ("scales",)

    def _in_order(self, stream, arrays):
        super()._in_order(stream, arrays)
        last = self.last
        last.tokens = arrays["x"].shape[0]
        last.captured = last.captured or self.world.backend.capture_of(stream) is not None

    def _check(self, arrays):
        sizes, ids = super()._check({**arrays, **self.received}), arrays.get("topk_ids")
        if ids is not None and ids.dtype.name not in ("int32", "int64"):
            raise ValueError(f"{self._who}: topk_ids is {array_text(ids)}; it must be int32 or int64")
        return sizes

    def _bind(self, x, scales, topk_ids=None, weights=None):
        tokens = x.shape[0]
        scales = self.world.xp.empty((tokens, 0), "float32") if scales is None else scales
        weights = self.ones[:tokens] if weights is None else weights
        return self.bind(words_of(x), scales.view("uint32"), topk_ids, weights)


class HandleCall(DispatchCall):
    """A dispatch with a handle."""

    ARRAYS = {name: x for name, x in DispatchCall.ARRAYS.items() if name not in ("topk_ids", "weights")}


class CombineCall(Call):
    ARRAYS = {
        "y": Given("n_local n_ranks*max_tokens hidden"),
        "out": Given("tokens hidden", new=True),
    }
    _name = "ExpertParallel.combine"

    def _bind(self, y, out):
        return self.bind(words_of(y), words_of(out))


class RaggedCombineCall(CombineCall):
    ARRAYS = {**CombineCall.ARRAYS, "y": Given("max_rows hidden")}


class WeightsCall(Call):
    ARRAYS = {
        "values": Given("max_rows", "float32", align=0),
        "out": Given("tokens topk", "float32", align=0, new=True),
    }
    columns = "topk"
    _name = "ExpertParallel.combine_weights"

    def _bind(self, values, out):
        return self.bind(values, out)


def words_of(rows):
    """-> `rows` as words of 16 bytes, 1-D."""
    return rows.reshape(-1).view("uint8").view("complex128")
