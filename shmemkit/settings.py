"""Switches that are set in the environment."""

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
