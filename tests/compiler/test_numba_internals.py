"""A kernel that is loaded once more has a library of its own: constant memory of its own."""

from types import SimpleNamespace

from shmemkit.compiler import numba_internals
from shmemkit.compiler.numba_internals import Module


class ObjectCode:
    """As cuda.core's: whoever asks one for its handle gets the library that it loaded at first."""

    loaded = 0

    def __init__(self, code):
        self.code, self._handle = code, None

    from_cubin = classmethod(lambda cls, code: cls(code))

    @property
    def handle(self):
        if self._handle is None:
            ObjectCode.loaded += 1
            self._handle = ObjectCode.loaded
        return self._handle

    def get_kernel(self, name):
        return SimpleNamespace(handle=100 * self.handle, name=name)


def test_each_module_is_loaded(monkeypatch):
    monkeypatch.setattr(numba_internals, "ObjectCode", ObjectCode)
    cubin, tables, gone = ObjectCode(b"cubin"), {}, []
    tables[cubin.handle] = "the World's"
    library = SimpleNamespace(
        get_cubin=lambda: cubin,
        _entry_name="kernel",
        _setup_functions=[lambda code: tables.update({code.handle: "a group's"})],
        _teardown_functions=[lambda code: gone.append(code.handle)],
    )
    one, other = (Module(SimpleNamespace(_codelibrary=library)) for _ in range(2))
    assert tables == {1: "the World's", 2: "a group's", 3: "a group's"}
    assert (one.function.handle, other.function.handle) == (200, 300)
    one.unload()
    assert gone == [2]
