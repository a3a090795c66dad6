"""ALiBi that a model rounds where keys lie: a row is told its own places, whatever stands beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from forerun.errors import UnsupportedModel
from forerun.models.bodies import readers
from forerun.models.scorer import Scorer
from forerun.models.trial.compare import _remedy
from support.pinned import needs_pinned_transformers
from support.recompute import check, recomputed
from support.tiny import tiny_model

pytestmark = needs_pinned_transformers

# Sixteen heads: every other slope is no power of two, so that a product with a place is rounded to 8 bits at once.
FALCON = {"hidden_size": 128, "num_attention_heads": 16}
BLOOM = {"hidden_size": 128, "n_head": 16}  # of half the width, a wrong place is within the room for rounding
SHORT, LONG = 5, 300  # tokens of a row and of its neighbour: past 256, bfloat16 has not every whole number


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def beside(scorer: Scorer, text: list[int], neighbour: list[int] | None) -> torch.Tensor:
    """Logits of the text's last token, behind its others in the cache, with a long row beside it or alone."""
    rows = [0] if neighbour is None else [0, 1]
    blocks = [text] if neighbour is None else [text, neighbour]
    for row in rows:
        scorer.admit(row)
        scorer.feed([row], [blocks[row][:-1]])
    made = scorer.score(rows, [block[-1:] for block in blocks])[0]
    for row in reversed(rows):
        scorer.release(row)
    return made


@pytest.mark.quick("falcon_alibi-settings0-dtype0")
@pytest.mark.parametrize(
    ("family", "settings", "dtype"),
    [("falcon_alibi", FALCON, torch.float32), ("bloom", BLOOM, torch.bfloat16)],
)
def test_a_row_is_the_same_beside_a_long_one(family: str, settings: dict[str, int], dtype: torch.dtype) -> None:
    model: Any = copy.deepcopy(tiny_model(family, **settings)).to(dtype)
    scorer, (text, neighbour) = Scorer(model), texts(SHORT, LONG)
    alone, together = (beside(scorer, text, other).float() for other in (None, neighbour))
    want = recomputed(model, text)[-1].float()
    if dtype is torch.float32:
        check(alone, want)
        check(together, want)
    # A batch of another size sums in another order: a few of the logits' last bits, where a wrong place is a tenth.
    room = 8 * torch.finfo(dtype).eps * float(want.abs().max())
    assert float((together - alone).abs().max()) <= room


def test_distances_without_rounding_are_nearer_to_float32_than_the_modules() -> None:
    """Which is why fused layers describe BLOOM in 16 bits, too: its modules round places, and scores at their size."""
    model: Any = copy.deepcopy(tiny_model("bloom", hidden_size=64, n_head=16))
    (text,) = texts(LONG)
    wanted = recomputed(model, text)
    rounded = recomputed(model.to(torch.bfloat16), text).float()
    assert readers.why_not(model) is None
    nearer = recomputed(model.float(), text)  # the same rounded weights, but places and scores in float32
    assert float((nearer - wanted).abs().mean()) < 0.5 * float((rounded - wanted).abs().mean())


def test_alibi_that_is_added_twice_is_refused() -> None:
    """transformers folds it into the mask for SDPA, and without SDPA adds it to the scores as well."""
    twice, once = (tiny_model("falcon_alibi", attn_implementation=kind) for kind in ("eager", "sdpa"))
    (text,) = texts(40)
    assert not torch.allclose(recomputed(twice, text), recomputed(once, text), atol=0.1), "control"
    with pytest.raises(UnsupportedModel, match="adds ALiBi twice; load it with attn_implementation='sdpa'"):
        Scorer(twice)
    Scorer(once)
    Scorer(tiny_model("falcon_rotary", attn_implementation="eager"))


def test_the_self_check_does_not_send_anybody_there() -> None:
    """Where it refuses a model it names the other implementation, unless that is refused as well."""
    assert _remedy(Scorer(tiny_model("falcon_alibi"))) == "use model.generate for it"
    assert "attn_implementation='eager'" in _remedy(Scorer(tiny_model("falcon_rotary"))), "control"
