"""Synthetic encoder-decoder pairs: the acceptance that was asked for, met in the engine, at full cost."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import nn

import forerun
from forerun.bench.synthetic import SyntheticPair, make_code
from forerun.bench.synthetic_seq2seq import DRAFTS, SIZES, a_source, build_seq2seq_pair, family_of
from forerun.errors import InvalidArgument

TINY = ("t5-tiny", "whisper-tiny")
TOLERANCE = 0.06  # four standard deviations of the mean over 800 drafts


@lru_cache
def pair(name: str, alpha: float) -> SyntheticPair:
    return build_seq2seq_pair(name, alpha, device="cpu", dtype="float32")


def accepted_share(name: str, alpha: float) -> float:
    """Of drafts of one token at temperature 1, in the engine."""
    made = pair(name, alpha)
    drafter = forerun.DraftModel(made.draft, shares_encoder=family_of(name).shares_encoder)
    stats = (
        forerun.SpeculativeDecoder(made.target, drafter, policy=1)
        .generate(**a_source(made.target, 16, length=9), max_new_tokens=100, temperature=1.0, seed=1, eos_token_id=[])
        .stats
    )
    assert stats.num_draft_tokens > 750
    return stats.num_accepted_tokens / stats.num_draft_tokens


@pytest.mark.parametrize("name", TINY)
def test_acceptance_is_what_was_asked_for(name: str) -> None:
    assert pair(name, 0.8).alpha == pytest.approx(0.8, abs=1e-3)
    assert accepted_share(name, 0.8) == pytest.approx(0.8, abs=TOLERANCE)


def test_another_acceptance_would_be_noticed() -> None:
    assert accepted_share("t5-tiny", 0.6) != pytest.approx(0.8, abs=TOLERANCE)


@pytest.mark.parametrize("name", TINY)
def test_blocks_compute_and_change_next_to_nothing(name: str) -> None:
    target, size = pair(name, 0.8).target, SIZES[name]
    ids = torch.randint(size.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = target(**a_source(target, 2), decoder_input_ids=ids).logits
    wanted = make_code(size.vocab, size.code, seed=0).logits(ids.flatten()).view(2, 9, -1)
    assert 0 < (logits - wanted).abs().max() < 0.02 * wanted.std()
    layers = [m for m in target.get_decoder().modules() if isinstance(m, nn.Linear)]
    assert len(layers) == size.decoder_layers * (11 if name.startswith("t5") else 10)
    assert all((layer.weight != 0).all() for layer in layers)


def test_a_draft_that_shares_has_the_targets_own_encoder() -> None:
    shared, own = pair("whisper-tiny", 0.8), pair("t5-tiny", 0.8)
    assert shared.draft.get_encoder() is shared.target.get_encoder()
    assert own.draft.get_encoder() is not own.target.get_encoder()


def test_sizes_are_those_of_the_names() -> None:
    """Weights of the decoder and the encoder, in billions: 11.1 for T5 XXL, 1.54 for Whisper large."""
    xxl, large = SIZES["t5-xxl"], SIZES["whisper-large-v2"]
    block = 4 * xxl.hidden**2 + 3 * xxl.hidden * xxl.mlp
    t5 = xxl.encoder_layers * block + xxl.decoder_layers * (block + 4 * xxl.hidden**2) + 2 * xxl.vocab * xxl.hidden
    block = 4 * large.hidden**2 + 2 * large.hidden * large.mlp
    whisper = large.encoder_layers * block + large.decoder_layers * (block + 4 * large.hidden**2)
    assert t5 / 1e9 == pytest.approx(11.1, abs=0.1)
    assert (whisper + large.vocab * large.hidden) / 1e9 == pytest.approx(1.54, abs=0.03)
    for target, draft in DRAFTS.items():
        assert SIZES[target].vocab == SIZES[draft].vocab


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="choose among t5-xxl"):
        build_seq2seq_pair("t5-huge")
