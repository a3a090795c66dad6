"""Files of `deploy/` name what is there: metrics that the server exports, options that the command has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from cli.command import Command
from serve.serving import Server

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_dashboard_shows_metrics_that_exist(server: Server) -> None:
    server.complete("the sea the sea", max_tokens=20, temperature=0, ignore_eos=True)
    text = server.client.get("/metrics").text
    dashboard = json.loads((DEPLOY / "grafana/forerun.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"(?:vllm|forerun):\w+", query)}
    assert len(names) > 10
    assert not [name for name in names if f"\n{name}" not in text]


def test_commands_have_the_options_they_are_given() -> None:
    told = Command("serve")("--help").output
    for name in ("Dockerfile", "compose.yaml", "forerun.service"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        started = [line for line in text.splitlines() if line.startswith(("ENTRYPOINT", "ExecStart", "    command"))]
        assert started
        options = [option for line in started for option in re.findall(r"--[a-z-]+", line)]
        assert not [option for option in options if option not in told]


def test_volumes_are_mounted_where_the_user_may_write() -> None:
    """Docker makes a mount point that the image lacks, and makes it root's."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    mounted = {volume.split(":")[1] for volume in compose["services"]["forerun"]["volumes"]}
    as_root, _, _ = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").partition("\nUSER forerun\n")
    folders = dict(re.findall(r"(\w+)=(/home/forerun/\w+)", as_root))
    (made,) = re.findall(r"install -d -o forerun -g forerun (.+)", as_root)
    assert mounted and mounted == {folders[name] for name in re.findall(r"\$\{(\w+)\}", made)}


def build_arguments(text: str) -> dict[str, str]:
    return dict(re.findall(r"--build-arg (\w+)=(\S+)", text))


def test_ray_on_kubernetes_runs_the_image_of_a_gpu() -> None:
    text = (DEPLOY / "ray/kuberay.yaml").read_text(encoding="utf-8")
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    first, _, _ = image.partition("\n")
    told, on_a_gpu = build_arguments(text), build_arguments(first)
    assert "nvidia.com/gpu" in text and on_a_gpu.keys() == {"BASE", "TORCH_INDEX"}
    assert told == on_a_gpu | {"EXTRAS": "serve,scale"}
    assert all(re.search(rf"^ARG {name}=", image, re.MULTILINE) for name in told)


@pytest.mark.parametrize("has_python", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_packages_of_the_image(on_gpu: bool, has_python: bool, tmp_path: Path) -> None:
    """The first command of the image, run with stand-ins for everything that it calls."""
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^RUN (packages=(?:.*\\\n)+.*)", image, re.MULTILINE)
    programs = {"apt-get": 'echo "$@"', "rm": "true", "python3": "true" if has_python else "false"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    index = build_arguments(image)["TORCH_INDEX"]
    if not on_gpu:
        (index,) = re.findall(r"^ARG TORCH_INDEX=(.+)", image, re.MULTILINE)
    environment = {"PATH": str(tmp_path), "TORCH_INDEX": index}
    done = subprocess.run(
        ["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    updated, installed = done.stdout.splitlines()
    packages = installed.removeprefix("install -y --no-install-recommends ").split()
    assert updated == "update"
    for_python = [] if has_python else ["python3", "python3-venv"]
    assert packages == ["wget", *for_python, *(["gcc", "libc6-dev", "python3-dev"] if on_gpu else [])]


def test_the_unit_names_places_for_what_is_written() -> None:
    """All else is read-only to it: Numba finds no place for compiled kernels, nor does Triton."""
    unit = (DEPLOY / "forerun.service").read_text(encoding="utf-8")
    lines = re.findall(r"^Environment=(.+)", unit, re.MULTILINE)
    places = dict(setting.split("=", 1) for line in lines for setting in line.split())
    assert "ProtectSystem=strict" in unit and "StateDirectory=forerun\n" in unit
    assert places.keys() == {"FORERUN_CACHE", "HF_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert all(place.startswith("/var/lib/forerun/") for place in places.values())
