"""The one entry: `python launch/train.py [group=choice ...] [setting=value ...]`; `-m` sweeps.

Exit status: 0 done (or a plan that is legal and fits), 1 failed while running, 2 the choice is
wrong wherever it runs, 3 this machine cannot run it now, 143 stopped by a signal after saving.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # A script's own folder comes first in sys.path; our packages are in the repository's root.
    sys.path[0] = str(ROOT)

from collections.abc import Callable, Sequence
from io import TextIOWrapper

from launch import usage
from planning.findings import ChoiceError, Finding, Refusal, did_you_mean

STOPPED = 143
MANY = ("-m", "--multirun")
HELP = ("-h", "--help")
# Hydra's own, which print something and start nothing.
HYDRA = (
    *("--cfg", "-c", "--resolve", "--package", "-p", "--info", "-i"),
    *("--hydra-help", "--shell-completion", "-sc", "--version"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line asks for: `words`, or the process's own."""
    given = list(sys.argv[1:] if words is None else words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may be no text
    try:
        options = _options(given)
        if any(option in HELP for option in options):
            print(usage.text(), end="")
            return 0
        if any(option in HYDRA for option in options):
            from launch import compose

            return compose.show(given)
        from launch import sweep

        return sweep.start([w for w in given if w not in MANY], any(o in MANY for o in options))
    except Refusal as refusal:
        return report(refusal)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED


def report(refusal: Refusal) -> int:
    from launch import secrets
    from planning.report import refusal_lines

    print(secrets.hide("\n".join(refusal_lines(refusal))), file=sys.stderr)
    return refusal.exit_status


def _options(words: Sequence[str]) -> list[str]:
    """The options among the words, `--cfg=job` as `--cfg`. Raises ChoiceError for another one."""
    found = []
    for word in words:
        option, _, value = word.partition("=")
        if not word.startswith("-"):
            continue
        known = (*MANY, *HELP, *HYDRA)
        if option not in known:
            bare = word.lstrip("-")
            fix = f"write {bare}, without dashes" if value else "see --help"
            raise ChoiceError(
                Finding(
                    "command-line",
                    "error",
                    word,
                    f"there is no such option{'' if value else did_you_mean(option, known)}",
                    fix,
                )
            )
        found.append(option)
    return found


def leave(command: Callable[[], int]) -> None:
    """Do it and leave with its status, also where nobody reads what is printed any more
    (`| head`)."""
    status = 1
    try:
        status = command()
        if sys.stdout is not None:  # a closed one
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


if __name__ == "__main__":
    leave(main)
