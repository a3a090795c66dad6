from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.math.penalties import adjust

VOCAB = 7
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
EVERYTHING = SamplingParams(
    repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=-0.3, logit_bias={0: 2.0, 5: -torch.inf}
)


def naive(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """One position, one token at a time."""
    out = logits.clone()
    for token in range(len(out)):
        out[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            out[token] = (
                out[token] * params.repetition_penalty if out[token] < 0 else out[token] / params.repetition_penalty
            )
        count = list(output).count(token)
        out[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    return out


def logits_of(positions: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(positions, VOCAB, dtype=torch.float64, generator=generator)


@settings(deadline=None, max_examples=60)
@given(tokens, tokens, st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3))
def test_every_position_is_adjusted_as_plain_decoding_would(prompt: list[int], output: list[int], drafted: list[int]):
    logits = logits_of(4)
    adjusted = adjust(logits, prompt, output, drafted, EVERYTHING)
    for i in range(4):
        expected = naive(logits[i], prompt, output + drafted[:i], EVERYTHING)
        assert torch.allclose(adjusted[i], expected, rtol=0, atol=1e-12)


def test_leaving_the_penalties_behind_along_the_draft_is_another_law():
    logits = logits_of(3)
    adjusted = adjust(logits, [1], [2], [3, 3], EVERYTHING)
    assert not torch.allclose(adjusted[2], naive(logits[2], [1], [2], EVERYTHING))


def test_repetition_is_transformers_rule():
    logits = logits_of(1).float()
    seen = [1, 4, 4, 6]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), logits)
    adjusted = adjust(logits, seen[:2], seen[2:], [], SamplingParams(repetition_penalty=1.3))
    assert torch.allclose(adjusted, expected)


def test_presence_and_frequency_look_at_the_output_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logits = logits_of(1)
    adjusted = adjust(logits, [0, 1, 1], [2, 2, 3], [], params)
    change = (logits - adjusted)[0]
    assert change.tolist() == pytest.approx([0, 0, 1.0, 0.75, 0, 0, 0])


def test_bias_comes_before_the_penalty():
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: -3.0})
    adjusted = adjust(torch.tensor([[1.0, 1.0]]), [0, 1], [], [], params)
    assert adjusted.tolist() == [[-4.0, 0.5]]


def test_a_forbidden_token_stays_forbidden():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=-9.0, logit_bias={0: -torch.inf})
    assert adjust(torch.zeros(1, 2), [0], [0], [], params)[0, 0] == -torch.inf


def test_stop_tokens_are_cut_until_enough_was_emitted():
    adjusted = adjust(torch.zeros(4, VOCAB), [1], [2], [3, 3, 3], SamplingParams(), forbid=(6, 5), min_new_tokens=3)
    cut = torch.isneginf(adjusted)
    assert cut[:2, 5:].all()
    assert cut.sum() == 4
    assert not torch.isneginf(adjust(torch.zeros(1, VOCAB), [], [1], [], SamplingParams(), (6,), 1)).any()


def test_the_callers_logits_are_never_edited():
    logits = logits_of(3)
    before = logits.clone()
    adjusted = adjust(logits, [1], [2], [3, 4], EVERYTHING, forbid=(1,), min_new_tokens=9)
    assert torch.equal(logits, before)
    untouched = adjust(logits, [], [], [0, 0], SamplingParams())
    assert torch.equal(untouched, logits)
    assert untouched.data_ptr() != logits.data_ptr()
    assert not torch.equal(adjusted, logits)


def test_work_is_in_single_precision_unless_the_logits_are_double():
    assert adjust(logits_of(1).bfloat16(), [], [], [], EVERYTHING).dtype == torch.float32
    assert adjust(logits_of(1), [], [], [], EVERYTHING).dtype == torch.float64


def test_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(InvalidArgument, match="ends at 6"):
        adjust(logits_of(1), [], [], [], SamplingParams(logit_bias={VOCAB: 1.0}))


def test_seen_ids_beyond_narrower_logits_are_passed_over():
    adjusted = adjust(logits_of(2), [VOCAB + 3, 1], [VOCAB], [VOCAB + 1], EVERYTHING)
    assert torch.allclose(adjusted[1], naive(logits_of(2)[1], [1], [], EVERYTHING))
