"""Read-only checks of the account before a job is submitted: one table, every failure with a fix.

Nothing is written. Whether the job can write is asked of IAM's policy simulator, for its role; the
upload of the plan, which comes next and costs nothing, shows whether this identity can.
"""

from __future__ import annotations

from collections.abc import Iterable

from launch.aws import checks_account, checks_capacity, checks_network, checks_storage
from launch.aws.checks import Request, Row
from launch.aws.clients import Clients
from planning.findings import Refusal, refuse
from planning.report import table

CHECKS = (
    *checks_account.CHECKS,
    *checks_capacity.CHECKS,
    *checks_storage.CHECKS,
    *checks_network.CHECKS,
)


def look(request: Request, clients: Clients) -> list[Row]:
    """All rows; without valid credentials only the one that says so."""
    try:
        arn = clients.identity[1]
    except Refusal as refusal:
        found = refusal.findings[0]
        return [Row("credentials", "failed", found.message, found.fix)]
    rows = [Row("credentials", "ok", f"{arn} in {clients.region}")]
    for check in CHECKS:
        rows += check(request, clients)
    return rows


def lines(rows: Iterable[Row]) -> list[str]:
    """The table, and below it what to do about each failure and warning."""
    rows = list(rows)
    shown = table([["check", "verdict", "found"], *([r.what, r.verdict, r.said] for r in rows)])
    return shown + [f"{r.what}: {r.fix}" for r in rows if r.fix and r.verdict != "ok"]


def check(request: Request, clients: Clients) -> None:
    """Look, print the table, and refuse if a check failed: ChoiceError or MachineError."""
    rows = look(request, clients)
    print("\n".join(lines(rows)), flush=True)
    refuse(row.finding for row in rows)
