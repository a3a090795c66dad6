"""Work of the host grows no faster than what users bring: prompts, outputs, queues, batches, kept beginnings.

Other tests are small, and there anything is fast. These count instructions, or tokens where the work is done in C, at
one size and at four times that size: in proportion is 4 times as much, every one with every other 16 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from forerun.cache.base import KeyValueCache
from forerun.cache.blocks import BlockPool
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.config import SamplingParams
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.growth import RowTree, TreeGrowth, TreeNode
from forerun.drafters.predicted_text import _Follower
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.engine import Engine, Request
from forerun.engine import row as rows
from forerun.engine.adjust import adjuster
from forerun.engine.admission import Admission
from forerun.engine.device.prompt_passes import CHUNKS, _chunks
from forerun.engine.device.row_options import make_options, write_options
from forerun.engine.row import Row
from forerun.engine.stops import StopRule
from forerun.inputs import as_tensors, unpadded
from forerun.models.scorer import Scorer
from forerun.policy import Constant, CostModel
from forerun.policy.acceptance import Acceptance
from forerun.policy.base import Policy
from forerun.serve.grammar import Grammar, make_tokenizer
from forerun.text import StreamDecoder
from forerun.types import DraftContext, LawParams, Siblings
from policy.rounds import outcome, view
from support.folders import VOCAB, byte_tokenizer, sentencepiece_tokenizer
from support.instructions import growth, instructions
from support.tiny import tiny_model

IN_PROPORTION = 6.0  # where 4 is exact, 16 is every one with every other, and a sort is a little more than 4
CONSTANT = 1.3
BYTES, PIECES = byte_tokenizer(), sentencepiece_tokenizer()


def request(number: int = 0, prompt: Sequence[int] = (1, 2), **more: Any) -> Request:
    return Request(**{"prompt": tuple(prompt), "max_new_tokens": 100, "request_id": number, **more})


def test_the_count_tells_a_walk_from_all_pairs() -> None:
    assert growth(lambda n: lambda: [2 * i for i in range(n)], 100) == pytest.approx(4, rel=0.1)
    assert growth(lambda n: lambda: [(i, j) for i in range(n) for j in range(n)], 30) > 2 * IN_PROPORTION
    assert growth(lambda n: lambda: sum(range(n)), 100) < CONSTANT


def test_short_prompts_beside_a_long_one_are_mostly_padding() -> None:
    def make(n: int) -> Callable[[], object]:
        ids = torch.ones(3, n, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        mask[0], mask[1, -3:], mask[2, :2] = 1, 1, 1
        return lambda: unpadded(ids, mask)

    assert growth(make, 500) < CONSTANT


def test_prompts_of_many_lengths_are_padded_on_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a list of as many zeros: of hundreds of rows as long as the longest there would be gigabytes."""
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a list of lists"))
    padded = as_tensors([[1, 2], [3], [4, 5, 6]], None, {}, None)
    assert padded.ids is not None and padded.mask is not None
    assert padded.ids.tolist() == [[0, 1, 2], [0, 0, 3], [4, 5, 6]]
    assert padded.mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]


def test_a_prediction_that_says_the_same_again_and_again() -> None:
    """A table of numbers: the answer leaves it in every line and meets it again."""

    def make(n: int) -> Callable[[], object]:
        follower, answer = _Follower((1, 2, 3, 4) * n, 0), [1, 2, 3, 9] * n
        return lambda: follower.follow(answer)

    assert growth(make, 50) < IN_PROPORTION


def test_a_copy_is_looked_up_in_a_text_of_any_length() -> None:
    def make(n: int) -> Callable[[], object]:
        drafter, text = PromptLookup(), [i * i % 1009 for i in range(n)]
        drafter.prepare([0], [text])
        return lambda: drafter._look_up(0, [*text, 5], 8, 1009)

    assert growth(make, 500) < CONSTANT


def test_a_prompt_that_is_read_in_parts_is_published_once() -> None:
    def make(n: int) -> Callable[[], object]:
        pool, tokens = BlockPool(n, 4), list(range(4 * n))
        blocks = [pool.take() for _ in range(n)]

        def publish_in_parts() -> None:
            for end in range(1, n + 1):
                pool.publish(tokens[: 4 * end], None, blocks[:end])

        return publish_in_parts

    assert growth(make, 30) < IN_PROPORTION


def test_what_was_published_in_parts_is_found_as_if_at_once() -> None:
    tokens = list(range(30))
    parts, whole = BlockPool(20, 4), BlockPool(20, 4)
    blocks = [parts.take() for _ in range(8)]
    assert blocks == [whole.take() for _ in range(8)]
    for end in (3, 4, 9, 17, 18, 30):
        parts.publish(tokens[:end], None, blocks[: -(-end // 4)])
    whole.publish(tokens, None, blocks)
    for asked in (tokens, [*tokens, 7, 7], tokens[:11], [*tokens[:13], 99], [5]):
        assert parts.find(asked, None) == whole.find(asked, None)
    assert parts.num_findable == whole.num_findable == 8


@pytest.mark.parametrize("count", [3, 700, 2047, 2048, 100_000])
def test_a_prompt_is_cut_into_chunks_in_few_steps(count: int) -> None:
    assert instructions(lambda: _chunks(count)) < 100 * len(CHUNKS) ** 2


def test_prompts_that_wait_to_be_read_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokens of them are read in every step, beside a row that decodes."""
    hashed: list[int] = []
    make_text = rows.RowText.__init__

    def counted(self: rows.RowText, tokens: tuple[int, ...], source: Any) -> None:
        hashed.append(len(tokens))
        make_text(self, tokens, source)

    monkeypatch.setattr(rows.RowText, "__init__", counted)
    cache = PagedCache(4096, torch.device("cpu"), block_size=16)
    engine = Engine(Scorer(tiny_model("llama"), cache=cache), None, Constant(0), prompt_tokens=4, join_tokens=0)
    engine.add(request())
    engine.step()
    for number in range(1, 5):
        engine.add(request(number, [number, *range(40)]))
    for _ in range(20):
        engine.step()
    assert sum(row.is_reading for row in engine.roster.running.values()) > 1, "they are still waiting"
    assert 4 * 41 <= sum(hashed) <= 2 + 4 * 41


def test_requests_that_wait_cost_a_step_little() -> None:
    def make(n: int) -> Callable[[], object]:
        engine = Engine(Scorer(tiny_model("llama")), None, Constant(0), max_rows=2)
        for number in range(n):
            engine.add(request(number))
        engine.step()
        return engine.step

    assert growth(make, 50) < CONSTANT * 1.3


CACHES: dict[str, Callable[[int], KeyValueCache]] = {
    "unbounded": lambda n: RaggedCache(),
    "bounded": lambda n: RaggedCache(n * 200),
    "blocks": lambda n: PagedCache(n * 200, torch.device("cpu"), block_size=16),
}


@pytest.mark.parametrize("kind", CACHES)
def test_many_requests_are_taken_in_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The needs of those that run are added up once, not again for each newcomer."""
    monkeypatch.setattr(Engine, "_read_prompts", lambda self: None)

    def make(n: int) -> Callable[[], object]:
        engine = Engine(Scorer(tiny_model("llama"), cache=CACHES[kind](n)), None, Constant(0))
        for number in range(n):
            engine.add(request(number))

        def take_in() -> None:
            engine._admit()
            assert len(engine.roster.running) == n

        return take_in

    assert growth(make, 100) < IN_PROPORTION


def test_all_requests_are_given_up_at_once() -> None:
    def make(n: int) -> Callable[[], object]:
        engine = Engine(Scorer(tiny_model("llama")), None, Constant(0))
        handles = [engine.add(request(number)) for number in range(n)]

        def give_up() -> None:
            engine.abort(*handles)
            assert len(engine.take_results()) == n and engine.is_idle

        return give_up

    assert growth(make, 50) < IN_PROPORTION


@pytest.mark.parametrize("is_recorded", [False, True], ids=["host", "device"])
def test_lengths_for_many_rows(is_recorded: bool) -> None:
    def make(n: int) -> Callable[[], object]:
        policy: Policy = CostModel()
        seen = replace(view(*range(n)), sizes=(1, 2, 4, 8) if is_recorded else (), tokens_left=tuple(range(50, 50 + n)))

        def step() -> None:
            lengths = policy.lengths(seen)
            kept = tuple(min(length, row % 4) for row, length in enumerate(lengths))
            policy.observe(outcome(seen.request_ids, lengths, kept, score_seconds=0.02 + 1e-5 * sum(lengths)))

        for _ in range(8):
            step()
        assert any(policy.lengths(seen)), "there is something to choose"
        return step

    assert growth(make, 8) < IN_PROPORTION


def a_row(number: int, prompt: Sequence[int], output: list[int], params: SamplingParams) -> Row:
    asked = request(number, prompt, params=params)
    return Row(number, asked, [*prompt, *output], output, StopRule(asked, 10**6, None), adjuster(asked, output), None)


OPTIONS = {
    "repetition": lambda n: SamplingParams(temperature=1.0, repetition_penalty=1.2),
    "frequency": lambda n: SamplingParams(temperature=1.0, frequency_penalty=0.2),
    "bias": lambda n: SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(n), 1.0)),
}


@pytest.mark.parametrize("evidence", [0, 999], ids=["seen", "never seen"])
def test_a_verified_draft_is_counted_beside_any_number_of_classes_and_places(evidence: int) -> None:
    """A row's draft changes what is expected of all classes at all places, which is computed when somebody asks."""

    def make(n: int) -> Callable[[], object]:
        acceptance = Acceptance(places=n)
        for kind in range(n):
            acceptance.observe(1, kind, 2, 1, ended=False)
        return lambda: acceptance.observe(1, 0, 2, 1, ended=False)

    def asked(n: int) -> Callable[[], object]:
        acceptance = Acceptance(places=n)
        acceptance.observe(1, 0, 2, 1, ended=False)
        return lambda: [acceptance.survival(row, evidence, 3) for row in range(500)]

    assert growth(make, 50) < CONSTANT
    assert growth(asked, 50) < CONSTANT


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_table_is_written_without_a_look_at_every_token(name: str) -> None:
    """Whenever a row comes or goes, for all rows: prompts and outputs of thousands of tokens, biases of as many ids."""
    column = torch.zeros(2)
    columns = {"repetition": column, "presence": column, "frequency": column, "min_new_tokens": column}

    def make(n: int) -> Callable[[], object]:
        options = make_options(2, 8192, torch.device("cpu"), **columns)
        written = [a_row(number, range(n), [5] * n, OPTIONS[name](n)) for number in range(2)]
        return lambda: write_options(options, written, Tensor.clone)

    assert growth(make, 500) < CONSTANT


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_adjusted_without_a_look_at_every_token(name: str) -> None:
    def make(n: int) -> Callable[[], object]:
        made = adjuster(request(0, [7, 8] * n, params=OPTIONS[name](n)), [5] * n)
        assert made is not None
        return lambda: made(torch.zeros(2, 8192), [3], 0)

    assert growth(make, 500) < CONSTANT


class ReadOutput(list[int]):
    """Counts how many of its tokens are looked at."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("name", ["repetition", "frequency"])
def test_penalties_count_every_token_of_an_output_once(name: str) -> None:
    output = ReadOutput([5] * 300)
    asked = request(0, params=OPTIONS[name](1))
    made = adjuster(asked, output)
    assert made is not None
    for token in range(20):
        output.append(token)
        drafted, logits = [3, 3, token], torch.randn(2, 30)
        again = adjuster(asked, list(output))
        assert again is not None
        assert torch.equal(made(logits, drafted, 2), again(logits, drafted, 2))
    assert output.num_read == 320 + sum(range(301, 321)), "once, and once for each copy"
    del output[10:]
    again = adjuster(asked, list(output))
    assert again is not None and torch.equal(made(logits, drafted, 0), again(logits, drafted, 0))


def test_a_prompt_is_walked_once_for_its_repetition_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    """In C, and then only its different tokens in each round."""
    given: list[int] = []

    def adjust(logits: Tensor, prompt: Sequence[int], *_: Any, **__: Any) -> Tensor:
        given.append(len(prompt))
        return logits

    monkeypatch.setattr("forerun.ops.adjust", adjust)
    made = adjuster(request(0, [7, 8] * 500, params=OPTIONS["repetition"](1)), [])
    assert made is not None
    made(torch.zeros(1, 10), [], 0)
    assert given == [2]


def test_a_prompt_that_waits_for_room_is_copied_once() -> None:
    class Full:
        num_tokens = 1

        def needs(self, ends: Any) -> int:
            return len(ends)

        def takes(self, needs: int, new: Any) -> bool:
            return len(new.tokens) < 0

    row, admission = a_row(0, range(100), [], SamplingParams()), Admission()
    row.history = ReadOutput(row.history)
    for _ in range(9):
        assert not admission.fits([Full()], [], row)  # type: ignore[list-item]
    assert row.history.num_read == 99
    row.history.append(7)
    assert not admission.fits([Full()], [], row)  # type: ignore[list-item]
    assert row.history.num_read == 99 + 100


def test_a_draft_model_that_nobody_asks_reads_nothing() -> None:
    """Of rows whose rounds have no draft it would otherwise look through all that it has not taken in, every time."""
    drafter, text = DraftModel(tiny_model("llama")), ReadOutput([5] * 300)
    drafter.admit(0, text)
    params = LawParams.stack([SamplingParams()])
    uniforms, device = torch.zeros(1, 4, dtype=torch.float64), torch.device("cpu")
    asked = DraftContext((0,), (text,), (0,), params, uniforms, (None,), 97, device)
    drafter.propose(asked)
    assert text.num_read == 0
    drafter.propose(replace(asked, max_lengths=(2,)))
    assert text.num_read >= 300, "control"


def test_results_that_nobody_takes_cost_those_to_come_nothing() -> None:
    engine = Engine(Scorer(tiny_model("llama")), None, Constant(0))
    engine.abort(engine.add(request(0)))
    unclaimed = engine.roster.results
    engine.abort(engine.add(request(1)))
    assert engine.roster.results is unclaimed and len(unclaimed) == 2


def test_a_grammar_goes_on_where_it_was() -> None:
    letter, guide = BYTES("a").input_ids[0], make_tokenizer(BYTES, VOCAB, frozenset({0}))
    grammar = Grammar(LLMatcher.grammar_from_regex("a*"), "guided_regex", guide, frozenset({0}))

    def make(n: int) -> Callable[[], object]:
        processor = grammar.processor(0)
        processor.along([letter] * n, (), torch.zeros(1, VOCAB))
        return lambda: processor.along([letter] * (n + 1), (), torch.zeros(1, VOCAB))

    assert growth(make, 100) < CONSTANT


def test_trees_of_many_rows() -> None:
    class Silent:
        def behind(self, numbers: list[int], tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
            return torch.zeros(sum(map(len, tokens)), 3)

    def make(n: int) -> Callable[[], object]:
        trees = [RowTree(4, [TreeNode(-1, token, 0.3, 1, 0) for token in range(3)]) for _ in range(n)]
        grown = TreeGrowth(Silent(), 3, 12, (Siblings.TOP,) * n, trees)  # type: ignore[arg-type]
        level = grown.level(1)
        return lambda: grown.look_behind(level)

    assert growth(make, 20) < IN_PROPORTION


class CountingDecoder(StreamDecoder):
    """Counts the tokens that its tokenizer decodes."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.decoded, decode = 0, self._decode

        def counted(tokens: list[int]) -> str:
            self.decoded += len(tokens)
            return decode(tokens)

        self._decode = counted


STREAMS = {
    "text": (BYTES, BYTES("a").input_ids),
    "characters of four bytes": (BYTES, BYTES("\U0001f389").input_ids),
    "no characters": (BYTES, BYTES("é").input_ids[1:]),
    "special tokens": (BYTES, [BYTES.eos_token_id]),
    "pieces": (PIECES, PIECES.convert_tokens_to_ids(["\u2581hello", "a"])),
    "bytes that are no character": (PIECES, PIECES.convert_tokens_to_ids(["<0xFF>", "<0xE6>"])),
}


@pytest.mark.parametrize("at_once", [1, 7, 10**6])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_decodes_few_tokens_again(name: str, at_once: int) -> None:
    tokenizer, period = STREAMS[name]
    decoded = []
    for number in (200, 800):
        decoder, tokens = CountingDecoder(tokenizer), period * (number // len(period))
        for start in range(0, number, at_once):
            decoder.push(*tokens[start : start + at_once])
        decoder.finish()
        decoded.append(decoder.decoded)
    assert decoded[1] < IN_PROPORTION * decoded[0]
    assert decoded[1] < 150 * 800, "a window at each token at most"
