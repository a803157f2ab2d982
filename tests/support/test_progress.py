"""The line on the terminal that says how far it is, as a terminal shows it."""

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from emulated import untyped

import shmemkit as sk

BEGIN = """
import time
import shmemkit as sk
from numba import cuda
from shmemkit.support import progress
progress.AFTER, progress.INTERVAL = 0.5, 0.05
"""


def start(*command, **environment):
    """-> (process, the terminal that it writes to)"""
    terminal, end = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "SHMEMKIT_PROGRESS")}
    environment = {**kept, "TERM": "xterm", **environment}
    process = subprocess.Popen(command, stdout=end, stderr=end, env=environment)
    os.close(end)
    return process, terminal


def text_of(terminal, until="\0"):
    """What was written there, to the end or until `until` is there."""
    found = b""
    while until.encode() not in found:
        try:
            found += os.read(terminal, 1 << 16)
        except OSError:  # its other end is closed
            os.close(terminal)
            break
    return found.decode()


def written(*command, **environment):
    process, terminal = start(*command, **environment)
    text = text_of(terminal)
    assert process.wait() is not None
    return text


def python(code, begin=BEGIN):
    return sys.executable, "-c", begin + textwrap.dedent(code)


def seen(text):
    """The lines that stand on the terminal at the end."""
    lines, at = [""], 0
    for character in text:
        if character == "\n":
            lines.append("")
        elif character != "\r":
            lines[-1] = lines[-1][:at].ljust(at) + character + lines[-1][at + 1 :]
        at = at + 1 if character not in "\r\n" else 0
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.slow
@pytest.mark.processes(1)
def test_an_exploration_counts_its_schedules():
    text = written(
        *python("""
        def main():
            sk.init()
            time.sleep(0.3)  # some looks
            print("a line of main")
        found = sk.emu.explore(main, 2, seeds=range(4), deliveries="eager")
        print(found.runs, flush=True)
        """)
    )
    assert re.search(r"explore: [123] of 4 schedules \|", text)
    assert seen(text) == ["a line of main"] * 8 + ["4"]


@pytest.mark.slow
def test_an_exhaustive_exploration_counts_its_runs():
    text = written(
        *python("""
        @cuda.jit
        def add(x):
            cuda.atomic.add(x, cuda.threadIdx.x % 1, 1)
        def main():
            with sk.init() as world:
                x = sk.zeros(1, "int32")
                add[1, 3, world.stream](x)
                time.sleep(0.2)
        sk.emu.explore(main, 1, exhaustive=True, max_runs=8)
        """)
    )
    assert re.search(r"explore: \d runs, 00:0", text) and seen(text) == []


@pytest.mark.slow
@pytest.mark.processes(1)
@untyped
def test_kernels_say_how_many_blocks_have_ended():
    text = written(
        *python("""
        @cuda.jit
        def slow(x):
            x[cuda.blockIdx.x] = 1
            time.sleep(0.4)
        def main():
            with sk.init() as world:
                x = world.xp.zeros(5)
                slow[5, 1, world.stream](x)
                print(int(x.sum()), end="", flush=True)
                time.sleep(0.8)
                print(" blocks")
        sk.emu.run(main, 1)
        """)
    )
    assert "slow: 3 of 5 blocks ended" in text
    assert seen(text) == ["5 blocks"]  # nothing was drawn over a line that had been begun


@pytest.mark.slow
def test_a_collective_is_named():
    text = written(
        *python("""
        begun = []
        def main():
            with sk.init() as world:
                reduce = sk.AllReduce(world, 32)
                begun.append(world.rank)
                if len(begun) == 2:
                    time.sleep(1.2)
                reduce(world.xp.ones(8, "float32"))
                world.stream.synchronize()
        sk.emu.run(main, 2)
        """)
    )
    assert "AllReduce of 8 float32: 0 of " in text and seen(text) == []


@pytest.mark.slow
@pytest.mark.processes(1)
def test_the_report_of_a_failure_stands_alone():
    text = written(
        *python("""
        def main():
            with sk.init():
                time.sleep(1.2)
                raise ValueError("no\\nprogress")
        try:
            sk.emu.run(main, 1)
        except ValueError as error:
            print(error)
        """)
    )
    assert "host code, 00:0" in text and seen(text) == ["no", "progress"]


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing():
    process, terminal = start(
        *python("""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
        def main():
            sk.init()
            time.sleep(0.1)
        try:
            sk.emu.explore(main, 1, seeds=range(10**6))
        except KeyboardInterrupt:
            print("interrupted")
        """)
    )
    before = text_of(terminal, "schedules")
    process.send_signal(signal.SIGINT)
    assert seen(before + text_of(terminal)) == ["interrupted"] and process.wait() == 0


SLEEP = """
import time
from shmemkit.support import progress
with progress.showing("asleep"):
    time.sleep({})
print("end")
"""
ASLEEP = sys.executable, "-c", SLEEP.format(2.8)


@pytest.mark.slow
def test_where_it_is_shown():
    quiet = ["CI", "1"], ["TERM", "dumb"], ["SHMEMKIT_PROGRESS", "off"], ["OMPI_COMM_WORLD_RANK", "1"]
    started = [start(*ASLEEP, **{name: value}) for name, value in quiet]
    started.append(start(sys.executable, "-c", SLEEP.format(1.5)))  # two seconds have not passed
    piped = subprocess.Popen(ASLEEP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shown = text_of(start(*ASLEEP)[1])
    assert "asleep, 00:02" in shown and seen(shown) == ["end"]
    assert [text_of(terminal) for _, terminal in started] == ["end\r\n"] * 5
    assert piped.communicate() == ("end\n", "")


@pytest.mark.slow
@pytest.mark.processes(1)
def test_what_is_no_terminal_is_not_written_to(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    sleep = python("with progress.showing('asleep'): time.sleep(1)")
    assert written(*sleep, SHMEMKIT_PROGRESS=str(file)) == "" and file.read_text() == "text"


@pytest.mark.slow
@pytest.mark.processes(1)
def test_a_rank_in_the_background_goes_on():
    """As mpirun's ranks are, on a terminal that stops what writes to it in the background."""
    job = python("""
        with progress.showing("asleep"):
            time.sleep(1.2)
    """)
    leader = f"""
        import fcntl, os, subprocess, termios
        os.setsid()
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)
        modes = termios.tcgetattr(2)
        modes[3] |= termios.TOSTOP
        termios.tcsetattr(2, termios.TCSANOW, modes)
        null = subprocess.DEVNULL
        job = subprocess.Popen({job}, preexec_fn=os.setpgrp, stdout=null, stderr=null)
        print("status", os.waitpid(job.pid, os.WUNTRACED)[1])
        job.kill()
    """
    text = written(*python(leader, begin=""), SHMEMKIT_PROGRESS="/dev/tty")
    assert "asleep, 00:0" in text and "status 0" in text


def test_a_bad_switch_is_refused(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_PROGRESS", "perhaps")
    with pytest.raises(ValueError, match="SHMEMKIT_PROGRESS is 'perhaps'; it must be"):
        sk.emu.run(sk.init, 1)


@pytest.mark.slow
def test_under_mpi_launch(tmp_path):
    """Ranks write to pipes, of which mpirun passes on whole lines."""
    script = tmp_path / "script.py"
    script.write_text(
        BEGIN + "with sk.init() as world:\n"
        "    if world.rank == 1:\n"
        "        time.sleep(1.5)\n"
        "    sk.AllReduce(world, 32)(world.xp.ones(8, 'float32'))\n"
        "    world.host_barrier()\n"
    )
    launch = str(Path(__file__).parents[2] / "mpi_launch.sh")
    text = written(launch, "-n", "2", str(script), SHMEMKIT_PYTHON=sys.executable)
    assert re.search("of 8 float32: 0 of .* blocks ended|host code, 00:0", text)


@pytest.mark.slow
def test_under_pytest_its_own_line_stays(tmp_path):
    tmp_path.joinpath("test_it.py").write_text(
        BEGIN + "def main():\n"
        "    sk.init()\n"
        "    time.sleep(1)\n"
        "def test_quick():\n"
        "    pass\n"
        "def test_slow(pes):\n"
        "    pes(1).run(main)\n"
    )
    command = f"cd {tmp_path}; {sys.executable} -m pytest --color=no -p no:cacheprovider"
    text = written("sh", "-c", f"{command} -s")
    assert "host code, 00:0" in text and seen(text)[-3:-1] == ["test_it.py .", "."]
    assert "host code" not in written("sh", "-c", command)


@pytest.mark.slow
def test_bench_says_which_case_runs():
    text = written(
        *python("""
        progress.AFTER = 0
        from shmemkit.bench.__main__ import main
        main(["all_gather", "--sizes", "8K,64K", "--vs", "", "--methods", "push_1d,ll"])
        """)
    )
    assert re.search(r"all_gather: [0-6] of 7 \|.*, (8|64)K, (push_1d|ll)", text)
    assert not re.search("of 5", "\n".join(seen(text)))


@pytest.mark.slow
@pytest.mark.processes(1)
def test_kernels_that_compile_are_named():
    pytest.importorskip("cuda.core")
    text = written(
        *python("""
        from numba.cuda.dispatcher import CUDADispatcher
        from shmemkit.compiler import jit_cache
        CUDADispatcher.compile = lambda kernel, signature: time.sleep(1)
        jit_cache.install()
        @cuda.jit
        def kernel(x):
            pass
        kernel.compile("void(int32)")
        """)
    )
    assert "compiling kernel, 00:0" in text and seen(text) == []
