"""Plans and launch settings for runs elsewhere, and the files that say how they should look."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from planning.plan import Plan
from planning.resolve import resolve
from planning.schema import RunConfig
from tests import choices

GOLDEN = Path(__file__).with_name("golden")
# Writes the files anew: to be read in the diff before they are committed.
WRITE = "SLIPWAY_WRITE_GOLDEN"
NAME = "gpt-160m-20261201-103341-a1b2"
MODEL = ("model=gpt_160m", "precision=bf16", "layout=ddp")
ACCOUNT = "111122223333"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/slipway-job"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/slipway:1a2b3c"
TRAINING_PLAN = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-plan/june"
GIVEN = (f"launch.role={ROLE}", f"launch.image={IMAGE}", "launch.bucket=team-runs")


def choose(launch: str, *words: str) -> RunConfig:
    """A choice of 160 M parameters for `launch`; the hardware is p6_b200 unless words name it."""
    hardware = () if any(w.startswith("hardware=") for w in words) else ("hardware=p6_b200",)
    return choices.config(f"launch={launch}", *MODEL, *hardware, *words)


def planned(config: RunConfig) -> Plan:
    plan = resolve(config).plan
    assert plan is not None
    return plan


@cache
def plan(launch: str, *words: str) -> Plan:
    return planned(choose(launch, *words))


def golden(name: str, text: str) -> None:
    """The text is that of the file."""
    path = GOLDEN / name
    if os.environ.get(WRITE):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; {WRITE}=1 writes it anew"
