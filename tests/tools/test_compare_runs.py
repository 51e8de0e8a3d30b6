"""tools/compare_runs.py: a table with the runs' values, a picture, results from S3."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from planning.resolve import resolve
from tests import choices
from tests.launch.aws.fake_aws import Account
from tools import compare_runs


def made(folder: Path, *, steps: int = 20, speed: float = 1000.0, **result: object) -> Path:
    """A run folder as training leaves it; `result` is added to its result.json."""
    folder.mkdir(parents=True)
    plan = resolve(choices.config("model=gpt_tiny", "hardware=cpu")).plan
    assert plan is not None
    (folder / "plan.yaml").write_text(plan.to_yaml())
    per_step = plan.derived.tokens_per_step
    lines = [
        {"step": n, "tokens": n * per_step, "loss": 3.0 - 0.05 * n, "tokens_per_s_per_gpu": speed}
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result:
        (folder / "result.json").write_text(json.dumps({"steps": steps, **result}))
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    capsys.readouterr()
    assert compare_runs.main([str(word) for word in words]) == status
    both = capsys.readouterr()
    return both.out + both.err


def cells(screen: str) -> list[dict[str, str]]:
    """The table's rows by its head, whose columns start where the rows' do."""
    head, *rest = screen.splitlines()
    names = head.split("  ")
    starts = [(name.strip(), head.index(name)) for name in names if name.strip()]
    ends = [at for _, at in starts[1:]] + [None]
    return [
        {name: row[at:end].strip() for (name, at), end in zip(starts, ends, strict=True)}
        for row in rest
        if not row.startswith(("picture", "no run"))
    ]


def test_a_table_of_how_the_runs_of_a_sweep_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "2", status="done", final_loss=2.0, validation_loss=2.1,
         median_tokens_per_s_per_gpu=1234.0, median_mfu=0.412, peak_memory_gib=12.34)  # fmt: skip
    made(tmp_path / "10", status="failed", final_loss=float("nan"))
    first, second = cells(run(capsys, tmp_path))
    assert first == {
        "run": "2", "model": "gpt_tiny", "precision": "bf16", "status": "done", "steps": "20",
        "tokens": "41 K", "loss": "2.0000", "validation": "2.1000", "tokens/s/GPU": "1,234",
        "MFU": "41.2%", "peak GiB": "12.3",
    }  # fmt: skip
    assert (second["run"], second["status"], second["loss"]) == ("10", "failed", "not finite")


def test_a_run_that_is_not_done_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "a", steps=7)
    (row,) = cells(run(capsys, tmp_path / "a"))
    assert (row["status"], row["steps"], row["loss"]) == ("no result yet", "7", "2.6500")


def test_the_picture_is_a_png_where_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        made(tmp_path / name, status="done")
    picture = tmp_path / "new" / "both.png"
    assert f"picture: {picture}" in run(capsys, tmp_path, "--picture", picture)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1300, 910)


def test_many_runs_are_not_all_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(13):
        made(tmp_path / str(number), steps=2)
    screen = run(capsys, tmp_path)
    assert "the picture shows the first 12 of 13 runs" in screen
    assert [row["run"] for row in cells(screen)[:13]] == [str(n) for n in range(13)]


def test_without_a_step_there_is_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "a", steps=0)
    assert "no run has a step yet: no picture" in run(capsys, tmp_path / "a")
    assert not (tmp_path / "a" / "compare.png").exists()


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run is there" in run(capsys, tmp_path, status=2)


def test_results_of_jobs_come_from_s3(
    account: Account,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from launch.aws.record import Job, Record
    from tests.launch.aws.requests import BUCKET, prepare, request

    prepare(account)
    folder = made(tmp_path / "a", steps=0)
    Record(region="us-west-2", account="123456789012", request=request(), max_restarts=0,
           price_per_node_hour=None, jobs=[Job(name="a", created="", reason="first")]
           ).save(folder)  # fmt: skip
    result = {"status": "done", "steps": 5, "final_loss": 1.5}
    body = json.dumps(result)
    account.client("s3").put_object(
        Bucket=BUCKET, Key="slipway/a/checkpoints/result.json", Body=body
    )
    (row,) = cells(run(capsys, folder, "--offline"))
    assert row["status"] == "no result yet"
    (row,) = cells(run(capsys, folder))
    assert (row["status"], row["steps"], row["loss"]) == ("done", "5", "1.5000")
