"""Compile kernels to PTX and machine code on a machine without a GPU, and look at the result.

    ptx = compile_ptx(kernel, (float32[::1], int64))       # a @cuda.jit kernel or plain function
    link(kernel, types, lto=True) -> cubin
    resources(ptx, (9, 0, "a")) -> Resources(registers=24, spills=0, stack=0, shared=0)
    machine_code(ptx, (9, 0, "a")) -> SASS

What is missing (NVVM, ptxas, nvdisasm) skips the test that needs it; with SHMEMKIT_REQUIRE_PTXAS=1 it fails
instead. ``machine_code.py`` keeps what it makes of the package's kernels by this.
"""

import contextlib
import functools
import re
import shutil
import subprocess
import tempfile
from collections import namedtuple
from pathlib import Path
from unittest import mock

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

from shmemkit.support.garbage_collection import uncollected
from shmemkit.support.settings import switch

HOPPER, AMPERE = (9, 0, "a"), (8, 0)
Resources = namedtuple("Resources", "registers spills stack shared")


def missing(what):
    """Skip the test, or fail it where everything must be there."""
    try:
        import pytest
    except ImportError:  # machine_code.py, beside another Python
        raise SystemExit(what) from None
    if switch("SHMEMKIT_REQUIRE_PTXAS", False):
        pytest.fail(f"{what}, and SHMEMKIT_REQUIRE_PTXAS=1")
    pytest.skip(what)


def needs_compiler():
    """Skip, or fail, a test before numba has typed its kernel in vain."""
    if lacks := _lacks():
        missing(f"{lacks} (pip install -e '.[cu13,dev]')".partition("\n")[0])


@functools.cache
def _lacks():
    """What says which library of the compiler is not there, if one is not."""
    try:
        for name in ("nvrtc", "nvvm"):
            load_nvidia_dynamic_lib(name)
    except DynamicLibNotFoundError as error:
        return str(error)


@contextlib.contextmanager
def without_gpu(cc):
    """numba compiles for compute capability `cc`; needs no GPU and no driver."""
    device = mock.patch("numba.cuda.dispatcher.get_current_device", lambda: mock.Mock(compute_capability=cc))
    with device, uncollected():
        yield


def compile_ptx(kernel, argument_types, cc=HOPPER, refused=False):
    """The PTX of `kernel`, a @cuda.jit kernel or a plain function, for these numba types. `refused`: Numba
    shall refuse it, which it does without a compiler."""
    if not refused:
        needs_compiler()
    from numba import cuda
    from numba.core.errors import TypingError
    from numba.cuda.cudadrv.error import NvvmSupportError

    with without_gpu(cc):
        try:
            bounds = getattr(kernel, "targetoptions", {}).get("launch_bounds")
            function = getattr(kernel, "py_func", kernel)
            code, _ = cuda.compile_ptx(function, argument_types, cc=cc, launch_bounds=bounds)
        except (NvvmSupportError, ImportError, FileNotFoundError) as error:
            missing(f"NVVM is not installed: {error}")
        except TypingError as error:
            if "nvshmem4py's Numba bindings" not in str(error):
                raise
            missing("nvshmem4py is not installed")
    return code


@functools.cache
def tool(name):
    """Path of a CUDA command line tool: from PyPI (ptxas: nvidia-cuda-nvcc), of the version of NVVM, or on
    PATH; None if it is not there."""
    try:
        import nvidia
    except ImportError:
        return shutil.which(name)
    packaged = (str(p) for root in nvidia.__path__ for p in Path(root).glob(f"*/bin/{name}"))
    return next(packaged, None) or shutil.which(name)


def assemble(ptx, cc=HOPPER, max_registers=None):
    """The kernel's machine code, with so many registers at most, as (cubin, Resources)."""
    ptxas = tool("ptxas")
    if ptxas is None:
        missing("ptxas is not installed (pip install nvidia-cuda-nvcc)")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        # -c: the table of peers and NVSHMEM are linked later.
        command = [ptxas, "-v", "-c", f"-arch=sm_{''.join(map(str, cc))}", "-o", str(cubin), "-"]
        if max_registers:
            command.insert(1, f"-maxrregcount={max_registers}")
        done = subprocess.run(command, input=ptx, capture_output=True, text=True)
        if newest := re.search(r"Unsupported \.version .*current version is '([\d.]+)'", done.stderr):
            # NVVM is a little newer than ptxas; what our kernels use is older than both.
            ptx = re.sub(r"^\.version .*$", f".version {newest.group(1)}", ptx, flags=re.M)
            done = subprocess.run(command, input=ptx, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        return cubin.read_bytes(), _resources(done.stderr)


def _resources(log):
    """What ptxas -v says of a kernel and its functions."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) .*?, (\d+)", log)
    stack, stores, loads = (sum(map(int, numbers)) for numbers in zip(*frames, strict=True))
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    return Resources(registers, stores + loads, stack, sum(map(int, re.findall(r"(\d+) bytes smem", log))))


def resources(ptx, cc=HOPPER, max_registers=None):
    """What ptxas needs for the kernel, of so many registers at most: registers, spilled bytes (stores and
    loads), bytes of stack and of static shared memory."""
    return assemble(ptx, cc, max_registers)[1]


def link(kernel, argument_types, lto, cc=HOPPER):
    """The machine code that numba would load for `kernel`, as a cubin: linked by nvJitLink, with or without
    its optimization."""
    from numba import cuda
    from numba.cuda.codegen import CUDACodeLibrary
    from numba.cuda.dispatcher import _Kernel

    bounds = getattr(kernel, "targetoptions", {}).get("launch_bounds")
    dispatcher = cuda.jit(lto=lto, launch_bounds=bounds)(getattr(kernel, "py_func", kernel))
    with without_gpu(cc), mock.patch.object(CUDACodeLibrary, "_ensure_cc", lambda self, given: given or cc):
        compiled = _Kernel(dispatcher.py_func, argument_types, **dispatcher.targetoptions)
        try:
            return compiled.library.get_cubin(cc=cc).code
        except (RuntimeError, ImportError) as error:
            if "nvJitLink" in str(error):
                missing(f"nvJitLink is not installed: {error}")
            raise


def machine_code(ptx, cc=HOPPER):
    """The SASS of the kernel."""
    return disassembled(assemble(ptx, cc)[0])


def disassembled(cubin):
    """The SASS of a cubin, such as ``link`` returns."""
    nvdisasm = tool("nvdisasm")
    if nvdisasm is None:
        missing("nvdisasm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([nvdisasm, "-c", file], capture_output=True, text=True, check=True).stdout


def instructions(ptx):
    """The instructions of the kernel's body, one per line, without comments, labels and directives."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    lines = (re.sub(r"//.*", "", line).strip() for line in body.splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(".")]


def position(ptx, pattern):
    """Index of the first instruction that matches `pattern`; an AssertionError with the PTX if there is
    none."""
    for i, line in enumerate(instructions(ptx)):
        if re.search(pattern, line):
            return i
    raise AssertionError(f"no instruction matches {pattern!r} in\n{ptx}")
