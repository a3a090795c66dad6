"""What a run leaves in its folder: the checkpoint it resumes from, and at the end the drafter a decoder loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.files import write_whole
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, describe_target, save_drafter
from forerun.train.init_student import InitialStudent, end_names

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_FORMAT = 1
AGAIN = "make room and run again with --resume"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """`state` holds tensors, numbers, texts, lists and dictionaries only. Written beside its place and renamed."""
    write_whole(folder / CHECKPOINT, lambda beside: torch.save({"format": CHECKPOINT_FORMAT, **state}, beside), AGAIN)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / CHECKPOINT
    if not path.is_file():
        raise InvalidArgument(f"{str(folder)!r} has no {CHECKPOINT} to resume from; start the run without --resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InvalidArgument(f"{str(path)!r} is damaged ({error}); delete it and train again") from error
    version = state.get("format") if isinstance(state, dict) else None
    if version != CHECKPOINT_FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has format {version!r}, this version reads {CHECKPOINT_FORMAT}; delete it and train again"
        )
    return state


def write_drafter(
    folder: Path, target: PreTrainedModel, initial: InitialStudent, provenance: dict[str, Any], dtype: torch.dtype
) -> None:
    """`forerun.json`, `config.json` and `model.safetensors`; shared parts are left out, they are the target's."""
    student = initial.student
    manifest = DrafterManifest(
        kind=student.kind,
        num_blocks=student.num_blocks,
        target=describe_target(target),
        shares=initial.shares,
        provenance=provenance,
    )
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors_to_save(initial).items()}
    if initial.head.tokens is not None:
        tensors[DRAFT_VOCABULARY] = initial.head.tokens.to(torch.int32)
    save_drafter(folder, manifest, student.network.config, tensors, AGAIN)


def _tensors_to_save(initial: InitialStudent) -> dict[str, Tensor]:
    """All that the draft does not have from its target, and of tied weights one."""
    network = initial.student.network
    left_out: set[str] = set()
    if isinstance(network, PreTrainedModel) and initial.shares:
        left_out = end_names(network)
    elif isinstance(network, PreTrainedModel) and network.config.tie_word_embeddings:
        left_out = set(getattr(network, "_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in network.state_dict().items() if name not in left_out}
