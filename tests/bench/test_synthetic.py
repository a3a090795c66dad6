"""Synthetic pairs: the acceptance that was asked for, at full cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forerun.bench.synthetic import (
    SIZES,
    SyntheticName,
    build_pair,
    is_synthetic,
    make_bigram_law,
    measure_alpha,
    noise_for,
    parse,
)
from forerun.errors import InvalidArgument
from forerun.math.theory import acceptance


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.6, 0.87])
def test_acceptance_is_what_was_asked_for(alpha: float) -> None:
    """Measured with the models themselves, along text that the target sampled."""
    pair = build_pair(f"synthetic:tiny+mini@{alpha}", device="cpu", dtype="float32", seed=0)
    assert pair.alpha == pytest.approx(alpha, abs=1e-3)
    assert measure_alpha(pair.target, pair.draft, num_tokens=2048) == pytest.approx(alpha, abs=0.015)


def test_without_noise_the_draft_is_as_good_as_the_target() -> None:
    pair = build_pair("synthetic:tiny+mini@1", device="cpu", dtype="float32")
    assert measure_alpha(pair.target, pair.draft, num_tokens=64) > 0.99


def test_blocks_compute_and_change_next_to_nothing() -> None:
    pair = build_pair("synthetic:tiny+mini", device="cpu", dtype="float32")
    size = SIZES["tiny"]
    law = make_bigram_law(size.vocab, size.code, seed=0)
    ids = torch.randint(size.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = pair.target(ids).logits
    wanted = law.logits(ids.flatten()).view(2, 9, -1)
    assert 0 < (logits - wanted).abs().max() < 0.02 * wanted.std()
    layers = [m for m in pair.target.model.layers.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 7 * size.layers
    assert all((layer.weight != 0).all() for layer in layers)


def test_the_published_noise_gives_the_published_acceptance() -> None:
    """0.065 on a code of 64 dimensions and 32000 tokens: near 0.87."""
    law = make_bigram_law(32000, 64, seed=0)
    tokens = torch.arange(0, 32000, 250)
    p, q = law.logits(tokens).softmax(-1), law.logits(tokens, noise=0.065).softmax(-1)
    assert float(acceptance(p, q).mean()) == pytest.approx(0.87, abs=0.02)


def test_more_noise_is_less_acceptance() -> None:
    law = make_bigram_law(256, 16, seed=3)
    noises = [noise_for(law, alpha)[0] for alpha in (0.95, 0.8, 0.5)]
    assert noises == sorted(noises)
    assert noise_for(law, 0.8) == noise_for(law, 0.8)


def test_types_are_kept_and_sizes_are_those_of_the_names() -> None:
    pair = build_pair("synthetic:tiny+mini", device="cpu", dtype="bfloat16")
    assert pair.target.dtype == pair.draft.dtype == torch.bfloat16
    billions = {}
    for name, size in SIZES.items():
        layer = 4 * size.hidden**2 + 3 * size.hidden * size.mlp
        billions[name] = (size.layers * layer + 2 * size.vocab * size.hidden) / 1e9
    assert billions["6.7b"] == pytest.approx(6.74, abs=0.01)
    assert billions["0.33b"] == pytest.approx(0.33, abs=0.01)


def test_names() -> None:
    assert parse("synthetic:6.7b+0.33b@0.9") == SyntheticName("6.7b", "0.33b", 0.9)
    assert str(parse("synthetic:6.7b+0.33b")) == "synthetic:6.7b+0.33b@0.87"
    assert not is_synthetic("embedded")


@pytest.mark.parametrize(
    ("name", "words"),
    [("synthetic:tiny", "write it like"), ("synthetic:huge+mini", "no size 'huge'"), ("synthetic:6.7b+mini", "differ"),
     ("synthetic:tiny+mini@1.5", "acceptance rate"), ("synthetic:tiny+mini@0", "acceptance rate"),
     ("synthetic:tiny+mini@1.2.3", "no number")],
)  # fmt: skip
def test_names_that_mean_nothing_are_refused(name: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(name)
