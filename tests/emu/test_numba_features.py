"""Every feature that numba-cuda documents does what the table in docs/numba.md says."""

from pathlib import Path

import numba_features
import pytest
from numba_features import FEATURES

import shmemkit as sk

PAGE = Path(__file__).parents[2] / "docs" / "numba.md"


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.program.__name__)
def test_feature(feature, races):
    if feature.lacks:
        with pytest.raises(Exception, match="is not emulated"):
            sk.emu.run(numba_features.main, 1, (feature.program,), races=races)
    else:
        sk.emu.run(numba_features.main, 1, (feature.program,), races=races)


def test_the_table_is_that_of_the_page():
    assert numba_features.table() in PAGE.read_text("utf-8")
