"""Can a draft read what its target reads?"""

from __future__ import annotations

from forerun.errors import InvalidArgument
from forerun.models.encoder import Encoder
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer


def check_encoders(target: Scorer, draft: Scorer, shares_encoder: bool) -> None:
    """Raise unless the draft's encoder, or its cross-attention over the target's, fits the target."""
    if not isinstance(draft, Seq2SeqScorer):
        if shares_encoder:
            raise InvalidArgument(f"shares_encoder=True: {type(draft.model).__name__} has no cross-attention")
        return
    if not isinstance(target, Seq2SeqScorer):
        raise InvalidArgument(
            f"the draft {type(draft.model).__name__} reads a source and the target {type(target.model).__name__} has "
            "none; choose a decoder-only draft"
        )
    mine, other = draft.encoder, target.encoder
    if shares_encoder and mine.width != other.width:
        raise InvalidArgument(
            f"shares_encoder=True: the target's encoder states are {other.width} wide and the draft's cross-attention "
            f"reads {mine.width}; leave shares_encoder out, so that the draft reads with an encoder of its own"
        )
    if not shares_encoder and mine.name != other.name:
        raise InvalidArgument(f"the target's encoder reads {_what(other)} and the draft's {_what(mine)}")


def _what(encoder: Encoder) -> str:
    return f"{encoder.name} ({type(encoder.module).__name__})"
