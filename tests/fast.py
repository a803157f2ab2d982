"""Which tests are slow, and which run. tests/README.md says what for.

    @pytest.mark.slow                                    this test is slow
    @pytest.mark.parametrize("n", [2, *slow(3, 5, 16)])  it is slow with these values
    @pytest.mark.each_value                              it is fast with as few combinations of its parameters
                                                         as have each value once, slow with as few more as
                                                         have each pair of values once, and full with all
                                                         others; of slow values, slow with each value once
    @pytest.mark.every(3)                                of the cases that would be fast, each third is; the
                                                         others are slow
    *in_turn(ways, cases)                                each way, a tuple, with each of the cases, tuples; it
                                                         is fast with one of them
    @examples(40)                                        of hypothesis; a quarter of them in the fast set
    @pytest.mark.full, *full(8, 16)                      too long for slow tests, too

Slow tests run with ``--slow``, with ``-m slow`` (or any other -m that names slow), and when the command line
names them as ``file::test``. So do full ones, with ``--full``, which implies ``--slow``, and ``-m full``.
``--sample`` runs a few slow tests alone, of those that guard what no fast test does: in each file, of every
other function that has no fast case, the first slow case.
"""

import itertools
import os
import zlib

import pytest
from hypothesis import HealthCheck, settings

FULL, QUARTER = 100, 25  # examples of a test that does not say how many

settings.register_profile(
    "full", max_examples=FULL, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.register_profile("fast", settings.get_profile("full"), max_examples=QUARTER)


def slow(*values):
    """`values` for ``parametrize``, with which the test is slow; a tuple for several parameters."""
    return [_marked(value, pytest.mark.slow) for value in values]


def full(*values):
    """Likewise values with which the test is full."""
    return [_marked(value, pytest.mark.full) for value in values]


def _marked(value, mark):
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=mark)


def in_turn(ways, cases):
    """Each of `ways` with each of `cases`, tuples of values for ``parametrize``: fast with one case, the next
    one for each way."""
    return [
        _marked((*way, *case), pytest.mark.slow) if (i - k) % len(cases) else (*way, *case)
        for i, way in enumerate(ways)
        for k, case in enumerate(cases)
    ]


def examples(most, **others):
    """Decorator: hypothesis tries so many examples, or a quarter of them when only the fast set runs."""
    share = settings().max_examples / FULL
    return settings(max_examples=max(1, round(most * share)), **others)


def with_slow(config):
    """Whether the command line asks for slow tests."""
    return _asked(config, "slow") or _asked(config, "full")


def _asked(config, mark):
    return config.getoption(mark) or mark in config.getoption("markexpr")


def several_ranks():
    """Whether pytest runs under several ranks: each skips what is not marked gpu."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1) > 1


def is_chosen(config):
    """Whether tests are chosen otherwise than by marks: names of files, words, one rank of several."""
    options = "keyword", "deselect", "ignore", "ignore_glob", "lf", "collectonly", "sample"
    named = config.args_source is not config.ArgsSource.TESTPATHS
    return named or several_ranks() or any(config.getoption(option, None) for option in options)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run slow tests and all examples of hypothesis, too")
    parser.addoption("--full", action="store_true", help="run full tests, too; implies --slow")
    parser.addoption("--sample", action="store_true", help="run a few slow tests alone")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs with --slow or -m slow only (tests/README.md)")
    config.addinivalue_line("markers", "full: runs with --full or -m full only (tests/README.md)")
    config.addinivalue_line(
        "markers",
        "each_value: fast with each value of each parameter once, slow with each pair of values, else full",
    )
    config.addinivalue_line("markers", "every(n): of the cases that would be fast, each n-th is")
    settings.load_profile("full" if with_slow(config) else "fast")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    mark_each_value(items, with_slow(config))
    mark_every(items)
    chosen = sample_of(items) if config.getoption("sample") else asked_of(items, config)
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[*set(items).difference(chosen)])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that lie together run in one worker, as far as it goes: a kernel is typed once, not in each."""
    if config.getvalue("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)


def asked_of(items, config):
    """Those that the command line asks for, but for other marks."""
    not_asked = [] if with_slow(config) else ["slow"]
    not_asked += [] if _asked(config, "full") else ["full"]
    named = {arg.partition("::")[2] for arg in config.args if "::" in arg}
    return [item for item in items if not any(map(item.get_closest_marker, not_asked)) or _named(item, named)]


def _named(item, named):
    """Whether the command line names this test, or its function."""
    name = item.nodeid.partition("::")[2]
    return name in named or name.partition("[")[0] in named


def mark_each_value(items, with_slow):
    """Mark as slow or full what ``each_value`` leaves out. All that is full is slow, too: unless slow tests
    run, which of the two it is does not matter."""
    of_function = {}
    for item in items:
        chosen = item.get_closest_marker("each_value") and not item.get_closest_marker("full")
        if chosen and "mutate" not in item.fixturenames:  # all steps are taken out
            key = item.nodeid.partition("[")[0], bool(item.get_closest_marker("slow"))
            of_function.setdefault(key, []).append(item)
    for (_, is_slow), combinations in of_function.items():
        chosen = covering(combinations, _parameters)
        rest = [item for item in combinations if item not in set(chosen)]
        paired = set()
        if not is_slow:
            paired = set(covering(rest, _parameters, 2, chosen) if with_slow else rest)
        for item in rest:
            item.add_marker(pytest.mark.slow if item in paired else pytest.mark.full)


def mark_every(items):
    """Mark as slow what ``every`` leaves out. Where it begins depends on the test's name: tests with the same
    parameters have different ones of them."""
    for name, cases in _of_functions(items).items():
        if mark := cases[0].get_closest_marker("every"):
            fast = [case for case in cases if not _is_slow(case)]
            n = min(mark.args[0], len(fast))
            for i, case in enumerate(fast):
                if i % n != zlib.crc32(name.encode()) % n:
                    case.add_marker(pytest.mark.slow)


def sample_of(items):
    """-> in each file, of every other function that has no fast case, the first slow case"""
    of_file = {}
    for cases in _of_functions(items).values():
        slow = [case for case in cases if not case.get_closest_marker("full")]
        if slow and all(map(_is_slow, cases)):
            of_file.setdefault(cases[0].path, []).append(slow[0])
    return [case for found in of_file.values() for case in found[::2]]


def _of_functions(items):
    found = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def _is_slow(item):
    return bool(item.get_closest_marker("slow") or item.get_closest_marker("full"))


def _parameters(item):
    return item.callspec.params


def covering(combinations, parameters, together=1, others=()):
    """-> few of the `combinations` that have each value of each parameter: again and again the one with most
    new values. ``parameters(combination)``: {name: value}; values with the same repr are the same.

    together  2: that have each pair of values of two parameters that any combination has
    others    combinations whose values, or pairs, count as there
    """

    def values_of(combination):
        items = sorted((name, repr(value)) for name, value in parameters(combination).items())
        return set(itertools.combinations(items, together))

    values = {combination: values_of(combination) for combination in combinations}
    missing, chosen = set().union(*values.values()).difference(*map(values_of, others)), []
    while missing:
        best = max(values, key=lambda combination: len(values[combination] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen
