"""The files of ``deploy/``: their commands are those of this version, and their names agree."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from forethought.cli import serve

DEPLOY = Path(__file__).parent.parent / "deploy"
CHECKED_ENVIRONMENT = {"FORETHOUGHT_API_KEYS", "OPENAI_API_KEY", "RAY_worker_niceness"}


def serve_options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.configure(parser)
    args = parser.parse_args(words)
    serve.settings_of(args)
    return args


def entry_point() -> list[str]:
    """Of the image, without the program's name."""
    line = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert line is not None
    program, command, *options = yaml.safe_load(line[1])
    assert (program, command) == ("forethought", "serve")
    return list(options)


# ---- compose -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_every_service_is_a_server_that_starts(services: dict[str, Any]) -> None:
    for service in services.values():
        args = serve_options([*entry_point(), *service["command"]])
        serve.opener(args)  # raises for options that contradict each other
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace > args.drain_seconds
        assert service["environment"].keys() <= CHECKED_ENVIRONMENT


def test_the_ingress_asks_the_engines_with_their_key(services: dict[str, Any]) -> None:
    ingress = services["ingress"]
    engines = services.keys() - {"ingress"}
    args = serve_options([*entry_point(), *ingress["command"]])
    urls = [urlsplit(url) for url in args.upstream.split(",")]
    assert {url.hostname for url in urls} == engines == ingress["depends_on"].keys()
    ports = {serve.address(serve_options(entry_point()))[1], *(url.port for url in urls)}
    assert ports == {int(ingress["ports"][0].rpartition(":")[2])}
    for name in engines:
        key = services[name]["environment"]["FORETHOUGHT_API_KEYS"]
        assert key == ingress["environment"]["OPENAI_API_KEY"]


# ---- KubeRay -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    text = (DEPLOY / "kuberay.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods(objects: dict[str, Any]) -> dict[str, Any]:
    """Templates by role."""
    cluster = objects["RayCluster"]["spec"]
    templates = [cluster["headGroupSpec"]["template"], objects["Deployment"]["spec"]["template"]]
    templates += [group["template"] for group in cluster["workerGroupSpecs"]]
    return {template["metadata"]["labels"]["role"]: template for template in templates}


def test_the_ingress_joins_the_cluster_and_asks_for_its_replicas(objects: dict[str, Any]) -> None:
    container = pods(objects)["ingress"]["spec"]["containers"][0]
    assert container["command"] == ["bash", "-c"]
    joining, serving = container["args"][0].split("&& exec ")
    _, _, *words = shlex.split(serving)
    args = serve_options(words)
    cluster = objects["RayCluster"]["spec"]
    assert args.replicas == sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert args.ray_address == "auto"
    assert args.port == container["ports"][0]["containerPort"]
    assert args.drain_seconds < pods(objects)["ingress"]["spec"]["terminationGracePeriodSeconds"]
    scripts = pytest.importorskip("ray.scripts.scripts", reason="the extra ray is not installed")
    program, command, *options = shlex.split(joining)
    assert (program, command) == ("ray", "start")
    joined = scripts.start.make_context("start", options).params
    name = objects["RayCluster"]["metadata"]["name"]
    assert joined["address"] == f"{name}-head-svc:6379"  # as KubeRay names it
    assert joined["num_cpus"] == 0


def test_images_and_versions_of_the_cluster_agree(objects: dict[str, Any]) -> None:
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(objects).values()}
    assert len(images) == 1
    constraints = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    assert f"ray=={objects['RayCluster']['spec']['rayVersion']}" in constraints
    environment = [e["name"] for p in pods(objects).values() for e in containers_of(p)["env"]]
    assert set(environment) <= CHECKED_ENVIRONMENT


def containers_of(template: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = template["spec"]["containers"][0]
    return container


def test_selectors_and_ports_are_those_of_the_pods(objects: dict[str, Any]) -> None:
    labels = {role: pod["metadata"]["labels"] for role, pod in pods(objects).items()}
    assert objects["Service"]["spec"]["selector"] == labels["ingress"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels["ingress"]
    everything = objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items()
    assert all(everything <= own.items() for own in labels.values())
    port = containers_of(pods(objects)["ingress"])["ports"][0]["name"]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert containers_of(pods(objects)["ingress"])[probe]["httpGet"]["port"] == port
