"""Secrets where none belong: settings end in a plan, a request and logs, which many can read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from planning.findings import Finding
from planning.schema import RunConfig

# Forms that nothing but a secret has, by their issuers' documentation.
_FORMS = {
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a signed URL": r"(?i)[?&](?:x-amz-(?:signature|credential|security-token)|x-goog-signature"
    r"|signature|sig|access_token)=",
    "a password in a URL": r"\w://[^/\s:@]+:[^/\s@]+@",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,})",
    "a GitLab token": r"\bglpat-[\w-]{16,}",
    "a Slack token": r"\bxox[abeoprs]-[\w-]{10,}",
    "an API key": r"\b(?:sk|nvapi|rk)-[\w-]{20,}|\bAIza[\w-]{30,}",
    "a JSON web token": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",
}
_KNOWN = [(what, re.compile(form)) for what, form in _FORMS.items()]
_NAMES = re.compile(
    r"(?i)(?:^|[_-])(?:(?:api|ssh|access|private|secret)?_?key|token|secret|pass(?:word|wd|phrase)?"
    r"|pwd|credentials?|auth)(?:[_-]|$)"
)
# What a name like TOKENIZER_KEY_FILE may well hold: where something is, not what it is.
_HARMLESS = re.compile(r"(?i)arn:aws[\w-]*:.*|[/~.].*|\w+://\S*|[\d.]+|true|false|none|null|auto")
# 40 characters of base64, unless they begin as a path does.
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+])(?!/)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
ENTROPY = 2.8  # bits a character: words of a language have less, keys have more
_HIDDEN = "<secret>"
SHORTEST = 8  # characters of a value worth the suspicion

FIX = (
    "leave it out: give the job's role the permission instead, or keep the secret in AWS Secrets "
    "Manager (Kubernetes: a Secret) and let the job read it there; and replace the secret, which "
    "the shell's history has now"
)


def kind(value: str, name: str = "") -> str | None:
    """What kind of secret a text seems to be, or None. name: the name under which it is given."""
    for what, form in _KNOWN:
        if form.search(value):
            return what
    if any(_mixed(found) and entropy(found) > 4 for found in _AWS_SECRET.findall(value)):
        return "an AWS secret key"
    if (
        _NAMES.search(name)
        and len(value) >= SHORTEST
        and not _HARMLESS.fullmatch(value)
        and entropy(value) >= ENTROPY
    ):
        return f"a secret, being named {name}"
    return None


def entropy(text: str) -> float:
    """Shannon's, in bits a character."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def _mixed(text: str) -> bool:
    return all(any(test(c) for c in text) for test in (str.islower, str.isupper, str.isdigit))


# Settings whose values stand under names of the user's: such a name may tell.
_NAMED = ("launch.environment", "launch.tags", "launch.annotations")
_ASSIGNED = re.compile(r"(?:--[\w-]+[= ])?([A-Za-z_]\w*)=(.+)")  # --env=NAME=VALUE


def check(config: RunConfig) -> list[Finding]:
    """An error for every setting that seems to hold a secret; none repeats it."""
    return [
        Finding("secret", "error", setting, f"it looks like {what}", FIX, "launch/secrets.py")
        for setting, what in _found("", config.model_dump(mode="json"))
    ]


def _found(setting: str, value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            told = str(key) if setting in _NAMED else ""
            if (what := kind(str(key))) is not None:
                yield setting, f"{what} (a name in it)"
                continue
            yield from _found(f"{setting}.{key}".lstrip("."), inner, told)
    elif isinstance(value, list):
        for inner in value:
            yield from _found(setting, inner)
    elif isinstance(value, str):
        what = kind(value, name)
        if what is None and setting == "launch.options" and (pair := _ASSIGNED.fullmatch(value)):
            what = kind(pair[2], pair[1])
        if what is not None:
            yield setting, what


def redact(word: str) -> str:
    """A word of the command line as it may be kept: without what seems a secret."""
    name, equals, value = word.partition("=")
    group, _, last = name.lstrip("+").rpartition(".")
    if equals and kind(value, last if group in _NAMED else ""):
        return f"{name}={_HIDDEN}"
    return _HIDDEN if kind(word) else word


def hide(text: str) -> str:
    """What is said on the screen, without what seems a secret: a word that cannot be read is
    repeated before anything is checked."""
    for what, form in _KNOWN:
        start = 0
        while found := form.search(text, start):
            end = len(text) if what == "a private key" else _rest(text, found.end())
            text = f"{text[: found.start()]}{_HIDDEN}{text[end:]}"
            start = found.start() + len(_HIDDEN)
    return _NAMED_VALUE.sub(lambda m: m[1] + _HIDDEN if kind(m[3], m[2]) else m[0], text)


_ENDS = re.compile(r"[\s'\",}\]]|$")
_NAMED_VALUE = re.compile(r"((?:^|[\s.{,+\"'])(\w+)[=:]['\"]*)([^\s'\",}\]]+)")


def _rest(text: str, start: int) -> int:
    found = _ENDS.search(text, start)
    return len(text) if found is None else found.start()
