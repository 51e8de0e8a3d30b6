"""Checks of the VPC: addresses, zones, and the rules that EFA traffic needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.aws.checks import Request, Row, asked, instances
from launch.aws.clients import Clients, code
from planning.hardware import INSTANCES


def subnets(request: Request, clients: Clients) -> Iterator[Row]:
    network = request.get("VpcConfig")
    if network is None:
        return
    kind, nodes = instances(request)
    try:
        found = clients("ec2").describe_subnets(SubnetIds=network["Subnets"])["Subnets"]
    except Exception as error:
        if code(error) != "InvalidSubnetID.NotFound":
            raise
        yield Row(
            "subnets",
            "failed",
            f"{', '.join(network['Subnets'])}: not all exist in {clients.region}",
            "correct launch.subnets",
            "launch.subnets",
            False,
        )
        return
    zones = _plan_zones(request, clients)
    usable = [s for s in found if not zones or s["AvailabilityZone"] in zones]
    if not usable:
        yield Row(
            "subnets",
            "failed",
            f"none is in the training plan's zone {', '.join(sorted(zones))}",
            "add a subnet of that zone",
            "launch.subnets",
            machine=False,
        )
        return
    # The nodes of a job are in one zone, so one subnet must hold them all.
    best = max(usable, key=lambda subnet: subnet["AvailableIpAddressCount"])
    free, where = (
        best["AvailableIpAddressCount"],
        f"{best['SubnetId']} ({best['AvailabilityZone']})",
    )
    devices = INSTANCES[kind].efa_devices if kind in INSTANCES else 1
    if free < nodes:
        yield Row(
            "subnets",
            "failed",
            f"{free} free addresses in {where}, {nodes} nodes",
            "free some, or take a larger subnet",
            "launch.subnets",
        )
    elif free < nodes * devices:
        yield Row(
            "subnets",
            "warning",
            f"{free} free addresses in {where}; a {kind} has {devices} network devices",
            "a larger subnet is safer",
            "launch.subnets",
        )
    else:
        yield Row("subnets", "ok", f"{free} free addresses in {where}")


def _plan_zones(request: Request, clients: Clients) -> set[str]:
    arn = request["ResourceConfig"].get("TrainingPlanArn")
    if arn is None:
        return set()
    plan = clients("sagemaker").describe_training_plan(TrainingPlanName=arn.rsplit("/", 1)[-1])
    capacity = plan.get("ReservedCapacitySummaries", [])
    return {c["AvailabilityZone"] for c in capacity if c.get("AvailabilityZone")}


def security_groups(request: Request, clients: Clients) -> Iterator[Row]:
    """Several nodes talk over EFA, which needs a group that lets all traffic to and from itself
    pass (EC2 User Guide, "Get started with EFA")."""
    network = request.get("VpcConfig")
    if network is None or instances(request)[1] < 2:
        return
    names = network["SecurityGroupIds"]
    try:
        found = clients("ec2").describe_security_groups(GroupIds=names)["SecurityGroups"]
    except Exception as error:
        if code(error) not in ("InvalidGroup.NotFound", "InvalidGroupId.Malformed"):
            raise
        yield Row(
            "security groups",
            "failed",
            f"{', '.join(names)}: not all exist",
            "correct launch.security_groups",
            "launch.security_groups",
            False,
        )
        return
    if any(
        _open_to_itself(group, "IpPermissions", names)
        and _open_to_itself(group, "IpPermissionsEgress", names)
        for group in found
    ):
        yield Row("security groups", "ok", "all traffic passes between the nodes")
    else:
        yield Row(
            "security groups",
            "failed",
            f"{', '.join(names)}: EFA traffic between the nodes does not pass",
            "allow all traffic from and to the group itself, inbound and outbound",
            "launch.security_groups",
        )


def _open_to_itself(group: dict[str, Any], direction: str, names: list[str]) -> bool:
    """All protocols, to a group of the job. 0.0.0.0/0 does not do: EFA packets have no address."""
    return any(
        rule["IpProtocol"] == "-1"
        and any(pair.get("GroupId") in names for pair in rule.get("UserIdGroupPairs", []))
        for rule in group.get(direction, [])
    )


CHECKS = (
    asked("subnets", "ec2:DescribeSubnets", subnets),
    asked("security groups", "ec2:DescribeSecurityGroups", security_groups),
)
