"""What .ci/full found, in .ci/full.json: of each part its result, its steps, when, and of which files.

state.py digest                             of the files that tests depend on
state.py record PART DIGEST STATUS STEPS    STEPS: a file of lines "12 s  command"
state.py tell PART ...                      how old the result of each is
"""

import hashlib
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
FILE = TREE / ".ci" / "full.json"
FILES = "shmemkit", "tests", "examples", ".ci", "mpi_launch.sh", "pyproject.toml", ":!.ci/full.json"


def git(*args):
    done = subprocess.run(["git", *args], cwd=TREE, capture_output=True, text=True, check=True)
    return done.stdout


def digest():
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FILES).split("\0")
    told = hashlib.sha256()
    for name in sorted({name for name in names if (TREE / name).is_file()}):
        told.update(f"{name}\n".encode() + hashlib.sha256((TREE / name).read_bytes()).digest())
    return told.hexdigest()[:16]


def results():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def record(part, files, status, steps):
    lines = Path(steps).read_text().splitlines() if Path(steps).exists() else []
    found = {
        "result": "failed" if int(status) else "passed",
        "at": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "digest": files,
        "commit": git("rev-parse", "HEAD").strip(),
        "steps": {command: int(seconds) for seconds, command in (line.split(" s  ", 1) for line in lines)},
    }
    FILE.write_text(json.dumps({**results(), part: found}, indent=1) + "\n")


def tell(*parts):
    """A line for each. It fails nothing."""
    now, found = digest(), results()
    for part in parts:
        if of := found.get(part):
            print(f".ci/full {part}: {of['result']} on {of['at']}, {_age(of, now)}")
        else:
            print(f".ci/full {part}: has not run")


def _age(of, now):
    if of["digest"] == now:
        return "of these files"
    try:
        changed = git("diff", "--name-only", of["commit"], "--", *FILES).splitlines()
    except subprocess.CalledProcessError:
        return "of other files"
    return f"of other files; changed since {of['commit'][:10]}: {len(changed)}"


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    if command == "digest":
        print(digest())
    else:
        {"record": record, "tell": tell}[command](*args)
