"""Long passes of transformers' modules on a CPU: rows attend block by block, and score as plain forwards do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.config import Kernels
from forerun.math import banded_attention
from forerun.models import attention
from forerun.models.ragged_states import LONG
from forerun.models.scorer import Scorer
from support.recompute import check, recomputed
from support.tiny import tiny_model

FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "gpt_neox", "opt", "phi3")  # windows of 8 keys, capped scores
LENGTHS = (150, 3, LONG + 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_rows_score_as_plain_forwards(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt, a short one and one more, at first empty and then behind keys."""
    model: Any = tiny_model(family, max_position_embeddings=512)
    scorer, passes = Scorer(model, use=Kernels.OFF), []
    run = attention.attend_bands
    monkeypatch.setattr(attention, "attend_bands", lambda *call: passes.append(call[3].window) or run(*call))
    monkeypatch.setattr(banded_attention, "BLOCK", 32)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(97, (2 * n,), generator=generator).tolist() for n in LENGTHS]
    for row in range(3):
        scorer.admit(row)
    for half in range(2):
        blocks = [text[half * n : (half + 1) * n] for text, n in zip(texts, LENGTHS, strict=True)]
        made = scorer.score(range(3), blocks).split(list(LENGTHS))
        for text, n, logits in zip(texts, LENGTHS, made, strict=True):
            check(logits, recomputed(model, text[: (half + 1) * n])[half * n :])
    assert len(passes) == 2 * model.config.num_hidden_layers
    assert (8 in passes) == (family in ("mistral", "gemma2", "gemma3"))


def test_short_rows_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend_bands", None)
    scorer = Scorer(tiny_model("mistral"), use=Kernels.OFF)
    scorer.admit(0)
    assert scorer.score([0], [[1] * (LONG - 1)]).shape[0] == LONG - 1
