"""What protocols need of machine code, read there: in that of this Python, and of all others whose code lies
beside it (``machine_code.py``)."""

import platform
import re

import pytest
from machine_code import folders, kernels, sources, versions_of
from sass import accesses, whole_lines
from sass_rules import broken

from shmemkit.compiler.machine_code import accesses as accesses_of_llvm

# How many lines a warp stores, and loads, after each of its barriers; "n" is the number in the kernel's name.
# (They are loaded in two places. Of those that wait for flags ptxas leaves the flags, which are not counted.)
# SEVERAL: in a loop over what shared memory has, unrolled as compilers like: a line after each barrier.
SEVERAL = "several"
LINES = {
    r"collectives.schedules.exchange-ll128\[.*?(?P<n>\d+),\w+\]": (["n"], ["n"]),
    r"collectives.schedules.two_shot-ll128\[.*?(?P<n>\d+),\w+\]": (["n"] * 2, ["n"] * 2),
    r"collectives.schedules.rows-ll128": ([1], [1]),
    r"collectives.schedules.rooted-(scatter|gather)\[ll128": ([1], [1]),
    r"collectives.schedules.rooted-broadcast\[ll128": ([1] * 7, [1]),
    r"collectives.schedules.rooted-reduce \w+ \w+ of (?P<n>\d+)\[ll128": ([1], ["n"]),
    r"collectives.schedules.rooted-reduce \w+ \w+\[ll128": ([1], [1] * 2),
    r"gemm.all_reduce.ll128-64x64 one-": (SEVERAL, [10]),
    r"gemm.all_reduce.ll128-64x32 one split float32-": (SEVERAL, [20]),
    r"gemm.all_reduce.ll128-64x128 one split-": (SEVERAL, [16]),
    r"gemm.all_reduce.ll128-64x128 one float32-": (SEVERAL, [16]),
    r"gemm.all_reduce.ll128-64x96 two-": (SEVERAL, [3, 4]),
    r"gemm.all_reduce.ll128-64x128 two split float32-": (SEVERAL, [5, 8]),
    r"gemm.reduce_scatter.ll128-128x(128|64 float32)-": (SEVERAL, [12, 12]),
    r"gemm.reduce_scatter.ll128-128x128 of 16-": (SEVERAL, [16, 16]),
    r"gemm.reduce_scatter.ll128-128x128 everywhere-": (SEVERAL, [4, 4, 9, 12]),
    r"gemm.reduce_scatter.ll128-128x64 everywhere-": (SEVERAL, [5, 8, 8, 12]),
    r"gemm.reduce_scatter.ll128-128x64 everywhere float32-": (SEVERAL, [2, 2, 9, 12]),
}
# Threads also store and load packets of their own, which are not counted.
BESIDE_PACKETS = {
    r"moe.combine-expert_combine": ([1, 1], [4]),
    r"moe.dispatch-expert_dispatch": ([1] * 28, [4]),
}
FLAG, LOADED = (False, 32), (False, 128)
ASSEMBLED = r"mov\.u32 l, %laneid|bar\.warp\.sync 0xffffffff; ld\.relaxed"  # how PTX stores and loads lines


def lines_of(name, table):
    """What the table says of a kernel, or None."""
    for pattern, (stores, loads) in table.items():
        if found := re.match(pattern, name):
            numbers = {"n": int(found.groupdict().get("n") or 0)}
            return [
                some if some is SEVERAL else [numbers.get(k, k) for k in some] for some in (stores, loads)
            ]
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in kernels() if lines_of(name, {**LINES, **BESIDE_PACKETS})])
def test_a_line_is_one_instruction_of_a_warp(code, name):
    expected = lines_of(name, LINES)
    both = "stores", "loads"
    stores, loads = whole_lines(code(name).sass, both, () if expected else both)
    expected_stores, expected_loads = expected or lines_of(name, BESIDE_PACKETS)
    assert loads == expected_loads
    assert set(stores) == {1} if expected_stores is SEVERAL else stores == expected_stores


@pytest.mark.slow
@pytest.mark.parametrize("name", kernels())
def test_the_lemmas_hold(code, name):
    """ptxas makes no two accesses of one, and leaves none out (copies, for warps that were divided, are
    more): a packet of 16 bytes shows that it has arrived only if it arrives as a whole. And what all threads
    of a warp do, or one of them, they do (docs/machine_code.md)."""
    kernel = code(name)
    assert not broken(kernel.sass)
    in_ptx, in_sass = accesses(kernel.ptx), accesses(kernel.sass)
    if re.search(ASSEMBLED, kernel.ptx) and FLAG not in in_ptx:
        in_ptx[LOADED] -= in_sass.pop(FLAG)
    assert in_ptx.keys() == in_sass.keys()
    assert all(in_sass[kind] >= in_ptx[kind] for kind in in_ptx), (in_ptx, in_sass)
    if re.search(ASSEMBLED, kernel.ptx):
        assert lines_of(name, {**LINES, **BESIDE_PACKETS}), "it has lines of LL128: say how many, in LINES"


def test_torn_lines_are_found(code, code_of):
    """Of Python 3.12 and newer; 3.11's bytecode gives one store."""
    python = versions_of(folders()[code_of])["python"] if code_of else platform.python_version()
    torn = code("torn_lines-torn_line-sm_90a").sass
    if tuple(map(int, python.split(".")[:2])) < (3, 12):
        assert whole_lines(torn) == [[1], []]
    else:
        with pytest.raises(AssertionError, match="not by all threads of a warp|the warp may part"):
            whole_lines(torn)


def test_settings_that_change_the_code_have_a_folder_of_their_own(monkeypatch):
    for name in ("SHMEMKIT_TIMEOUT", "NUMBA_OPT"):
        monkeypatch.setenv(name, "1")
        assert sources.__wrapped__() != sources()
        monkeypatch.delenv(name)


# ---- the rule itself

STORE, LOAD = "STG.E.128.STRONG.SYS desc[UR4][R2.64], R8", "LDG.E.128.STRONG.SYS R8, desc[UR4][R2.64]"
ASIDE = ["BRA.DIV UR5, `(.L0)", "NOP"]
BARRIER_ASIDE = [".L0:", "BSSY B0, `(.L8)", "WARPSYNC.COLLECTIVE R9, `(.L9)", "NOP", "ENDCOLLECTIVE", ".L9:"]
BARRIER_ASIDE += ["BSYNC B0", ".L8:"]


def of(*steps):
    return "".join(f"{step}\n" for step in ("function:", *steps))


@pytest.mark.parametrize(
    "steps, stores, loads",
    [
        (["NOP", "SEL R10, R6, R10, P0", STORE, STORE, "NOP", STORE], [1, 2], []),
        (["@P0 BRA `(.L1)", "NOP", STORE, ".L1:", "EXIT"], [1], []),
        ([*ASIDE, ".L7:", LOAD, "EXIT", *BARRIER_ASIDE, "BRA `(.L7)"], [], [1]),
        ([*ASIDE, STORE, ".L7:", "EXIT", *BARRIER_ASIDE, "MOV R4, R5", STORE, "BRA `(.L7)"], [1], []),
        ([".L1:", "WARPSYNC.ALL", LOAD, LOAD, "VOTE.ANY P0, P0", "@P0 BRA `(.L1)"], [], [2]),
        (["WARPSYNC R4", "ST.E.128.STRONG.SYS [R2.64], R8"], [1], []),
    ],
)
def test_whole_lines(steps, stores, loads):
    assert whole_lines(of(*steps)) == [stores, loads]


@pytest.mark.parametrize(
    "steps, why",
    [
        (["NOP", f"@P1 {STORE}"], "not by all threads of a warp"),
        (["NOP", f"@!UP1 {LOAD}"], "not by all threads of a warp"),
        (["NOP", "@P1 BRA `(.L3)", STORE, ".L3:"], "the warp may part"),
        (["NOP", STORE, "@P1 EXIT", STORE], "the warp may part"),
        (["NOP", "BRX R4 -0x10", STORE], "the warp may part"),
        (["@P1 BRA `(.L3)", "NOP", ".L3:", STORE], "others join the warp"),
        (["NOP", "BRA `(.L3)", "@P1 BRA `(.L3)", ".L3:", STORE], "others join the warp"),
        ([*ASIDE, ".L7:", LOAD, *BARRIER_ASIDE, "@P0 BRA `(.L7)"], "others join the warp"),
        ([STORE], "no barrier of the warp"),
        (["function:", "NOP", "RET.REL.NODEC R20 `(_Z0)", "function:", STORE], "no barrier of the warp"),
        ([*ASIDE, STORE, STORE, "EXIT", *BARRIER_ASIDE, STORE], "for divided warps"),
    ],
)
def test_lines_that_are_not_whole(steps, why):
    with pytest.raises(AssertionError, match=why):
        whole_lines(of(*steps))


def test_lines_beside_packets():
    text = of("@P0 STG.E.128.STRONG.SYS desc[UR4][R4.64], R8", ".L1:", "@P0 BRA `(.L1)", STORE, "NOP", STORE)
    assert whole_lines(text, ["stores"], ["stores"]) == [[1], []]
    with pytest.raises(AssertionError, match="the warp may part"):  # not one of a whole warp
        whole_lines(text.replace("NOP\n", ""), ["stores"], ["stores"])
    with pytest.raises(AssertionError, match="it loads no line"):
        whole_lines(text, ["stores", "loads"], ["stores"])


@pytest.mark.parametrize("torn, whole", [(STORE, LOAD), (LOAD, STORE)])
def test_lines_that_are_torn_beside_whole_ones_of_the_other_kind(torn, whole):
    """Also where packets are stored and loaded by threads alone; where they are not, always."""
    both, text = ["stores", "loads"], of("NOP", whole, "NOP", f"@P0 {torn}", f"@!P0 {torn}")
    for packets in ([], both):
        with pytest.raises(AssertionError, match=f"(?s)@P0 {torn[:3]}.*@!P0 {torn[:3]}"):
            whole_lines(text, both, packets)
    (other,) = {"stores", "loads"} - {"stores" if whole is STORE else "loads"}
    with pytest.raises(AssertionError, match="not by all threads"):
        whole_lines(of("NOP", STORE, "NOP", LOAD, "NOP", f"@P0 {torn}"), both, {*both} - {other})


def test_which_accesses_a_kernel_has():
    line, packet = "bar.warp.sync 0xffffffff; {}", "{{ {} }}"
    store, load = "st.relaxed.sys.global.v2.b64 [$0], {$1, high}; ", "ld.relaxed.sys.global.b128 p, [$2]; "
    for snippets, found in {
        (line.format(store),): ({"stores"}, set()),
        (line.format(store + store), packet.format(load)): ({"stores"}, {"loads"}),
        (line.format(load.replace("b128 p", "v2.b64 {$0, $1}")), packet.format(store)): (
            {"loads"},
            {"stores"},
        ),
        (packet.format("st.relaxed.sys.global.u64 [$0], $1;"),): (set(), set()),
    }.items():
        llvm = "".join(f'  call void asm sideeffect "{text}", "l,l"(i64 %.1)\n' for text in snippets)
        assert accesses_of_llvm(llvm) == found


def test_accesses():
    ptx = """
	st.relaxed.sys.global.v2.b64 [%rd1], {%rd2, %rd3};
	{ .reg .b64 a; ld.acquire.sys.global.u64 %rd1, [%rd2]; st.relaxed.sys.global.u32 [%rd1], %r1; }
	st.global.u32 [%rd1], %r1;
"""
    sass = of(
        STORE, "@P0 LD.E.64.STRONG.SYS R8, [R2.64]", "STG.E.STRONG.SYS [R2.64], R1", "STG.E [R2.64], R1"
    )
    assert accesses(ptx) == accesses(sass) == {(True, 128): 1, (False, 64): 1, (True, 32): 1}
