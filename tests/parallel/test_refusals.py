"""What cannot be split, or cannot draft for a split target, is refused before anything runs."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import GPT2Config, LlamaConfig, Phi3Config, T5Config

import forerun
from cli.command import Command
from forerun.errors import UnsupportedModel
from forerun.loading.sizes import check_divides
from forerun.models.bodies.shard_cpu import ShardCpuBody
from forerun.parallel.join import check_split
from support.folders import save
from support.ranks import VOCAB, load_shard, raised, run_ranks
from support.tiny import tiny_model


def test_heads_that_do_not_divide() -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=12, num_key_value_heads=6)
    check_divides(config, 3, "llama")
    with pytest.raises(
        UnsupportedModel, match=r"12 heads of attention and 6 of keys.* by 4 processes; use 1 or 2 or 3 or 6"
    ):
        check_divides(config, 4, "llama")


@pytest.mark.parametrize("config", [GPT2Config(), T5Config()])
def test_models_without_a_plan(config: Any) -> None:
    with pytest.raises(UnsupportedModel, match="no tensor parallel plan"):
        check_divides(config, 2, "model")


def test_heads_that_every_process_has() -> None:
    check_divides(Phi3Config(num_attention_heads=5, num_key_value_heads=5), 2, "phi3")


def refusals(folder: str) -> Any:
    target = load_shard(folder)
    early = raised(lambda: forerun.SpeculativeDecoder(target, forerun.EarlyExit(1)))
    split = raised(
        lambda: forerun.SpeculativeDecoder(tiny_model("llama", vocab=VOCAB), forerun.DraftModel(load_shard(folder)))
    )
    decoder = forerun.SpeculativeDecoder(target, "auto", kernels="on")
    asked = raised(lambda: decoder.generate([[1, 2]], max_new_tokens=2, temperature=-1))
    streams = raised(lambda: decoder.stream([[1, 2]], max_new_tokens=2).close())
    body = decoder.engine.target.body
    assert isinstance(body, ShardCpuBody)
    return early, split, asked, streams, any(isinstance(weight, DTensor) for weight in body.model.parameters())


def test_what_runs_on_rank_0_alone(tmp_path: Path) -> None:
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    ranks = run_ranks(2, refusals, str(tmp_path))
    assert all(isinstance(rank, tuple) for rank in ranks), ranks
    for early, split, asked, _, has_split_weights in ranks:
        assert "EarlyExit computes with the weights of its target" in early
        assert "the draft model of a target that is split over the same ones" in split
        assert asked.startswith("InvalidArgument: temperature")
        assert not has_split_weights, "weights that are split were given to kernels that take addresses"
    assert ranks[0][3] == "nothing was raised"
    assert "serve_passes" in ranks[1][3]


def split_by_others() -> list[str]:
    """What is said of weights that are DTensors by hand and by FSDP, as a target, as a draft, and between two calls."""
    mesh = init_device_mesh("cpu", (1,))
    by_hand, by_fsdp, later = (copy.deepcopy(tiny_model("llama", vocab=VOCAB)) for _ in range(3))
    for module in by_hand.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]), requires_grad=False)
    fully_shard(by_fsdp, mesh=mesh)
    decoder = forerun.SpeculativeDecoder(later, None, kernels="on")
    decoder.generate([[1, 2]], max_new_tokens=2)
    fully_shard(later, mesh=mesh)
    return [
        raised(lambda: forerun.SpeculativeDecoder(by_hand, None, kernels="on")),
        raised(lambda: forerun.SpeculativeDecoder(by_fsdp, None, kernels="off")),
        raised(lambda: forerun.SpeculativeDecoder(tiny_model("llama", vocab=VOCAB), forerun.DraftModel(by_hand))),
        raised(lambda: decoder.generate([[1, 2]], max_new_tokens=2)),
    ]


def test_weights_that_others_have_split() -> None:
    """However they lie: each of these would be another way to run a pass in step."""
    (found,) = run_ranks(1, split_by_others)
    assert isinstance(found, list), found
    for said in found[:2]:
        assert said.startswith("UnsupportedModel") and "not split by transformers' tensor parallelism" in said
        assert "DistributedConfig(tp_size=...)" in said and "full_tensor()" in said
    assert all("split over processes that nobody has told to run in step" in said for said in found[2:])


def split_oddly() -> dict[str, str]:
    """What is said of a target as transformers splits it, but for one thing: its types, where it lies, and how many
    processes there are beside those that it is split over."""
    mesh, said = init_device_mesh("cpu", (1,)), {}
    for odd in ("nothing", "types", "place", "mesh"):
        model = copy.deepcopy(tiny_model("llama", vocab=VOCAB))
        model._tp_size = 2  # as it would be where a mesh of one process splits nothing
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        for index, module in enumerate(linear):
            own = module.weight.bfloat16() if odd == "types" and index == 1 else module.weight
            module.weight = torch.nn.Parameter(distribute_tensor(own, mesh, [Shard(0)]), requires_grad=False)
        with pytest.MonkeyPatch.context() as patch:
            if odd == "place":
                patch.setattr(DTensor, "is_cuda", True)
            if odd == "mesh":
                patch.setattr(dist, "get_world_size", lambda: 2)
            said[odd] = raised(partial(check_split, model))
    return said


def test_targets_that_transformers_splits_in_a_way_that_is_not_run() -> None:
    (said,) = run_ranks(1, split_oddly)
    assert isinstance(said, dict), said
    assert said["nothing"] == "nothing was raised"
    assert said["types"].endswith("has shards of bfloat16 and float32; load it with one dtype")
    assert "lies on GPUs and its processes talk by gloo" in said["place"]
    assert "is split over 1 of 2 processes; start as many as DistributedConfig(tp_size=...) says" in said["mesh"]
    assert all(said[odd].startswith("UnsupportedModel: ") for odd in ("types", "place", "mesh"))


def load_unalike(folder: str, other: str) -> Any:
    """On rank 1 another model than on rank 0, then the same one."""
    name = other if dist.get_rank() else folder
    refused = raised(lambda: forerun.SpeculativeDecoder(load_shard(name), None, kernels="off"))
    decoder = forerun.SpeculativeDecoder(load_shard(folder), None, kernels="off")
    return refused, decoder.generate([[1, 2, 3]], max_new_tokens=3).new_tokens


@pytest.mark.parametrize("how", ["layers", "dtype"])
def test_ranks_that_have_loaded_different_models(how: str, tmp_path: Path) -> None:
    """Their sums would be of different sizes, or of no meaning."""
    whole = tiny_model("llama", vocab=VOCAB)
    whole.save_pretrained(tmp_path / "a")
    other = tiny_model("llama", vocab=VOCAB, layers=1) if how == "layers" else copy.deepcopy(whole).bfloat16()
    other.save_pretrained(tmp_path / "b")
    said = forerun.SpeculativeDecoder(whole, None, kernels="off").generate([[1, 2, 3]], max_new_tokens=3).new_tokens
    for rank in run_ranks(2, load_unalike, str(tmp_path / "a"), str(tmp_path / "b"), seconds=100):
        assert isinstance(rank, tuple), rank
        assert "rank 0 and rank 1 have loaded different models: model." in rank[0]
        assert ("on rank 0 and not there on rank 1" if how == "layers" else "on rank 0 and bfloat16 (") in rank[0]
        assert rank[1] == said


def test_commands(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_model("llama", vocab=VOCAB))
    heads = Command("generate")("--model", folder, "--tensor-parallel", "3", "abc")
    assert heads.exit_code == 2 and "do not divide by 3 processes; use 1 or 2" in heads.stderr
    for option in ("--quantize-head", "--no-quantize-head"):
        rounded = Command("generate")("--model", folder, "--tensor-parallel", "2", option, "abc")
        assert rounded.exit_code == 2 and f"{option}: a model split over processes" in rounded.stderr
    odd = save(
        tmp_path / "odd", tiny_model("llama", vocab=VOCAB, hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    )
    on = ("--draft-split", "on")
    draft = Command("generate")("--model", folder, "--tensor-parallel", "2", "--draft", odd, *on, "abc")
    assert draft.exit_code == 2 and "3 of keys, which do not divide by 2 processes; use 1 or 3" in draft.stderr
    nobody = Command("generate")("--model", folder, "--tensor-parallel", "2", "--draft", "lookup", *on, "abc")
    assert nobody.exit_code == 2 and "--draft names no model" in nobody.stderr
    whole = Command("generate")("--model", folder, "--draft", odd, *on, "abc")
    assert whole.exit_code == 2 and "--draft-split on: the target is not split" in whole.stderr
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
    several = Command("doctor")(**torchrun)
    assert several.exit_code == 2 and "`forerun doctor` runs in one" in several.stderr
    decode = Command("bench")("decode", **torchrun)
    assert decode.exit_code == 2 and decode.stderr.endswith("`forerun bench decode` runs in one: start it without\n")
    for name, asked, why in (
        ("check", ("--quantize", "int8"), "--quantize int8: a model split over processes is not quantised"),
        ("bench", ("--quantize", "int8"), "--quantize int8: a model split over processes is not quantised"),
        ("bench", ("--draft", "lookup", *on), "--draft names no model"),
        ("bench", ("--model", "embedded", "--peer", "llama.cpp"), "those are not split over processes"),
        ("eval", ("asr", "--data", str(tmp_path)), "'asr' is run by one process"),
        ("plan", ("synthetic:tiny+mini@0.87",), "is made whole, and not split over processes"),
        ("plan", (folder, "--devices", "8"), "--devices predicts by formulas"),
    ):
        refused = Command(name)(*asked, **torchrun)
        assert refused.exit_code == 2 and why in refused.stderr, (name, refused.output)
    other = Command("generate")("--model", folder, "--tensor-parallel", "4", "abc", **torchrun)
    assert other.exit_code == 2 and "torchrun has started 2 processes" in other.stderr
