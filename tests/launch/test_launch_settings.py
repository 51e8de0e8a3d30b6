"""Settings of the six kinds of launch: each has its own, and a wrong one says which would do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import pytest

from launch import compose
from planning.findings import ChoiceError
from planning.schema import RunConfig, SageMakerLaunch


def test_each_kind_has_a_choice_of_its_name() -> None:
    kinds = [model.model_fields["kind"].annotation for model in compose._models(
        RunConfig.model_fields["launch"].annotation)]  # fmt: skip
    names = sorted(get_args(kind)[0] for kind in kinds)
    assert names == compose.choices("launch")
    for name in names:
        assert compose.choose([f"launch={name}"]).launch.kind == name


@pytest.mark.parametrize(
    ("words", "setting", "message", "fix"),
    [
        (["launch=sagemaker", "launch.spot=maybe"], "launch.spot", "'maybe' is not legal",
         "take true or false"),
        (["launch=sagemaker", "launch.max_run_hours=0"], "launch.max_run_hours", "0 is not legal",
         "take a number above 0"),
        # The same name in two kinds, with other types.
        (["launch=docker", "launch.image=null"], "launch.image", "null is not legal",
         "take a text"),
        (["launch=sagemaker", "launch.image=7"], "launch.image", "7 is not legal",
         "take a text or null"),
        # Of another kind, of none, of one that is nearly there.
        (["launch.spot=true"], "launch.spot", "it is a setting of launch=sagemaker",
         "choose launch=sagemaker, or leave it out"),
        (["launch=sagemaker", "launch.imag=x"], "launch.imag",
         "there is no such setting; did you mean launch.image?",
         "conf/launch/NAME.yaml has the settings of launch=NAME"),
        (["launch=docker", "+launch.gpus=2"], "launch.gpus",
         "there is no such setting; did you mean hardware.gpu?",
         "conf/launch/NAME.yaml has the settings of launch=NAME"),
        (["launch.kind=sagemaker"], "launch.kind", "it comes with the choice of launch",
         "write launch=local, plan, sagemaker, slurm, docker, kubernetes"),
        # Values under names of one's own.
        (["launch=sagemaker", "launch.environment=3"], "launch.environment", "3 is not legal",
         """take texts with names, 'launch.environment={a: "x", b: "y"}' or null"""),
        (["launch=sagemaker", "launch.environment={A: 1}"], "launch.environment",
         "1 is not legal",
         """take texts with names, 'launch.environment={a: "x", b: "y"}' or null"""),
        (["launch=sagemaker", "launch.environment.A=x"], "launch.environment.A",
         "launch.environment has no such name yet", "add it: +launch.environment.A=VALUE"),
        (["launch=sagemaker", "+launch.tags.a=x", "launch.tags={b: y}"], "launch.tags.b",
         "launch.tags has no such name yet", "add it: +launch.tags.b=VALUE"),
    ],
)  # fmt: skip
def test_a_wrong_setting_says_what_would_do(
    words: list[str], setting: str, message: str, fix: str
) -> None:
    with pytest.raises(ChoiceError) as refused:
        compose.choose(words)
    (finding,) = refused.value.findings
    assert (finding.setting, finding.message, finding.fix) == (setting, message, fix)


def test_names_of_ones_own_are_given_in_two_ways() -> None:
    for word in ("+launch.channels.web=s3://b/x", 'launch.channels={web: "s3://b/x"}'):
        launch = compose.choose(["launch=sagemaker", word]).launch
        assert launch.channels == {"web": "s3://b/x"}  # type: ignore[union-attr]


def test_a_file_with_an_unknown_kind_says_which_there_are() -> None:
    with pytest.raises(ChoiceError) as refused:
        compose.from_values({"launch": {"name": "mine", "kind": "mine"}})
    (finding,) = (f for f in refused.value.findings if f.setting.startswith("launch"))
    assert finding.setting == "launch.kind"
    assert finding.fix == "take one of local, plan, sagemaker, slurm, docker, kubernetes"


def test_a_team_keeps_its_own_values_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(compose.CONF, tmp_path / "conf", ignore=shutil.ignore_patterns("local"))
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")
    (tmp_path / "conf" / "local").mkdir()
    mine = tmp_path / "conf" / "local" / "sagemaker.yaml"
    mine.write_text("bucket: team-runs\nprefix: ours\ntags: {team: research}\n")
    launch = compose.choose(["launch=sagemaker", "launch.prefix=mine", "+launch.tags.a=b"]).launch
    assert isinstance(launch, SageMakerLaunch)
    assert (launch.bucket, launch.prefix) == ("team-runs", "mine")
    assert launch.tags == {"team": "research", "a": "b"}
    assert compose.choose(["launch=local"]).launch.kind == "local"
    mine.write_text("buket: team-runs\n")
    with pytest.raises(ChoiceError) as refused:
        compose.choose(["launch=sagemaker"])
    assert str(refused.value.findings[0]).startswith(
        "launch.buket: there is no such setting; did you mean launch.bucket?"
    )
