"""Runs scripts one after another, each in a process of its own, with NeMo-Run imported once.

Reads one JSON list a line from stdin, [script, argument, ...]; answers each with its exit status.
What a script prints goes to `<script>.out`. The scripts share nothing but the disk.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback


def run(script: str, words: list[str]) -> None:
    out = os.open(f"{script}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import nemo_run.__main__  # noqa: F401

    for line in sys.stdin:
        script, *words = json.loads(line)
        child = os.fork()
        if child == 0:
            run(script, words)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
