"""Machine code, for all tests here: of this Python, and of others whose code lies beside it."""

import pytest
from machine_code import folders, made
from ptx import needs_compiler


def pytest_generate_tests(metafunc):
    if "code_of" in metafunc.fixturenames:
        metafunc.parametrize("code_of", [None, *folders()], ids=["here", *folders()])


@pytest.fixture
def code(code_of):
    """``code(name)``: what has been made of a kernel."""
    needs_compiler()
    if code_of is None:
        return made

    def of_other(name):
        try:
            return made(name, folders()[code_of])
        except KeyError as error:
            pytest.skip(str(error))

    return of_other
