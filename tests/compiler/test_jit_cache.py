"""The disk cache of compiled code: damage, races, unusable folders, every change of what it depends on."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import types
import warnings

import pytest

from shmemkit.compiler import jit_cache

SHIM = "#define __NVSHMEM_NUMBA_SUPPORT__\n#include <entry_point.h>"


def function(name):
    return (
        f'\n    extern "C" __device__ int\n    {name}(int &retval ) {{\n        return 0;\n    }}\n        '
    )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SHMEMKIT_CACHE", raising=False)
    return tmp_path / "cache"


class Maker:
    """Counts how often it is asked."""

    def __init__(self, payload=b"code"):
        self.calls, self.payload = 0, payload

    def __call__(self):
        self.calls += 1
        return self.payload


def test_an_entry_is_made_once():
    make = Maker()
    assert [jit_cache.cached("ab", make) for _ in range(3)] == [b"code"] * 3
    assert make.calls == 1


@pytest.mark.parametrize("damage", [b"", b"shmemkit-cache-1", b"garbage" * 20, None])
def test_a_damaged_entry_is_made_anew(folder, damage):
    jit_cache.cached("ab", Maker())
    entry = folder / "ab.bin"
    entry.write_bytes(entry.read_bytes()[:-1] + b"!" if damage is None else damage)
    make = Maker()
    assert jit_cache.cached("ab", make) == b"code" and make.calls == 1
    assert jit_cache.cached("ab", make) == b"code" and make.calls == 1


def test_it_can_be_turned_off(folder, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_CACHE", "0")
    make = Maker()
    jit_cache.cached("ab", make), jit_cache.cached("ab", make)
    assert make.calls == 2 and not folder.exists()


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("SHMEMKIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit_cache.folder() == tmp_path / "shmemkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jit_cache.folder() == tmp_path / ".cache" / "shmemkit"


def test_a_folder_that_cannot_be_used_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SHMEMKIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    make = Maker()
    with pytest.warns(UserWarning, match="SHMEMKIT_CACHE_DIR"):
        assert jit_cache.cached("ab", make) == b"code"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit_cache.cached("ab", make) == b"code"
    assert make.calls == 2


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: folder.chmod(0o770), "other users may write to .*cache. If you trust .* chmod go-w"),
        (lambda folder: folder.chmod(0o707), "other users may write to .*cache. If you trust .* chmod go-w"),
        pytest.param(
            lambda folder: os.chown(folder, 12345, -1), "cache belongs to user 12345", marks=as_root
        ),
    ],
)
def test_a_folder_that_others_write_to_is_not_used(folder, spoil, message):
    jit_cache.cached("ab", Maker(b"planted"))
    spoil(folder)
    make = Maker()
    with pytest.warns(UserWarning, match=f"no JIT cache: .*{message}"):
        assert jit_cache.cached("ab", make) == b"code"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit_cache.cached("ab", make) == b"code" and make.calls == 2, "and nothing is written there"


def _link(entry):
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def _fifo(entry):
    entry.unlink()
    os.mkfifo(entry)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda entry: entry.chmod(0o620), "other users may write to"),
        (_link, "is a link"),
        (_fifo, "is not a regular file"),
        pytest.param(lambda entry: os.chown(entry, 12345, -1), "belongs to user 12345", marks=as_root),
    ],
)
def test_an_entry_of_others_is_made_anew(folder, spoil, message):
    for key in ("ab", "cd"):
        jit_cache.cached(key, Maker(b"planted"))
        spoil(folder / f"{key}.bin")
    make = Maker()
    with pytest.warns(UserWarning, match=f"an entry is not used, .* again: .*{message}") as told:
        assert jit_cache.cached("ab", make) == jit_cache.cached("cd", make) == b"code"
        assert jit_cache.cached("ab", make) == jit_cache.cached("cd", make) == b"code"
    assert make.calls == 2 and len(told) == 1
    assert not (folder / "elsewhere").exists() or (folder / "elsewhere").read_bytes().endswith(b"planted")


@pytest.mark.parametrize("spoil", [_link, _fifo])
def test_a_lock_that_is_no_file(folder, spoil):
    jit_cache.cached("ab", Maker())
    (folder / "lock-cd").touch()
    spoil(folder / "lock-cd")
    with pytest.warns(UserWarning, match="no JIT cache: .*lock-cd is (a link|not a regular file)"):
        assert jit_cache.cached("cd", Maker()) == b"code"


@pytest.mark.parametrize(
    "variable, value", [("SHMEMKIT_CACHE_DIR", "~nosuchuser/x"), ("XDG_CACHE_HOME", "~nosuchuser")]
)
def test_no_such_user(monkeypatch, tmp_path, variable, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHMEMKIT_CACHE_DIR")
    monkeypatch.setenv(variable, value)
    with pytest.warns(UserWarning, match="no JIT cache: cannot use ~nosuchuser.* home directory"):
        assert jit_cache.cached("ab", Maker()) == b"code"
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_warns(folder):
    def make():
        shutil.rmtree(folder)
        return b"code"

    with pytest.warns(UserWarning, match="cannot write to .*cache .*No such file"):
        assert jit_cache.cached("ab", make) == b"code"


def test_a_failing_compiler_leaves_nothing(folder):
    def fail():
        raise RuntimeError("nvrtc")

    with pytest.raises(RuntimeError, match="nvrtc"):
        jit_cache.cached("ab", fail)
    assert jit_cache.cached("ab", Maker()) == b"code"


def test_the_oldest_entries_go(folder, monkeypatch):
    monkeypatch.setattr(jit_cache, "MAX_ENTRIES", 12)
    jit_cache.cached("new", Maker())
    for i in range(jit_cache.MAX_ENTRIES + 2):
        (folder / f"{i}.bin").touch()
        os.utime(folder / f"{i}.bin", (i, i))
    jit_cache.cached("newer", Maker())
    left = {path.name for path in folder.glob("*.bin")}
    assert len(left) == jit_cache.MAX_ENTRIES and {"new.bin", "newer.bin", "4.bin"} < left
    assert not left & {f"{i}.bin" for i in range(4)}


def test_the_oldest_bytes_go(folder, monkeypatch):
    monkeypatch.setattr(jit_cache, "MAX_BYTES", 3000)
    for i in range(5):
        jit_cache.cached(f"{i}", lambda: bytes(900))
        os.utime(folder / f"{i}.bin", (i, i))
    assert {path.name for path in folder.glob("*.bin")} == {"2.bin", "3.bin", "4.bin"}


def test_what_a_killed_process_left_goes(folder):
    jit_cache.cached("a", Maker())
    for name, age in (("old", 2 * jit_cache.LEFT_BEHIND), ("new", 0)):
        (folder / f".new-{name}").touch()
        os.utime(folder / f".new-{name}", (time.time() - age,) * 2)
    jit_cache.cached("b", Maker())
    assert [path.name for path in folder.glob(".new-*")] == [".new-new"]


def test_a_lock_that_is_not_released_is_waited_for_only_so_long(folder, monkeypatch, capsys):
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 400 * clock())
    folder.mkdir(0o700)
    with open(folder / "lock-ab", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert jit_cache.cached("ab", Maker()) == b"code"
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "another process that compiles" in told
    assert re.search(r"lock-ab; in \d+ s this one compiles", told)
    assert jit_cache.cached("ab", None) == b"code" and capsys.readouterr().err == ""


def start(script, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_of_many_processes_one_compiles(tmp_path):
    script = f"""
        import os, time
        from shmemkit.compiler import jit_cache
        def make():
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("made\\n")
            time.sleep(0.5)
            return b"code" * 100000
        print(jit_cache.cached("ab", make) == b"code" * 100000)
    """
    processes = [start(script) for _ in range(4)]
    assert [finish(process) for process in processes] == ["True\n"] * 4
    assert (tmp_path / "log").read_text() == "made\n"


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    script = """
        import time
        from shmemkit.compiler import jit_cache
        def make():
            print("in", flush=True)
            time.sleep(100)
        jit_cache.cached("ab", make)
    """
    process = start(script)
    assert process.stdout.readline() == "in\n"
    process.kill()
    process.wait()
    process.stdout.close(), process.stderr.close()
    assert jit_cache.cached("ab", Maker()) == b"code"


# -- what is compiled, and what the key depends on


@pytest.fixture
def compiler(monkeypatch):
    """compile(...) behind the cache, with NVRTC faked; `.sources` are those that reached it."""
    pytest.importorskip("cuda.core")
    nvrtc = pytest.importorskip("numba.cuda.cudadrv.nvrtc")
    monkeypatch.setattr(nvrtc, "_get_nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(
        "numba.cuda.cuda_paths.get_cuda_paths", lambda: {"include_dir": types.SimpleNamespace(info="/x")}
    )
    sources = []

    def original(src, name, cc, ltoir=False, lineinfo=False, debug=False):
        sources.append(src)
        return types.SimpleNamespace(code=b"compiled"), ""

    compile = jit_cache.caching_compile(original)
    compile.sources = sources
    yield compile
    jit_cache.versions.cache_clear()


def test_key_of_a_compilation(compiler, monkeypatch, tmp_path):
    from numba.cuda import config
    from numba.cuda.cudadrv import nvrtc

    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "nvshmem.h").write_text("1")
    monkeypatch.setattr(config, "CUDA_NVRTC_EXTRA_SEARCH_PATHS", str(headers))
    source = SHIM + function("_Z1a")

    def compiled_anew(*args, **kwargs):
        before = len(compiler.sources)
        code, log = compiler(*args, **kwargs)
        assert code.code == b"compiled" and log == ""
        return len(compiler.sources) > before

    assert compiled_anew(source, "name", (9, 0, "a"), ltoir=True)
    assert not compiled_anew(source, "another name", (9, 0, "a"), ltoir=True)
    assert not compiled_anew(source.encode(), "name", (9, 0, "a"), ltoir=True)
    assert compiled_anew(source, "name", (9, 0), ltoir=True)
    assert compiled_anew(source, "name", (9, 0, "a"))
    assert compiled_anew(source, "name", (9, 0, "a"), ltoir=True, debug=True)
    assert compiled_anew(source, "name", (9, 0, "a"), ltoir=True, lineinfo=True)
    assert compiled_anew(source + function("_Z1b"), "name", (9, 0, "a"), ltoir=True)
    monkeypatch.setattr(nvrtc, "_get_nvrtc_version", lambda: (13, 1))
    assert compiled_anew(source, "name", (9, 0, "a"), ltoir=True)
    (headers / "nvshmem.h").write_text("22")
    jit_cache.headers_digest.cache_clear()
    assert compiled_anew(source, "name", (9, 0, "a"), ltoir=True)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99")
    jit_cache.versions.cache_clear()
    assert compiled_anew(source, "name", (9, 0, "a"), ltoir=True)


def test_sources_with_headers_of_the_users_are_not_cached(compiler):
    for _ in range(2):
        compiler('#include "mine.h"\nint x;', "name", (9, 0))
    assert len(compiler.sources) == 2


def test_the_shim_does_not_depend_on_what_was_compiled_before(compiler):
    a, b = function("_Z1a"), function("_Z1b")
    compiler(SHIM + a + b, "name", (9, 0))
    compiler(SHIM + b + a, "name", (9, 0))
    assert len(compiler.sources) == 1


def test_the_shim_gets_all_point_to_point_functions():
    pytest.importorskip("nvshmem.bindings.device.numba")
    library = jit_cache.shim_library()
    for name in (
        "float_put_signal_nbi_block",
        "uint64_g",
        "bfloat16_put_warp",
        "barrier_all_block",
        "uint64_atomic_fetch_add",
    ):
        assert any(f"nvshmem_{name}" in f or f"nvshmemx_{name}" in f for f in library), name
    assert not any("reduce" in name or "_qp_" in name for name in library)
    source = jit_cache.widen(SHIM + next(iter(library.values())) + function("_Z6custom"))
    assert source.startswith(SHIM) and source.count("extern") == len(library) + 1
    assert source.count("{") == source.count("}")


FIRST_LAUNCH = """
    import os, sys, time
    os.environ["NUMBA_CUDA_ENABLE_NRT"] = "1"
    from unittest import mock
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.cudadrv import driver, nvrtc
    import nvshmem.core.device.numba as nv
    from shmemkit.compiler import jit_cache
    nvrtc.compile = mock.Mock(wraps=nvrtc.compile)
    jit_cache.install()

    @cuda.jit
    def kernel(dst, src, signal, pe):
        nv.put_signal_block(dst, src, signal, 1, 9, pe)

    @cuda.jit
    def another(dst, src, signal, pe):
        nv.get_block(dst, src, pe)
        nv.barrier_all_block()

    array, signals = types.Array(types.float32, 1, "C"), types.Array(types.uint64, 1, "C")
    hopper = mock.Mock(compute_capability=(9, 0))
    device = mock.patch("numba.cuda.dispatcher.get_current_device", lambda: hopper)
    target = mock.patch("numba.cuda.codegen.CUDACodeLibrary._ensure_cc", lambda library, cc: (9, 0, "a"))
    with device, target, mock.patch("numba.cuda.dispatcher._Kernel.bind"):
        for k in (kernel, another):
            start = time.perf_counter()
            compiled = k.compile((array, array, signals, types.int32))
            code = compiled._codelibrary.get_cubin().code
            assert code[:4] == b"\\x7fELF", code[:4]
            print(f"{time.perf_counter() - start:.2f} s", file=sys.stderr)
    print(nvrtc.compile.__wrapped__.call_count)
"""


def test_nvshmem_is_compiled_once_for_all_kernels_and_processes():
    """With the real NVRTC and nvJitLink, which need no GPU."""
    pytest.importorskip("nvshmem.bindings")
    driver = pytest.importorskip("numba.cuda.cudadrv.driver")
    if not driver._have_nvjitlink():
        pytest.skip("nvJitLink is not installed")
    assert finish(start(FIRST_LAUNCH)) == "1\n"
    entries = set(os.listdir(os.environ["SHMEMKIT_CACHE_DIR"]))
    assert finish(start(FIRST_LAUNCH, PYTHONHASHSEED="7")) == "0\n"
    assert set(os.listdir(os.environ["SHMEMKIT_CACHE_DIR"])) == entries  # the linked kernels were found, too
