"""The target's top log-probabilities, against one plain forward a text."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from forerun.errors import InvalidArgument, NonFiniteLogits
from forerun.train.teacher import teacher, top_logprobs
from support.tiny import ragged_prompts, tiny_model

TEXTS = [torch.tensor(tokens) for tokens in ragged_prompts(7, 97, seed=5)]


def alone(text: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logprobs = tiny_model("llama")(text[None]).logits[0].log_softmax(-1)
    best = logprobs.topk(top_k)
    return best.indices, best.values


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_as_in_a_forward_of_each_text_alone(batch_tokens: int) -> None:
    ids, logprobs = top_logprobs(tiny_model("llama"), TEXTS, 5, batch_tokens)
    assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float16)
    expected = [alone(text, 5) for text in TEXTS]
    torch.testing.assert_close(logprobs.float(), torch.cat([v for _, v in expected]), atol=5e-3, rtol=2e-3)
    assert (ids == torch.cat([i for i, _ in expected])).float().mean() > 0.99  # ties may change places


def test_the_whole_vocabulary_sums_to_one() -> None:
    _, logprobs = top_logprobs(tiny_model("llama"), TEXTS, 97)
    torch.testing.assert_close(logprobs.float().exp().sum(-1), torch.ones(len(logprobs)), atol=3e-3, rtol=0)


def test_packed_in_the_order_given() -> None:
    forward, _ = top_logprobs(tiny_model("llama"), TEXTS, 1)
    backward, _ = top_logprobs(tiny_model("llama"), TEXTS[::-1], 1)
    lengths = [len(text) for text in TEXTS]
    parts = backward.split(lengths[::-1])[::-1]
    assert torch.equal(forward, torch.cat(parts))
    assert not torch.equal(forward, backward)


@pytest.mark.parametrize("top_k", [0, 98])
def test_senseless_k_is_refused(top_k: int) -> None:
    with pytest.raises(InvalidArgument, match="97"):
        teacher(tiny_model("llama"), top_k)


def test_broken_logits_are_an_error() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.get_output_embeddings().weight.data[3] = torch.nan
    with pytest.raises(NonFiniteLogits):
        teacher(model, 2)(TEXTS)
