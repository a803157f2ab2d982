"""The rules for machine code find what breaks a lemma of docs/machine_code.md, and accuse nothing else."""

import re

import pytest
from sass_rules import RULES, broken, steps


def sass(*lines):
    """As nvdisasm prints it: labels begin with a dot."""
    return "\n".join(
        f"{line}:" if line.startswith(".") else f"        /*{16 * i:04x}*/               {line} ;"
        for i, line in enumerate(lines)
    )


PRODUCTS = ("WARPGROUP.ARRIVE", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, UP0")
LOAD = ("SYNCS.ARRIVE.TRANS64 RZ, [UR9], R8", ".L_x_1", "@P0 ELECT P2, URZ, PT", "UTMALDG.2D [UR8], [UR4]")
LOOP = "@P0 BRA.U.ANY `(.L_x_1)"

WAIT = (
    ".L_x_1",
    "NOP",
    "LDG.E.STRONG.SYS R10, desc[UR4][R8.64+0x8]",
    "LDG.E.STRONG.SYS R11, desc[UR4][R6.64+0x8]",
)
VOTE = ("ISETP.NE.AND P0, PT, R11, R12, PT", "ISETP.NE.OR P0, PT, R10, R12, P0", "VOTE.ANY P0, P0")
LINES = ("NOP", "LDG.E.128.STRONG.SYS R8, desc[UR4][R8.64]", "LDG.E.128.STRONG.SYS R4, desc[UR4][R6.64]")
AGAIN = "@P0 BRA `(.L_x_1)"
DIVIDED = ("BRA.DIV UR6, `(.L_x_8)", *LINES, ".L_x_9", "EXIT", ".L_x_8", "WARPSYNC.COLLECTIVE R9, `(.L_x_7)")
DIVIDED += ("NOP", "ENDCOLLECTIVE", ".L_x_7", *LINES[1:], "BRA `(.L_x_9)")

RIGHT = {
    "lines that are awaited": (*WAIT, "WARPSYNC.ALL", *VOTE, AGAIN, *LINES),
    "lines of divided warps, too": (*WAIT, *VOTE, AGAIN, *DIVIDED),
    "packets": ("NOP", "@P0 BRA `(.L_x_2)", "LDG.E.128.STRONG.SYS R8, desc[UR4][R8.64]", ".L_x_2"),
    "a vote and a shuffle": ("WARPSYNC.ALL", "VOTE.ANY P0, P0", "@P0 BRA `(.L_x_2)", "SHFL.IDX PT, R1, R2"),
    "what the warp decides together": ("@UP0 BAR.SYNC 0x0", "@!P1 STG.E.128 desc[UR4][R2.64], R4"),
    "products of one group": (*PRODUCTS, "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"),
    "a label to which nothing goes": (PRODUCTS[0], ".L_x_9", PRODUCTS[1]),
    "a load": (*LOAD, LOOP),
    "a store": (
        "@P0 BRA `(.L_x_3)",
        "UTMASTG.2D [UR8], [UR4]",
        "UTMACMDFLUSH",
        ".L_x_3",
        "DEPBAR.LE SB0, 0x1",
    ),
}
WRONG = {
    "whole line": [
        LINES,
        (*WAIT, AGAIN, *LINES),  # no vote
        (*WAIT, *VOTE, *LINES),  # nothing waits for it
        (*WAIT, *LINES, *VOTE, AGAIN),  # loaded before it
        (*WAIT, *VOTE, LINES[1], AGAIN, *LINES),
        (*WAIT, *VOTE[1:], AGAIN, *LINES),  # of one flag alone
        (*WAIT, *VOTE, "ISETP.NE.AND P0, PT, R1, R2, PT", AGAIN, *LINES),  # another branch
        ("@P1 BRA `(.L_x_3)", *WAIT, *VOTE, AGAIN, ".L_x_3", *LINES),  # a way around it
        (*WAIT, *VOTE, AGAIN, "STG.E [R2.64], R4", WAIT[2], *LINES),  # loaded flags again
        ("BRA.DIV UR6, `(.L_x_8)", *WAIT, *VOTE, AGAIN, *LINES, ".L_x_9", "EXIT", *DIVIDED[6:]),
    ],
    "whole warp": [
        ("@P0 SHFL.IDX PT, R1, R2, RZ, 0x1f",),
        ("@!P3 VOTE.ANY P0, P0",),
        ("@P1 HMMA.16816.F32 R4, R8, R2, R4",),
    ],
    "whole warpgroup": [
        ("@P0 WARPGROUP.ARRIVE",),
        ("@P2 USETMAXREG.DEALLOC.CTAPOOL 0x18",),
        PRODUCTS[1:],
        (PRODUCTS[0], "@P0 BRA `(.L_x_1)", PRODUCTS[1], ".L_x_1"),
        (PRODUCTS[0], ".L_x_1", PRODUCTS[1], "@P0 BRA `(.L_x_1)"),
    ],
    "one elected thread": [
        LOAD,  # once, whoever is there
        (*LOAD[1:], LOOP),  # nobody has said how many bytes come
        (LOAD[0], "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R4", *LOAD[1:], LOOP),
        ("UTMASTG.2D [UR8], [UR4]", "DEPBAR.LE SB0, 0x0"),
        ("UBLKCP.G.S [UR18], [UR17], UR15", "EXIT"),
    ],
}


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_right(lines):
    assert not broken(sass(*lines))


@pytest.mark.parametrize(("lemma", "lines"), [(lemma, lines) for lemma in WRONG for lines in WRONG[lemma]])
def test_wrong(lemma, lines):
    assert list(broken(sass(*lines))) == [lemma]


def test_every_rule_is_a_lemma(pytestconfig):
    assert set(RULES) == set(WRONG)
    page = (pytestconfig.rootpath / "docs" / "machine_code.md").read_text()
    assert set(RULES) <= {heading.lower() for heading in re.findall(r"^## (.*)$", page, re.M)}


@pytest.mark.parametrize("plain", [False, True])
def test_steps(plain):
    text = sass("@!P1 LDG.E R2, desc[UR4][R2.64]", "BRA `(.L_x_1)", ".L_x_1", ".L_x_2", "@UP0 EXIT")
    if plain:
        text = "function:\n" + re.sub(r"^ +/\*.*?\*/ +| ;$", "", text, flags=re.M)
    code = [(step.predicate, step.op) for step in steps("\t.section .text\n//---\n" + text)]
    assert code[plain:] == [("!P1", "LDG.E"), ("", "BRA"), ("", ":"), ("UP0", "EXIT")]
