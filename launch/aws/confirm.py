"""What costs money or cannot be undone is done after a person has typed a word for it."""

from __future__ import annotations

from planning.findings import ChoiceError, Finding


def typed(word: str, doing: str, given: str | None = None) -> None:
    """ChoiceError unless `word` is typed now, or was `given` on the command line (--confirm)."""
    if given is None:
        try:
            given = input(f"to {doing}, type {word}: ").strip()
        except EOFError:  # no terminal
            given = ""
    if given != word:
        raise ChoiceError(
            Finding(
                "not-confirmed",
                "error",
                "confirmation",
                f"nothing is done: {given!r} is not {word}",
                f"to {doing}, type {word}",
            )
        )
