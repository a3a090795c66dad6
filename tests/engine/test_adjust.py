"""Penalties, processors and log-probabilities hold at every position of a draft, as they do in plain decoding."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)

import forerun
from engine.scripted import PROMPT, Scripted, answer, prophet, run
from forerun.config import SamplingParams
from forerun.drafters import DraftModel, PromptLookup, Tree
from forerun.engine import Request
from forerun.engine.adjust import adjuster
from forerun.engine.bans import without_banned
from forerun.errors import InvalidArgument, NonFiniteLogits
from support.batches import padded
from support.tiny import draft_of, ragged_prompts, tiny_model
from support.warned import forerun_warnings

PROMPTS = ragged_prompts(4, 97, seed=31, longest=14)
NEW = 30


def decoder_with(drafter: str, **settings: Any) -> forerun.SpeculativeDecoder:
    made: Any = {
        "model": lambda: DraftModel(draft_of(tiny_model("llama"))),
        "lookup": PromptLookup,
        "none": lambda: None,
    }
    return forerun.SpeculativeDecoder(tiny_model("llama"), made[drafter](), policy=4, **settings)


def plain(**keywords: Any) -> list[list[int]]:
    """`model.generate`, each prompt alone."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = tiny_model("llama").generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **keywords
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@cache
def unadjusted() -> list[list[int]]:
    return plain()


class NoNeighbours(LogitsProcessor):
    """Depends on the whole history: forbids tokens next to the last one, and likes the history's length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = int(input_ids[0, -1])
        scores = scores.clone()
        scores[:, max(0, last - 20) : last + 20] = -torch.inf
        scores[:, (7 * input_ids.shape[1]) % 97] += 3.0
        return scores


class Counting(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


KEYWORDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[answer(tuple(PROMPTS[1]))[0]], [5, 6]]},
    {"suppress_tokens": list(range(0, 97, 3))},
    {"sequence_bias": {(answer(tuple(PROMPTS[1]))[1],): -9.0, (4,): 2.0}},
    {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "eos_token_id": answer(tuple(PROMPTS[1]))[2],
    },
]


@pytest.mark.parametrize("drafter", ("none", "model", "lookup"))
@pytest.mark.parametrize("keywords", KEYWORDS, ids=lambda k: "+".join(k))
@pytest.mark.quick(every=9)
def test_keywords_mean_what_they_mean_in_generate(drafter: str, keywords: dict[str, Any], recwarn: Any) -> None:
    out = decoder_with(drafter).generate(*padded(PROMPTS), max_new_tokens=NEW, **keywords)
    assert out.new_tokens == plain(**keywords)
    assert out.new_tokens != unadjusted()
    assert not forerun_warnings(recwarn)


@pytest.mark.parametrize("drafter", ("none", "model", "lookup"))
@pytest.mark.parametrize("processor", (NoNeighbours(), NoRepeatNGramLogitsProcessor(2)), ids=("own", "ngram"))
@pytest.mark.quick(every=6)
def test_processors_see_every_position(drafter: str, processor: Any) -> None:
    out = decoder_with(drafter).generate(*padded(PROMPTS), max_new_tokens=NEW, logits_processor=[processor])
    assert out.new_tokens == plain(logits_processor=LogitsProcessorList([processor]))
    assert out.new_tokens != unadjusted()


@pytest.mark.parametrize("at", (None, 0, 3, 4, 6, 7))
def test_banned_tokens_at_all_positions_are_transformers_one_by_one(at: int | None) -> None:
    """At every position or at one of them, which may be before or behind; ids the model does not have are nobody's."""
    ids, history, drafted = [3, 90, 5, 400, -1], [1, 2, 3], [4, 5, 6]
    theirs = SuppressTokensLogitsProcessor(ids) if at is None else SuppressTokensAtBeginLogitsProcessor(ids, at)
    logits = torch.randn(4, 97)
    rows = [theirs(torch.tensor([[*history, *drafted[:i]]]), logits[i : i + 1].clone()) for i in range(4)]
    ours = without_banned(theirs, len(history), logits)
    assert ours is not None and torch.equal(ours, torch.cat(rows))
    assert ours.isinf().any() == (at in (None, 3, 4, 6)) and not logits.isinf().any()
    assert without_banned(NoNeighbours(), 3, logits) is None


def test_good_drafts_survive_processors() -> None:
    """The drafter's law passes through the same processor, so an equal model is accepted throughout."""
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), DraftModel(tiny_model("llama")), policy=4)
    out = decoder.generate(
        *padded(PROMPTS), max_new_tokens=NEW, logits_processor=[NoNeighbours()], repetition_penalty=1.3
    )
    assert out.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("drafter", ("none", "lookup", "model"))
@pytest.mark.filterwarnings("ignore::forerun.errors.ForerunWarning")
def test_stateful_processors_are_refused(drafter: str) -> None:
    decoder = decoder_with(drafter)
    with pytest.raises(InvalidArgument, match="Counting changes its own state"):
        decoder.generate(*padded(PROMPTS), max_new_tokens=4, logits_processor=[Counting()])
    assert len(decoder.generate(*padded(PROMPTS), max_new_tokens=4).new_tokens[0]) == 4


class Remembering:
    """Keeps what it has seen in something of its own, changed in place."""

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if isinstance(self.seen, dict):
            self.seen[length] = True
        elif isinstance(self.seen, set):
            self.seen.add(length)
        else:
            self.seen += type(self.seen)([length])
        return scores


@pytest.mark.parametrize("kind", (list, dict, set, tuple))
def test_processors_that_remember_are_refused(kind: type) -> None:
    with pytest.raises(InvalidArgument, match="Remembering changes its own state"):
        decoder_with("none").generate(*padded(PROMPTS), max_new_tokens=2, logits_processor=[Remembering(kind())])


class Turns:
    """Likes one token in every second call: the text depends on how often it was called."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def liked(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([5]), 1e4 * (self.calls % 2))

    __call__ = liked


def _function_with_a_counter() -> Any:
    calls = 0

    def count(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return scores.index_fill(1, torch.tensor([5]), 1e4 * (calls % 2))

    return count


def _around(inner: Any) -> Any:
    return lambda input_ids, scores: inner(input_ids, scores)


class Holding:
    """Keeps its state in something that it holds."""

    def __init__(self, held: Any, change: Any) -> None:
        self.held, self.change = held, change

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.change(self.held)
        return scores


def _count_within(held: dict[str, list[int]]) -> None:
    held["calls"][0] += 1


def _watermark() -> Any:
    return SynthIDTextWatermarkLogitsProcessor(3, [11, 12, 13], 64, 0, 16, torch.device("cpu"))


STATEFUL: dict[str, Any] = {
    "slots": Turns,
    "bound method": lambda: Turns().liked,
    "closure": _function_with_a_counter,
    "partial": lambda: partial(lambda turns, input_ids, scores: turns.liked(input_ids, scores), Turns()),
    "function around one": lambda: _around(Turns()),
    "nested list": lambda: Holding({"calls": [0]}, _count_within),
    "tensor": lambda: Holding(torch.zeros(()), lambda held: held.add_(1)),
    "object of its own": lambda: Holding(Turns(), lambda held: held.liked(None, torch.zeros(1, 9))),
    "generator": lambda: Holding(torch.Generator(), lambda held: torch.rand(1, generator=held)),
    "Python's generator": lambda: Holding(Random(1), lambda held: held.random()),
    "watermark": _watermark,
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_state_is_noticed_wherever_it_is_kept(kind: str) -> None:
    with pytest.raises(InvalidArgument, match="changes its own state"):
        decoder_with("none").generate(*padded(PROMPTS), max_new_tokens=3, logits_processor=[STATEFUL[kind]()])


class MakesItsTable(LogitsProcessor):
    """What it needs is made by the first call, and the same in all."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens, self.table = tokens, None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.tensor(self.tokens, device=scores.device)
        return scores.index_fill(1, self.table, -torch.inf)


@pytest.mark.quick("method")
@pytest.mark.parametrize(
    "wrap", (lambda one: one, lambda one: one.__call__, _around), ids=("object", "method", "lambda")
)
def test_processors_without_state_may_be_of_any_kind(wrap: Any) -> None:
    bans, unbounded = (5, 7, 11), torch.full((3,), torch.nan)  # which no comparison finds equal to itself

    def banned(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(unbounded) == len(bans)
        return scores.index_fill(1, torch.tensor(bans), -torch.inf)

    wanted = decoder_with("lookup").generate(*padded(PROMPTS), max_new_tokens=12, suppress_tokens=list(bans))
    assert wanted.new_tokens != [row[:12] for row in unadjusted()]
    for processor in (wrap(MakesItsTable(bans)), banned):
        out = decoder_with("lookup").generate(*padded(PROMPTS), max_new_tokens=12, logits_processor=[processor])
        assert out.new_tokens == wanted.new_tokens


ODD_TENSORS: dict[str, Any] = {
    "sparse": lambda: torch.ones(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_a_processor_may_hold_tensors_whose_numbers_cannot_be_listed(kind: str) -> None:
    decoder, processor = decoder_with("lookup"), Holding(ODD_TENSORS[kind](), lambda held: None)
    out = decoder.generate(*padded(PROMPTS), max_new_tokens=12, logits_processor=[processor])
    assert out.new_tokens == [row[:12] for row in unadjusted()]


LIBRARY = """
class Allowed:
    "As a library does that follows a schema: it keeps what it has worked out."

    def __init__(self):
        self.known = {}

    def __call__(self, batch, sent):
        tokens = tuple(sent.tolist())
        return self.known.setdefault(tokens, [tokens[-1], (tokens[-1] + 1) % 32])

    def counted(self, input_ids, scores):
        self.known[len(self.known)] = True
        return scores
"""


def test_what_a_library_keeps_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "follows_schemas.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    library: Any = importlib.import_module("follows_schemas")
    texts = [
        decoder_with(drafter)
        .generate(
            *padded(PROMPTS),
            max_new_tokens=NEW,
            logits_processor=[PrefixConstrainedLogitsProcessor(library.Allowed(), num_beams=1)],
        )
        .new_tokens
        for drafter in ("none", "lookup")
    ]
    assert texts[0] == texts[1]
    with pytest.raises(InvalidArgument, match="changes its own state"):  # here its object is the processor
        decoder_with("none").generate(*padded(PROMPTS), max_new_tokens=3, logits_processor=[library.Allowed().counted])


class Texts(LogitsProcessor):
    """Allows one text behind each prompt, and knows nothing of others, as a trie does."""

    def __init__(self, texts: list[list[int]], behind: Any = None) -> None:
        self.texts = {tuple(prompt): tuple(text) for prompt, text in zip(PROMPTS, texts, strict=True)}
        self.behind = behind  # what every token gets behind another text; None raises

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = tuple(input_ids[0].tolist())
        prompt = next(prompt for prompt in self.texts if said[: len(prompt)] == prompt)
        text, said = self.texts[prompt], said[len(prompt) :]
        if said != text[: len(said)] or len(said) >= len(text):
            if self.behind is None:
                raise ValueError(f"nothing may follow {said}")
            return torch.full_like(scores, self.behind)
        return torch.full_like(scores, -torch.inf).index_copy(1, torch.tensor([text[len(said)]]), torch.zeros(1, 1))


TEXTS = [[(7 * i + 3 * place) % 11 + 1 for i in range(12)] for place in range(len(PROMPTS))]
TEXTS[-1][7:] = [90]


def known(history: Sequence[int], room: int) -> list[int]:
    """The text of a row, and something behind its end."""
    prompt, text = next(pair for pair in zip(PROMPTS, TEXTS, strict=True) if history[: len(pair[0])] == pair[0])
    return [*text[len(history) - len(prompt) :], 5, 6, 7][:room]


STRAYING: dict[str, Any] = {
    "lookup": PromptLookup,
    "scripted": lambda: Scripted(lambda history, room: [(history[-1] + 7) % 11 + 1, 5, 6, 7][:room]),
    "known": lambda: Scripted(known),
    "model": lambda: DraftModel(draft_of(tiny_model("llama"))),
    "tree": lambda: Tree(DraftModel(draft_of(tiny_model("llama"))), nodes=6, width=3),
}


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("behind", (None, -torch.inf, torch.nan), ids=("raises", "nothing", "no number"))
@pytest.mark.parametrize("drafter", STRAYING)
@pytest.mark.quick(every=6)
def test_processors_may_know_nothing_of_texts_that_are_not_kept(
    drafter: str, behind: Any, temperature: float, recwarn: Any
) -> None:
    """The last text ends with a stop id, behind which nothing is known either."""
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), STRAYING[drafter](), policy=4)
    out = decoder.generate(
        *padded(PROMPTS), max_new_tokens=12, temperature=temperature, eos_token_id=90,
        logits_processor=[NoNeighbours(), Texts(TEXTS, behind)],
    )  # fmt: skip
    assert out.errors == [None] * len(PROMPTS)
    assert out.new_tokens == TEXTS
    assert not forerun_warnings(recwarn)


def test_a_list_of_texts_behind_a_copied_token_that_is_none_of_theirs() -> None:
    """As in transformers, whose processor raises where a function allows nothing."""
    prompt, text = [5, 6, 7, 8, 5, 6], [7, 30, 31, 5, 6, 40, 41]

    def allowed(batch: int, ids: Tensor) -> list[int]:
        said = ids.tolist()[len(prompt) :]
        return text[len(said) : len(said) + 1] if said == text[: len(said)] else []

    out = forerun.SpeculativeDecoder(tiny_model("llama"), PromptLookup(), policy=4).generate(
        torch.tensor([prompt]),
        max_new_tokens=len(text),
        logits_processor=[PrefixConstrainedLogitsProcessor(allowed, num_beams=1)],
    )
    assert out.new_tokens == [text] and out.stats.acceptance_rate < 1


@pytest.mark.parametrize("rule", ("token", "block", "coupled"))
def test_what_a_processor_raises_where_the_text_comes_is_raised(rule: str) -> None:
    """Also in the middle of a draft that is kept up to there."""

    def late(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == len(PROMPT) + 7:
            raise LookupError("not here")
        return scores

    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), prophet(), policy=4, rule=rule)
    with pytest.raises(LookupError, match="not here"):
        decoder.generate(torch.tensor([PROMPT]), max_new_tokens=12, logits_processor=[late])
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=7, logits_processor=[late])
    assert out.new_tokens == [list(answer()[:7])]


def test_an_option_that_leaves_nothing_is_named_where_the_text_has_come() -> None:
    """Not where the draft has strayed: there another processor would be blamed."""

    def ends(input_ids: Tensor, scores: Tensor) -> Tensor:
        said = tuple(input_ids[0, len(PROMPT) :].tolist())
        return scores - torch.inf if len(said) == 6 else scores

    def strict(input_ids: Tensor, scores: Tensor) -> Tensor:
        said = tuple(input_ids[0, len(PROMPT) :].tolist())
        return scores if said == answer()[: len(said)] else scores - torch.inf

    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), prophet({7: 3}), policy=8)
    with pytest.raises(
        NonFiniteLogits, match=rf"ends .*strict.* leaves no token to choose after {len(PROMPT) + 6} tokens"
    ):
        decoder.generate(torch.tensor([PROMPT]), max_new_tokens=12, logits_processor=[strict, ends])


def test_an_option_that_failed_once_is_not_blamed_for_what_it_says_now(tmp_path: Path) -> None:
    """A processor that asks something outside, which is down when a draft leads there and up again afterwards."""
    down = tmp_path / "down"
    down.touch()

    def asks(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == len(PROMPT) + 3 and down.exists():
            down.unlink()
            raise ConnectionError
        return scores

    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), prophet(), policy=8)
    with pytest.raises(NonFiniteLogits, match=r"one of .*asks, asked a second time after an error,"):
        decoder.generate(torch.tensor([PROMPT]), max_new_tokens=12, logits_processor=[asks])
    assert not down.exists()


def test_a_processor_without_memory_says_so_wherever_it_is_asked() -> None:
    """Also where the draft has strayed and the text never comes: it may have none at the next position, either."""

    def greedy(input_ids: Tensor, scores: Tensor) -> Tensor:
        said = tuple(input_ids[0, len(PROMPT) :].tolist())
        if said != answer()[: len(said)]:
            raise MemoryError("too much")
        return scores

    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), prophet({7: 3}), policy=8)
    with pytest.raises(MemoryError, match="too much"):
        decoder.generate(torch.tensor([PROMPT]), max_new_tokens=12, logits_processor=[greedy])


class Along:
    """Changes logits in place, at all positions at once."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.along(input_ids[0].tolist(), (), scores)

    def along(self, history: Any, drafted: Any, logits: Tensor) -> Tensor:
        return logits.mul_(0.5)


@pytest.mark.parametrize("where", ("biases", "processors"))
def test_logprobs_are_the_models_own_whoever_writes_into_logits(where: str) -> None:
    own = run(None, logprobs=0)
    changed: Any = {where: (Along(),)}
    out = run(None, logprobs=0, **changed)
    assert out.tokens == own.tokens and out.logprobs == own.logprobs


def test_a_count_that_was_interrupted_begins_anew() -> None:
    class Pulled(int):
        """As a Ctrl-C while it is counted, once."""

        is_pulled = False

        def __hash__(self) -> int:
            if not self.is_pulled:
                Pulled.is_pulled = True
                raise KeyboardInterrupt
            return hash(int(self))

    request = Request(prompt=PROMPT, max_new_tokens=9, params=SamplingParams(frequency_penalty=0.5))
    made, wanted = adjuster(request, [7, 7, Pulled(8)]), adjuster(request, [7, 7, 8])
    assert made is not None and wanted is not None
    with pytest.raises(KeyboardInterrupt):
        made(torch.zeros(1, 10), [], 0)
    assert torch.equal(made(torch.zeros(1, 10), [], 0), wanted(torch.zeros(1, 10), [], 0))


@pytest.mark.quick("model-0.0", "none-1.1")
@pytest.mark.parametrize("temperature", (0.0, 1.1))
@pytest.mark.parametrize("drafter", ("none", "model"))
def test_logprobs_are_the_models_own(drafter: str, temperature: float) -> None:
    """Of a full recompute, before temperature and penalties; alternatives best first."""
    out = decoder_with(drafter).generate(
        *padded(PROMPTS),
        max_new_tokens=12,
        temperature=temperature,
        top_k=20,
        repetition_penalty=1.2,
        seed=2,
        logprobs=3,
    )
    for prompt, row in zip(PROMPTS, out.rows, strict=True):
        text = [*prompt, *row.tokens]
        laws = (
            tiny_model("llama")(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        )
        assert row.logprobs is not None
        assert [entry.token for entry in row.logprobs] == list(row.tokens)
        own = torch.tensor([entry.logprob for entry in row.logprobs])
        torch.testing.assert_close(own, laws[torch.arange(12), torch.tensor(row.tokens)], atol=1e-4, rtol=0)
        top = torch.tensor([[value for _, value in entry.top] for entry in row.logprobs])
        torch.testing.assert_close(top, laws.topk(3).values, atol=1e-4, rtol=0)


def test_logprobs_stop_with_the_row() -> None:
    stop = answer()[2]
    out = decoder_with("model").generate(torch.tensor([PROMPT]), max_new_tokens=12, logprobs=True, eos_token_id=stop)
    assert len(out.logprobs[0] or ()) == len(out.new_tokens[0]) < 12
    assert decoder_with("none").generate(torch.tensor([PROMPT]), max_new_tokens=2).logprobs == [None]
