"""Greedy identity on real models: a chat model on real questions, and a story told until the context ends."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import forerun
from forerun.kernels import why_not_numba
from support.stories import Stories, needs_spec_bench, spec_bench_prompts
from support.ties import check_greedy, deviation
from support.tiny import draft_of, plain_greedy

CATEGORIES = ("writing", "coding", "qa", "math_reasoning", "extraction")
PER_CATEGORY = 4
LONGEST = 160  # questions are cut there: identity needs real text, not long text
NEW = 24


def questions(tokenizer: Any) -> list[list[int]]:
    """Twenty prompts as the chat model expects them."""
    found = []
    for category in CATEGORIES:
        for text in spec_bench_prompts(category, PER_CATEGORY):
            words = tokenizer.decode(tokenizer.encode(text)[:LONGEST])
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": words}], add_generation_prompt=True, return_dict=True
            )
            found.append(list(chat["input_ids"]))
    return found


@lru_cache
def _answers(model: Any, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [plain_greedy(model, list(prompt), NEW) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.model
@needs_spec_bench
@pytest.mark.parametrize(
    ("policy", "rows", "kernels"), [("auto", 4, "off"), (4, 10, "off"), (4, 1, "off"), (4, 10, "on")]
)
def test_real_questions(embedded: tuple[Any, Any], policy: Any, rows: int, kernels: str) -> None:
    if kernels == "on" and (reason := why_not_numba()) is not None:
        pytest.skip(f"needs the compiled CPU kernels: {reason}")
    model, tokenizer = embedded
    prompts = questions(tokenizer)
    wanted = _answers(model, tuple(map(tuple, prompts)))
    noise = max(deviation(model, [*prompts[i], *wanted[i]]) for i in (0, 7))
    decoder = forerun.SpeculativeDecoder(model, forerun.PromptLookup(), policy=policy, kernels=kernels)
    assert decoder.engine.target.is_fused == (kernels == "on")
    chosen = prompts if rows > 1 else prompts[::5]
    answers = wanted if rows > 1 else wanted[::5]
    ties = accepted = 0
    for start in range(0, len(chosen), rows):
        batch, known = chosen[start : start + rows], answers[start : start + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        out = decoder.generate(ids, mask, max_new_tokens=NEW)
        accepted += out.stats.num_accepted_tokens
        for row, prompt in enumerate(batch):
            ties += not check_greedy(model, prompt, out.new_tokens[row], known[row], noise, f"question {start + row}")
    print(f"{len(chosen)} questions, {ties} ties, noise {noise:.2g}, {accepted} tokens accepted")  # noqa: T201
    assert ties <= 2
    assert accepted > 0 or policy == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ("model", "lookup"))
def test_a_story_up_to_the_end_of_the_context(stories: Stories, drafter: str) -> None:
    """Hundreds of rounds on one cache: nothing drifts."""
    model = stories.model
    made: Any = forerun.DraftModel(draft_of(model)) if drafter == "model" else forerun.PromptLookup()
    decoder = forerun.SpeculativeDecoder(model, made, policy=4)
    prompt = stories.encode("Once upon a time")
    limit = model.config.max_position_embeddings - len(prompt)
    out = decoder.generate(torch.tensor([prompt]), max_new_tokens=2000)
    assert len(out.new_tokens[0]) == limit
    assert out.finish_reasons == ["length"]
    wanted = plain_greedy(model, prompt, limit)
    noise = deviation(model, [*prompt, *wanted][:256])
    assert check_greedy(model, prompt, out.new_tokens[0], wanted, noise, "story")
    assert out.stats.tokens_per_round > 1.2
