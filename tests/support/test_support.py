"""The helpers themselves: an oracle that is wrong, or a model that always says the same, makes every test worthless."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ForerunWarning
from support import data, tiny
from support.batches import padded
from support.markov import count_joint, joint_law, misfit, softmax_at, toy_pair
from support.stories import Stories, Vocabulary, needs_spec_bench, needs_stories, spec_bench_prompts
from support.tiny import (
    EXTRA_FAMILIES,
    FAMILIES,
    REFUSED_FAMILIES,
    disturbed_models,
    draft_of,
    plain_greedy,
    ragged_prompts,
    tiny_model,
)
from support.warned import forerun_warnings

CAUSAL = FAMILIES + EXTRA_FAMILIES


def greedy_rows(model: PreTrainedModel, num_tokens: int = 40, length: int = 12) -> Tensor:
    """Greedy continuations of eight random prompts, prompts included: [8, length + num_tokens]."""
    ids = torch.randint(1, model.config.vocab_size, (8, length), generator=torch.Generator().manual_seed(5))
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    assert isinstance(rows, Tensor)
    return rows


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.quick(every=2)
def test_greedy_text_is_varied(family: str) -> None:
    new = greedy_rows(tiny_model(family))[:, 12:]
    distinct = [len(set(row.tolist())) for row in new]
    assert sum(distinct) / len(distinct) >= 7, distinct
    assert len({tuple(row.tolist()) for row in new[:, :8]}) >= 7, "the prompt makes no difference"


@pytest.mark.parametrize("family", CAUSAL)
def test_logits_are_spread(family: str) -> None:
    ids = torch.randint(1, 97, (8, 12), generator=torch.Generator().manual_seed(6))
    logits = tiny_model(family)(ids).logits
    assert 1.5 < logits.std(-1).mean() < 4
    best = logits.topk(2).values
    assert (best[..., 0] - best[..., 1]).median() > 0.2, "greedy choices would hang on rounding"


@pytest.mark.parametrize("family", CAUSAL)
def test_the_distant_past_matters(family: str) -> None:
    ids = torch.randint(1, 97, (8, 7), generator=torch.Generator().manual_seed(7))
    other = ids.clone()
    other[:, 0] = 96 - other[:, 0]
    model = tiny_model(family)
    changed = (model(ids).logits[:, -1] - model(other).logits[:, -1]).abs().amax(-1)
    assert changed.max() > 0.1


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.quick(every=2)
def test_draft_agrees_often_but_not_always(family: str) -> None:
    model = tiny_model(family)
    rows = greedy_rows(model)
    draft, target = draft_of(model)(rows).logits[:, 12:], model(rows).logits[:, 12:]
    agreement = (draft.argmax(-1) == target.argmax(-1)).float().mean().item()
    assert 0.45 < agreement < 0.97, agreement


def test_draft_leaves_the_model_alone() -> None:
    model = tiny_model("gpt2")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    draft = draft_of(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert draft.get_input_embeddings().weight is draft.get_output_embeddings().weight, "a tied head came loose"


@pytest.mark.parametrize("family", CAUSAL + REFUSED_FAMILIES)
def test_models_are_plain(family: str) -> None:
    model = tiny_model(family)
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id is None
    assert model.generation_config.pad_token_id == 0


def test_same_arguments_same_model() -> None:
    assert tiny_model("llama") is tiny_model("llama", 0, vocab=97)
    first, second = tiny_model("llama", 0), tiny_model("llama", 1)
    assert not torch.equal(first.get_input_embeddings().weight, second.get_input_embeddings().weight)


def test_building_a_model_spends_no_random_numbers() -> None:
    state = torch.get_rng_state()
    tiny_model("llama", seed=12345)
    assert torch.equal(state, torch.get_rng_state())


def test_overrides_reach_the_configuration() -> None:
    assert tiny_model("llama", layers=1, max_position_embeddings=64).config.max_position_embeddings == 64
    assert tiny_model("gemma3", layers=3).config.layer_types[-1] == "sliding_attention"


@pytest.mark.parametrize("family", ("gemma3", "gemma2", "mistral"))
def test_window_is_narrower_than_the_prompt(family: str) -> None:
    """One layer with a window of 8: the first of twelve tokens cannot reach the last position."""
    model = tiny_model(family, layers=1)
    ids = torch.randint(1, 97, (4, 12), generator=torch.Generator().manual_seed(8))
    other = ids.clone()
    other[:, 0] = 96 - other[:, 0]
    assert torch.equal(model(ids).logits[:, -1], model(other).logits[:, -1])
    assert not torch.equal(model(ids).logits[:, 6], model(other).logits[:, 6])


@pytest.mark.parametrize("num", (1, 2, 5, 40))
def test_ragged_prompts(num: int) -> None:
    prompts = ragged_prompts(num, 97, seed=3)
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) == num
    assert lengths[0] == 1
    assert max(lengths) <= 20
    assert len(set(lengths)) == min(num, 20)
    assert all(0 < token < 97 for prompt in prompts for token in prompt)
    assert prompts == ragged_prompts(num, 97, seed=3)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", CAUSAL)
def test_plain_greedy_is_argmax_without_a_cache(family: str) -> None:
    model = tiny_model(family)
    text = [5]
    for _ in range(12):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert plain_greedy(model, [5], 12) == text[1:]


def test_plain_greedy_refuses_foreign_attention() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.config._attn_implementation_internal = "something else"
    with pytest.raises(AssertionError, match="no oracle"):
        plain_greedy(model, [1], 2)


@pytest.fixture
def private_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiny, "_built", {})
    monkeypatch.setattr(tiny, "_fresh", {})
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("private_cache")
def test_changed_models_are_noticed() -> None:
    model = tiny_model("llama")
    assert not disturbed_models()
    next(model.parameters()).mul_(2)
    assert len(disturbed_models()) == 1


@pytest.mark.usefixtures("private_cache")
def test_replaced_weights_are_noticed() -> None:
    model = tiny_model("llama")
    assert not disturbed_models(replaced=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert not disturbed_models()
    assert len(disturbed_models(replaced=True)) == 1


@pytest.mark.parametrize("vocab", (3, 5, 7))
def test_toy_laws_differ_in_most_contexts(vocab: int) -> None:
    target, draft = toy_pair(vocab)
    contexts = torch.randint(0, vocab, (200, 9), generator=torch.Generator().manual_seed(0))
    gap = (target(contexts).logits.softmax(-1) - draft(contexts).logits.softmax(-1)).abs().sum(-1)[:, 1:] / 2
    assert ((gap > 0.2) & (gap < 0.6)).float().mean() > 0.5
    assert 0.2 < gap.mean() < 0.5


def test_toy_law_depends_on_more_than_the_last_token() -> None:
    target, _ = toy_pair()
    contexts = torch.randint(0, 5, (200, 9), generator=torch.Generator().manual_seed(1))
    contexts[:, -1] = 3
    laws = target(contexts).logits[:, -1].softmax(-1)
    assert (laws - laws.mean(0)).abs().sum(-1).mean() / 2 > 0.15


def test_toy_law_depends_on_the_place_of_the_past() -> None:
    target, _ = toy_pair()
    here, there = (target(torch.tensor([[*past, 3]])).logits[0, -1].softmax(-1) for past in ([1, 2, 4], [2, 1, 4]))
    assert (here - there).abs().sum() / 2 > 0.05


def test_joint_law_is_the_chain_rule() -> None:
    target, _ = toy_pair(3)
    joint = joint_law(target, [1, 2], 3)
    assert joint.shape == (3, 3, 3)
    torch.testing.assert_close(joint.sum(), torch.tensor(1.0, dtype=torch.float64))
    law = target(torch.tensor([[1, 2, 0, 2, 1]])).logits[0].double().softmax(-1)
    torch.testing.assert_close(joint[0, 2, 1], law[1, 0] * law[2, 2] * law[3, 1], atol=1e-6, rtol=0)


def test_joint_law_hands_the_history_to_the_warp() -> None:
    """A warp that forbids repeating the last token leaves no mass on repetitions, the prompt's last included."""

    def no_repeats(logits: Tensor, histories: Tensor) -> Tensor:
        return logits.scatter(1, histories[:, -1:], -torch.inf).softmax(-1)

    joint = joint_law(toy_pair(3)[0], [1, 2], 2, no_repeats)
    assert joint[2].sum() == 0
    assert joint.diagonal().sum() == 0
    torch.testing.assert_close(joint.sum(), torch.tensor(1.0, dtype=torch.float64))


def sample_joint(model: PreTrainedModel, prompt: list[int], steps: int, num: int) -> Tensor:
    """Plain sampling of many rows at once."""
    rows = torch.tensor([prompt]).repeat(num, 1)
    for _ in range(steps):
        law = model(rows, use_cache=False).logits[:, -1].softmax(-1)
        rows = torch.cat([rows, torch.multinomial(law, 1)], dim=1)
    return rows[:, len(prompt) :]


def test_misfit_accepts_the_right_law_and_rejects_a_close_one() -> None:
    target, draft = toy_pair()
    counts = count_joint(sample_joint(target, [1, 2], 3, 20_000).tolist(), 5, 3)
    assert misfit(counts, joint_law(target, [1, 2], 3)) < 6
    assert misfit(counts, joint_law(target, [1, 2], 3, softmax_at(1.15))) > 6
    assert misfit(counts, joint_law(target, [2, 1], 3)) > 100
    assert misfit(counts, joint_law(draft, [1, 2], 3)) > 100


def test_misfit_is_infinite_for_the_impossible() -> None:
    assert misfit(torch.tensor([9.0, 1.0]), torch.tensor([1.0, 0.0], dtype=torch.float64)) == float("inf")


def test_count_joint_addresses_cells_by_token() -> None:
    counts = count_joint([[2, 0, 1], [2, 0, 2], [0, 1, 1]], 3, 2)
    assert counts[2, 0] == 2
    assert counts[0, 1] == 1
    assert counts.sum() == 3


@needs_stories
def test_stories_model_tells_a_story(stories: Stories) -> None:
    assert sum(weight.numel() for weight in stories.model.parameters()) == 260_032
    text = stories.decode(plain_greedy(stories.model, stories.encode("Once upon a time"), 30))
    assert text.startswith(", there was a little girl named Lily.")


@needs_stories
@pytest.mark.parametrize("text", ("", "Once upon a time", "naïve 😀 <s>", "  two  spaces\n"))
def test_stories_tokens_give_the_text_back(stories: Stories, text: str) -> None:
    assert stories.decode(stories.encode(text)) == text


@needs_stories
def test_stories_tokens_are_merged(stories: Stories) -> None:
    assert stories.encode("Once upon a time") == [1, 403, 407, 261, 378]


def test_best_scored_pair_is_merged_first() -> None:
    pieces = (b" ", b"a", b"b", b"c", b"ab", b"bc")
    first, last = (0.0, 0.0, 0.0, 0.0, 2.0, 1.0), (0.0, 0.0, 0.0, 0.0, 1.0, 2.0)
    assert Vocabulary(pieces, first).encode("abc") == [1, 0, 4, 3]
    assert Vocabulary(pieces, last).encode("abc") == [1, 0, 1, 5]


@needs_spec_bench
def test_spec_bench_prompts() -> None:
    prompts = spec_bench_prompts("qa", 3)
    assert len(set(prompts)) == 3
    assert all(isinstance(prompt, str) and prompt for prompt in prompts)
    with pytest.raises(ValueError, match="asked for"):
        spec_bench_prompts("no such category", 1)


def test_absent_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data.VARIABLE, "nowhere")
    assert "no stories260K" in data.lack_of("stories260K")
    assert data.VARIABLE in data.lack_of("stories260K")


def test_warnings_of_forerun_are_told_from_others() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("the drafter failed", ForerunWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert forerun_warnings(caught) == ["the drafter failed"]


def test_batches_are_padded_on_either_side() -> None:
    ids, mask = padded([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [7, 7, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    ids, mask = padded([[1, 2, 3], [4]], "right", pad=0)
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
