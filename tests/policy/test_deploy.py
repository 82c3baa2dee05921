"""What deploy/ holds is well-formed, and says nothing that the server does not know."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml

from graphrunner.entrypoints.openai.app import _GETS
from graphrunner.entrypoints.openai.server_options import ServerOptions

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ROOT = DEPLOY.parent
CONTAINERFILE = DEPLOY / "Containerfile"
UNIT = DEPLOY / "systemd" / "graphrunner.service"
MANIFEST = DEPLOY / "kubernetes" / "graphrunner.yaml"
DRAIN_S = ServerOptions().drain_timeout_s


@cache
def serve_flags() -> set[str]:
    from typer.main import get_command

    from graphrunner.entrypoints.cli.main import app

    return {flag for option in get_command(app).commands["serve"].params for flag in option.opts}  # type: ignore[attr-defined]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


@cache
def resources() -> dict[str, dict]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def test_containerfile_is_clean() -> None:
    checked = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), str(CONTAINERFILE)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_containerfile_fits_the_repository() -> None:
    text = CONTAINERFILE.read_text()
    for source in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in source.split()), source
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.M)
    assert flags_in(entry) <= serve_flags() and '"--host", "0.0.0.0"' in entry
    (port,) = re.findall(r'"--port", "(\d+)"', entry)
    assert f"EXPOSE {port}" in text and f"127.0.0.1:{port}/health" in text
    assert re.search(r"^USER (?!0|root)", text, re.M), "the server does not run as root"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine to ask")
def test_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    """Everything but the program itself, which is not where the unit says on this machine."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.M))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0 and copy.name not in checked.stderr, checked.stderr


def test_unit_says_what_the_server_knows() -> None:
    text = UNIT.read_text()
    (start,) = re.findall(r"^ExecStart=(.+)$", text, re.M)
    assert flags_in(start) <= serve_flags() and "--host 127.0.0.1" in start
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert int(stop_s) > DRAIN_S, "systemd kills before the drain is over"
    assert "KillMode=mixed" in text and "RestartPreventExitStatus=2" in text and "DynamicUser=yes" in text


def test_manifest_fits_the_schemas() -> None:
    from kubernetes_validate import latest_version, validate

    for resource in resources().values():
        validate(resource, latest_version(), strict=True)


def test_manifest_fits_the_server() -> None:
    pod = resources()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert flags_in(" ".join(container["args"])) <= serve_flags()
    routes = {path for path, _ in _GETS}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes
        assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]
    annotations = resources()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(container["args"][container["args"].index("--drain-timeout-s") + 1])
    assert pod["terminationGracePeriodSeconds"] > sleep_s + drain_s
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    selector = resources()["Service"]["spec"]["selector"]
    assert selector.items() <= resources()["Deployment"]["spec"]["template"]["metadata"]["labels"].items()


def test_container_and_manifest_agree() -> None:
    text = CONTAINERFILE.read_text()
    pod = resources()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert f"USER {pod['securityContext']['runAsUser']}" in text
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in text
    state = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "state")
    assert f"VOLUME {state}" in text
    assert {"drain_timeout_s", "api_key_file"} <= {field.name for field in fields(ServerOptions)}
