"""Files of `deploy/` name what is there: metrics that the server exports, options that the command has."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
