"""A trained causal draft as an ordinary transformers folder, with the parts it shared filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.files import fresh_folder
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, building, fill, load_drafter
from forerun.train.init_student import end_names

WHY_NOT = "it reads the target's hidden states, as no ordinary model does; use the folder as it is, as a drafter"


def check_exportable(manifest: DrafterManifest, folder: Path) -> None:
    if manifest.kind != "causal":
        raise InvalidArgument(f"{str(folder)!r} is a {manifest.kind} draft and stands on no feet of its own: {WHY_NOT}")


def check_fresh(output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        raise InvalidArgument(f"{str(output)!r} is not empty; choose a new folder")


def export(folder: Path, output: Path, target: PreTrainedModel, tokenizer: Any) -> bool:
    """Write the standalone model and its tokenizer; True if a reduced vocabulary was widened to the whole one."""
    manifest, config, tensors = load_drafter(folder)
    check_exportable(manifest, folder)
    check_fresh(output)
    reduced = tensors.pop(DRAFT_VOCABULARY, None) is not None
    dtype = next(iter(tensors.values())).dtype
    with building(folder):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _fill(model, target, manifest.shares)
    fill(model, tensors, folder, end_names(model))
    with fresh_folder(output) as place:
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    return reduced


@torch.no_grad()
def _fill(model: PreTrainedModel, target: PreTrainedModel, shares: tuple[str, ...]) -> None:
    parts = {"embedding": "get_input_embeddings", "head": "get_output_embeddings"}
    for share in shares:
        mine, its = getattr(model, parts[share])().weight, getattr(target, parts[share])().weight
        if mine.shape != its.shape:
            raise InvalidArgument(
                f"the draft's {share} is {tuple(mine.shape)} and the target's {tuple(its.shape)}: give the target it "
                "was trained for with --target"
            )
        mine.copy_(its)
