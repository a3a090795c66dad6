"""Text in the target's own words: many prompts in flight at once, each with its own temperature and random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from forerun.config import SamplingParams
from forerun.engine import Engine, FinishReason, Request, RowResult
from forerun.keywords import id_set
from forerun.math.attention import Form
from forerun.measure.repetition import repeated_grams
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.train.options import SHORTEST, WritingSettings
from forerun.train.shards import ShardWriter, TrainingText

PASS_TOKENS = 16384  # of prompts encoded in one pass: a GPU takes as long for few
REFILL = 16  # new rows come in when one place in so many is free: a pass of their own costs as much as a round

# cuDNN's attention is left out: it plans anew for every number of keys, and that number changes with every round.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class Item:
    """One text to write."""

    number: int  # decides its temperature and its random numbers, whoever its neighbours are
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingLimits:
    """When to stop before all is written."""

    tokens: int | None = None  # in the folder, earlier runs included
    seconds: float | None = None
    interrupted: Callable[[], bool] = lambda: False


class WritingEnd(StrEnum):
    """Why writing stopped."""

    DONE = "all prompts are answered"
    TOKENS = "the number of tokens asked for is reached"
    DISK = "the disk budget is used up"
    TIME = "the time is up"
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Tally:
    """What one run wrote."""

    sequences: int = 0
    tokens: int = 0  # prompts included
    new_tokens: int = 0
    too_short: int = 0
    failed: int = 0  # the target returned NaN or infinity
    stopped: int = 0  # ended by the target itself
    grams: int = 0
    repeated_grams: int = 0
    seconds: float = 0.0
    ending: WritingEnd = WritingEnd.DONE
    by_temperature: dict[float, int] = field(default_factory=dict)

    @property
    def repeated_share(self) -> float:
        return self.repeated_grams / self.grams if self.grams else 0.0

    @property
    def stopped_share(self) -> float:
        return self.stopped / self.sequences if self.sequences else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New ones: prompts are read, not written."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def count(self, result: RowResult) -> None:
        self.sequences += 1
        self.tokens += len(result.request.prompt) + len(result.tokens)
        self.new_tokens += len(result.tokens)
        self.stopped += result.finish_reason is FinishReason.STOP
        repeated, grams = repeated_grams(result.tokens)
        self.repeated_grams += repeated
        self.grams += grams
        temperature = result.request.params.temperature
        self.by_temperature[temperature] = self.by_temperature.get(temperature, 0) + 1


class WideScorer(Scorer):
    """A target for hundreds of rows: prompts are encoded in few, large passes instead of many small ones.

    Rows come in the order of their slots, so that each pass reads its keys in place.
    """

    def feed(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        for part in _passes([(row, block) for row, block in zip(rows, blocks, strict=True) if len(block)]):
            self._feed_pass([row for row, _ in part], [block for _, block in part], self.modules)


def wide_engine(model: PreTrainedModel, tokenizer: Any = None) -> Engine:
    """Plain decoding of many rows: a batch this large leaves no idle time for drafts to fill."""
    scorer = WideScorer(model, Form.PAD if model.device.type == "cuda" else Form.AUTO)
    return Engine(scorer, None, Constant(0), tokenizer=tokenizer, join_tokens=0, compile=False)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """What ends a text, as the model's own configuration says."""
    return id_set(getattr(model.generation_config, "eos_token_id", None))


def temperature_of(number: int, temperatures: Sequence[float]) -> float:
    """Each as often as any other, also within every n-th number, so that all slices of the prompts meet all of them."""
    base = len(temperatures)
    digit_sum = 0
    while number and base > 1:
        number, digit = divmod(number, base)
        digit_sum += digit
    return temperatures[digit_sum % base]


def items_of(place: int, prompt: tuple[int, ...], samples: int, temperatures: Sequence[float]) -> list[Item]:
    """The texts for the prompt at `place`: `samples` of them, but one alone where several would be greedy, so equal."""
    numbers = range(place * samples, (place + 1) * samples)
    greedy = [number for number in numbers if temperature_of(number, temperatures) == 0]
    return [Item(number, prompt) for number in numbers if number not in greedy[1:]]


def _request(item: Item, settings: WritingSettings) -> Request:
    temperature = temperature_of(item.number, settings.temperatures)
    return Request(
        prompt=item.prompt,
        max_new_tokens=settings.max_new_tokens,
        params=SamplingParams(temperature=temperature, top_p=settings.top_p if temperature else 1.0),
        seed=settings.seed,
        request_id=item.number,
        stop_ids=settings.stop_ids,
    )


def write_items(engine: Engine, items: Iterable[Item], settings: WritingSettings) -> Iterator[list[RowResult]]:
    """What was finished in each round. As rows finish, new ones take their places."""
    engine.begins_together = True
    waiting = iter(items)
    in_flight, least = 0, max(1, settings.batch_size // REFILL)
    while True:
        free = settings.batch_size - in_flight
        if free >= least:
            new = list(islice(waiting, free))
            for item in new:
                engine.add(_request(item, settings))
            in_flight += len(new)
        if engine.is_idle:
            return
        with sdpa_kernel(BACKENDS):
            engine.step()
        results = engine.take_results()
        in_flight -= len(results)
        yield results


def write_shards(
    engine: Engine,
    items: Iterable[Item],
    writer: ShardWriter,
    settings: WritingSettings,
    limits: WritingLimits,
    tell: Callable[[Tally], None] = lambda tally: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tally:
    """Answer what is not answered yet, until done or a limit is met. Texts cut off by a limit are not kept."""
    started, tally = clock(), Tally()
    left = (item for item in items if item.number not in writer.done)
    try:
        for results in write_items(engine, left, settings):
            ending = _keep(results, writer, tally, limits)
            tally.seconds = clock() - started
            tell(tally)
            if ending is None and limits.seconds is not None and tally.seconds >= limits.seconds:
                ending = WritingEnd.TIME
            if ending is None and limits.interrupted():
                ending = WritingEnd.INTERRUPTED
            if ending is not None:
                tally.ending = ending
                break
    finally:
        writer.flush()
    return tally


def _keep(results: Iterable[RowResult], writer: ShardWriter, tally: Tally, limits: WritingLimits) -> WritingEnd | None:
    """Hand finished texts on; says which limit that met."""
    for result in sorted(results, key=lambda result: result.request.request_id):
        number, prompt = result.request.request_id, result.request.prompt
        if result.finish_reason is FinishReason.ERROR:
            tally.failed += 1
            writer.skip(number)
        elif len(result.tokens) < SHORTEST:
            tally.too_short += 1
            writer.skip(number)
        elif not writer.has_room(len(prompt) + len(result.tokens)):
            return WritingEnd.DISK
        else:
            writer.add(number, TrainingText(torch.tensor([*prompt, *result.tokens]), len(prompt)))
            tally.count(result)
        if limits.tokens is not None and writer.num_tokens >= limits.tokens:
            return WritingEnd.TOKENS
    return None


def _passes(waiting: Sequence[tuple[int, Sequence[int]]]) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Neighbours together, at most PASS_TOKENS at a time where one prompt alone is not longer."""
    part: list[tuple[int, Sequence[int]]] = []
    size = 0
    for row, block in waiting:
        if part and size + len(block) > PASS_TOKENS:
            yield part
            part, size = [], 0
        part.append((row, block))
        size += len(block)
    if part:
        yield part
