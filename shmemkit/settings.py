"""What users set: switches in the environment, integers in calls."""

import operator
import os

_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def switch(variable, default):
    """Whether the environment's `variable` is on; `default` where it is not set. ValueError for any other
    text than 0, 1, true, false, yes, no, on and off."""
    text = os.environ.get(variable, "").strip()
    try:
        return _WORDS[text.lower()] if text else default
    except KeyError:
        raise ValueError(f"{variable}={text!r}: {', '.join(_WORDS)} are allowed") from None


def integer(who, argument, value):
    """`value` as an int; TypeError for what is none, True and False among them."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{who}: {argument}={value!r}: an integer is allowed") from None
