"""The manifests of docs/kubernetes.md: the environment that each pod gets makes the world that the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from guozhuang.launch.options.arguments import read
from guozhuang.net.meeting_point import MeetingPoint
from guozhuang.world.discovery import discover
from guozhuang.world.identity import Identity

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md").read_text()
MANIFESTS = {
    each["kind"]: each
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for each in yaml.safe_load_all(block)
}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SECRET = "00" * 32


def environment(container: dict[str, Any], index: int) -> dict[str, str]:
    """The variables of the pod with this index, as Kubernetes would resolve them."""
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
    for variable in container["env"]:
        source = variable.get("valueFrom")
        if source is None:
            assert isinstance(variable["value"], str), "Kubernetes takes strings alone"
            found[variable["name"]] = variable["value"]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == INDEX
            found[variable["name"]] = str(index)
        else:
            assert "secretKeyRef" in source
            found[variable["name"]] = SECRET
    return found


def point(identity: Identity) -> tuple[str, int, bytes, bool]:
    meeting = identity.meeting_point
    assert isinstance(meeting, MeetingPoint)
    return meeting.host, meeting.port, meeting.secret, meeting.is_loopback_meant


def test_an_indexed_job_is_one_world() -> None:
    service, job = MANIFESTS["Service"], MANIFESTS["Job"]
    pod = job["spec"]["template"]["spec"]
    size = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == size == 4 and job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"  # the host name of pod 0, in the domain of the service
    assert pod["subdomain"] == service["metadata"]["name"]
    for index in range(size):
        found = discover(environment(pod["containers"][0], index))
        assert (found.rank, found.size, found.launcher) == (index, size, "environment")
        assert point(found) == (first, 29500, bytes.fromhex(SECRET), False)


def test_a_jobset_gives_each_agent_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobset = MANIFESTS["JobSet"]
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"
    name = jobset["metadata"]["name"]
    assert container["command"][:2] == ["guozhuang", "run"]
    for index in range(spec["completions"]):
        for variable, value in environment(container, index).items():
            monkeypatch.setenv(variable, value)
        found = read(container["command"][2:])
        assert (found.nnodes, int(found.node_rank), found.nproc_per_node) == (str(spec["completions"]), index, "4")
        # JobSet's host names: <jobset>-<job>-<index of the job>-<index of the pod>.<jobset>
        assert (found.master_addr, int(found.master_port)) == (f"{name}-{job['name']}-0-0.{name}", 29500)
        assert (found.strategy, found.training_script) == ("sharded", "train.py")


def test_a_pytorchjob_is_one_world_though_the_master_is_told_localhost() -> None:
    replicas = MANIFESTS["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    size = sum(each["replicas"] for each in replicas.values())
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    pods = [dict(word.split("=", 1) for word in shlex.split(line)) for line in block.splitlines()]
    found = [discover(pod) for pod in pods]
    assert [(each.rank, each.size) for each in found] == [(0, size), (2, size)]
    assert [point(each)[:2] for each in found] == [("localhost", 23456), ("train-master-0", 23456)]
    assert not point(found[0])[3], "inside of Kubernetes rank 0 listens where the others can reach it"
