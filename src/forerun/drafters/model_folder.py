"""A trained draft model in a folder, some of whose parts may be its target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, load_drafter
from forerun.models.offloaded import refuse_offloaded_head


@dataclass(frozen=True)
class ModelFolder(ABC):
    """What such a folder holds; `beside` makes a model of it once the target is known."""

    kind: ClassVar[str]

    name: str
    manifest: DrafterManifest
    config: PreTrainedConfig
    tensors: dict[str, Tensor]
    ids: Tensor | None  # [Vd] int64

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        manifest, config, tensors = load_drafter(folder)
        if manifest.kind != cls.kind:
            raise InvalidArgument(
                f"drafter {str(folder)!r} is of kind {manifest.kind}, not {cls.kind}; use forerun.drafters.from_folder"
            )
        ids = tensors.pop(DRAFT_VOCABULARY, None)
        return cls(str(folder), manifest, config, tensors, None if ids is None else ids.long())

    @abstractmethod
    def beside(self, target: PreTrainedModel) -> tuple[PreTrainedModel, Tensor | None]:
        """The model in its target's type and place, and the ids of its head's outputs (None for all)."""


def cut_head(head: nn.Linear, ids: Tensor) -> nn.Linear:
    """The rows of a head that speak of `ids`."""
    refuse_offloaded_head(head)
    small = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    small.weight = nn.Parameter(head.weight.detach()[ids], requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    return small
