"""A trained causal draft as an ordinary transformers folder, with the parts it shared filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.files import fresh_folder
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, load_drafter
from forerun.train.init_student import causal_draft

WHY_NOT = "it reads the target's hidden states, as no ordinary model does; use the folder as it is, as a drafter"


def check_exportable(manifest: DrafterManifest, folder: Path) -> None:
    if manifest.kind != "causal":
        raise InvalidArgument(f"{str(folder)!r} is a {manifest.kind} draft and no model by itself: {WHY_NOT}")


def check_fresh(output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        raise InvalidArgument(f"{str(output)!r} is not empty; choose a new folder")


def export(folder: Path, output: Path, target: PreTrainedModel, tokenizer: Any) -> bool:
    """Write the standalone model and its tokenizer; True if a reduced vocabulary was widened to the whole one."""
    contents = load_drafter(folder)
    manifest, _, tensors = contents
    check_exportable(manifest, folder)
    check_fresh(output)
    dtype = next(tensor.dtype for name, tensor in tensors.items() if name != DRAFT_VOCABULARY)
    model = causal_draft(contents, folder, target, dtype)
    with fresh_folder(output) as place:
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    return DRAFT_VOCABULARY in tensors
