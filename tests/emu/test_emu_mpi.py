"""The emulator under mpirun, one process per PE: results, deadlock reports of all ranks, and how failures
end."""

import re
import textwrap

import pytest
from fast import slow
from launched import MPIRUN, ROOT, mpirun, succeed

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")


@pytest.mark.slow
def test_print_in_the_order_of_ranks():
    status, output, _ = mpirun(
        3,
        """
        with sk.init() as world:
            time.sleep(0.1 * (3 - world.rank))
            world.print("of rank", world.rank)
            world.print("of one", ranks=2)
        """,
    )
    assert status == 0, output
    assert "of rank 0\nof rank 1\nof rank 2\nof one\n" in output


@pytest.mark.slow
def test_the_queue_example():
    status, output, _ = mpirun(4, "examples/01_notify_wait.py", "--inputs", "40")
    assert status == 0, output
    for rank in range(4):
        assert f"rank {rank} of 4 (emulator)" in output
    assert output.count("passed") == 4


def test_the_pytorch_example():
    """It prints what it says, of 2 ranks."""
    pytest.importorskip("torch")
    status, output, _ = mpirun(2, "examples/11_torch_mlp.py", timeout=120)
    assert status == 0, output
    text = (ROOT / "examples" / "11_torch_mlp.py").read_text()
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", text, re.S)[1]
    sizes = "4 ranks (emulator): 16 tokens, 16 hidden, 32 inside"
    assert sizes in expected
    expected = expected.replace(sizes, "2 ranks (emulator): 8 tokens, 16 hidden, 16 inside")
    assert textwrap.dedent(expected) in output


@pytest.mark.slow
def test_what_processes_share():
    """Atomics from several processes add up; puts, signals, barriers and collectives work; hosts see each
    other."""
    succeed(
        3,
        """
        @cuda.jit
        def count(x, data, spin):
            me, n = rank(), num_ranks()
            for pe in range(n):
                atomic_add(x, 1, pe)
                red_release(symm_at(x, pe), 1, 2)
                notify(x[2:], pe, 3, "add")
                cuda.atomic.add(symm_at(x, pe), 3, 4)
            if cuda.grid(1) == 0:
                put_signal(data[me], data[me], x[4:], 1, SignalOp.SIGNAL_ADD, (me + 1) % n)
                signal_wait_until(x[4:], ComparisonType.CMP_GE, 1)
                st_release(symm_at(spin, (me + 1) % n), 0, me + 1)
                while ld_acquire(spin, 0) == 0:
                    pass
                while atomic_fetch(x[1:], me) != 2 * 40 * n:
                    pass
                barrier_all()
                reduce(0, x[5:6], x[4:5], "sum")

        with sk.init() as world:
            n, me = world.n_ranks, world.rank
            assert (world.node, world.n_nodes, world.local_rank) == (0, 1, me)
            x, spin = sk.signals(6), sk.zeros(1, "int32")
            data = sk.array(np.arange(n * 100).reshape(n, 100))
            data[...] = np.where(np.arange(n)[:, None] == me, data + 1, 0)
            world.host_barrier()
            for repeat in range(3):
                x[...], spin[...] = 0, 0
                world.host_barrier()
                count[4, 10](x, data, spin)
                world.barrier()
                assert x.tolist() == [40 * n, 80 * n, 120 * n, 160 * n, 1, n], x
                previous = (me - 1) % n
                assert (data[previous] == np.arange(100) + 100 * previous + 1).all()
                assert spin[0] == previous + 1
                world.host_barrier()
            assert (sk.peer_view(data, previous)[previous, 1:] > 0).all()
            sk.free(x)
            big = sk.zeros(10**6)
            world.host_barrier()
        with sk.init(local_size=1) as world:  # and once more
            assert world.n_nodes == 3 and sk.zeros(3).sum() == 0
        print("rank ok")
        """,
    )


@pytest.mark.slow
def test_hosts_that_are_late():
    """Kernels of one process go on while its host waits at a barrier; kernels wait for ranks whose host is
    late, and a
    launch returns although its kernel waits for what the host starts next."""
    output = succeed(
        3,
        """
        import shmemkit.emu.processes as processes
        processes.PATIENCE = 0.4

        @cuda.jit
        def pass_on(x):
            me, n = rank(), num_ranks()
            if me > 0:
                wait(x, 1, "sys", "acquire", 1)
            if me + 1 < n:
                notify(x, me + 1, 1)

        @cuda.jit
        def await_go(x, y):
            wait(x, 1, "sys", "acquire", 1)
            y[0] = 1

        with sk.init() as world:
            x, y, me = sk.signals(2), np.zeros(1), world.rank
            time.sleep(1.2 * (me == 0))
            pass_on[1, 4](x)
            world.host_barrier()
            x[...] = 0
            world.host_barrier()
            await_go[1, 1, cuda.stream()](x, y)  # all ranks wait: the launches return
            time.sleep(0.3 * me)
            peer = sk.peer_view(x, (me + 1) % 3)
            peer[0] = 1  # the host itself lets the peer go on
            world.synchronize()
            assert y[0] == 1
            world.comm.barrier()  # one that the emulator does not know of
        print("rank ok")
        """,
    )
    assert "still in host code" in output


@pytest.mark.slow
def test_deadlock_in_kernels():
    status, output, seconds = mpirun(
        3,
        """
        @cuda.jit
        def stuck(flags):
            if rank() == 2:
                while ld_acquire(flags, 1) != 7:
                    pass
            elif cuda.threadIdx.x == 0:
                wait(symm_at(flags, 2)[rank():], 1, "sys", "acquire", rank() + 4, "eq")
            cuda.syncthreads()

        with sk.init() as world:
            flags = sk.full(4, 1, "uint64")
            stuck[2, 4](flags)
            print("launched", flush=True)
            world.barrier()
            world.synchronize()
            print("not reached")
        """,
    )
    assert status != 0 and "not reached" not in output
    assert output.count("DeadlockError: deadlock: no rank can go on") == 1, output
    for text in (
        "rank 0 blocks 0 and 1 thread 0 in stuck: waits for flags[0] on rank 2 == 4, now 1",
        "rank 0 blocks 0 and 1 threads 1 to 3 in stuck: waits for the other threads of its block",
        "rank 1 blocks 0 and 1 thread 0 in stuck: waits for flags[1] on rank 2 == 5, now 1",
        "rank 2 blocks 0 and 1 threads 0 to 3 in stuck: waits for flags[1] on rank 2 to change",
        "while ld_acquire(flags, 1) != 7",
    ):
        assert text in output, output
    assert seconds < 20


@pytest.mark.slow
def test_a_rank_that_ends_early():
    """It waits for the others in finalize; they wait for a signal that it does not send."""
    status, output, _ = mpirun(
        3,
        """
        @cuda.jit
        def waits(flags):
            wait(flags, 1, "sys", "acquire", 1)

        with sk.init() as world:
            flags = sk.signals(1)
            if world.rank == 1:
                sys.exit(0)
            waits[1, 1](flags)
            world.synchronize()
        """,
    )
    assert status != 0
    assert "rank 0 block 0 thread 0 in waits: waits for flags[0] on rank 0 >= 1, now 0" in output, output
    assert "rank 2 block 0 thread 0 in waits" in output
    assert "rank 1: its host program waits for ranks 0 and 2 to call finalize() (" in output


@pytest.mark.slow
def test_a_rank_that_misses_a_collective():
    status, output, _ = mpirun(
        2,
        """
        @cuda.jit
        def meet():
            barrier_all()

        with sk.init() as world:
            if world.rank == 1:
                sk.zeros(3)
            else:
                meet[1, 1]()
                world.stream.synchronize()
        """,
    )
    assert status != 0
    assert (
        "rank 0 block 0 thread 0 in meet: waits for rank 1 in a barrier, sync or collective of ranks 0 to 1"
        in output
    )
    assert "rank 1: its host program waits for rank 0 to call zeros() (" in output


FAILURES = {
    "kernel": ("ValueError: in a kernel\n  rank 1 block 0 thread 2 at ", "fail[1, 4](flags, 1)"),
    "bounds": (
        "flags[3] is out of bounds: flags is uint64 (3,) on rank 1\n  rank 1 block 0 thread 3",
        "fail[1, 4](flags, 2)",
    ),
    "host": ("KeyError: 'in the host'", 'raise KeyError("in the host")'),
}


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("how", ["kernel", *slow("bounds", "host")])
def test_one_rank_fails(how):
    """The others wait for it in a kernel, or compute; all end within seconds."""
    text, code = FAILURES[how]
    status, output, seconds = mpirun(
        3,
        f"""
        @cuda.jit
        def fail(flags, how):
            t = cuda.threadIdx.x
            if how == 1:
                if t == 2:
                    raise ValueError("in a kernel")
            else:
                flags[t] = 1

        @cuda.jit
        def waits(flags):
            wait(flags, 1, "sys", "acquire", 1)

        with sk.init() as world:
            flags = sk.signals(3)
            world.host_barrier()
            if world.rank == 0:
                waits[1, 1](flags)
                world.synchronize()
            elif world.rank == 2:
                time.sleep(30)
            else:
                {code}
        """,
    )
    assert status != 0 and seconds < 20
    assert text in output, output


@pytest.mark.slow
def test_requests_that_differ():
    """Heaps of different sizes, arrays of different shapes, other arrays to free: every rank raises, and can
    go on."""
    succeed(
        2,
        """
        from mpi4py import MPI

        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = f"{MPI.COMM_WORLD.rank + 1}M"
        try:
            sk.init()
        except RuntimeError as error:
            assert "symmetric heap: rank 0: 1048576 bytes; rank 1: 2097152 bytes" in str(error), error
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = "1M"
        with sk.init() as world:
            try:
                sk.zeros(3 + world.rank, "int32")
            except ValueError as error:
                assert "rank 0 asks for int32 (3,), rank 1 asks for int32 (4,)" in str(error), error
            x, y = sk.zeros(3), sk.zeros(3)
            try:
                sk.free([x, y][world.rank])
            except ValueError as error:
                assert "rank 0 frees array 1 (float32 (3,)), rank 1 frees array 2" in str(error), error
            try:
                sk.zeros(2**40, "int8")
            except MemoryError as error:
                assert "NVSHMEM_SYMMETRIC_SIZE" in str(error)
            world.host_barrier()
        print("rank ok")
        """,
    )


@pytest.mark.slow
def test_heavy_traffic_is_no_deadlock():
    """Signals to and fro, with every kind of waiting, thousands of times: no wait is missed, nothing ends
    early."""
    succeed(
        2,
        """
        @cuda.jit
        def ping_pong(flags, rounds):
            me, other, t = rank(), 1 - rank(), cuda.threadIdx.x
            theirs = symm_at(flags, other)
            for i in range(1, rounds + 1):
                if t == 0:
                    if me == 0:
                        if i % 4 == 0:
                            theirs[0] = i  # an ordinary store
                        else:
                            notify(flags, other, i)
                    if i % 3 == 0:
                        while ld_acquire(flags, 0) != i:
                            pass
                    elif i % 3 == 1:
                        wait(flags, 1, "sys", "acquire", i, "eq")
                    else:
                        while cuda.atomic.max(flags, 0, 0) != i:
                            pass
                    if me == 1:
                        p(flags, i, other)
                cuda.syncthreads()

        with sk.init() as world:
            flags = sk.signals(1)
            for _ in range(3):
                ping_pong[1, 3](flags, 700)
                world.host_barrier()
                flags[0] = 0
                world.host_barrier()
        print("rank ok")
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize("nameless", [True, *slow(False)])
def test_shared_memory_has_no_name(nameless):
    """Nothing stays of it, however ranks end; where such memory cannot be had, it is a file for a moment."""
    without = "" if nameless else "del os.memfd_create"
    succeed(
        2,
        f"""
        import glob, tempfile
        from mpi4py import MPI
        {without}
        folders = "/dev/shm", tempfile.gettempdir()
        def ours():
            return [f for folder in folders for f in glob.glob(folder + "/shmemkit-*")]

        before = ours()
        with sk.init() as world:
            x = sk.zeros(1)
            world.host_barrier()
            sk.peer_view(x, 1 - world.rank)[0] = 7
            world.host_barrier()
            assert x[0] == 7 and ours() == before
        print("rank ok")
        """,
    )


@pytest.mark.slow
def test_after_a_failure_all_ranks_raise_and_can_begin_anew():
    """What a notebook does: it catches the error, and goes on."""
    succeed(
        3,
        """
        @cuda.jit
        def outside(box):
            box[5] = 1

        @cuda.jit
        def stuck(signals):
            wait(signals, 1, "sys", "acquire", 1)

        def refused(function, *words):
            try:
                function()
            except EmulatorError as error:
                assert all(w in str(error) for w in words), error
                assert "call shmemkit.init()" not in str(error), error  # most programs end
            else:
                assert False

        def launch(kernel, *arguments):
            kernel[1, 1](*arguments)
            world.synchronize()

        world = sk.init()
        for anew in range(2):
            box = sk.zeros(1, "int32", "box")
            if world.rank != 1:  # it waits for the others
                refused(lambda: launch(outside, box), "box[5] is out of bounds")
                time.sleep(0.1 * world.rank)
            cause = "has failed: OutOfBoundsError: box[5] is out of bounds: box is int32 (1,) on rank "
            for _ in range(2):
                refused(world.host_barrier, cause)
                refused(lambda: sk.zeros(4), cause)
            if anew:
                world.finalize()
            world = sk.init()
            assert world.host_allgather(world.rank) == [0, 1, 2]
        refused(lambda: launch(stuck, sk.signals(1)), "deadlock: no rank can go on")
        refused(world.host_barrier, "has failed: DeadlockError: deadlock: no rank can go on")
        with sk.init() as world:
            sk.zeros(3)
        try:
            with sk.init() as world:
                if world.rank == 2:
                    1 // 0
                world.host_barrier()
        except (ZeroDivisionError, EmulatorError) as error:
            told = "rank 2 has failed: ZeroDivisionError" in str(error)
            assert told == (world.rank != 2), error
        with sk.init() as world:
            sk.zeros(3)
        print("rank ok")
        """,
    )


@pytest.mark.slow
def test_a_cell_that_fails_on_one_rank():
    """In a notebook the rank lives on; those who wait for it are told why it does not come."""
    succeed(
        2,
        """
        import types

        class Shell:
            compile, custom_exceptions, last_execution_result = None, [1], None
            def __init__(self):
                self.events, self.hooks = self, {}
            def register(self, name, function):
                self.hooks[name] = function
            def unregister(self, name, function):
                del self.hooks[name]
            def cell(self, function):
                self.hooks.get("pre_execute", int)()
                result = types.SimpleNamespace(error_in_exec=None)
                try:
                    function()
                except Exception as error:
                    result.error_in_exec = error
                self.last_execution_result = result
                self.hooks.get("post_execute", int)()
                return str(result.error_in_exec)

        shell = Shell()
        sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
        world = sk.init()

        def both():
            if world.rank == 1:
                raise KeyError("missing")
            world.host_barrier()

        def one_fails_and_nobody_waits():
            raise KeyError("all")

        assert "all" in shell.cell(one_fails_and_nobody_waits)
        assert shell.cell(world.host_barrier) == "None"
        said = shell.cell(both)
        time.sleep(world.rank)  # until the other has been told
        if world.rank == 0:
            assert "rank 1: its host program has raised KeyError: 'missing'" in said, said
        assert "To go on, call shmemkit.init() on all ranks" in shell.cell(world.host_barrier)
        assert shell.cell(sk.init) == "None"
        assert shell.cell(lambda: sk.current().finalize()) == "None"
        assert shell.hooks == {}
        print("rank ok")
        """,
    )


@pytest.mark.slow
def test_a_kernel_that_waits_for_a_rank_in_host_code_times_out():
    status, output, seconds = mpirun(
        3,
        """
        @cuda.jit
        def waits(flags):
            wait(flags, 1, "sys", "acquire", 1)

        world = sk.init()
        flags = sk.signals(1)
        if world.rank == 1:
            time.sleep(30)
        waits[1, 1](flags)
        world.synchronize()
        """,
        SHMEMKIT_TIMEOUT="1",
    )
    assert status == 1 and seconds < 20
    assert "SignalTimeout: rank " in output and " s for rank 1, still in host code" in output, output
    assert "in waits: waits for flags[0] on rank" in output


@pytest.mark.slow
@pytest.mark.parametrize("size", ["60T", "900T"])
def test_absurd_heap(size):
    status, output, _ = mpirun(2, "sk.init()\n", NVSHMEM_SYMMETRIC_SIZE=size)
    assert status != 0 and "Use a smaller NVSHMEM_SYMMETRIC_SIZE" in output, output


@pytest.mark.slow
def test_folder_that_is_full():
    """Where the ranks share a file, its pages are there before they are used: no rank ends by SIGBUS."""
    code = """
    import errno
    del os.memfd_create  # as in containers that do not see each other's processes
    reserve = os.posix_fallocate

    def few(file, first, n_bytes):
        if n_bytes > 1 << 24:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, first, n_bytes)

    os.posix_fallocate = few
    with sk.init() as world:
        x = sk.zeros(1 << 20, "uint8")
        try:
            sk.zeros(1 << 25, "uint8")
        except MemoryError as error:
            print("refused:", error)
        sk.free(x)
        y = sk.zeros(1 << 20, "uint8")
        print("sum", y.sum())
        sk.free(y)
    """
    status, output, _ = mpirun(2, code)
    assert status == 0 and output.count("No space left on device. Make room there, or set TMPDIR") == 2, (
        output
    )
    assert output.count("sum 0") == 2, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.modules['rich'] = None; main(['p2p'])", "needs rich, which is not installed: pip install rich"),
        ("main(['p2p', '--json', '/'])", "'/' is a folder"),
    ],
)
def test_the_bench_leaves_on_all_ranks(code, said):
    status, output, _ = mpirun(2, f"from shmemkit.bench.__main__ import main\n{code}", timeout=20)
    assert status == 2 and output.count(said) == 1, output


@pytest.mark.slow
def test_settings_for_one_process_are_told_once():
    status, output, _ = mpirun(3, "\nsk.init()", SHMEMKIT_RACES="1")
    said = "3 processes. They need all ranks in one process: start 'shmemkit emu -n 3 script.py'"
    assert status == 1 and output.count(said) == 1, output


@pytest.mark.slow
def test_a_failure_is_written_in_one_piece():
    """What several ranks write at once cannot mix."""
    code = """
    write = os.write
    os.write = lambda file, text: write(file, b"<%s>" % text) and len(text)

    with sk.init() as world:
        if world.rank == 1:
            raise ValueError("boom")
        time.sleep(30)
    """
    output = mpirun(2, code)[1]
    assert re.search(r"<shmemkit: rank 1 of 2 failed\nTraceback[^<]*<module>[^<>]*: boom\n>", output), output


@pytest.mark.slow
@pytest.mark.processes(2)
def test_ranks_of_two_machines():
    """They have one name, as pods do, and another boot: memory is not shared, and rank 0 alone says so."""
    status, output, _ = mpirun(
        2,
        """
        from shmemkit.support import hosts
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        hosts.boot_id = lambda: rank * 4
        sk.init()
        """,
    )
    assert status != 0 and output.count("the emulator runs on one host") == 1, output
    assert "of boot 0000 (rank 0)" in output and "of boot 1111 (rank 1)" in output, output
