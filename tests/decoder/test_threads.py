"""One model in several threads: decoders wait for each other's passes, and `model.generate` notices nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from threading import Barrier, Event
from typing import Any

import pytest
import torch

import forerun
from forerun.models.passes import NAME, alone
from support.recompute import check
from support.seq2seq import batch_of, rows_of
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

PROMPTS = ragged_prompts(2, 97, seed=71)
NEW = 10
TIMES = 4


@pytest.fixture(autouse=True)
def _often_switched() -> Iterator[None]:
    """Threads take turns much more often than they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*tasks: Callable[[], Any]) -> list[list[Any]]:
    """Each task several times in a thread of its own, all begun at the same moment."""
    start = Barrier(len(tasks))

    def repeat(task: Callable[[], Any]) -> list[Any]:
        start.wait(60)
        return [task() for _ in range(TIMES)]

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [done.result() for done in [pool.submit(repeat, task) for task in tasks]]


def decoding(family: str, prompt: list[int], drafter: Any = None) -> Callable[[], Any]:
    ours = forerun.SpeculativeDecoder(tiny_model(family), drafter, policy=2, kernels="off")
    return lambda: ours.generate(torch.tensor([prompt]), max_new_tokens=NEW).new_tokens[0]


def generating(family: str, prompt: list[int]) -> Callable[[], Any]:
    ids = torch.tensor([prompt])
    return lambda: tiny_model(family).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
    )[0, len(prompt) :].tolist()  # fmt: skip


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ("llama", "gemma3", "bloom"))
def test_two_decoders_and_generate_share_a_model(family: str) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    wanted = [plain_greedy(model, prompt, NEW) for prompt in PROMPTS]
    draft = forerun.DraftModel(draft_of(model))
    tasks = (decoding(family, PROMPTS[0], draft), decoding(family, PROMPTS[1], draft), generating(family, PROMPTS[0]))
    for made, text in zip(together(*tasks), (wanted[0], wanted[1], wanted[0]), strict=True):
        assert made == [text] * TIMES
    assert model.config._attn_implementation == before
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.slow
def test_an_encoder_decoder_in_two_threads() -> None:
    model, inputs = tiny_model("t5"), batch_of("t5", rows_of("t5")[:2])

    def theirs() -> Any:
        return model.generate(**inputs, do_sample=False, max_new_tokens=NEW).tolist()

    ours = forerun.SpeculativeDecoder(model, forerun.DraftModel(draft_of(model)), policy=2, kernels="off")
    wanted, decoded = theirs(), ours.generate(**inputs, max_new_tokens=NEW).new_tokens
    made = together(lambda: ours.generate(**inputs, max_new_tokens=NEW).new_tokens, theirs)
    assert made == [[decoded] * TIMES, [wanted] * TIMES]


@pytest.mark.parametrize("own", ("sdpa", "eager"))
def test_who_comes_during_a_pass_gets_the_models_own_attention(own: str) -> None:
    """Not a matter of luck: the other thread runs while the name is set."""
    model = tiny_model("llama", seed=7, attn_implementation=own)
    ids = torch.tensor([PROMPTS[1]])
    wanted = model(ids).logits
    with alone(model, [model.config]), ThreadPoolExecutor(1) as pool:
        assert model.config._attn_implementation == NAME
        got = pool.submit(lambda: model(ids).logits).result(60)
    assert torch.equal(got, wanted)
    assert model.config._attn_implementation == own


def test_names_come_back_when_passes_overlap() -> None:
    """Two models may have one configuration."""
    first, second = tiny_model("llama"), tiny_model("llama", seed=1)
    config, before = first.config, first.config._attn_implementation
    one, other = alone(first, [config]), alone(second, [config])
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert config._attn_implementation == NAME
    other.__exit__(None, None, None)
    assert config._attn_implementation == before


def test_a_pass_waits_for_another_of_the_same_model() -> None:
    model, begun = tiny_model("llama"), Event()
    own = model.config._attn_implementation

    def pass_of_its_own() -> str:
        with alone(model, [model.config]):
            begun.set()
            return str(model.config._attn_implementation)

    with ThreadPoolExecutor(1) as pool:
        with alone(model, [model.config]):
            other = pool.submit(pass_of_its_own)
            assert not begun.wait(0.2), "two passes at once: the first to end takes the other's names away"
        assert other.result(60) == NAME
    assert model.config._attn_implementation == own


def test_what_an_interrupt_left_behind_goes_with_the_next_pass() -> None:
    """As if Ctrl-C had come at the very moment a pass was to be left."""
    model = tiny_model("llama", seed=8)
    own = model.config._attn_implementation
    left = alone(model, [model.config])
    left.__enter__()
    copied = deepcopy(model)
    assert copied.config._attn_implementation == NAME
    ids = torch.tensor([PROMPTS[1]])
    out = forerun.SpeculativeDecoder(model, None, policy=0).generate(ids, max_new_tokens=3)
    assert model.config._attn_implementation == own
    assert out.sequences.tolist() == model.generate(ids, max_new_tokens=3, do_sample=False).tolist()
    check(copied(ids).logits, model(ids).logits)
    with suppress(RuntimeError):
        left.__exit__(None, None, None)
