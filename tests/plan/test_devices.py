"""Layouts of a target over devices: formulas that can be followed by hand, and a simulation that agrees with them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.cli.main import cli
from forerun.errors import InvalidArgument
from forerun.plan.devices import DeviceSettings, ModelShape, collective_seconds, layouts, pass_seconds
from forerun.plan.simulate import simulate

SHAPE = ModelShape(
    weights=70_000_000_000, stored=71_000_000_000, layers=80, width=8192, heads=64, key_heads=8, head_size=128,
    vocabulary=128256, bytes_each=2,
)  # fmt: skip
SETTINGS = DeviceSettings(devices=8)


def test_shape_of_a_model() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=100, tie_word_embeddings=False)  # fmt: skip
    with torch.device("meta"):
        shape = ModelShape.of(LlamaForCausalLM(config).to(torch.bfloat16))
    assert (shape.stored - shape.weights, shape.head_size, shape.key_bytes) == (6400, 16, 2 * 2 * 2 * 16 * 2)


def test_a_pass_by_hand() -> None:
    plain = replace(SETTINGS, context=1000, bandwidth=4000.0, link_latency=10.0, link_bandwidth=400.0, tflops=1e6)
    read = 140e9 + 1000 * 2 * 80 * 8 * 128 * 2
    assert pass_seconds(SHAPE, plain, 1, 1, 1) == pytest.approx(read / 4e12)
    sums = 161 * 2 * (1 / 2) * 8192 * 2 / 4e11
    logits = (1 / 2) * 128256 * 2 / 4e11
    assert collective_seconds(SHAPE, plain, 2, 1) == pytest.approx(162 * 1e-5 + sums + logits)
    assert pass_seconds(SHAPE, plain, 2, 1, 1) == pytest.approx(read / 8e12 + 162 * 1e-5 + sums + logits)


def test_layouts_that_fit() -> None:
    found = layouts(SHAPE, SETTINGS)
    assert [(one.split, one.copies) for one in found] == [(2, 4), (4, 2), (8, 1)]
    assert [one.rows for one in found] == [8, 16, 32]
    with pytest.raises(InvalidArgument, match="142 GB of weights need at least 2 devices"):
        layouts(SHAPE, replace(SETTINGS, devices=1))


def test_a_row_that_is_alone_waits_for_its_own_rounds() -> None:
    """With hardly any traffic, a simulated token takes a round's time over the tokens of a round."""
    quiet = replace(SETTINGS, rate=0.01, context=400, rows=1)
    layout = layouts(SHAPE, quiet)[-1]
    waiting = simulate(SHAPE, quiet, layout)
    assert waiting.served == 2000 and not waiting.is_overloaded
    assert waiting.each_token[0] == pytest.approx(1 / layout.row_tokens_per_second, rel=0.15)


@pytest.mark.slow
def test_more_requests_than_can_be_answered() -> None:
    busy = replace(SETTINGS, rate=2000.0, context=400, rows=1)
    assert simulate(SHAPE, busy, layouts(SHAPE, busy)[-1]).is_overloaded


def test_the_command(tmp_path: object) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2).save_pretrained(str(tmp_path))
    run = CliRunner().invoke(cli, ["plan", str(tmp_path), "--devices", "4", "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.output)
    assert told["prediction"] is True
    assert [layout["split"] for layout in told["layouts"]] == [1, 2, 4]
    refused = CliRunner().invoke(cli, ["plan", str(tmp_path), "--devices", "4", "--repeats", "3"])
    assert refused.exit_code == 2 and "--repeats" in refused.output
    refused = CliRunner().invoke(cli, ["plan", str(tmp_path), "--rate", "3", "--memory", "80"])
    assert refused.exit_code == 2 and "--memory, --rate: of a prediction for --devices N" in refused.output
