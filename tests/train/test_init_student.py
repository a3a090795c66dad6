"""Where drafts begin, what is frozen, and what becomes of them: folders and standalone models."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from forerun.drafters import from_folder
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.loading.drafter_folder import load_drafter
from forerun.train.export import export
from forerun.train.init_student import draft_tokens, init_student
from forerun.train.loop import train_draft
from forerun.train.students import CausalStudent, FeatureStudent, ParallelStudent
from support.tiny import tiny_model
from train.texts import markov_target, memory, small, written_by

VOCAB = 24


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return markov_target(VOCAB)


def trained(target: PreTrainedModel, folder: Path, **options: Any) -> Path:
    data = memory(written_by(target, 40, 20), VOCAB)
    train_draft(target, data, small(steps=2, **options), folder, save_dtype=torch.float32)
    return folder


def test_layers_of_the_target_are_copied() -> None:
    target = tiny_model("llama", vocab=VOCAB, layers=3)
    for kind in ("feature", "causal"):
        student = init_student(target, small(kind=kind, layers=(2, 0)), None).student
        body = student.head.body if isinstance(student, FeatureStudent) else student.model.base_model
        for mine, number in zip(body.layers, (2, 0), strict=True):
            torch.testing.assert_close(mine.state_dict(), target.model.layers[number].state_dict())
        torch.testing.assert_close(body.norm.weight, target.model.norm.weight)
    with pytest.raises(InvalidArgument, match=r"layers 0 to 2"):
        init_student(target, small(layers=(3,)), None)


@pytest.mark.slow
def test_shared_parts_are_neither_trained_nor_stored(target: PreTrainedModel, tmp_path: Path) -> None:
    initial = init_student(target, small(kind="causal"), None)
    names = {name for name, weight in initial.student.named_parameters() if weight.requires_grad}
    assert names and not any("embed" in name or "lm_head" in name for name in names)
    manifest, _, tensors = load_drafter(trained(target, tmp_path, kind="causal"))
    assert manifest.shares == ("embedding", "head")
    assert not any("embed" in name or "lm_head" in name for name in tensors)


@pytest.mark.slow
def test_copied_parts_are_trained_and_stored(target: PreTrainedModel, tmp_path: Path) -> None:
    manifest, _, tensors = load_drafter(trained(target, tmp_path, kind="causal", share=False))
    assert manifest.shares == ()
    assert not torch.equal(tensors["lm_head.weight"], target.get_output_embeddings().weight)
    assert not torch.equal(tensors["model.embed_tokens.weight"], target.get_input_embeddings().weight)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feature", "parallel", "causal"])
def test_a_draft_goes_on_from_its_folder(target: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    options = {"kind": kind, "draft_vocabulary": 15, "heads": 2}
    folder = trained(target, tmp_path / "first", **options)
    again = small(kind=kind, heads=2, start=str(folder))
    tokens = draft_tokens(again, Counter(), (), VOCAB)
    assert tokens is not None and len(tokens) == 15
    initial = init_student(target, again, tokens)
    stored = load_drafter(folder)[2]
    module = initial.student.model if isinstance(initial.student, CausalStudent) else initial.student.head
    for name, tensor in module.state_dict().items():
        if name in stored:
            torch.testing.assert_close(tensor, stored[name])
    other = "causal" if kind == "feature" else "feature"
    with pytest.raises(InvalidArgument, match=kind):
        init_student(target, small(kind=other, start=str(folder)), None)


@pytest.mark.slow
def test_a_reduced_vocabulary_without_the_targets_head_names_what_was_given(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    reduced = trained(target, tmp_path / "reduced", kind="causal", draft_vocabulary=15)
    whole = trained(target, tmp_path / "whole", kind="causal", share=False)
    for given, said in (
        (small(kind="causal", start=str(reduced), share=False), r"reduced' has a reduced .*; leave share=False out"),
        (
            small(kind="causal", start=str(whole), draft_vocabulary=15),
            r"whole' has a head .*; leave draft_vocabulary out",
        ),
    ):
        with pytest.raises(InvalidArgument, match=said):
            init_student(target, given, draft_tokens(given, Counter(), (), VOCAB))


@pytest.mark.slow
def test_a_configuration_of_ones_own(target: PreTrainedModel, tmp_path: Path) -> None:
    config = {**target.config.to_dict(), "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    folder = trained(target, tmp_path / "run", kind="causal", config=str(path))
    manifest, stored, _ = load_drafter(folder)
    assert manifest.shares == () and stored.hidden_size == 16
    with pytest.raises(InvalidArgument, match="one width"):
        trained(target, tmp_path / "other", kind="causal", config=str(path), loss="topk003")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidArgument, match="no transformers configuration"):
        init_student(target, small(kind="causal", config=str(path)), None)


def test_a_model_with_bent_logits_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        init_student(tiny_model("gemma2"), small(), None)


def test_a_window_shorter_than_the_texts_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="max_length to 8"):
        init_student(tiny_model("mistral"), small(), None)
    init_student(tiny_model("mistral"), small(unroll=1), None)


def test_a_parallel_student_has_as_many_heads_as_asked(target: PreTrainedModel) -> None:
    student = init_student(target, small(kind="parallel", heads=5), None).student
    assert isinstance(student, ParallelStudent) and student.depth == 5


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("share", [True, False])
def test_an_exported_draft_says_what_the_draft_said(target: PreTrainedModel, tmp_path: Path, share: bool) -> None:
    folder = trained(target, tmp_path / "draft", kind="causal", share=share)
    assert export(folder, tmp_path / "out", target, None) is False
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    again = init_student(target, small(kind="causal", start=str(folder), share=share), None)
    ids = torch.randint(1, VOCAB, (2, 9))
    with torch.no_grad():
        logits = again.student(ids, None)[0] @ again.head.weight.T
        torch.testing.assert_close(alone(ids).logits, logits)
    with pytest.raises(InvalidArgument, match="not empty"):
        export(folder, tmp_path / "out", target, None)


def test_only_causal_drafts_stand_alone(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = trained(target, tmp_path / "draft", kind="feature")
    with pytest.raises(InvalidArgument, match="hidden states"):
        export(folder, tmp_path / "out", target, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "tree"},
        {"loss": "l2"},
        {"steps": 0},
        {"layers": (0,), "start": "x"},
        {"share": False},
        {"kind": "causal", "share": False, "draft_vocabulary": 9},
        {"kind": "parallel", "rollout_share": 0.5},
        {"rollout_share": 1.0},
        {"batch_tokens": 8},
        {"learning_rate": 0.0},
        {"learning_rate": math.inf},
        {"epochs": math.inf},
        {"epochs": math.nan},
        {"max_minutes": math.inf},
        {"weight_decay": math.nan},
        {"weight_decay": -0.1},
        {"weight_decay": math.inf},
        {"depth_decay": math.inf},
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        small(**wrong)


@pytest.mark.slow
def test_drafters_load_what_was_trained(target: PreTrainedModel, tmp_path: Path) -> None:
    for kind, name in (("feature", "FeatureHead"), ("parallel", "ParallelHeads"), ("causal", "DraftModel")):
        assert type(from_folder(trained(target, tmp_path / kind, kind=kind))).__name__ == name
