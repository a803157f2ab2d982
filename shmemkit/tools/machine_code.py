"""Rules for machine code, as nvdisasm and cuobjdump print it.

A line of LL128 has to be stored, and loaded, by one instruction of all threads of a warp: it is not
predicated, and a barrier of the warp stands before it, with no branch, label or other way in between
(docs/protocols.md, whole lines).
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

LINE = re.compile(r"\b(STG?|LDG?)\.E\.128\.STRONG\.SYS\b")


def disassembler():
    """-> the command of nvdisasm or cuobjdump, on PATH, in CUDA_HOME or from PyPI; None where there is none"""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders += [found for path in sys.path for found in glob.glob(os.path.join(path, "nvidia", "*", "bin"))]
    for name, option in (("nvdisasm", "-c"), ("cuobjdump", "-sass")):
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            return [found, option]
    return None


def disassembled(command, cubin):
    """-> the machine code of a cubin, as text"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def lines_of(sass):
    """-> (accesses to lines, those of them that are not whole)"""
    return [], []
