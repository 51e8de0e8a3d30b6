from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.container.hosts import Job, job


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """hosts.job in a folder of the test's; nothing of it is left after the test."""
    made: list[Job] = []

    def make(plan: str, **settings: Any) -> Job:
        folder = tmp_path / f"job-{len(made)}"
        made.append(job(folder, plan, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()
