"""The `args` of a config file are options of `forerun serve`, with its defaults and complaints."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from forerun.cli.deployed import parsed
from forerun.errors import InvalidArgument
from forerun.serve.replicas.names import DEPLOYMENT, MIDDLEWARES

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
