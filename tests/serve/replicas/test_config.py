"""The `args` of a config file are options of `forerun serve`, with its defaults and complaints."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forerun.cli.deployed import app, parsed
from forerun.cli.replicas import share_of
from forerun.errors import InvalidArgument
from forerun.serve.replicas.names import DEPLOYMENT, MIDDLEWARES
from forerun.serve.replicas.run import SETTINGS
from forerun.serve.settings import ServiceSettings
from forerun.serve.speech import BATCH
from support.tiny import tiny_model
from support.whisper import tiny_whisper

DEPLOY = Path(__file__).resolve().parents[3] / "deploy/ray"


def test_arguments_are_options() -> None:
    options = parsed(
        {"model": "some/model", "max_rows": 4, "offline": True, "cors_origin": ["a", "b"], "compile": False}
    )
    assert (options["model"], options["max_rows"], options["offline"]) == ("some/model", 4, True)
    assert (options["cors_origin"], options["compile"], options["max_queued"]) == (("a", "b"), False, 512)


@pytest.mark.parametrize(
    ("name", "value"), [("max_row", 4), ("max_rows", "many"), ("offline", "yes"), ("max_rows", True)]
)
def test_what_the_command_would_not_take(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"args: .*(has no --max-row|--max-rows|true or false|a value)"):
        parsed({name: value})


def test_null_is_the_same_as_leaving_it_out() -> None:
    """A key that read "None" would let everybody in who writes that word."""
    given = {"model": "some/model", "max_rows": 4}
    nulls = {name: None for name in parsed(given) if name not in given}
    assert parsed({**given, **nulls}) == parsed(given)
    assert parsed({"model": "some/model", "api_key": None})["api_key"] is None
    with pytest.raises(InvalidArgument, match="args: cors_origin: null in a list"):
        parsed({"model": "some/model", "cors_origin": ["a", None]})


def test_a_config_file_needs_a_queue() -> None:
    with pytest.raises(InvalidArgument, match="--max-queued 0: requests for replicas wait in Ray"):
        app({"model": "some/model", "max_queued": 0, "allow_anyone": True})


@dataclass(frozen=True)
class Share:
    """Stands for the real one, which needs Ray."""

    num_cpus: float
    num_gpus: int
    rows: int


def test_a_whisper_decodes_fewer_recordings_than_others_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "forerun.serve.replicas.deployment", SimpleNamespace(Share=Share))  # type: ignore[arg-type]
    tiny_whisper().config.save_pretrained(tmp_path / "whisper")
    tiny_model("llama").config.save_pretrained(tmp_path / "llama")

    def rows(name: str, device: str = "cuda", **limits: int) -> int:
        options = parsed({"model": str(tmp_path / name), "offline": True})
        return share_of(options, ServiceSettings(**limits), device, 1.0).rows

    assert (rows("whisper"), rows("whisper", "cpu"), rows("whisper", max_rows=3)) == (BATCH, BATCH, 3)
    assert (rows("llama"), rows("llama", "cpu")) == (128, 16)
    assert rows("on another node") == 128


def test_replicas_fit_the_cores_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits without a limit for what does not fit. It counts in ten-thousandths of a core, as is done here."""
    monkeypatch.setitem(sys.modules, "forerun.serve.replicas.deployment", SimpleNamespace(Share=Share))  # type: ignore[arg-type]
    options, limits = parsed({"model": "some/model"}), ServiceSettings(max_rows=4)
    for cores, replicas in itertools.product(range(1, 193), range(1, 33)):
        share = share_of(options, limits, "cpu", cores / replicas).num_cpus
        assert round(share * 10_000) * replicas <= cores * 10_000, (cores, replicas)
        assert share > cores / replicas - 0.02, "no more than rounding takes"


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_files_of_deploy_name_options_that_exist(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    config = yaml.safe_load(config["spec"]["serveConfigV2"]) if "spec" in config else config
    (application,) = config["applications"]
    module, function = application["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert parsed(application["args"])["max_replicas"] == 4
    assert [one["name"] for one in application["deployments"]] == [DEPLOYMENT]
    assert MIDDLEWARES in text


def test_nodes_of_a_cluster_get_the_variables_that_the_page_asks_for() -> None:
    """Those of the page are those that the command sets by itself, as far as nodes need them."""
    page = (DEPLOY.parents[1] / "docs/scale.md").read_text(encoding="utf-8")
    asked = dict(re.findall(r"`(RAY_SERVE_[A-Z_]+)=([^`]+)`", page))
    containers = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterConfig"]
    head = containers["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    (workers,) = containers["workerGroupSpecs"]
    assert len(asked) == 5 and workers["template"]["spec"]["containers"][0]["env"] == head
    assert asked == {one["name"]: one["value"] for one in head if one["name"].startswith("RAY_")}
    assert asked.items() <= (SETTINGS | {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES}).items()
