"""What all drafters that read their target's features do alike: hold a trunk and let it follow the rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from forerun.arguments import refuse
from forerun.cache.base import KeyValueCache
from forerun.drafters.autoregressive import BranchingDrafter, check_stop_below
from forerun.drafters.trunk import Trunk
from forerun.errors import InvalidArgument
from forerun.math.attention import Form
from forerun.models.draft_head import DraftHead
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer


class OnFeatures(BranchingDrafter):
    """A drafter on a trunk. `draft_vocabulary` names the token ids it can say (all by default).

    A row is drafted for once the target has run its prompt.
    """

    kind: ClassVar[str]  # as a drafter's folder names it

    def __init__(
        self,
        head: DraftHead,
        *,
        draft_vocabulary: Tensor | None = None,
        made_for: Mapping[str, Any] | None = None,
        stop_below: float | None = None,
        form: Form = Form.AUTO,
    ) -> None:
        check_stop_below(stop_below)
        _check_head(head)
        self.trunk = Trunk(head, _ascending(draft_vocabulary), made_for, form)
        self.stop_below = stop_below

    @classmethod
    def load(cls, folder: str | Path, *, stop_below: float | None = None, form: Form = Form.AUTO) -> Self:
        """From the folder that training wrote."""
        trunk = Trunk.load(folder, cls.kind, form)
        return cls(trunk.head, draft_vocabulary=trunk.ids, made_for=trunk.made_for, stop_below=stop_below, form=form)

    def clone(self) -> Self:
        """The same head with rows of its own."""
        twin = copy.copy(self)
        twin.trunk = self.trunk.clone()
        return twin

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        if isinstance(target, Seq2SeqScorer):
            raise InvalidArgument(
                f"{type(self).__name__} is trained on the features of decoder-only models and cannot draft for "
                f"{type(target.model).__name__}; use DraftModel, EarlyExit or PromptLookup"
            )
        self.trunk.bind(target)

    def has_changed(self) -> bool:
        """Whether the head is no longer what its passes were made from."""
        return self.trunk.body.has_changed()

    @property
    def draft_models(self) -> tuple[nn.Module, ...]:
        return self.trunk.models

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.trunk.admit(row)

    @property
    def caches(self) -> tuple[KeyValueCache, ...]:
        return (self.trunk.body.cache,)

    def num_unread(self, row: int, length: int) -> int:
        """Pairs of a feature and the token behind it; the last is run by every draft."""
        return max(length - 2 - self.trunk.body.length(row), 0)

    def release(self, row: int) -> None:
        self.trunk.release(row)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.trunk.rewind(rows, lengths)


def _check_head(head: Any) -> None:
    if not isinstance(head, DraftHead):
        refuse("head", head, "must be a DraftHead; `load` makes a drafter of a folder that training wrote")


def _ascending(ids: Any) -> Tensor | None:
    """Token ids that laws can look up: of others they would say that tokens which were drawn have no chance."""
    if ids is None:
        return None
    remedy = "must be a tensor of token ids, ascending and without repeats"
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        refuse("draft_vocabulary", ids, remedy)
    if not len(ids) or int(ids[0]) < 0 or not bool((ids[1:] > ids[:-1]).all()):
        refuse("draft_vocabulary", ids, remedy)
    return ids
