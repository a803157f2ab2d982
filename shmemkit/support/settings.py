"""What users set: switches in the environment, integers and names in calls."""

import operator
import os

BACKENDS = ("auto", "nvshmem", "emulator")
SWITCHES = (
    *("SHMEMKIT_CACHE", "SHMEMKIT_CACHE_KERNELS", "SHMEMKIT_OVERSUBSCRIBE", "SHMEMKIT_RACES"),
    *("SHMEMKIT_TYPING", "SHMEMKIT_UNINITIALIZED", "SHMEMKIT_FULL_TRACEBACK"),
)
VARIABLES = [  # the last three are of shmemkit's own tests
    *SWITCHES,
    *"SHMEMKIT_BACKEND SHMEMKIT_HOST_ID SHMEMKIT_LOCAL_SIZE SHMEMKIT_TIMEOUT SHMEMKIT_DELIVERY".split(),
    *"SHMEMKIT_SEED SHMEMKIT_EMULATED_GPU SHMEMKIT_TUNING SHMEMKIT_CACHE_DIR SHMEMKIT_PROGRESS".split(),
    *"SHMEMKIT_TIMELINE SHMEMKIT_SECRET SHMEMKIT_PORT SHMEMKIT_MPIRUN SHMEMKIT_PYTHON".split(),
    *"SHMEMKIT_REQUIRE_PTXAS SHMEMKIT_LIST_SKIPPED SHMEMKIT_MACHINE_CODE".split(),
]
_WORDS: dict[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def switch(variable, default):
    """Whether the environment's `variable` is on; `default` where it is not set. ValueError for any other
    text than 0, 1, true, false, yes, no, on and off."""
    text = os.environ.get(variable, "").strip()
    try:
        return _WORDS[text.lower()] if text else default
    except KeyError:
        raise ValueError(f"{variable} is {text!r}; it must be {listed(_WORDS)}") from None


def backend():
    """What SHMEMKIT_BACKEND says, "auto" if nothing. ValueError for any other text than BACKENDS."""
    text = os.environ.get("SHMEMKIT_BACKEND", "").strip() or "auto"
    if text not in BACKENDS:
        raise ValueError(f"SHMEMKIT_BACKEND is {text!r}; it must be {listed(BACKENDS)}")
    return text


def unknown_variables():
    """-> a line for each SHMEMKIT_ variable of the environment that does not exist, with the nearest one"""
    lines = []
    for name in sorted(os.environ):
        if name.startswith("SHMEMKIT_") and name not in VARIABLES:
            from difflib import get_close_matches

            near = get_close_matches(name, VARIABLES, 1, 0.8)
            also = f"; do you mean {near[0]}?" if near else ""
            lines.append(f"the environment variable {name} does not exist, and has no effect{also}")
    return lines


def listed(words, last="or"):
    """ "fp16, bf16 or fp32" """
    *others, end = map(str, words)
    return f"{', '.join(others)} {last} {end}" if others else end


def shown(value):
    """`value` in an error message: itself if that is short, else "a list" or "a numpy.ndarray"."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{getattr(value, 'item', lambda: value)()!r:.60}"  # of NumPy's float64: 1.0
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def array_text(array):
    """ "float32 (4, 8)", and the strides of an array that is not C-contiguous"""
    strides = "" if array.flags.c_contiguous else f" with strides {array.strides}"
    return f"{array.dtype} {array.shape}{strides}"


def integer(who, argument, value, least=None, most=None):
    """`value` as an int. TypeError if it is not an integer (True and False are not), ValueError if it is less
    than `least` or more than `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise TypeError(f"{who}: {argument} is {shown(value)}; it must be an integer") from None
    if (least is not None and result < least) or (most is not None and result > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most}" if most > least else least
        raise ValueError(f"{who}: {argument} is {result}; it must be {wanted}")
    return result


def n_bytes(text):
    """A number of bytes, as "64M" or "1.5GiB"; 0 for any other text."""
    text = text.strip()
    digits = text.rstrip("kKmMgGtTbBiI")
    scale = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    try:
        return int(float(digits) * scale[text[len(digits) :].upper()[:1]])
    except (KeyError, ValueError, OverflowError):
        return 0


def options_of(who, known, given):
    """`known`, {name: default}, with what is `given` instead, likewise or None. TypeError if that is no dict,
    ValueError if it has another name."""
    if given is not None and not isinstance(given, dict):
        raise TypeError(f"{who}: options is {shown(given)}; it must be a dict")
    for name in given or ():
        if name not in known:
            raise ValueError(f"{who}: options has {name!r}; it must be {listed(known)}")
    return {**known, **(given or {})}


def one_of(who, argument, value, allowed):
    """`value`, one of the names (or None) that are `allowed`. TypeError if it is not a name, ValueError if it
    is another one."""
    if value is None or isinstance(value, str):
        if value in allowed:
            return value
        kind = ValueError
    else:
        kind = TypeError
    raise kind(f"{who}: {argument} is {shown(value)}; it must be {listed(map(repr, allowed))}")
