"""shmemkit check, on the emulator: that every operation and method is a case, and that planted faults are
found."""

import functools
import json
import sys
from types import ModuleType

import numpy as np
import pytest
from emulated import spmd

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.bench import __main__ as bench
from shmemkit.collectives import registry
from shmemkit.collectives.all_gather.pull import Pull
from shmemkit.tools import doctor_hosts, machine_code
from shmemkit.tools.check import collectives, command, plan, records, subjects, trials

NO_OPERATION = {  # what is public and computes nothing: errors, memory, launches, what measures
    *("RankTimeout", "SignalTimeout", "WaitRecord", "Timeline", "Timer", "bind", "current", "init"),
    *("array", "empty", "free", "full", "peer_view", "signals", "zeros"),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache folder of the test's own, and no other settings."""
    monkeypatch.setenv("SHMEMKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHMEMKIT_BACKEND", "emulator")
    # What compiles kernels in an earlier test imports MPI; then this process counts as launched.
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return tmp_path / "cache"


def run(*arguments, n=2):
    return command.main(["-n", str(n), *arguments])


@functools.cache
def names(n=1):
    """The cases' names, and what they are of."""
    cases = spmd(n, plan.cases)[0]
    return [case.name for case in cases], {(case.of, case.method) for case in cases}


def test_every_public_operation_is_a_case():
    public = {name for name in sk.__all__ if not isinstance(getattr(sk, name), ModuleType)}
    assert public - NO_OPERATION == {of for of, _ in names(2)[1]}


def test_every_method_is_a_case():
    kinds = [getattr(sk, of) for of, _ in names()[1]]
    wanted = {(kind.__name__, m) for kind in kinds for m in getattr(kind, "methods", ())}
    wanted -= {("AllToAllV", "push")}  # the only one
    assert len(wanted) > 60 and wanted <= names()[1]
    assert len(names()[0]) == len(set(names()[0]))


def test_budgets_come_after_what_is_usual():
    order = names(2)[0]
    budgets = [i for i, name in enumerate(order) if " sms=4" in name]
    assert len(budgets) == len(registry.collectives()) + 4 and order.index("Queue bfloat16") < budgets[0]
    assert budgets[-1] < order.index("AllGather lamport float32")


# ---- planted faults


def planted(monkeypatch, when, only=lambda out, in_place: True):
    """AllGather gets the method "planted", which leaves one element as it was, in calls as `when` says:
    (its call, from 1 on; whether a graph captures it; ranks); `only` with such arrays."""

    class Planted(Pull):
        calls = 0

        def bind(self, x, out, in_place):
            run, backend = super().bind(x, out, in_place), self.world.backend
            last = out.view("uint8")[-4:]
            old = self.world.xp.zeros(4, "uint8")
            keep, restore = backend.copy(old, last), backend.copy(last, old)

            def step(stream):
                self.calls += 1
                handle = backend.handle(stream)
                stale = when(self.calls, backend.capture_of(stream) is not None, self.world.n_ranks)
                stale = stale and only(out, in_place)
                for each in (keep, run, restore) if stale else (run,):
                    each(stream if each is run else handle)

            return step

    monkeypatch.setitem(sk.AllGather._METHODS, "planted", Planted)
    monkeypatch.setattr(sk.AllGather, "methods", (*sk.AllGather.methods, "planted"))


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize(
    "dtype, narrower",
    [("float64", "float32"), ("int64", "int32"), ("float32", "float16"), ("int32", "uint32")],
)
@pytest.mark.parametrize("n", [2, 7])
def test_numbers_show_a_narrower_dtype(n, dtype, narrower, op):
    """They are exact in theirs, and not in another one. Of max, some are negative."""

    def main(world):
        of_rank = collectives.Moved(world, subjects.Arrays(world), sk.AllReduce, 64, dtype, 0, op, None).given
        return [of_rank(1, r)[0] for r in range(n)]

    given = spmd(n, main)[0]
    exact = sum(x.astype("int64") for x in given)
    assert (sum(x.astype(dtype) for x in given).astype("int64") == exact).all()
    if op == "max" and dtype == "int32":
        assert all((x < 0).any() and (x > 0).any() for x in given)
    elif dtype != "int32" and not (op == "avg" and dtype == "float32" and n == 7):
        with np.errstate(over="ignore", invalid="ignore"):
            assert (given[0].astype(narrower).astype("int64") != given[0]).any()


ONLY = "--only", "AllGather planted float32"


@pytest.mark.parametrize(
    "when, where",
    [
        (lambda call, captured, n: True, "37 elements, the first call"),
        (lambda call, captured, n: call == 3, "back to back"),
        (lambda call, captured, n: captured, "in a graph"),
    ],
)
def test_one_element_that_is_stale(monkeypatch, capsys, when, where):
    planted(monkeypatch, when)
    assert run(*ONLY) == command.WRONG
    said = capsys.readouterr().out
    assert f"WRONG: AllGather planted float32, 37 elements, {where.split(', ')[-1]}" in said
    assert "1 of 74 elements are wrong, the first at 73" in said
    assert "1 of them were not written" in said or "1 of them are as with" in said


@pytest.mark.parametrize(
    "only, where",
    [(lambda out, in_place: in_place, "in place"), (lambda out, in_place: out.ctypes.data % 8, "unaligned")],
)
def test_wrong_with_such_arrays_only(monkeypatch, capsys, only, where):
    planted(monkeypatch, lambda call, captured, n: True, only)
    assert run(*ONLY) == command.WRONG
    said = capsys.readouterr().out
    assert f"WRONG: AllGather planted float32, 134 elements, {where}, the first call" in said
    assert "1 of 268 elements are wrong, the first at 267" in said


def spoiled(monkeypatch, wrong):
    """The methods that AllGather takes here zero an element where wrong(method, bytes of out, bytes of out of
    the call before) says so."""
    for name in ("ll", "ll128", "push_1d"):

        class Spoiled(Pull):
            before = 0

            def bind(self, x, out, in_place):
                run = super().bind(x, out, in_place)

                def step(stream):
                    run(stream)
                    stale = wrong(self, out.nbytes, self.before)
                    self.before = out.nbytes
                    if stale:
                        backend = self.world.backend
                        old = self.world.xp.zeros(4, "uint8")
                        backend.copy(out.view("uint8")[-4:], old)(backend.handle(stream))

                return step

        monkeypatch.setitem(sk.AllGather._METHODS, name, Spoiled)


@pytest.mark.parametrize(
    "case, wrong, where",
    [
        ("auto float32 sms=4", lambda method, size, before: method.sms, "134 elements"),
        ("auto float32", lambda method, size, before: size > 12 << 10, "2048 elements"),
        ("ll float32", lambda method, size, before: before > size, "134, 37, 134 elements in turn"),
    ],
)
def test_wrong_within_a_budget_or_for_large_arrays_or_after_larger_ones(
    monkeypatch, capsys, case, wrong, where
):
    spoiled(monkeypatch, wrong)
    assert run("--only", f"AllGather {case}") == command.WRONG
    assert f"WRONG: AllGather {case}, {where}, the first call" in capsys.readouterr().out


@pytest.mark.parametrize("n, status", [(3, command.INCOMPLETE), (4, command.WRONG)])
def test_wrong_on_four_ranks_only(monkeypatch, capsys, n, status):
    planted(monkeypatch, lambda call, captured, n_ranks: n_ranks == 4)
    assert run(*ONLY, n=n) == status
    assert ("WRONG" in capsys.readouterr().out) == (n == 4)


def test_whose_data_are_wrong():
    """Of which rank, and how many calls before: found by what the subject says that it would give."""

    def main(world):
        arrays = subjects.Arrays(world)
        subject = plan.Moved(world, arrays, sk.AllReduce, 9, "float32", 0, "sum", None)
        stale = subject.wanted([4, 5, 5])[0][0]
        want = subject.wanted([5, 5, 5])[0]
        one = trials.Trials(world, 0, lambda text: None)
        out = want[0].copy()
        out[4:] = stale[4:]
        return one.finding(subject, 5, 0, out, want, subject.differs(0, out, want), 4, 5)

    said = spmd(3, main)[1]
    assert "call 2 of 2: 5 of 9 elements are wrong, the first at 4, 5, 6, 7, 8: " in said
    assert said.endswith("5 of them equal the result with the data of rank 0 from 1 call earlier")


def test_numbers_tell_calls_and_ranks_apart():
    """Of a call before every element differs, also by much; of another rank most do, in every call."""

    def main(world):
        arrays = subjects.Arrays(world)
        for span in (3, 4, 7, 16, 201, 254, 1000):
            made = {(c, r): arrays.integers((997,), span, c, r) for c in range(30) for r in range(4)}
            for call in range(2, 30):
                assert all((made[call, r] != made[call - ago, r]).all() for r in range(4) for ago in (1, 2))
                shares = [(made[call, 0] != made[call, r]).mean() for r in (1, 2, 3)]
                assert min(shares) > 0.6 * (1 - 1 / span)
            moved = abs(made[5, 0] - made[4, 0])
            assert moved.min() >= span // 4

    spmd(1, main)


def test_what_several_ranks_find_is_said_once(monkeypatch, capsys):
    planted(monkeypatch, lambda call, captured, n: True)
    assert run(*ONLY) == command.WRONG
    assert capsys.readouterr().out.count("ranks 0, 1, call 1 of 1: 1 of 74 elements are wrong") == 1


def test_soak_gives_each_replay_other_data():
    """A replay that does nothing leaves what the one before made: that is wrong."""

    class Kept(subjects.Subject):
        dtypes, out_dtypes, calls = ("int32",), ("int32",), 0

        def given(self, call, rank):
            return [self.arrays.integers((9,), 7, call, rank)]

        def result(self, given):
            return [given[self.me][0]]

        def outputs(self):
            return [self.arrays.empty((9,), "int32")]

        def enqueue(self, inputs, outputs):
            given, out = inputs[0].copy(), outputs[0]  # of when it is captured
            backend = self.world.backend
            backend.copy(out.view("uint8"), given.view("uint8"))(backend.handle(None))

    def main(world):
        one = trials.Trials(world, 0, lambda text: None)
        chosen = [("kept", Kept(world, subjects.Arrays(world)))]
        assert one.mixed(chosen, False) == 1
        with pytest.raises(trials.Wrong, match="rank 0, kept, call 1 of 1: 9 of 9 elements"):
            one.mixed(chosen, True)

    spmd(1, main)


@pytest.mark.parametrize(
    "method, error, said",
    [
        ("auto", "no", "of what must be right here: 1 case: Queue auto"),
        ("auto", "bind(): grid is too large", "does not fit: "),
        ("push", "bind(): grid is too large", "does not fit: "),
        ("push", "no", 'passed: all that "auto" takes'),
        ("", "no", "of what must be right here: 1 case: Queue float32"),
    ],
)
@pytest.mark.parametrize("sizes", [[(6, 12)], [(6, 12), (5, 12)]])
def test_what_may_not_refuse_is_incomplete(monkeypatch, capsys, method, error, said, sizes):
    """It is "auto", an operation that has none, or a kernel that does not fit. Another method may."""

    class Refusing(plan.layers.Queued):
        def enqueue(self, inputs, outputs):
            if self.shapes[0][0] == 6:
                raise ValueError(error)
            super().enqueue(inputs, outputs)

    def of(world):
        make = functools.partial(sk.Queue, world, 4, 12, "float32", n_producers=2, n_consumers=1, block=8)
        yield plan.case(world, "Queue", method, "float32", Refusing, make, sizes)
        if method == "push":
            yield plan.case(world, "Queue", "auto", "float32", plan.layers.Queued, make, sizes)

    monkeypatch.setattr(plan, "OPERATIONS", (of,))
    passes = method == "push" and error == "no"
    assert run() == (command.RIGHT if passes else command.INCOMPLETE)
    out = capsys.readouterr().out
    assert said in out and error in out


# ---- the command


@pytest.fixture
def few(monkeypatch):
    """Only some cases."""
    monkeypatch.setattr(plan, "OPERATIONS", (plan.of_exchanges,))


def test_passed(few, cache, tmp_path, capsys):
    """The answer, what is kept of it, and the file."""
    file = tmp_path / "check.json"
    assert run("--json", str(file)) == command.RIGHT
    said = capsys.readouterr().out
    assert 'passed: all that "auto" takes here is right. 6 right, 0 wrong, 1 not tried' in said
    assert "Queue" in said and "6 cases, about 3 s" in said
    found = json.loads(file.read_text())
    assert (found["answer"], found["exit_status"], found["untried"]) == ("passed", 0, [])
    assert found["machine"]["ranks"] == 2 and found["machine"]["gpus"] == {}
    (queue, *_) = (case for case in found["cases"] if case["case"] == "Queue float32")
    assert queue["answer"] == "right" and queue["calls"] > 10
    assert queue["ways"] == ["eagerly", "back to back", "in a graph", "under skew"]
    (record,) = records.all_of("emulator")
    assert (record["answer"], record["ranks"], record["cases"]) == ("passed", 2, 7)
    command.main(["-n", "2", "--only", "Barrier"])
    assert records.read("emulator", 2) == record  # of the whole one
    records.write("emulator", 2, "wrong", None, 1)
    assert records.read("emulator", 2)["answer"] == "wrong"
    assert records.read("emulator", 2)["seconds"] == record["seconds"]  # of the last whole one
    assert records.read("emulator", 3) is None


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_that_share_a_gpu_count_it_once(few, monkeypatch, tmp_path, capsys, n):
    """In what is printed, and in the file, of which docs/checked.py takes "ledger"."""
    monkeypatch.setattr(EmulatorBackend, "gpu_name", "NVIDIA H200")
    monkeypatch.setattr(EmulatorBackend, "gpu_id", property(lambda self: ("host", self.pe // 2)))
    file = tmp_path / "check.json"
    assert run("--only", "Queue float32", "--json", str(file), n=n) == command.INCOMPLETE
    gpus = (n + 1) // 2
    assert f"{n} rank{'s' * (n > 1)} on {gpus} x NVIDIA H200: 1 of" in capsys.readouterr().out
    found = json.loads(file.read_text())
    for about in (found["machine"], found["ledger"], found["ledger"]["machine"]):
        assert about["gpus"] == {"NVIDIA H200": gpus}
    assert records.read("NVIDIA H200", n)["answer"] == "incomplete"


def test_what_was_not_tried_is_not_passed(few, capsys):
    assert run("--only", "Queue float32") == command.INCOMPLETE
    said = capsys.readouterr().out
    left = "not tried, of what must be right here: 5 cases: Queue bfloat16, "
    assert f"incomplete: {left}" in said and "passed" not in said
    assert records.all_of("emulator")[0]["why"].startswith(left)  # for doctor


def test_out_of_time(few, capsys):
    assert run("--seconds", "1e-9") == command.INCOMPLETE
    assert "out of time" in capsys.readouterr().out


def test_what_is_refused_is_not_tried_and_not_needed(capsys):
    assert run("--only", "AllGatherGemm overlap_2d bfloat16") == command.INCOMPLETE
    said = capsys.readouterr().out
    assert "refused: AllGatherGemm: " in said and "there is one node" in said
    assert "1 not tried" not in said and "2 not tried" in said  # the machine code, too
    needed = {case.name for case in spmd(1, plan.cases)[0] if case.needed}
    assert not {"AllGatherGemm overlap_2d bfloat16", "AllGatherGroupedGemm overlap bfloat16"} & needed


def test_list(few, capsys):
    assert run("--list") == command.RIGHT
    assert capsys.readouterr().out.splitlines()[0] == "Queue float32, auto"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--seconds", "no"], "it must be a number greater than 0"),
        (["-n", "0"], "it must be an integer of 1 or more"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--what"], "unrecognized arguments: --what; see --help"),
    ],
)
def test_wrong_options(capsys, arguments, said):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2 and said in capsys.readouterr().err


def test_some_cases(few, capsys):
    def listed(only):
        assert run("--list", "--only", only) == command.RIGHT
        return {line.removesuffix(", auto") for line in capsys.readouterr().out.splitlines()}

    queues = {"Queue float32", "Queue bfloat16"}
    assert listed("Queue *") == listed("ueue ") == queues
    assert listed("Queue*,Barr") == queues | {"Barrier"}
    assert listed("Queue float32") == {"Queue float32"}
    assert run("--list", "--only", "ueue *") == command.USAGE


def test_no_such_case(few, capsys):
    assert run("--only", "Nothing") == command.USAGE
    assert "no case has that in its name" in capsys.readouterr().err


@pytest.mark.parametrize("main", [command.main, bench.main, lambda _: doctor_hosts.main()])
def test_ranks_that_cannot_start_end_by_a_message(monkeypatch, main):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="shmemkit.*: there are 2 ranks .WORLD_SIZE., but no variable says"):
        main(["all_reduce"] if main is bench.main else [])


def test_a_deadlock_names_the_case(monkeypatch, capsys):
    """Nothing hangs: rank 1 does not call."""

    def enqueue(self, inputs, outputs):
        if self.me == 0:
            self.call(*inputs, *outputs)

    monkeypatch.setattr(plan, "OPERATIONS", (plan.of_exchanges,))
    monkeypatch.setattr(plan.layers.Queued, "enqueue", enqueue)
    assert run("--only", "Queue float32") == command.WRONG
    assert "failed in Queue float32, 6 items of 12, the first call" in capsys.readouterr().err


def test_soak(few, capsys):
    assert run("--soak", "--seconds", "0.3") == command.RIGHT
    assert "calls on each rank, 0 rounds with wrong results" in capsys.readouterr().out


def test_a_step_that_takes_too_long_ends_the_process(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(command.os, "_exit", ended.append)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)

    def main(world):
        watch = command.Watch(world, 0.5)
        watch("AllReduce auto, back to back")
        watch._give_up()

    spmd(1, main)
    assert ended == [command.WRONG]
    assert (
        "rank 0 hangs in AllReduce auto, back to back: it has not ended in 0.5 s" in capsys.readouterr().err
    )


# ---- machine code

WHOLE = """
.text.kernel:
        /*08e0*/                   BRA.DIV UR14, `(.L_x_8) ;
        /*0900*/                   NOP ;
.L_x_24:
        /*0910*/                   STG.E.128.STRONG.SYS desc[UR12][R6.64], R8 ;
        /*0920*/                   EXIT ;
.L_x_8:
        /*0930*/                   WARPSYNC.COLLECTIVE R9, `(.L_x_25) ;
        /*0940*/                   NOP ;
        /*0950*/                   ENDCOLLECTIVE ;
.L_x_25:
        /*0960*/               @PT BRA `(.L_x_24) ;
"""
STORE = "STG.E.128.STRONG.SYS desc[UR12][R6.64], R8"


@pytest.mark.parametrize(
    "before, after, reason",
    [
        (f"   {STORE}", f"@P3 {STORE}", "not by all threads"),
        ("@PT BRA", "@P0 BRA", "others join the warp by @P0 BRA `(.L_x_24)"),
        ("ENDCOLLECTIVE", "BSSY B0, `(.L_x_8)", "others join the warp"),
    ],
)
@pytest.mark.parametrize("tool", ["nvdisasm", "cuobjdump"])
def test_a_line_that_several_instructions_store(tool, before, after, reason):
    """The rule itself is tested in test_machine_code.py; here, what the tools print."""

    def printed(text):
        if tool == "nvdisasm":
            return text
        for label, address in (("24", "0x910"), ("25", "0x960"), ("8", "0x930")):
            text = text.replace(f".L_x_{label}:\n", "").replace(f"`(.L_x_{label})", address)
        return text.replace(".text.kernel:", "\t\tFunction : kernel").replace(" ;", " ;  /* 0x000ea2 */")

    assert before in WHOLE
    assert machine_code.lines_of(printed(WHOLE)) == ([1], [], [])
    (line,) = machine_code.lines_of(printed(WHOLE.replace(before, after))).torn
    assert line.startswith(f"@P3 {STORE}" if "@P3" in after else STORE)
    assert reason in line or tool == "cuobjdump" and reason.partition(" by ")[0] in line
