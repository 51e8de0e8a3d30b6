"""The manifest of a run on Kubernetes: a TrainJob of Kubeflow's Trainer v2 and its plan.

The same kind of object as NeMo-Run 0.11.1's KubeflowExecutor makes (kubeflow.py, get_job_body).
"""

from __future__ import annotations

from typing import Any

import yaml

from container.contract import BASE
from launch import start as start_file
from launch.scripts.common import HOST, HOSTS, IMAGE_ROOT, PLAN
from planning.hardware import INSTANCES
from planning.plan import Plan
from planning.schema import KubernetesLaunch

FILE = "job.yaml"
# JobSet names a pod's host after the job, and the runtime's job is `node`; in all 63 characters.
LONGEST_BASE = 16
_OPT_ML = "/opt/ml"


def build(plan: Plan, launch: KubernetesLaunch, *, name: str, start: dict[str, Any]) -> str:
    """Two objects for `kubectl apply`: a ConfigMap with plan.yaml and start.json, the TrainJob.

    name: a DNS label of at most 40 characters.
    """
    labels = {"app.kubernetes.io/name": "slipway", "app.kubernetes.io/instance": name}
    metadata = {"name": name, "namespace": launch.namespace, "labels": labels}
    files = {"plan.yaml": plan.to_yaml(), start_file.FILE: start_file.to_json(start)}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata | {"name": f"{name}-plan"},
        "immutable": True,
        "data": files,
    }
    if launch.annotations:
        metadata = metadata | {"annotations": dict(launch.annotations)}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": launch.runtime},
            "trainer": _trainer(plan, launch, name),
            "podTemplateOverrides": [
                {"targetJobs": [{"name": "node"}], "spec": _pod(launch, name)}
            ],
        },
    }
    return yaml.dump_all([config_map, job], Dumper=_Dumper, sort_keys=False, width=100)


def _trainer(plan: Plan, launch: KubernetesLaunch, name: str) -> dict[str, Any]:
    hosts = [f"{name}-node-0-{number}.{name}" for number in range(plan.nodes)]
    environment = {
        **(launch.environment or {}),
        BASE: _OPT_ML,
        HOSTS: ",".join(hosts),
    }
    # Kubernetes gives each pod of an indexed job its number.
    command = (
        f'export {HOST}="{name}-node-0-$JOB_COMPLETION_INDEX.{name}"; '
        f"exec python {IMAGE_ROOT}/container/first_process.py"
    )
    trainer: dict[str, Any] = {
        "image": launch.image,
        "numNodes": plan.nodes,
        "numProcPerNode": plan.processes_per_node,
        "command": ["bash", "-c", command],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
    }
    if plan.backend == "te":
        resources = {"nvidia.com/gpu": plan.processes_per_node}
        instance = INSTANCES.get(plan.config.hardware.instance_type or "")
        if instance is not None and plan.nodes > 1:
            resources["vpc.amazonaws.com/efa"] = instance.efa_devices
        trainer["resourcesPerNode"] = {"requests": resources.copy(), "limits": resources.copy()}
    return trainer


def _pod(launch: KubernetesLaunch, name: str) -> dict[str, Any]:
    volumes = {
        "plan": ({"configMap": {"name": f"{name}-plan"}}, f"{_OPT_ML}/{PLAN}"),
        "runs": (
            {"persistentVolumeClaim": {"claimName": launch.volume_claim}},
            launch.mount_path,
        ),
        # Data loaders and NCCL need more than a container's 64 MiB.
        "shm": ({"emptyDir": {"medium": "Memory"}}, "/dev/shm"),
    }
    # What a TrainJob may override of the runtime's pod; the time to save after SIGTERM
    # (terminationGracePeriodSeconds) is not in it: the runtime has to give it.
    spec: dict[str, Any] = {
        "volumes": [{"name": key, **source} for key, (source, _) in volumes.items()],
        "containers": [
            {
                "name": "node",  # the runtime's, to which these are added
                "volumeMounts": [
                    {"name": key, "mountPath": path} for key, (_, path) in volumes.items()
                ],
            }
        ],
    }
    if launch.node_selector:
        spec["nodeSelector"] = dict(launch.node_selector)
    if launch.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in launch.tolerations]
    return spec


class _Dumper(yaml.SafeDumper):
    """Writes files as blocks, and nothing as a reference to what stands above."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
