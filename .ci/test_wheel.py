"""What a wheel offers without the checkout. ``.ci/run`` runs this file in an empty folder."""

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, num_ranks, rank, symm_at, wait


@cuda.jit
def pass_right(inbox, flag, value):
    right = (rank() + 1) % num_ranks()
    symm_at(inbox, right)[0] = value
    notify(flag, right, 1, "set", "sys")
    wait(flag, 1, "sys", "acquire", 1)


def main():
    with sk.init() as world:
        inbox, flag = sk.zeros(1, "int64"), sk.signals(1)
        pass_right[1, 1, world.stream](inbox, flag, world.rank)
        world.stream.synchronize()
        return int(inbox[0])


def program(*arguments):
    command = Path(sys.executable).with_name(arguments[0])
    run = subprocess.run([command, *arguments[1:]], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_shmemkit_is_the_wheel():
    assert Path(sk.__file__) in [Path(file.locate()) for file in files("shmemkit")]


def test_wheel_is_typed():
    assert "shmemkit/py.typed" in map(str, files("shmemkit"))


def test_fixture(pes):
    assert pes(4).run(main) == [3, 0, 1, 2]


def test_product():
    x, w = np.ones((64, 48), "float16"), np.ones((48, 32), "float16")
    assert (sk.emu.run(lambda: (sk.init(), sk.matmul(x, w))[1], n_ranks=1)[0] == 48).all()


def test_programs():
    Path("ring.py").write_text(f"from {Path(__file__).stem} import main\n\nprint(main())\n")
    for command in (["python", "-m", "shmemkit.emu"], ["shmemkit-emu"]):
        assert sorted(program(*command, "-n", "4", "--races", "ring.py").split()) == ["0", "1", "2", "3"]
    assert sorted(program("shmemkit", "run", "-n", "3", "ring.py").split()) == ["0", "1", "2"]
    assert "The emulator backend is ready." in program("python", "-m", "shmemkit", "doctor")
    assert "auto" in program("shmemkit-bench", "all_gather", "--sizes", "8K", "--vs", "", "--iters", "1")
