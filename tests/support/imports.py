"""Which packages Forerun itself imports; torch and transformers bring others, which differ from version to version."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import builtins, sys
asked, import_ = set(), builtins.__import__

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "").partition(".")[0]
    if importer == "forerun" and not level:
        asked.add(name.partition(".")[0])
    return import_(name, globals, locals, fromlist, level)

builtins.__import__ = watched
{program}
print(*sorted(asked), file=sys.stderr)
"""


def asked_for_by_forerun(program: str) -> set[str]:
    """The packages that Forerun's modules name in `import` statements which `program` runs into, in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(program=program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())
