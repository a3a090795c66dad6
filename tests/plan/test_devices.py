"""Layouts of a target over devices: formulas that can be followed by hand, and a simulation that agrees with them."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
)

from forerun.cli.main import cli
from forerun.errors import InvalidArgument
from forerun.plan.devices import DeviceSettings, ModelShape, collective_seconds, layouts, pass_seconds
from forerun.plan.simulate import _Simulation, simulate
from support.pinned import needs_pinned_transformers

SHAPE = ModelShape(
    weights=70_000_000_000, stored=71_000_000_000, layers=80, width=8192, heads=64, key_heads=8,
    key_bytes=2 * 80 * 8 * 128 * 2, vocabulary=128256, bytes_each=2,
)  # fmt: skip
SETTINGS = DeviceSettings(devices=8)


def test_shape_of_a_model() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=100, tie_word_embeddings=False)  # fmt: skip
    with torch.device("meta"):
        shape = ModelShape.of(LlamaForCausalLM(config).to(torch.bfloat16))
    assert (shape.stored - shape.weights, shape.key_bytes) == (6400, 2 * 2 * 2 * 16 * 2)
    assert shape.weights_met(1) == shape.weights_met(50) == shape.weights


def outline(config: PreTrainedConfig) -> ModelShape:
    with torch.device("meta"):
        return ModelShape.of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def test_one_key_for_all_heads() -> None:
    """Falcon's 71 heads read one key of 64 numbers, which cannot be split."""
    shape = outline(FalconConfig(vocab_size=100, hidden_size=4544, num_attention_heads=71, num_hidden_layers=2))
    assert (shape.key_heads, shape.key_bytes) == (1, 2 * 2 * 64 * 2)
    assert [one.split for one in layouts(shape, SETTINGS)] == [1]


def test_latents_lie_on_every_device() -> None:
    """DeepSeek keeps 512 numbers that all heads share, and 64 that are rotated."""
    shape = outline(DeepseekV3Config(vocab_size=100, num_hidden_layers=2, first_k_dense_replace=2))
    assert shape.key_bytes == shape.key_bytes_each(8) == 2 * (512 + 64) * 2
    whole, *_, most = layouts(shape, replace(SETTINGS, rows=1))
    assert most.key_tokens < 1.1 * whole.key_tokens, "more room where fewer weights lie, and no less for a token"


@needs_pinned_transformers
@pytest.mark.parametrize(("family", "experts"), [
    ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [1, 3]}),  # layer by layer
    ("gemma4_text", {"num_experts": 8, "top_k_experts": 2, "enable_moe_block": True, "moe_intermediate_size": 96}),
    ("aria_text", {"moe_num_experts": 8, "moe_topk": 2}),
])  # fmt: skip
def test_experts_by_other_names(family: str, experts: dict[str, Any]) -> None:
    """A token is sent to two of eight, on average."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}  # fmt: skip
    shape = outline(AutoConfig.for_model(family, **sizes, **experts))
    assert shape.expert_weights == 2 * 8 * 3 * 64 * 96
    assert shape.weights - shape.weights_met() == shape.expert_weights * 6 / 8


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    """Two of Mixtral's eight; two tokens meet 1 - (3/4)^2 of them, if their choices have nothing to do with others."""
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=100, head_dim=16,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    shape = outline(config)
    experts = 2 * 8 * 3 * 64 * 96
    assert shape.stored - shape.weights == 6400
    assert shape.weights - shape.weights_met() == experts * 6 / 8
    assert shape.weights - shape.weights_met(2) == experts * 36 / 64
    narrow = replace(SETTINGS, tflops=1e-3)  # so slow that computing is all that counts
    assert pass_seconds(shape, narrow, 1, 1, 10) == pytest.approx(2 * shape.weights_met() * 10 / 1e9)
    wide = replace(SETTINGS, tflops=1e6, bandwidth=1e-3, context=1)
    read = shape.weights_met(10) * 2 + shape.key_bytes
    assert pass_seconds(shape, wide, 1, 1, 10) == pytest.approx(read / 1e6)


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


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_no_more_rows_are_counted_than_there_are(rows: int) -> None:
    """One row is no faster for the seven copies beside it."""
    for one in layouts(replace(SHAPE, stored=35_000_000_000), replace(SETTINGS, rows=rows)):
        assert one.tokens_per_second == pytest.approx(rows * one.row_tokens_per_second)


def test_keys_that_do_not_fit_are_not_blamed_on_the_weights() -> None:
    """142 GB over eight devices of 20, a tenth kept: 0.25 GB are left on each; keys of a token take 41 kB."""
    tight = replace(SETTINGS, memory=20.0, context=8192)
    with pytest.raises(
        InvalidArgument, match=r"context=8192: keys .* take 0\.336 GB on each of 8 devices.* leave 0\.25"
    ):
        layouts(SHAPE, tight)
    assert layouts(SHAPE, replace(tight, context=4096))


@pytest.mark.parametrize(
    "name", ["memory", "bandwidth", "tflops", "link_bandwidth", "link_latency", "draft_cost", "rate"]
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_figures_are_finite(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=name):
        DeviceSettings(**{name: value})


def test_a_row_that_is_alone_waits_for_its_own_rounds() -> None:
    """With hardly any traffic, a simulated token takes a round's time over the tokens of a round."""
    quiet = replace(SETTINGS, rate=0.01, context=400, rows=1)
    layout = layouts(SHAPE, quiet)[-1]
    waiting = simulate(SHAPE, quiet, layout)
    assert waiting.served == 2000 and not waiting.is_overloaded
    assert waiting.each_token[0] == pytest.approx(1 / layout.row_tokens_per_second, rel=0.15)


@pytest.mark.slow
def test_answers_may_take_longer_than_requests_are_simulated_for() -> None:
    """Half a minute of requests, each of which is written for longer: as many tokens come as are asked for."""
    slow = replace(SETTINGS, devices=1000, rate=70.0, context=8192, link_latency=1000.0)
    slow = replace(slow, alpha=1.0, draft_length=15, draft_cost=0.0)  # few rounds to simulate
    waiting = simulate(SHAPE, slow, layouts(SHAPE, slow)[-1])
    assert not waiting.is_overloaded
    assert waiting.tokens_per_second == pytest.approx(70 * 8192 / 4, rel=0.1)


def test_long_answers_are_simulated_for_fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation takes as long as its rounds are many, whatever the context."""
    monkeypatch.setattr("forerun.plan.simulate.MOST_ROUNDS", 50_000)
    monkeypatch.setattr("forerun.plan.simulate.LEAST", 20)
    settings = replace(SETTINGS, rate=0.1, context=8192)
    simulation = _Simulation(SHAPE, settings, layouts(SHAPE, settings)[-1], Random(0))
    served = simulation.run().served
    assert 20 < served < 2000 and served == pytest.approx(50_000 / simulation._rounds, abs=1)


def test_more_requests_than_can_be_answered() -> None:
    """Beyond a rate that the formulas give, and not below it, those who come later wait longer."""
    few = replace(SETTINGS, context=400, memory=19.95, rate=1.0)
    layout = layouts(SHAPE, few)[-1]
    assert layout.key_tokens // 400 == 12, "rows that there is room for"
    simulations = {rate: _Simulation(SHAPE, replace(few, rate=rate), layout, Random(0)) for rate in range(1, 200)}
    rates = [rate for rate, simulation in simulations.items() if simulation.steady_rows is not None]
    most = max(rates)
    assert rates == list(range(1, most + 1))
    for share, grows in ((0.85, False), (1.2, True)):
        simulation = _Simulation(SHAPE, replace(few, rate=share * most), layout, Random(1))
        assert simulation.run().is_overloaded is grows
        waits = [request.first - request.arrived for request in simulation.ended if request.arrived > 0]
        assert (mean(waits[1500:]) > 3 * mean(waits[:500])) is grows


@pytest.mark.slow
def test_the_more_requests_the_smaller_the_split_that_answers_soonest() -> None:
    """As docs/devices.md says of eight devices."""
    best = []
    for rate in (8.0, 16.0, 24.0):
        settings = replace(SETTINGS, rate=rate)
        waits = [simulate(SHAPE, settings, layout) for layout in layouts(SHAPE, settings)]
        bearing = [one for one in waits if not one.is_overloaded]
        best.append(min(bearing, key=lambda one: one.first_token[1] + 100 * one.each_token[1]).layout.split)
    assert best == [8, 4, 2]


def test_the_command(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.plan.simulate.MOST", 500)
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2).save_pretrained(str(tmp_path))
    run = CliRunner().invoke(cli, ["plan", str(tmp_path), "--devices", "4", "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.output)
    assert told["prediction"] is True
    assert [layout["split"] for layout in told["layouts"]] == [1, 2, 4]
    flooded = CliRunner().invoke(cli, ["plan", str(tmp_path), "--devices", "1", "--rate", "1e6"])
    assert flooded.exit_code == 0 and "all of them are overloaded" in flooded.output
    refused = CliRunner().invoke(cli, ["plan", str(tmp_path), "--devices", "4", "--repeats", "3"])
    assert refused.exit_code == 2 and "--repeats" in refused.output
    refused = CliRunner().invoke(cli, ["plan", str(tmp_path), "--rate", "3", "--memory", "80"])
    assert refused.exit_code == 2 and "--memory, --rate: of a prediction for --devices N" in refused.output
