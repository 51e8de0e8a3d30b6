"""SageMaker training plans: yours, what is offered, and buying one.

    python tools/plans.py                                    yours
    python tools/plans.py p6_b200 --instances 2              what is offered, all durations
    python tools/plans.py p6_b200 --instances 2 --buy OFFERING --name NAME

A plan is paid for when it is bought, and AWS does not take it back: nothing is bought before its
price is shown and typed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.aws import confirm
from launch.aws.clients import Clients, code, said
from launch.train import report
from planning.findings import ChoiceError, Finding, Refusal, did_you_mean
from planning.hardware import INSTANCES
from planning.report import table

# The search matches a duration exactly, so those that AWS sells are asked for one by one.
HOURS = (24, 48, 72, 96, 120, 144, 168, 336, 504, 672, 720)
TARGET = "training-job"


@dataclass(frozen=True)
class Offering:
    """One that can be bought. gpu_hours: of all its GPUs."""

    id: str
    instance_type: str
    instances: int
    hours: float
    start: datetime
    end: datetime
    zone: str
    fee: float
    currency: str

    @property
    def gpu_hours(self) -> float:
        gpus = INSTANCES[self.instance_type].gpus if self.instance_type in INSTANCES else 1
        return self.instances * gpus * self.hours

    @property
    def per_gpu_hour(self) -> float:
        return self.fee / self.gpu_hours


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    try:
        clients = Clients(given.region)
        if given.hardware is None:
            if given.buy:
                fix = "python tools/plans.py p6_b200 --buy OFFERING --name NAME"
                raise _wrong("--buy", "it needs the hardware that the offering is of", fix)
            return _own(clients)
        found = search(given, clients)
        return _buy(given, found, clients) if given.buy else _show(found, given)
    except Refusal as refusal:
        return report(refusal)
    except KeyboardInterrupt:
        return 143


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/plans.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("hardware", nargs="?", help="p6_b200, ... or ml.p6-b200.48xlarge; without it: your plans")
    add("--instances", type=_positive, default=1, metavar="N", help="nodes (default 1)")
    add("--ultraserver", metavar="TYPE", help="GB200: --instances counts these, ml.u-p6e-gb200x72")
    add("--hours", type=_positive, nargs="+", default=list(HOURS), help="durations to ask for")
    add("--after", type=_date, metavar="YYYY-MM-DD", help="start not before, UTC")
    add("--before", type=_date, metavar="YYYY-MM-DD", help="end not after, UTC")
    add("--region", help="default: the AWS configuration's")
    add("--buy", metavar="OFFERING", help="buy it, after its price was typed")
    add("--name", help="of the plan that is bought")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1")
    return int(text)


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no date such as 2026-12-31") from None


def _wrong(setting: str, message: str, fix: str = "") -> ChoiceError:
    return ChoiceError(Finding("plans", "error", setting, message, fix))


# --- searching ---------------------------------------------------------------------------------


def instance_type(hardware: str) -> str:
    """p6_b200 or ml.p6-b200.48xlarge -> ml.p6-b200.48xlarge. Raises ChoiceError."""
    by_choice = {one.choice: kind for kind, one in INSTANCES.items()}
    found = by_choice.get(hardware, hardware)
    if found not in INSTANCES:
        near = did_you_mean(hardware, [*by_choice, *INSTANCES])
        raise _wrong("hardware", f"no instance is named {hardware}{near}",
                     f"there are {', '.join(by_choice)}")  # fmt: skip
    return found


def search(given: argparse.Namespace, clients: Clients) -> list[Offering]:
    """What is offered now, the earliest start first."""
    kind = instance_type(given.hardware)
    what: dict[str, Any] = {"InstanceType": kind, "InstanceCount": given.instances}
    if given.ultraserver:
        what = {"UltraServerType": given.ultraserver, "UltraServerCount": given.instances}
    if given.after:
        what["StartTimeAfter"] = given.after
    if given.before:
        what["EndTimeBefore"] = given.before
    found: dict[str, Offering] = {}
    for hours in given.hours:
        with said(f"search for plans of {hours} hours", "hardware"):
            try:
                answer = clients("sagemaker").search_training_plan_offerings(
                    DurationHours=hours, TargetResources=[TARGET], **what
                )
            except Exception as error:
                if code(error) == "ResourceLimitExceeded":
                    continue  # none of that length
                raise
        for entry in answer["TrainingPlanOfferings"]:
            found[entry["TrainingPlanOfferingId"]] = _offering(entry, kind)
    return sorted(found.values(), key=lambda offering: (offering.start, offering.fee))


def _offering(entry: dict[str, Any], kind: str) -> Offering:
    parts = entry["ReservedCapacityOfferings"]
    return Offering(
        id=entry["TrainingPlanOfferingId"],
        instance_type=parts[0].get("InstanceType", kind),
        instances=parts[0]["InstanceCount"],
        hours=entry["DurationHours"] + entry.get("DurationMinutes", 0) / 60,
        start=min(part["StartTime"] for part in parts),
        end=max(part["EndTime"] for part in parts),
        zone=", ".join(sorted({part.get("AvailabilityZone", "?") for part in parts})),
        fee=float(entry["UpfrontFee"]),
        currency=entry.get("CurrencyCode", "USD"),
    )


def lines(found: Iterable[Offering]) -> list[str]:
    rows = [["start (UTC)", "end (UTC)", "hours", "nodes", "zone", "fee", "a GPU-hour", "offering"]]
    for x in found:
        rows.append(
            [f"{x.start:%Y-%m-%d %H:%M}", f"{x.end:%Y-%m-%d %H:%M}", f"{x.hours:g}",
             f"{x.instances} x {x.instance_type}", x.zone, f"{x.fee:,.2f} {x.currency}",
             f"{x.per_gpu_hour:.2f}", x.id]
        )  # fmt: skip
    return table(rows)


def _show(found: list[Offering], given: argparse.Namespace) -> int:
    if not found:
        print(
            f"nothing is offered: {given.instances} x {instance_type(given.hardware)} for "
            f"{', '.join(map(str, given.hours))} hours; try other --hours, --after, --instances "
            "or --region"
        )
        return 0
    print("\n".join(lines(found)))
    print("buy one: --buy OFFERING --name NAME (paid at once, and AWS does not take it back)")
    return 0


def _own(clients: Clients) -> int:
    with said("list training plans"):
        pages = clients("sagemaker").get_paginator("list_training_plans").paginate()
        plans = [plan for page in pages for plan in page["TrainingPlanSummaries"]]
    if not plans:
        print(f"no training plan in {clients.region}")
        return 0
    rows = [["plan", "status", "instances", "free", "until (UTC)", "ARN"]]
    for plan in plans:
        kinds = {c["InstanceType"] for c in plan.get("ReservedCapacitySummaries", [])}
        rows.append(
            [plan["TrainingPlanName"], plan["Status"].lower(),
             f"{plan.get('TotalInstanceCount', '?')} x {', '.join(sorted(kinds)) or '?'}",
             str(plan.get("AvailableInstanceCount", "?")),
             f"{plan['EndTime']:%Y-%m-%d %H:%M}" if "EndTime" in plan else "?",
             plan["TrainingPlanArn"]]
        )  # fmt: skip
    print("\n".join(table(rows)))
    return 0


# --- buying ------------------------------------------------------------------------------------


def _buy(given: argparse.Namespace, found: list[Offering], clients: Clients) -> int:
    chosen = next((offering for offering in found if offering.id == given.buy), None)
    if chosen is None:
        near = did_you_mean(given.buy, [offering.id for offering in found])
        raise _wrong("--buy", f"{given.buy} is not offered (any more){near}",
                     "search again with the same words, without --buy")  # fmt: skip
    if not given.name:
        raise _wrong("--name", "the plan needs a name", "--name my-plan")
    print("\n".join(lines([chosen])))
    price = f"{chosen.fee:.2f}"
    account = clients.identity[0]
    doing = f"pay {chosen.fee:,.2f} {chosen.currency} now from account {account}, not refundable"
    confirm.typed(price, doing)
    with said("buy the plan", "--buy"):
        arn = clients("sagemaker").create_training_plan(
            TrainingPlanName=given.name, TrainingPlanOfferingId=chosen.id
        )["TrainingPlanArn"]
    print(f"bought {given.name}; use it with launch.training_plan={arn}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
