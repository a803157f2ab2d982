"""``shmemkit timeline run.json``: what a timeline says, and a picture of it. See docs/timeline.md."""

import argparse
import os
import sys

from .support import command_line, trace_file


def parser():
    result = argparse.ArgumentParser(
        prog=command_line.name_of("shmemkit.timeline"),
        description="Print the summary of a timeline and draw it. Perfetto (ui.perfetto.dev) opens the file, "
        "too.",
        allow_abbrev=False,
    )
    result.add_argument("file", help="what sk.Timeline, SHMEMKIT_TIMELINE or shmemkit emu --timeline wrote")
    result.add_argument("--svg", metavar="FILE", help="the picture, SVG; default: beside the file")
    result.add_argument(
        "--between",
        nargs=2,
        type=float,
        metavar=("FIRST", "LAST"),
        help="only what is between these times: microseconds, or steps of the emulator",
    )
    return result


def main(argv=None):
    """-> the exit status"""
    options_of = parser()
    options = options_of.parse_args(argv)
    try:
        data = trace_file.load(options.file)
    except (OSError, ValueError) as error:
        options_of.error(str(error))
    if options.between is not None:
        first, last = options.between
        if not first < last:
            options_of.error(f"--between {first:g} {last:g}: the first time must be before the last")
        part = trace_file.between(data, first, last)
        if not part["traceEvents"]:
            end = max((e["ts"] + e.get("dur", 0) for e in data["traceEvents"]), default=0)
            options_of.error(f"--between {first:g} {last:g}: nothing is there; the timeline ends at {end:g}")
        data = part
    print(trace_file.summary(data))
    part = "" if options.between is None else ".{:g}-{:g}".format(*options.between)
    path = options.svg or f"{os.path.splitext(options.file)[0]}{part}.svg"
    if os.path.abspath(path) == os.path.abspath(options.file):
        options_of.error(f"{path} is the timeline; name another file for the picture by --svg")
    try:
        from .support.trace_picture import svg

        text = svg(data)
    except ImportError as error:
        print(f"no picture: {error}; pip install 'shmemkit[bench]'", file=sys.stderr)
        return 0 if options.svg is None else 1
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        options_of.error(str(error))
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
