"""The pytest plugin: kernels of several ranks in ordinary tests, on the emulator.

    @pytest.mark.schedules(deliveries=("eager", "unordered"), seeds=range(20))
    def test_ring(pes):
        assert pes(4).run(main) == [3, 0, 1, 2]

Races are looked for, each schedule is a test of its own (``test_ring[unordered-7]``), and what fails is shown
as the emulator's report or the assertion of `main`, not as the way through the scheduler. docs/testing.md has
more. Nothing of the emulator, nor Numba, is imported before a test uses the fixture.
"""

import os
import shlex
from typing import Any

import pytest

from .support import progress
from .support.settings import shown, switch

DELIVERIES = ("eager", "ordered", "unordered")
_FAILED = pytest.StashKey()  # of a test: what is said about the run that failed


# ---- options and schedules


def pytest_addoption(parser):
    group = parser.getgroup("shmemkit", "SHMEM kernels on the emulator (shmemkit)")
    group.addoption(
        "--shmem-seeds",
        type=int,
        metavar="N",
        help="run each test that uses the fixture pes under the random schedules of the seeds 0 to N - 1; "
        "0: first come, first served",
    )
    group.addoption(
        "--shmem-delivery",
        action="append",
        choices=(*DELIVERIES, "all"),
        help="when messages arrive in the tests that use pes; may be given several times",
    )


@pytest.hookimpl(trylast=True)  # after the terminal's
def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "schedules(deliveries=('eager', 'unordered'), seeds=range(20)): the deliveries and seeds under which "
        "a test runs that uses the fixture pes",
    )
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    progress.end_line = reporter and reporter.ensure_newline


def pytest_generate_tests(metafunc):
    if "pes" not in metafunc.fixturenames:
        return
    schedules = _schedules(metafunc.config, metafunc.definition.get_closest_marker("schedules"))
    if schedules is not None:
        metafunc.parametrize("pes", schedules, indirect=True, ids=[_id(*s) for s in schedules])


def _schedules(config, marker):
    """Each (delivery, seed) of a test with that marker, or None for the defaults. What the command line says
    goes before the environment, and that before the marker."""
    deliveries, seeds = _of_marker(marker)
    delivery, seed = os.environ.get("SHMEMKIT_DELIVERY"), os.environ.get("SHMEMKIT_SEED", "").strip()
    if delivery:
        deliveries = [_checked("SHMEMKIT_DELIVERY", delivery)]
    if seed:
        try:
            seeds = [int(seed)]
        except ValueError:
            raise pytest.UsageError(f"SHMEMKIT_SEED is {seed!r}; it must be an integer") from None
    given, n = config.getoption("shmem_delivery"), config.getoption("shmem_seeds")
    if given:
        deliveries = DELIVERIES if "all" in given else list(dict.fromkeys(given))
    if n is not None:
        if n < 0:
            raise pytest.UsageError(f"--shmem-seeds is {n}; it must be 0 or more")
        seeds = range(n) if n else [None]
    return _product(deliveries, seeds) or None


def _product(deliveries, seeds):
    if deliveries is None and seeds is None:
        return []
    return [(d, s) for d in deliveries or ["eager"] for s in seeds or [None]]


def _of_marker(marker):
    """-> deliveries, seeds; None and None without a marker"""
    return (None, None) if marker is None else _marked(*marker.args, **marker.kwargs)


def _marked(*args, deliveries=("eager", "unordered"), seeds=range(20), **others):
    if args or others:
        raise pytest.UsageError(
            f"@pytest.mark.schedules: {args or others} is given; it must be deliveries= or seeds="
        )
    deliveries = (deliveries,) if isinstance(deliveries, str) else tuple(deliveries)
    try:
        seeds = list(seeds)
    except TypeError:
        raise pytest.UsageError(
            f"@pytest.mark.schedules: seeds is {shown(seeds)}; it must be a sequence, such as range(20)"
        ) from None
    if not deliveries or not seeds:
        raise pytest.UsageError(
            "@pytest.mark.schedules: deliveries or seeds is empty; it must have one element or more"
        )
    for seed in seeds:
        if seed is not None and not hasattr(seed, "__index__"):
            raise pytest.UsageError(
                f"@pytest.mark.schedules: a seed is {shown(seed)}; it must be an integer or None"
            )
    return [_checked("@pytest.mark.schedules: a delivery", d) for d in deliveries], seeds


def _checked(source, delivery):
    if delivery not in DELIVERIES:
        from .emu.network import checked_delivery

        try:
            checked_delivery(source, delivery)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(str(error)) from None
    return delivery


def _id(delivery, seed):
    return delivery if seed is None else f"{delivery}-{seed}"


# ---- the fixture


@pytest.fixture
def pes(request):
    """``pes(n)`` are n ranks of the emulator. ``pes(n).run(main, *args)`` is the list of what ``main(*args)``
    returned on each rank.

    pes(n, local_size=None, heap_size=None, races=True, delivery=, seed=)

    As `shmemkit.emu.run` takes them. Delivery and seed are by default those of this test: see the marker
    `schedules`. Races are looked for, unless SHMEMKIT_RACES is off.
    """
    delivery, seed = getattr(request, "param", (None, None))
    races = switch("SHMEMKIT_RACES", True)
    return _Pes(request, {"races": races, "delivery": delivery, "seed": seed})


class _Pes:
    """What the fixture gives to a test."""

    def __init__(self, request, defaults):
        self._request, self._defaults = request, defaults

    def __call__(self, n, **options):
        return PEs(self._request, n, {**self._defaults, **options})

    def __getattr__(self, name):
        raise AttributeError(
            f"pes has no {name}. Call pes with the number of ranks first, as in pes(4).run(main)"
        )

    def __repr__(self):
        return f"<pes: {', '.join(f'{name} {value}' for name, value in self._defaults.items())}>"


class PEs:
    """`n` ranks that a test runs programs on."""

    def __init__(self, request, n, options):
        self._request, self._n, self._options = request, n, options

    def run(self, main, *args):
        """Run ``main(*args)`` on each rank. -> the list of what each returned

        Raises what `shmemkit.emu.run` raises, without the frames of the emulator.
        """
        __tracebackhide__ = True
        from .emu import EmulatorError, run
        from .emu.run import current_host, schedule_of

        _, delivery, seed = schedule_of(**{k: self._options[k] for k in ("races", "delivery", "seed")})
        ranks = []

        def main_of_this_rank(*args):
            try:
                return main(*args)
            except Exception:
                host: Any = current_host()
                ranks.append(host.pe)
                raise

        if self._request.config.getoption("fulltrace"):
            return run(main_of_this_rank, self._n, args, **self._options)
        try:
            return run(main_of_this_rank, self._n, args, **self._options)
        except EmulatorError as error:
            self._failed("")
            raise error.with_traceback(None) from None
        except Exception as error:
            where = f"rank {ranks[0]} of {self._n}, " if ranks else ""
            self._failed(f"{where}delivery {delivery!r}, seed {seed}")
            inner = _called_by(main_of_this_rank.__code__, error.__traceback__)
            raise error.with_traceback(inner)  # noqa: B904  the same one

    def _failed(self, what):
        """Remember what is said of this run besides the exception."""
        node = self._request.node
        node.stash[_FAILED] = f"{what}\n{_command(node)}".lstrip("\n")


def _called_by(code, traceback):
    """The part of `traceback` that the innermost frame of `code` has called; all of it if there is none."""
    found, entry = traceback, traceback
    while entry is not None:
        if entry.tb_frame.f_code is code:
            found = entry.tb_next
        entry = entry.tb_next
    return found


def _command(node):
    """What runs this test again, under the same schedule. (The name of a test with a schedule that was chosen
    on the command line is known only where it is chosen again.)"""
    command = f"pytest {shlex.quote(node.nodeid)}"
    if not switch("SHMEMKIT_RACES", True):
        command = f"SHMEMKIT_RACES=0 {command}"
    schedule = getattr(getattr(node, "callspec", None), "params", {}).get("pes")
    if schedule is None or schedule in _product(*_of_marker(node.get_closest_marker("schedules"))):
        return command
    delivery, seed = schedule
    chosen = f"SHMEMKIT_DELIVERY={delivery}" + (f" SHMEMKIT_SEED={seed}" if seed is not None else "")
    return f"{chosen} {command}"


# ---- failures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure of ``pes(n).run(main)`` begins in `main`, and says what runs it again."""
    entries = call.excinfo.traceback if call.excinfo is not None and _FAILED in item.stash else []
    runs = [i for i, entry in enumerate(entries) if entry.frame.code.raw is PEs.run.__code__]
    if call.excinfo is not None and runs and entries[runs[-1] + 1 :]:
        call.excinfo.traceback = entries[runs[-1] + 1 :]
    report = yield
    if runs and report.failed:
        report.sections.append(("the same again", item.stash[_FAILED]))
    return report
