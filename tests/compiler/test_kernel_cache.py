"""The disk cache of this package's kernels: what is found again is what was compiled; each part of a key
counts; what cannot be kept is compiled as ever. With the real compilers and a driver that takes notes."""

import os
from pathlib import Path
from unittest import mock

import kernel_types
import pytest
from kernel_types import listed
from ptx import missing

pytest.importorskip("cuda.core")

from numba.cuda import types
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.core import config
from numba.cuda.dispatcher import CUDADispatcher

from shmemkit.collectives.schedules import exchange
from shmemkit.compiler import kernel_cache, stamps
from shmemkit.compiler.machine_code import compiled_kernels
from shmemkit.gemm import sm90
from shmemkit.gemm.sm90 import Kinds, Tile, gemm_kernel
from shmemkit.moe import moved_rows
from shmemkit.support import timeouts

KERNEL, TYPES, _ = listed(moved_rows)["put_rows[uint16]"]
KINDS = Kinds("bfloat16", "k", "k", "bfloat16")


@pytest.fixture(autouse=True)
def driver(tmp_path, monkeypatch):
    """The context, which notes what modules are made."""
    monkeypatch.setenv("SHMEMKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("SHMEMKIT_CACHE", "SHMEMKIT_CACHE_KERNELS", "SHMEMKIT_TIMELINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(timeouts, "default", lambda: None)
    monkeypatch.setattr(
        "numba.cuda.dispatcher.get_current_device", lambda: mock.Mock(compute_capability=(9, 0))
    )
    monkeypatch.setattr(CUDACodeLibrary, "_ensure_cc", lambda library, cc: cc or (9, 0, "a"))
    monkeypatch.setattr(
        kernel_cache, "IMPORTED", stamps(kernel_cache.PACKAGE)
    )  # whatever was edited just now
    kernel_cache.sources.cache_clear()
    context = mock.Mock()
    context.create_module_image.return_value.get_function.return_value.module.initialized = False
    monkeypatch.setattr("numba.cuda.codegen.devices.get_context", lambda: context)
    yield context
    kernel_cache.sources.cache_clear()


class Compiler:
    """``CUDADispatcher.compile`` with the cache, as of a new process, which counts what is compiled."""

    def __init__(self):
        self.compiled = 0

        def compile(dispatcher, types):
            self.compiled += 1
            return original(dispatcher, types)

        original, self.compile = CUDADispatcher.compile, kernel_cache.caching_compile(compile)

    def __call__(self, kernel, types):
        try:
            return self.compile(CUDADispatcher(kernel.py_func, kernel.targetoptions), tuple(types))
        except (ImportError, FileNotFoundError) as error:
            missing(f"NVVM or nvJitLink is not installed: {error}")


def loaded(context):
    """What the driver got: (the machine code, the setup functions, the entry), of each module."""
    images = [(bytes(call[0][0].code), call[0][1]) for call in context.create_module_image.call_args_list]
    entries = context.create_module_image.return_value.get_function.call_args_list
    return [(*image, *call[0]) for image, call in zip(images, entries, strict=True)]


def test_what_is_found_is_what_was_compiled(driver):
    compile = Compiler()
    first, second = compile(KERNEL, TYPES), compile(KERNEL, TYPES)
    assert compile.compiled == 1
    made, found = loaded(driver)
    assert made == found and made[0][:4] == b"\x7fELF"
    assert first.argument_types == second.argument_types == TYPES and second.cooperative is False
    assert first.entry_name == second.entry_name
    assert driver.create_module_image.return_value.get_function.return_value.module.setup.call_count == 2


def test_it_is_compiled_once_in_a_process():
    compile, kernel = Compiler(), CUDADispatcher(KERNEL.py_func, KERNEL.targetoptions)
    assert compile.compile(kernel, TYPES) is compile.compile(kernel, TYPES)
    Compiler().compile(again := CUDADispatcher(KERNEL.py_func, KERNEL.targetoptions), TYPES)
    assert again.overloads[TYPES] is compile.compile(again, TYPES)


@pytest.mark.slow
def test_tables_are_filled(driver):
    """A kernel that reads the table of peers has it filled, from the cache, too."""
    compile = Compiler()
    kernel, types = next(entry[:2] for name, entry in listed(exchange).items() if name.startswith("ll128"))
    compile(kernel, types), compile(kernel, types)
    made, found = loaded(driver)
    assert compile.compiled == 1 and made[0] == found[0] and set(made[1]) == set(found[1]) != set()


def test_it_can_be_turned_off(monkeypatch, tmp_path):
    monkeypatch.setenv("SHMEMKIT_CACHE", "0")
    compile = Compiler()
    compile(KERNEL, TYPES), compile(KERNEL, TYPES)
    assert compile.compiled == 2 and not (tmp_path / "cache").exists()


def test_a_damaged_entry_is_compiled_anew(tmp_path):
    compile = Compiler()
    compile(KERNEL, TYPES)
    entry = tmp_path / "cache" / f"{kernel_cache.key_of(KERNEL, TYPES)}.bin"
    entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    compile(KERNEL, TYPES), compile(KERNEL, TYPES)
    assert compile.compiled == 2


def test_a_kernel_that_the_driver_refuses_is_compiled_anew(driver):
    compile = Compiler()
    compile(KERNEL, TYPES)
    refusing = [RuntimeError("no kernel image is available"), driver.create_module_image.return_value]
    driver.create_module_image.side_effect = refusing
    compile(KERNEL, TYPES)
    assert compile.compiled == 2


def test_sources_that_change_while_it_is_compiled(monkeypatch):
    """What has been compiled may be newer than the key."""
    compile, packed = Compiler(), kernel_cache.packed

    def changed(kernel):
        monkeypatch.setattr(kernel_cache, "IMPORTED", {})
        return packed(kernel)

    monkeypatch.setattr(kernel_cache, "packed", changed)
    compile(KERNEL, TYPES)
    monkeypatch.setattr(kernel_cache, "IMPORTED", stamps(kernel_cache.PACKAGE))
    compile(KERNEL, TYPES)
    assert compile.compiled == 2


def test_a_table_that_is_not_there(monkeypatch):
    compile = Compiler()
    monkeypatch.setattr(kernel_cache, "packed", lambda kernel: b'{"tables": ["no such"]}\n')
    compile(KERNEL, TYPES), compile(KERNEL, TYPES)
    assert compile.compiled == 2


# ---- keys


def test_every_part_of_a_key_counts(monkeypatch, tmp_path):
    def key(kernel=KERNEL, types=TYPES):
        assert (found := kernel_cache.key_of(kernel, types)) is not None
        return found

    def of_tile(*tile, kinds=KINDS):
        gemm_kernel.cache_clear()
        sm90.gemm_body.cache_clear()
        return key(gemm_kernel(Tile(*tile), kinds))

    keys = [key(), key(types=(*TYPES[:2], types.int64[::1], TYPES[3])), key(moved_rows.take_rows)]
    keys += [of_tile(64, 64), of_tile(64, 64, 8), of_tile(64, 32), of_tile(128, 64)]
    keys.append(of_tile(64, 64, kinds=KINDS._replace(activation="relu")))
    keys.append(key(CUDADispatcher(KERNEL.py_func, KERNEL.targetoptions | {"max_registers": 32})))
    assert key() == keys[0] and of_tile(64, 64) == keys[3]
    with monkeypatch.context() as patch:
        patch.setattr(sm90, "SETTLED", 9)  # which the kernel names
        keys.append(of_tile(64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(sm90, "PIECES", 4)  # of which what it names is made
        keys.append(of_tile(64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(moved_rows, "int64", lambda x: x)
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(config, "OPT", 0)
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(CUDACodeLibrary, "_ensure_cc", lambda library, cc: (8, 0, ""))
        keys.append(key())
    for name, value in (("toolchain", lambda: ["another"]), ("VERSIONS", ("numba", "not installed"))):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_cache, name, value)
            kernel_cache.versions.cache_clear()
            keys.append(key())
    kernel_cache.versions.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "PACKAGE", str(tmp_path))
        for text in ("x = 1", "x = 2"):
            (tmp_path / "other.py").write_text(text)
            patch.setattr(kernel_cache, "IMPORTED", stamps(tmp_path))
            kernel_cache.sources.cache_clear()
            keys.append(key())
    assert len(set(keys)) == len(keys)


def test_names_count():
    """Of generated functions the names may be all that differs."""
    digests = set()
    for name in ("a", "b"):
        names = {"__name__": "shmemkit.generated"}
        exec(f"def kernel(x):\n x[0] = cuda.{name}", names)
        parts = []
        kernel_cache.described(names["kernel"], {}, parts.append)
        digests.add(repr(parts))
    assert len(digests) == 2


def test_what_is_not_kept(monkeypatch, tmp_path):
    def swapped(turn, n_m, n_n):
        return turn // n_n, turn % n_n

    kept = kernel_cache.key_of
    assert kept(gemm_kernel(Tile(64, 64), KINDS), ()) is not None
    exec("def nameless(x):\n x[0] = 1", names := {"__builtins__": {}})
    assert names["nameless"].__module__ is None and kept(CUDADispatcher(names["nameless"], {}), ()) is None
    theirs = CUDADispatcher(swapped, {"device": True})
    assert kept(theirs, ()) is None
    order = sm90.ordered(theirs)
    assert kept(gemm_kernel(Tile(64, 64), KINDS, order), ()) is None
    enums = types.IntEnumMember(type("Mine", (), {}), types.int64)
    assert kept(KERNEL, (*TYPES[:3], enums)) is None
    with monkeypatch.context() as patch:
        patch.setattr(timeouts, "default", lambda: 5.0)
        assert kept(KERNEL, TYPES) is None
    with monkeypatch.context() as patch:
        patch.setenv("SHMEMKIT_TIMELINE", str(tmp_path / "timeline"))
        assert kept(KERNEL, TYPES) is None
    with monkeypatch.context() as patch:
        patch.setattr(config, "DUMP_ASSEMBLY", 1)
        assert kept(KERNEL, TYPES) is None
    monkeypatch.setattr(kernel_cache, "IMPORTED", {**kernel_cache.IMPORTED, "one more": ()})
    kernel_cache.sources.cache_clear()
    assert kept(KERNEL, TYPES) is None, "the sources have changed since"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A file of the package in the place of all, which was just imported."""
    file = tmp_path / "package" / "device" / "ll128.py"
    file.parent.mkdir(parents=True)
    file.write_text("flag = 1")
    monkeypatch.setattr(kernel_cache, "PACKAGE", str(tmp_path / "package"))
    monkeypatch.setattr(kernel_cache, "IMPORTED", stamps(tmp_path / "package"))
    return file


@pytest.mark.parametrize("how", ["edited", "replaced", "removed", "one more"])
def test_a_source_that_changes_whatever_the_clocks_say(package, how):
    """Its time stamps are of the host that has the file: here, of an hour before this process began."""
    assert kernel_cache.sources() is not None and not kernel_cache.changed()
    file = package.with_name("one_more.py") if how == "one more" else package
    before = package.stat()
    file.unlink(missing_ok=True) if how in ("replaced", "removed") else None
    if how != "removed":
        file.write_text("flag = 2")
        times = before.st_mtime_ns - 3600 * 10**9 * (how != "replaced")
        os.utime(file, ns=(times, times))
    kernel_cache.sources.cache_clear()
    assert kernel_cache.changed() and kernel_cache.sources() is None


def test_a_patched_numba_cuda_has_other_keys(monkeypatch, tmp_path):
    assert (kernel_cache.NUMBA_CUDA / "compiler.py").exists()
    monkeypatch.setattr(kernel_cache, "NUMBA_CUDA", tmp_path)
    keys = []
    for size, time in ((1, 5), (1, 6), (2, 6)):
        (tmp_path / "lowering.py").write_text("#" * size)
        os.utime(tmp_path / "lowering.py", ns=(time, time))
        kernel_cache.versions.cache_clear()
        keys += [kernel_cache.key_of(KERNEL, TYPES) for _ in range(2)]
    kernel_cache.versions.cache_clear()
    assert keys[::2] == keys[1::2] and len(set(keys)) == 3


def test_what_links_more_is_not_kept():
    library = mock.Mock(_linking_files={object()}, referenced_objects={})
    kernel = mock.Mock(_codelibrary=library, launch_config_sensitive=False)
    assert kernel_cache.packed(kernel) is None


@pytest.mark.slow
def test_keys_are_the_same_in_every_process(tmp_path):
    """Whatever the order of sets is there."""
    import test_jit_cache as scripts

    script = f"""
        import sys
        sys.path.insert(0, {str(Path(kernel_types.__file__).parent)!r})
        from numba.cuda.codegen import CUDACodeLibrary
        CUDACodeLibrary._ensure_cc = lambda library, cc: (9, 0, "a")
        from shmemkit.compiler import kernel_cache
        from kernel_types import listed
        from shmemkit.gemm import block_scales
        print(*(kernel_cache.key_of(*entry[:2]) for entry in listed(block_scales).values()))
    """
    first, second = (scripts.finish(scripts.start(script, PYTHONHASHSEED=seed)) for seed in "17")
    assert first == second and "None" not in first


@pytest.mark.slow
def test_its_lines_can_be_read(monkeypatch):
    """`shmemkit check` reads the machine code of kernels from the cache, too."""
    name, (kernel, types, _) = next(x for x in listed(exchange).items() if x[0].startswith("ll128[False,2"))
    compiler, found = Compiler(), []
    monkeypatch.setattr(CUDADispatcher, "compile", compiler.compile)
    for _ in range(2):
        with compiled_kernels() as compiled:
            CUDADispatcher(kernel.py_func, kernel.targetoptions).compile(tuple(types))
        found.append(compiled.cubins)
    assert compiler.compiled == 1 and len(found[0]) == 1 and found[0] == found[1], name
