"""tools/plans.py against moto's server with training plans (tests/launch/aws/fake_aws.py)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.launch.aws.fake_aws import Account
from tools import plans

START = datetime(2030, 1, 1, 11, 30, tzinfo=UTC)


def offering(name: str, hours: int, fee: str, *, days: int = 0, nodes: int = 2) -> dict[str, Any]:
    start = START + timedelta(days=days)
    return {
        "TrainingPlanOfferingId": name, "TargetResources": ["training-job"],
        "DurationHours": hours, "DurationMinutes": 0, "UpfrontFee": fee, "CurrencyCode": "USD",
        "ReservedCapacityOfferings": [
            {"InstanceType": "ml.p6-b200.48xlarge", "InstanceCount": nodes,
             "AvailabilityZone": "us-west-2a", "DurationHours": hours,
             "StartTime": start, "EndTime": start + timedelta(hours=hours)}],
    }  # fmt: skip


@pytest.fixture(autouse=True)
def offered(account: Account) -> None:
    account.offerings = [
        offering("tpo-week", 168, "26880.00"),
        offering("tpo-day", 24, "4608.00", days=-1),
        offering("tpo-other", 24, "9999.00", nodes=4),
    ]


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert plans.main(words) == status
    both = capsys.readouterr()
    return both.out + both.err


def test_a_search_sweeps_durations_and_gives_prices_a_gpu_hour(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = run(capsys, "p6_b200", "--instances", "2")
    head, *rows = screen.splitlines()[:3]
    assert head.split("  ")[0] == "start (UTC)"
    # 26,880 USD for 2 nodes x 8 GPUs x 168 h; 4,608 for 24 h.
    assert [(row.split()[-1], row.split()[-2]) for row in rows] == [
        ("tpo-day", "12.00"), ("tpo-week", "10.00")]  # fmt: skip
    assert "2029-12-31 11:30" in rows[0]
    assert "26,880.00 USD" in rows[1]


def test_by_the_instances_own_name_and_one_duration(capsys: pytest.CaptureFixture[str]) -> None:
    screen = run(capsys, "ml.p6-b200.48xlarge", "--instances", "2", "--hours", "168")
    assert "tpo-week" in screen
    assert "tpo-day" not in screen


def test_nothing_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    screen = run(capsys, "p6_b300", "--hours", "24")
    assert "nothing is offered: 1 x ml.p6-b300.48xlarge for 24 hours" in screen


@pytest.mark.parametrize("words", [("--instances", "0"), ("--instances=-3",), ("--hours", "x")])
def test_what_is_no_number(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plans.main(["p6_b200", *words])
    assert "is no whole number from 1" in capsys.readouterr().err


def test_a_mistyped_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean p6_b200?" in run(capsys, "p6_b20", status=2)


@pytest.mark.parametrize("typed", ["", "y", "yes", "26880", "tpo-week"])
def test_nothing_is_bought_unless_the_price_is_typed(
    account: Account, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, typed: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("builtins.input", lambda _: typed)
    words = ("p6_b200", "--instances", "2", "--buy", "tpo-week", "--name", "block")
    assert "nothing is done" in run(capsys, *words, status=2)
    assert account.calls == []


def test_nothing_is_bought_where_nobody_types(
    account: Account, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def nobody(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    run(capsys, "p6_b200", "--instances", "2", "--buy", "tpo-week", "--name", "b", status=2)
    assert account.calls == []


def test_buying(
    account: Account, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[str] = []

    def person(question: str) -> str:
        asked.append(question)
        return "26880.00"

    monkeypatch.setattr("builtins.input", person)
    words = ("p6_b200", "--instances", "2", "--buy", "tpo-week", "--name", "block")
    screen = run(capsys, *words)
    assert asked == ["to pay 26,880.00 USD now from account 123456789012, not refundable, "
                     "type 26880.00: "]  # fmt: skip
    assert account.calls == ["CreateTrainingPlan"]
    arn = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/block"
    assert f"launch.training_plan={arn}" in screen
    assert "block  pending  2 x ml.p6-b200.48xlarge" in run(capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--buy", "tpo-week"), "it needs the hardware"),
        (("p6_b200", "--instances", "2", "--buy", "tpo-wek", "--name", "b"),
         "did you mean tpo-week?"),
        (("p6_b200", "--instances", "2", "--buy", "tpo-week"), "the plan needs a name"),
    ],
)  # fmt: skip
def test_words_that_cannot_buy(
    account: Account, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    assert says in run(capsys, *words, status=2)
    assert account.calls == []


def test_none_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys) == "no training plan in us-west-2\n"
