"""The same rounds replayed from CUDA graphs: the tokens of rounds step by step, `model.generate`'s, and the law."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, SuppressTokensLogitsProcessor

from engine.following import Follows, Replayed
from engine.graphs import GREEDY, MIXED, SAMPLED, VOCAB, law, requests, samples_of, texts
from exactness.sampling import verdict
from forerun.cache.paged import PagedCache
from forerun.config import SamplingParams
from forerun.drafters import Chain, DraftModel, PromptLookup, RandomDraft
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.errors import ForerunWarning
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.finish import tokens_by_request
from support.interpreter import DEVICE, on_gpu_alone
from support.markov import toy_pair
from support.tiny import draft_of, ragged_prompts, tiny_model

pytestmark = [pytest.mark.gpu, on_gpu_alone]

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt2")


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And products in full float32, so that a row's logits hardly depend on the shape of a pass."""
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


@lru_cache
def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model(family)
    return copy.deepcopy(target).to(DEVICE), draft_of(target).to(DEVICE)


def engine(
    compile: bool, family: str = "llama", rule: Rule = Rule.TOKEN, length: int = 4, drafter: Any = DraftModel,
    cache_tokens: int | None = None,
) -> Engine:  # fmt: skip
    target, draft = pair(family)
    guesser: Drafter | None = None
    if drafter is not None:
        guesser = drafter(draft) if drafter is DraftModel else drafter()
    scorer = Scorer(target, cache_tokens=cache_tokens)
    made = Engine(scorer, guesser, Constant(length), rule=rule, compile=compile)
    assert (made.runner is not None) == compile
    return made


@pytest.mark.parametrize(("number", "rule"), [(1, Rule.TOKEN), (3, Rule.BLOCK), (8, Rule.TOKEN), (5, Rule.COUPLED)])
def test_same_tokens_as_step_by_step(number: int, rule: Rule) -> None:
    made = engine(True, rule=rule)
    assert texts(made, requests(number)) == texts(engine(False, rule=rule), requests(number))
    assert made.runner is not None and made.runner.recorder.num_recordings >= 3
    assert texts(made, requests(number)) == texts(engine(False, rule=rule), requests(number)), "a replayed graph"


def read_apart(asked: Sequence[Request]) -> set[int]:
    """Requests whose first token comes from a pass over the prompt: a prompt of one token is read by the round."""
    return {number for number, request in enumerate(asked) if len(request.prompt) > 1}


@pytest.mark.parametrize("number", [1, 8])
def test_same_tokens_where_lengths_follow_outcomes_and_rounds_run_ahead(number: int) -> None:
    made, policy = engine(True), Follows()
    made.policy = policy
    found, slow = texts(made, requests(number)), engine(False)
    slow.policy = Replayed(policy.drafted, unheard=read_apart(requests(number)))
    assert found == texts(slow, requests(number))


def test_same_tokens_where_each_row_is_cut_in_its_own_way() -> None:
    found = texts(engine(True), requests(4, *MIXED))
    assert found == texts(engine(False), requests(4, *MIXED))
    assert found[3] != texts(engine(False), requests(4))[3], "the comparison can fail"


def with_options() -> list[Request]:
    """Each row another option, and one row none."""
    params = (
        SamplingParams(temperature=1.0, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, presence_penalty=1.2, frequency_penalty=0.4),
        SamplingParams(temperature=0.9, logit_bias={5: 3.0, 11: -math.inf}),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SAMPLED,
    )
    asked = requests(5, *params)
    asked[2] = replace(asked[2], logprobs=3)
    never = SuppressTokensLogitsProcessor(list(range(0, 97, 3)))
    asked[3] = replace(asked[3], processors=(never,), stop_ids=frozenset(range(1, 97, 4)), min_new_tokens=9)
    return asked


@pytest.mark.parametrize("drafter", [DraftModel, None])
@pytest.mark.parametrize("rule", list(Rule))
def test_options_of_every_kind_in_one_batch(rule: Rule, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = engine(False, rule=rule, drafter=drafter)
    want = texts(slow, with_options())
    assert want != texts(slow, requests(5, SAMPLED)), "the options do something"
    monkeypatch.setattr("forerun.engine.rounds.run_on_host", lambda *_, **__: pytest.fail("went step by step"))
    made = engine(True, rule=rule, drafter=drafter)
    assert texts(made, with_options()) == want
    assert texts(made, with_options()) == want, "a replayed graph"


def long_requests(number: int, new: int = 40) -> list[Request]:
    """Rows that begin in one block and end in two."""
    prompts = [ragged_prompts(2, 97, i, longest=100 + 3 * i)[1] for i in range(number)]
    return [
        Request(prompt=tuple(prompt), max_new_tokens=new, params=SAMPLED, seed=3, request_id=i)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("drafter", [DraftModel, PromptLookup, None])
def test_preempted_rows_say_the_same(drafter: Any) -> None:
    """Six rows, and blocks for as many of them at first as for two of them at their ends."""
    want = texts(engine(False, drafter=drafter), long_requests(6))
    made = engine(True, drafter=drafter, cache_tokens=384)
    assert texts(made, long_requests(6)) == want
    assert made.num_preempted > 0
    cache = made.target.cache
    assert isinstance(cache, PagedCache)
    cache.check()
    assert cache.num_used == cache.pool.num_findable == 0


def test_no_recording_is_made_anew_because_rows_grow_or_move() -> None:
    made = engine(True, cache_tokens=4096)
    for round in range(3):
        texts(made, [*requests(3 + round), *long_requests(2 + round)])
    assert made.runner is not None and made.runner.recordings.num_moved == 0


def _moved(model: Any) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = -2 * weight.data


def _assigned(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(tiny_model("llama", 7)).to(DEVICE).state_dict(), assign=True)


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: -out)


@pytest.mark.parametrize("change", [_moved, _assigned, _hooked], ids=lambda change: change.__name__)
def test_no_recording_of_a_model_outlives_its_change(change: Any) -> None:
    target, draft = map(copy.deepcopy, pair("llama"))
    made = Engine(Scorer(target), DraftModel(draft), Constant(4))
    before = texts(made, requests(3, GREEDY))
    assert made.runner is not None and made.runner.recorder.num_recordings > 0
    change(target)
    after = texts(Engine(Scorer(target), None, Constant(0), compile=False), requests(3, GREEDY))
    assert after != before, "control: this change is one"
    assert texts(made, requests(3, GREEDY)) == after
    assert (made.runner is None) == (change is _hooked), "a hook would be called once, when the graph is made"


def test_a_shared_beginning_is_shared_on_the_device() -> None:
    beginning = tuple(ragged_prompts(2, 97, 5, longest=150)[1])
    asked = [
        Request(prompt=(*beginning, i + 1), max_new_tokens=20, params=SAMPLED, seed=3, request_id=i) for i in range(4)
    ]
    made = engine(True)
    cache = made.target.cache
    assert isinstance(cache, PagedCache)
    for request in asked:
        made.add(request)
    made.step()
    assert cache.num_used == 1 + len(asked), "a block for all of them, and a block for each"
    found = tokens_by_request(made)
    assert found == {i: texts(engine(False), [request])[i] for i, request in enumerate(asked)}


@pytest.mark.parametrize("drafter", [DraftModel, None])
def test_prompts_read_by_recorded_passes_say_the_same(drafter: Any) -> None:
    """Alone, together, in chunks, beside rows that decode, and what a shared beginning leaves of them."""
    made = engine(True, drafter=drafter, cache_tokens=8192)
    made.warm_up(8, 4, 500)
    before = made.num_recordings
    lengths = (2, 30, 33, 64, 65, 130, 260, 450)
    prompts = [ragged_prompts(2, 97, place, longest=length)[1] for place, length in enumerate(lengths)]
    prompts += [[*prompts[-1], 1 + place] for place in range(4)]
    asked = [
        Request(prompt=tuple(prompt), max_new_tokens=12, params=SAMPLED, seed=3, request_id=i)
        for i, prompt in enumerate(prompts)
    ]
    found: dict[int, tuple[int, ...]] = {}
    for start in range(0, len(asked), 6):
        found |= texts(made, asked[start : start + 6])
    assert made.num_recordings == before and made.target.recorded_feed is not None
    assert found == {i: texts(engine(False, drafter=drafter), [each])[i] for i, each in enumerate(asked)}


def test_the_target_alone_is_recorded_where_the_draft_cannot_be() -> None:
    made = engine(True, drafter=RandomDraft)
    assert texts(made, requests(3)) == texts(engine(False, drafter=RandomDraft), requests(3))
    assert made.runner is not None and made.runner.recorder.num_recordings > 0


def copying() -> PromptLookup:
    return PromptLookup(max_ngram=1)


def copying_or_drawing() -> Chain:
    return Chain(copying(), DraftModel(pair("llama")[1]))


@pytest.mark.parametrize("drafter", [copying, copying_or_drawing])
@pytest.mark.parametrize(("number", "rule", "seed"), [(1, Rule.TOKEN, 3), (3, Rule.BLOCK, 3), (8, Rule.COUPLED, 11)])
def test_same_tokens_where_the_host_finds_copies(drafter: Any, number: int, rule: Rule, seed: int) -> None:
    """Seed 3 leaves an eighth row whose cut by min_p lies 1.5e-5 from a token: less than a pass rounds."""
    asked = [replace(request, seed=seed) for request in requests(number, SAMPLED, *MIXED)]
    made = engine(True, drafter=drafter, rule=rule)
    assert texts(made, asked) == texts(engine(False, drafter=drafter, rule=rule), asked)
    assert made.drafting.finds_copies and made.runner is not None and made.runner.recorder.num_recordings >= 3


@pytest.mark.parametrize("drafter", [copying, copying_or_drawing])
def test_same_tokens_where_rounds_run_ahead_of_copies(drafter: Any) -> None:
    made, policy = engine(True, drafter=drafter), Follows()
    made.policy = policy
    found, slow = texts(made, requests(4)), engine(False, drafter=drafter)
    copied = policy.copied if made.drafting.is_mixed else None
    slow.policy = Replayed(policy.drafted, copied, unheard=read_apart(requests(4)))
    assert found == texts(slow, requests(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    found = texts(engine(True, family), requests(3, GREEDY))
    model, _ = pair(family)
    for request in requests(3, GREEDY):
        ids = torch.tensor([request.prompt], device=DEVICE)
        full = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False
        )
        assert found[request.request_id] == tuple(full[0, ids.shape[1] :].tolist()), request.request_id


def test_a_capture_that_fails_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the device while a graph is captured breaks it; the text goes on, and torch still works."""
    from forerun.kernels import advance as kernel

    original, calls = kernel.advance, []

    def waiting(state: Any, *rest: Any) -> None:
        calls.append(int(state.past[0]))
        original(state, *rest)

    want, stream = texts(engine(False), requests(3)), torch.cuda.current_stream()
    own, drawn = graph_that_draws()
    torch.manual_seed(7)
    wanted = [torch.rand(3, device=DEVICE).tolist() for _ in range(2)]
    torch.manual_seed(7)
    monkeypatch.setattr(kernel, "advance", waiting)
    made = engine(True)
    for request in requests(3):
        made.add(request)
    with pytest.warns(ForerunWarning, match="without CUDA graphs"):
        while not made.is_idle:
            made.step()
    assert {result.request.request_id: result.tokens for result in made.take_results()} == want
    assert made.runner is not None and made.runner.is_disabled and calls
    assert torch.cuda.current_stream() == stream
    assert [torch.rand(3, device=DEVICE).tolist() for _ in range(2)] == wanted, "the user's own random numbers"
    own.replay()
    first = drawn.tolist()
    own.replay()
    assert drawn.tolist() != first
    assert kept_by_another_stream() == 0


def graph_that_draws() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(3, device=DEVICE)
    return graph, drawn


def kept_by_another_stream() -> int:
    """Bytes not given back of a tensor that two streams have used: all of them while a capture seems to go on."""
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    shared = torch.empty(1 << 20, device=DEVICE)
    shared.record_stream(torch.cuda.Stream())
    del shared
    torch.cuda.synchronize()
    torch.empty(1, device=DEVICE)
    return int(torch.cuda.memory_stats()["active_bytes.all.current"] - before)


def samples(rule: Rule) -> list[tuple[int, ...]]:
    target, draft = (copy.deepcopy(model).to(DEVICE) for model in toy_pair(VOCAB))
    return samples_of(Engine(Scorer(target), DraftModel(draft), Constant(3), rule=rule))


@pytest.mark.parametrize("rule", list(Rule))
def test_the_law_of_the_whole_loop(rule: Rule) -> None:
    assert not verdict(samples(rule), law())


def test_control_a_round_drawn_twice_bends_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose round counter stands still would meet the same random numbers again and again."""
    from forerun.kernels import advance as kernel

    original = kernel.advance

    def stuck(state: Any, *rest: Any) -> None:
        original(state, *rest)
        state.round.sub_(state.active)

    monkeypatch.setattr(kernel, "advance", stuck)
    assert verdict(samples(Rule.TOKEN), law())
