"""deploy/kuberay: the manifest has no field that KubeRay or Kubernetes do not know, and agrees with the rest.

The operator's own schema is a megabyte of pods; these are the fields of its API (ray.io/v1, KubeRay 1.6) and
of a Kubernetes pod as far as they are plausible here. A field that is not listed fails the test.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy/kuberay/rayservice.yaml"
Count = Annotated[int, msgspec.Meta(ge=0)]
Label = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")]
Quantity = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]+(m|[KMGT]i?)?\Z")] | int


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the manifest."""


class Metadata(Strict, frozen=True, kw_only=True):
    name: Label
    annotations: dict[str, str] = {}


class Port(Strict, frozen=True, kw_only=True):
    containerPort: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    name: Annotated[str, msgspec.Meta(max_length=15)]


class Resources(Strict, frozen=True, kw_only=True):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


class Variable(Strict, frozen=True, kw_only=True):
    name: str
    value: str


class Container(Strict, frozen=True, kw_only=True):
    name: Label
    image: str
    env: list[Variable] = []
    command: list[str]
    args: list[str]
    ports: list[Port]
    resources: Resources


class Toleration(Strict, frozen=True, kw_only=True):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    value: str | None = None


class PodSpec(Strict, frozen=True, kw_only=True):
    terminationGracePeriodSeconds: Count = 30
    containers: Annotated[list[Container], msgspec.Meta(min_length=1)]
    tolerations: list[Toleration] = []


class Template(Strict, frozen=True, kw_only=True):
    spec: PodSpec


class Head(Strict, frozen=True, kw_only=True):
    rayStartParams: dict[str, str]
    template: Template


class Workers(Strict, frozen=True, kw_only=True):
    groupName: Label
    replicas: Count
    minReplicas: Count
    maxReplicas: Count
    rayStartParams: dict[str, str]
    template: Template


class AuthOptions(Strict, frozen=True, kw_only=True):
    mode: Literal["disabled", "token"]


class AutoscalerOptions(Strict, frozen=True, kw_only=True):
    idleTimeoutSeconds: Count


class RayCluster(Strict, frozen=True, kw_only=True):
    rayVersion: str
    authOptions: AuthOptions
    enableInTreeAutoscaling: bool
    autoscalerOptions: AutoscalerOptions
    headGroupSpec: Head
    workerGroupSpecs: list[Workers]


class Spec(Strict, frozen=True, kw_only=True):
    serveConfigV2: str
    rayClusterConfig: RayCluster


class RayService(Strict, frozen=True, kw_only=True):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: Spec


def manifest() -> RayService:
    return msgspec.convert(yaml.safe_load(MANIFEST.read_text()), RayService)


def containers() -> list[Container]:
    cluster = manifest().spec.rayClusterConfig
    templates = [cluster.headGroupSpec.template, *(group.template for group in cluster.workerGroupSpecs)]
    return [container for template in templates for container in template.spec.containers]


def test_the_manifest_has_the_fields_of_a_ray_service() -> None:
    assert manifest().metadata.name == "headway"


def test_an_unknown_field_is_found() -> None:
    document = yaml.safe_load(MANIFEST.read_text())
    document["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParms"] = {}
    with pytest.raises(msgspec.ValidationError, match="rayStartParms"):
        msgspec.convert(document, RayService)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing ray.serve warns
def test_serve_takes_the_application_and_it_is_the_one_of_many_gpus() -> None:
    from cluster.deploy.serve_file import check_serve_document

    document: dict[str, Any] = yaml.safe_load(manifest().spec.serveConfigV2)
    check_serve_document(document, "manifest")
    many = yaml.safe_load((ROOT / "deploy/serve/many-gpus.yaml").read_text())
    many["applications"][0]["args"]["drain_s"] = 20
    assert document == many | {"proxy_location": "EveryNode"}


def test_every_pod_is_prepared_before_ray_starts() -> None:
    assert manifest().metadata.annotations["ray.io/overwrite-container-cmd"] == "true"
    for container in containers():
        (script,) = container.args
        assert re.match(r"headway deploy env .* > /tmp/headway-env &&\n\. /tmp/headway-env && ", script)
        assert script.rstrip().endswith("&& exec $KUBERAY_GEN_RAY_START_CMD")


def test_a_pod_that_is_to_end_has_time_to_drain() -> None:
    (application,) = yaml.safe_load(manifest().spec.serveConfigV2)["applications"]
    (workers,) = manifest().spec.rayClusterConfig.workerGroupSpecs
    (variable,) = workers.template.spec.containers[0].env
    assert variable.name == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    grace_s = workers.template.spec.terminationGracePeriodSeconds
    assert application["args"]["drain_s"] < float(variable.value) < grace_s


def test_there_is_a_gpu_for_every_replica_that_the_autoscaler_may_want() -> None:
    cluster = manifest().spec.rayClusterConfig
    (workers,) = cluster.workerGroupSpecs
    (application,) = yaml.safe_load(manifest().spec.serveConfigV2)["applications"]
    num_gpus = workers.template.spec.containers[0].resources.limits["nvidia.com/gpu"]
    scaling = application["args"]["autoscaling"]
    assert num_gpus == 1
    assert (workers.minReplicas, workers.maxReplicas) == (scaling["min_replicas"], scaling["max_replicas"])
    assert workers.minReplicas <= workers.replicas <= workers.maxReplicas


def test_image_and_ray_are_the_versions_of_this_project() -> None:
    dockerfile = (ROOT / "deploy/kuberay/Dockerfile").read_text()
    ray = f"rayproject/ray:{manifest().spec.rayClusterConfig.rayVersion}-py311-gpu"
    assert f"FROM {ray}\n" in dockerfile
    assert f"ray=={manifest().spec.rayClusterConfig.rayVersion}\n" in (ROOT / "constraints.txt").read_text()
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert f"headway-{version[1]}-py3-none-any.whl" in dockerfile
    assert {container.image for container in containers()} == {f"REGISTRY/headway:{version[1]}"}
