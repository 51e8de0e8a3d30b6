"""Every check of an account before a job is submitted, each against moto's server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from launch.aws import (
    checks_account as identity,
)
from launch.aws import (
    checks_capacity as capacity,
)
from launch.aws import (
    checks_network as network_,
)
from launch.aws import (
    checks_storage as storage,
)
from launch.aws import (
    preflight,
)
from launch.aws.clients import Clients
from planning.findings import ChoiceError, MachineError
from tests.launch.aws.fake_aws import ACCOUNT, REGION, Account
from tests.launch.aws.requests import BUCKET, IMAGE, prepare, request, resources


@pytest.fixture(autouse=True)
def prepared(account: Account) -> None:
    prepare(account)


@cache
def clients() -> Clients:
    """One for all tests: making them takes longer than asking."""
    return Clients()


def rows(given: dict[str, Any], room: ModuleType) -> dict[str, tuple[str, str]]:
    """What: (verdict, what was found), the worst of each kind; of one room of checks."""
    worst: dict[str, tuple[str, str]] = {}
    order = ["ok", "not checked", "warning", "failed"]
    for row in (row for check in room.CHECKS for row in check(given, clients())):
        if row.what not in worst or order.index(row.verdict) > order.index(worst[row.what][0]):
            worst[row.what] = (row.verdict, row.said)
    return worst


def test_an_account_that_is_ready_has_one_table_of_ok(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(request(), clients())
    screen = capsys.readouterr().out.splitlines()
    assert screen[0].split() == ["check", "verdict", "found"]
    assert {line.split("  ")[0] for line in screen[1:]} == {
        "credentials", "name", "role", "role may", "image", "quota", "bucket", "data",
    }  # fmt: skip
    assert [line for line in screen[1:] if " ok " not in line] == []


def test_nothing_is_written(account: Account) -> None:
    before = account.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]
    preflight.look(request(), clients())
    assert account.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"] == before
    assert account.calls == []


def test_all_failures_at_once_each_with_its_setting(account: Account) -> None:
    account.quotas.clear()
    account.quotas["ml.p6-b200.48xlarge for training job usage"] = 0.0
    wrong = request(RoleArn=f"arn:aws:iam::{ACCOUNT}:role/Missing")
    wrong["AlgorithmSpecification"]["TrainingImage"] = IMAGE.replace(":1", ":2")
    with pytest.raises(ChoiceError) as refused:
        preflight.check(wrong, clients())
    assert {f.setting for f in refused.value.findings} == {
        "launch.role", "launch.image", "hardware.nodes"}  # fmt: skip
    assert all(finding.fix for finding in refused.value.findings)


class TestRole:
    def test_that_sagemaker_cannot_take(self, account: Account) -> None:
        arn = account.make_role("Lambda", "lambda.amazonaws.com")
        assert rows(request(RoleArn=arn), identity)["role"] == (
            "failed", "Lambda does not let sagemaker.amazonaws.com take it")  # fmt: skip

    def test_of_another_account(self) -> None:
        found = rows(request(RoleArn="arn:aws:iam::999999999999:role/Training"), identity)["role"]
        assert found == ("failed", f"Training is of account 999999999999, you are in {ACCOUNT}")

    def test_that_may_not_write_checkpoints(self, account: Account) -> None:
        account.forbidden.add(("s3:PutObject", "checkpoints"))
        place = f"arn:aws:s3:::{BUCKET}/slipway/a/checkpoints/any"
        assert rows(request(), identity)["role may"] == (
            "failed",
            f"not s3:PutObject on {place}",
        )

    def test_where_a_policy_of_the_bucket_may_allow_it(self, account: Account) -> None:
        account.forbidden.add(("s3:GetObject", "data/web"))
        account.client("s3").put_bucket_policy(Bucket=BUCKET, Policy='{"Statement": []}')
        verdict, found = rows(request(), identity)["role may"]
        assert verdict == "warning"
        assert found.endswith("unless the bucket's policy allows it")

    def test_that_may_not_join_the_vpc(self, account: Account) -> None:
        account.forbidden.add(("ec2:CreateNetworkInterface", "*"))
        network = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
        assert rows(request(VpcConfig=network), identity)["role may"][0] == "failed"


class TestImage:
    def found(self, uri: str, kind: str = "ml.p6-b200.48xlarge") -> tuple[str, str]:
        given = request(ResourceConfig=resources(InstanceType=kind))
        given["AlgorithmSpecification"]["TrainingImage"] = uri
        return rows(given, identity)["image"]

    def test_of_another_processor(self) -> None:
        assert self.found(IMAGE, "ml.p6e-gb200.36xlarge") == (
            "failed", "it is for amd64, ml.p6e-gb200.36xlarge is arm64")  # fmt: skip

    def test_for_the_processor_of_gb200(self, account: Account) -> None:
        account.image_configuration["architecture"] = "arm64"
        assert self.found(IMAGE, "ml.p6e-gb200.36xlarge") == ("ok", "slipway, arm64")

    def test_list_of_platforms_without_ours(self, account: Account) -> None:
        uri = account.make_image(
            "many", "1", manifests=[{"digest": "sha256:" + "d" * 64, "size": 1, "mediaType": "x",
                                     "platform": {"architecture": "arm64", "os": "linux"}}]
        )  # fmt: skip
        assert self.found(uri) == ("failed", "it is for arm64, ml.p6-b200.48xlarge is amd64")

    def test_in_another_region(self) -> None:
        assert self.found(IMAGE.replace(REGION, "us-east-1")) == (
            "failed", f"it is in us-east-1, the job in {REGION}")  # fmt: skip

    def test_without_a_repository(self) -> None:
        assert self.found(IMAGE.replace("slipway", "nothing"))[0] == "failed"

    def test_outside_ecr(self) -> None:
        assert self.found("nvcr.io/nvidia/pytorch:26.01-py3")[0] == "warning"


class TestStorage:
    def test_bucket_that_is_not_there(self) -> None:
        output = {"S3OutputPath": "s3://nowhere/x"}
        assert rows(request(OutputDataConfig=output), storage)["bucket"] == (
            "failed", "there is no s3://nowhere")  # fmt: skip

    def test_bucket_in_another_region(self, account: Account) -> None:
        account.client("s3", "eu-west-1").create_bucket(
            Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        output = {"S3OutputPath": "s3://far/x"}
        assert rows(request(OutputDataConfig=output), storage)["bucket"] == (
            "failed", f"s3://far is in eu-west-1, the job in {REGION}")  # fmt: skip

    def test_empty_channel(self, account: Account) -> None:
        account.client("s3").delete_object(Bucket=BUCKET, Key="data/web/web.bin")
        assert rows(request(), storage)["data"] == (
            "failed", f"nothing is at s3://{BUCKET}/data/web/ (channel web)")  # fmt: skip

    def lustre(self, account: Account, path: str) -> tuple[str, str]:
        fsx = account.client("fsx")
        made = fsx.create_file_system(
            FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=["subnet-0123456789abcdef0"],
            LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
        )["FileSystem"]["FileSystemId"]  # fmt: skip
        source = {"FileSystemId": made, "FileSystemType": "FSxLustre", "DirectoryPath": path,
                  "FileSystemAccessMode": "ro"}  # fmt: skip
        channel = {"ChannelName": "web", "DataSource": {"FileSystemDataSource": source}}
        verdict, found = rows(request(InputDataConfig=[channel]), storage)["file system"]
        return verdict, found.replace(made, "fs")

    def test_lustre(self, account: Account) -> None:
        assert self.lustre(account, "/fsxmount/web") == ("ok", "fs, 1200 GiB, at /fsxmount/web")

    def test_lustre_path_that_does_not_start_with_the_mount(self, account: Account) -> None:
        assert self.lustre(account, "/web") == (
            "failed", "fs is mounted as /fsxmount, the path is /web")  # fmt: skip

    def test_file_systems_that_are_not_there(self) -> None:
        for kind, name in (("FSxLustre", "fs-0123456789abcdef0"), ("EFS", "fs-0123456789abcdef1")):
            source = {"FileSystemId": name, "FileSystemType": kind, "DirectoryPath": "/web"}
            channel = {"ChannelName": "web", "DataSource": {"FileSystemDataSource": source}}
            found = rows(request(InputDataConfig=[channel]), storage)["file system"]
            assert found == ("failed", f"there is no {name}")

    def test_efs_without_a_mount_target(self, account: Account) -> None:
        name = account.client("efs").create_file_system(CreationToken="x")["FileSystemId"]
        source = {"FileSystemId": name, "FileSystemType": "EFS", "DirectoryPath": "/web"}
        channel = {"ChannelName": "web", "DataSource": {"FileSystemDataSource": source}}
        found = rows(request(InputDataConfig=[channel]), storage)["file system"]
        assert found == ("failed", f"{name} has no mount target")


def works(account: Account, name: str, **resource_config: Any) -> None:
    """A job in progress."""
    account.client("sagemaker").create_training_job(
        **request(TrainingJobName=name, ResourceConfig=resources(**resource_config))
    )


class TestQuota:
    def test_none(self, account: Account) -> None:
        account.quotas["ml.p6-b200.48xlarge for training job usage"] = 0.0
        with pytest.raises(MachineError) as refused:
            preflight.check(request(), clients())
        assert "0 of ml.p6-b200.48xlarge, 0 in use, 2 needed" in str(refused.value)
        assert 'ask for more of "ml.p6-b200.48xlarge for training job usage"' in str(refused.value)

    def test_in_use_by_another_job(self, account: Account) -> None:
        works(account, "other", InstanceCount=3)
        assert rows(request(), capacity)["quota"] == (
            "failed", "4 of ml.p6-b200.48xlarge, 3 in use, 2 needed")  # fmt: skip

    def test_in_use_by_the_last_of_many_jobs(
        self, account: Account, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(capacity, "PAGE", 2)
        for number in range(4):
            works(account, f"small-{number}", InstanceType="ml.m5.large")
        works(account, "other", InstanceCount=3)
        assert rows(request(), capacity)["quota"] == (
            "failed", "4 of ml.p6-b200.48xlarge, 3 in use, 2 needed")  # fmt: skip

    def test_more_jobs_than_are_looked_at(
        self, account: Account, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(capacity, "MOST_JOBS", 2)
        for number in range(2):
            works(account, f"other-{number}", InstanceCount=1)
        verdict, found = rows(request(), capacity)["quota"]
        assert (verdict, found) == ("ok", "4 of ml.p6-b200.48xlarge, 2 in use, 2 needed")
        works(account, "other-2", InstanceCount=1)
        verdict, found = rows(request(), capacity)["quota"]
        assert verdict == "warning"
        assert found.startswith(
            "4 of ml.p6-b200.48xlarge, at least 2 in use, 2 needed (more than 2"
        )

    def test_of_spot_is_another(self, account: Account) -> None:
        account.quotas["ml.p6-b200.48xlarge for spot training job usage"] = 1.0
        stop = {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200}
        given = request(EnableManagedSpotTraining=True, StoppingCondition=stop)
        assert rows(given, capacity)["quota"] == (
            "failed",
            "1 of ml.p6-b200.48xlarge, 0 in use, 2 needed",
        )

    def test_of_a_warm_pool(self, account: Account) -> None:
        account.quotas["ml.p6-b200.48xlarge for training warm pool usage"] = 0.0
        given = request(ResourceConfig=resources(KeepAlivePeriodInSeconds=600))
        assert rows(given, capacity)["warm pool quota"][0] == "failed"

    def test_that_nobody_lists(self, account: Account) -> None:
        account.quotas.clear()
        assert rows(request(), capacity)["quota"][0] == "not checked"


class TestTrainingPlan:
    kind = "ml.p6-b200.48xlarge"

    def found(self, arn: str, **changes: Any) -> tuple[str, str]:
        return rows(request(ResourceConfig=resources(TrainingPlanArn=arn), **changes), capacity)[
            "training plan"
        ]

    def test_active_with_time_left(self, account: Account) -> None:
        verdict, found = self.found(account.make_plan("block", self.kind, 2))
        assert (verdict, found[:19]) == ("ok", "block, active until")

    def test_no_quota_is_needed(self, account: Account) -> None:
        account.quotas.clear()
        arn = account.make_plan("block", self.kind, 2)
        given = request(ResourceConfig=resources(TrainingPlanArn=arn))
        assert rows(given, capacity)["quota"] == (
            "ok",
            "the training plan's instances are reserved",
        )

    @pytest.mark.parametrize(
        ("plan", "verdict", "said"),
        [
            ({"Status": "Expired"}, "failed", "block is expired"),
            ({"TargetResources": ["hyperpod-cluster"]}, "failed", "block is for hyperpod-cluster"),
            ({"TotalInstanceCount": 1}, "failed", "block has 1 instances, the job wants 2"),
            ({"hours": 0.9}, "failed", "block ends too soon"),
            ({"hours": 10}, "warning", "block ends before the job's limit"),
            ({"AvailableInstanceCount": 1}, "warning", "1 of 2 instances of block are free"),
            ({"Status": "Scheduled"}, "warning", "block starts at"),
        ],
    )
    def test_that_does_not_do(
        self, account: Account, plan: dict[str, Any], verdict: str, said: str
    ) -> None:
        found = self.found(account.make_plan("block", self.kind, 2, **plan))
        assert found[0] == verdict
        assert found[1].startswith(said)

    def test_of_another_instance(self, account: Account) -> None:
        assert self.found(account.make_plan("block", "ml.p5.48xlarge", 2)) == (
            "failed", "block has ml.p5.48xlarge, the job wants ml.p6-b200.48xlarge")  # fmt: skip

    def test_that_is_not_there(self) -> None:
        arn = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-plan/nothing-of-that-name-here"
        assert self.found(arn) == ("failed", "there is no plan nothing-of-that-name-here")


class TestNetwork:
    def made(self, account: Account, size: str = "10.0.0.0/24") -> dict[str, Any]:
        ec2 = account.client("ec2")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=size, AvailabilityZone=f"{REGION}a")
        group = ec2.create_security_group(GroupName="g", Description="g", VpcId=vpc)["GroupId"]
        return {"Subnets": [subnet["Subnet"]["SubnetId"]], "SecurityGroupIds": [group]}

    def open(self, account: Account, network: dict[str, Any]) -> None:
        group, ec2 = network["SecurityGroupIds"][0], account.client("ec2")
        rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rule)
        ec2.authorize_security_group_egress(GroupId=group, IpPermissions=rule)

    def test_that_two_nodes_can_use(self, account: Account) -> None:
        network = self.made(account)
        self.open(account, network)
        found = rows(request(VpcConfig=network), network_)
        assert found["subnets"] == (
            "ok", f"251 free addresses in {network['Subnets'][0]} ({REGION}a)")  # fmt: skip
        assert found["security groups"] == ("ok", "all traffic passes between the nodes")

    def test_where_efa_does_not_pass(self, account: Account) -> None:
        assert (
            rows(request(VpcConfig=self.made(account)), network_)["security groups"][0] == "failed"
        )

    def test_with_few_addresses(self, account: Account) -> None:
        found = rows(request(VpcConfig=self.made(account, "10.0.0.0/28")), network_)["subnets"]
        assert found[0] == "warning"
        assert "11 free addresses" in found[1]

    def test_in_another_zone_than_the_plan(self, account: Account) -> None:
        kind = "ml.p6-b200.48xlarge"
        capacity = {"ReservedCapacityArn": "x", "InstanceType": kind, "TotalInstanceCount": 2,
                    "Status": "Active", "AvailabilityZone": f"{REGION}c"}  # fmt: skip
        arn = account.make_plan("block", kind, 2, ReservedCapacitySummaries=[capacity])
        given = request(VpcConfig=self.made(account), ResourceConfig=resources(TrainingPlanArn=arn))
        assert rows(given, network_)["subnets"] == (
            "failed", f"none is in the training plan's zone {REGION}c")  # fmt: skip

    def test_that_is_not_there(self) -> None:
        network = {"Subnets": ["subnet-00000000"], "SecurityGroupIds": ["sg-00000000"]}
        found = rows(request(VpcConfig=network), network_)
        assert (found["subnets"][0], found["security groups"][0]) == ("failed", "failed")


class TestCredentials:
    def test_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        (row,) = preflight.look(request(), Clients())
        assert (row.what, row.verdict) == ("credentials", "failed")
        assert "Unable to locate credentials" in row.said
        assert "AWS_PROFILE" in row.fix

    def test_no_region(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.delenv("AWS_REGION")
        monkeypatch.delenv("AWS_DEFAULT_REGION")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        with pytest.raises(MachineError, match="no AWS region is chosen"):
            Clients()

    def test_name_that_is_taken(self, account: Account) -> None:
        account.client("sagemaker").create_training_job(**request())
        assert rows(request(), identity)["name"][0] == "failed"


def test_what_is_forbidden_to_look_at_is_said_and_does_not_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from botocore.exceptions import ClientError

    asking = Clients()

    class Closed:
        def get_paginator(self, _: str) -> Any:
            raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "x")

    asking._made["service-quotas"] = Closed()
    found = {row.what: row for row in preflight.look(request(), asking)}
    assert found["quota"].verdict == "not checked"
    assert found["quota"].said == "servicequotas:ListServiceQuotas is not allowed to you"


def test_dates_of_plans_are_read_in_utc(account: Account) -> None:
    end = datetime(2030, 1, 2, 3, 30, tzinfo=UTC)
    arn = account.make_plan("block", "ml.p6-b200.48xlarge", 2, EndTime=end)
    found = rows(request(ResourceConfig=resources(TrainingPlanArn=arn)), capacity)["training plan"]
    assert found == ("ok", f"block, active until {end - timedelta(minutes=30):%Y-%m-%d %H:%M} UTC")
