"""The docs are true: their programs run, they name what there is, their tables are the measured results, and
their links lead on."""

import contextlib
import inspect
import io
import re
import subprocess
import sys
from importlib.metadata import metadata

import pytest
from pages import PAGES, ROOT, programs

import shmemkit as sk
from shmemkit import device
from shmemkit.tools import mpirun

HOST = [
    f"docs/{page}.md"
    for page in "host arrays collectives methods overlap products float8 expert_parallel queue".split()
]
PRIMITIVES = [f"docs/{page}.md" for page in "primitives messages packets tensor_cores timeline".split()]


def text_of(*pages):
    return "\n".join((ROOT / page).read_text() for page in pages)


def output_of(run):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run()
    return printed.getvalue()


def test_readme_shows_example_00():
    (program,) = programs("README.md", "with sk.init()")
    assert (ROOT / "examples" / "00_hello.py").read_text().endswith(program)


LARGE = ("products.md", 2), ("products.md", 1), ("timeline.md", 0), ("expert_parallel.md", 1)
COMPLETE = [
    pytest.param(
        program,
        id=f"{page.relative_to(ROOT)}-{i}",
        marks=[pytest.mark.slow] if (page.name, i) in LARGE else [],
    )
    for page in PAGES
    for i, program in enumerate(programs(page, "import shmemkit", some=False))
    if page.name not in ("README.md", "testing.md") and page.parent.name != "tutorial"  # tests of their own
]


@pytest.mark.parametrize("program", COMPLETE)
def test_program_prints_what_its_comments_say(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    if "import torch" in program:
        pytest.importorskip("torch")
    expected = re.findall(r"print\(.*\)  # (.*)", program)
    assert expected
    if "emu.run" in program or "emu.explore" in program:
        printed = output_of(lambda: exec(program, {}))
    else:
        printed = output_of(lambda: sk.emu.run(lambda: exec(program, {}), 4))
    assert set(expected) <= set(printed.splitlines())


@pytest.mark.parametrize("page", HOST)
def test_pages_of_the_host_api_have_complete_programs_only(page):
    assert programs(page, "", some=False) == programs(page, "import shmemkit", some=False)


def signatures(pages, owner):
    """(name, arguments) of the calls that tables of these pages show in their first column."""
    for row in re.findall(r"^\| (`.*?) \|", text_of(*pages), re.M):
        yield from re.findall(rf"`{owner}(\w+)\(([^`]*)\)`", row)


def parameters(function):
    """As the docs write them, without self and types."""
    found = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return [str(p).replace("'", '"') for p in found if p.name != "self"]


def test_primitives_page_has_all_names_and_their_arguments():
    text = text_of(*PRIMITIVES)
    assert [name for name in device.__all__ if not re.search(rf"`{name}\b", text)] == []
    shown = list(signatures(PRIMITIVES, ""))
    assert len(shown) > 40
    for name, arguments in shown:
        if name != "barrier_all_block":  # both arguments or none, which are two rows
            assert arguments.split(", ") == (parameters(getattr(device, name)) or [""]), name
    for enum in (device.SignalOp, device.ComparisonType, device.Teams, device.SmemAmount):
        row = re.search(rf"^\| `{enum.__name__}` \| (.*) \|", text, re.M)[1]
        assert sorted(re.findall(r"`([A-Z_]+)`", row)) == sorted(enum.__members__)


def test_host_page_has_the_arguments():
    text = text_of(*HOST)
    shown = [(name, arguments, sk.World) for name, arguments in signatures(["docs/host.md"], "")]
    shown += [(name, arguments, sk) for name, arguments in signatures(["docs/host.md"], "sk\\.")]
    shown += [(name, arguments, sk) for name, arguments in signatures(["docs/collectives.md"], "")]
    made = "init|Queue|AllToAllV|Barrier|AllGatherGemm|GemmReduceScatter|ExpertParallel|matmul|Gemm"
    shown += [(name, arguments, sk) for name, arguments in re.findall(rf"`sk\.({made})\((.+?)\)`", text)]
    emulator = re.findall(r"`sk\.emu\.(run|explore)\((.+?)\)`", text, re.S)
    assert len(emulator) == 2
    shown += [(name, " ".join(arguments.split()), sk.emu) for name, arguments in emulator]
    assert len(shown) > 12
    for name, arguments, owner in shown:
        function = getattr(owner, name)
        function = function.__init__ if inspect.isclass(function) else function
        arguments = [argument for argument in arguments.split(", ") if argument != "*"]
        assert arguments == (parameters(function) or [""]), name


@pytest.mark.slow
def test_tables_are_those_of_the_results():
    check = subprocess.run(
        [sys.executable, ROOT / "docs" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_summary_of_the_evaluation_is_of_rows_that_it_shows():
    summary, _, sections = text_of("docs/evaluation.md").partition("## Each operator")
    ends = re.findall(r"^\| (.+?) \| \d \w+†? \| ([\d.]+) .*? \| [\d.]+ \| ([\d.]+) ", summary, re.M)
    assert len(ends) > 10
    for title, *ratios in ends:
        section = sections.partition(f"### {title}\n")[2].partition("\n### ")[0]
        assert [ratio for ratio in ratios if f"| {ratio} |" not in section] == [], title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`.*?`", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def anchors(page):
    """Those that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_programs_named_in_the_docs_exist():
    for page in PAGES:
        for name in re.findall(
            r"\b(?:examples|benchmarks|docs|tests)/[\w/]+\.(?:py|md|json)\b", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_install_page_has_the_extras():
    text = (ROOT / "docs" / "install.md").read_text()
    rows = " ".join(re.findall(r"^\| (`.*?) \|", text.partition("## Starting ranks")[0], re.M))
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(metadata("shmemkit").get_all("Provides-Extra"))


def test_commands_of_the_install_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "hosts"):
        (tmp_path / name).touch()
    text = (ROOT / "docs" / "install.md").read_text()
    commands = re.findall(r"^shmemkit run (.*?)(?:  #.*)?$", text, re.M)
    assert len(commands) > 5
    for command in commands:
        _, program = mpirun.parse(command.split())
        assert program in (
            ["script.py"],
            ["-m", "pytest", "-m", "gpu"],
            ["-m", "shmemkit", "doctor", "--hosts"],
        )


def test_links_of_the_page_on_pypi_are_whole():
    """The installed metadata carries README as PyPI shows it."""
    text = re.sub(r"```.*?```|`.*?`", "", metadata("shmemkit").get_payload(), flags=re.S)
    links = re.findall(r"\]\((.*?)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_method_of_a_collective_has_a_row():
    kinds = {name for name in sk.__all__ if hasattr(getattr(sk, name), "_maker")}
    kinds -= {"AllToAllV"}  # it has one
    found, heading = {kind: set() for kind in kinds}, None
    for line in (ROOT / "docs" / "methods.md").read_text().splitlines():
        heading = (re.match(r"## `sk\.(\w+)", line) or [None, heading])[1]
        if row := re.match(r'\| `"(\w+)"`', line):
            found[heading].add(row[1])
    assert found == {kind: set(getattr(sk, kind).methods) for kind in kinds}
