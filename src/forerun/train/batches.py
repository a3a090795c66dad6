"""Which sequences meet in which step. A pure function of the seed and the step, so there is no position to lose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.transfer import to_device
from forerun.train.shards import TrainingText

WINDOW = 32  # batches' worth of sequences that are sorted by length together: little padding, still a good mix
ROUND = 32  # widths are multiples of this, so that the allocator meets few shapes


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded on the right, and the positions whose next token is to be learnt."""

    tokens: Tensor  # [B, L] int64
    keep: Tensor  # [M] int64, b * L + t: the law of the token after position t of row b carries loss
    times: Tensor  # [M] int64, t
    top_ids: Tensor | None  # [M, K] int64
    top_logprobs: Tensor | None  # [M, K]
    rolled: Tensor  # [R] int64, rows whose tokens after `cuts` are to be drafted
    cuts: Tensor  # [R] int64, the last token of each that stays
    num_tokens: int  # without padding

    def to(self, device: torch.device) -> Batch:
        """Copies that do not wait for one another."""

        def move(value: Tensor | int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return to_device(value, device)

        return Batch(*(move(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Rollouts:
    """How many sequences have their continuation drafted, and for how long."""

    share: float = 0.0
    length: int = 8


class BatchOrder:
    """The order of the data: epochs of batches, each holding at most `batch_tokens` with its padding."""

    def __init__(self, lengths: Sequence[int], members: Sequence[int], batch_tokens: int, max_length: int, seed: int):
        if not members:
            raise InvalidArgument("the data has no sequence to train on; make more, or hold fewer out")
        self._lengths = [min(length, max_length) for length in lengths]
        self._members = torch.tensor(list(members))
        self._batch_tokens = batch_tokens
        self._seed = seed

    def epoch(self, number: int) -> list[list[int]]:
        """Batches of sequence numbers, in the order of training."""
        generator = torch.Generator().manual_seed(_mix(self._seed, number))
        order = self._members[torch.randperm(len(self._members), generator=generator)].tolist()
        batches: list[list[int]] = []
        for window in self._windows(order):
            of_window = batches_by_length(window, self._lengths, self._batch_tokens, ROUND)
            batches += [of_window[i] for i in torch.randperm(len(of_window), generator=generator).tolist()]
        return batches

    def from_step(self, step: int) -> Iterator[list[int]]:
        """All batches from that step on, without end."""
        number = 0
        while True:
            batches = self.epoch(number)
            yield from batches[step:]
            step = max(step - len(batches), 0)
            number += 1

    def num_steps(self, epochs: float, enough: int | None = None) -> int:
        """Batches of so many epochs, each of which has to be made to know; `enough` or more end the counting."""
        whole, counted = int(epochs), 0
        for number in range(whole):
            counted += len(self.epoch(number))
            if enough is not None and counted >= enough:
                return counted
        if epochs > whole:
            counted += round(len(self.epoch(whole)) * (epochs - whole))
        return max(1, counted)

    def _windows(self, order: list[int]) -> Iterator[list[int]]:
        window: list[int] = []
        room = WINDOW * self._batch_tokens
        for index in order:
            window.append(index)
            room -= self._lengths[index]
            if room <= 0:
                yield window
                window, room = [], WINDOW * self._batch_tokens
        if window:
            yield window


def batches_by_length(
    members: Iterable[int], lengths: Sequence[int], batch_tokens: int, multiple: int = 1
) -> list[list[int]]:
    """Members of similar length together, so that little is padding: each batch, padded, holds at most `batch_tokens`.

    Widths are multiples of `multiple`; the longest of a batch is its last. One that is longer than all of
    `batch_tokens` makes a batch by itself.
    """
    batches: list[list[int]] = []
    for member in sorted(members, key=lambda member: lengths[member]):
        if batches and _rounded_up(lengths[member], multiple) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(member)
        else:
            batches.append([member])
    return batches


def split(prompts: Sequence[int], hold_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the sequences to train on, and of those to measure on; `prompts` says which prompt each answers.

    No prompt is on both sides: its texts are much alike, and one that was trained on tells of the others.
    """
    answers: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        answers.setdefault(prompt, []).append(i)
    held: list[int] = []
    shut: set[int] = set()
    for i in torch.randperm(len(prompts), generator=torch.Generator().manual_seed(_mix(seed, -1))).tolist():
        if len(held) >= hold_out:
            break
        if prompts[i] not in shut:
            shut.add(prompts[i])
            held += answers[prompts[i]]
    members = [i for i, prompt in enumerate(prompts) if prompt not in shut]
    if not members:
        alike = f" for {len(answers)} prompts" if len(answers) < len(prompts) else ""
        raise InvalidArgument(
            f"the data has {len(prompts)} sequences{alike} and {hold_out} are to be held out; make more, or lower "
            "hold_out"
        )
    return members, sorted(held[:hold_out])


def collate(texts: Sequence[TrainingText], max_length: int, rollouts: Rollouts, seed: int, with_tops: bool) -> Batch:
    """Pads, finds the positions that carry loss, and chooses what is rolled out. `seed` is the step's own."""
    cut = [_end_of(text, max_length) for text in texts]
    chosen = _choose_rollouts(cut, rollouts, torch.Generator().manual_seed(seed))
    width = _rounded_up(max(len(tokens) for tokens, _, _ in cut), ROUND)
    tokens = torch.zeros(len(cut), width, dtype=torch.long)
    keep, times = [], []
    for row, (content, first, _) in enumerate(cut):
        tokens[row, : len(content)] = content
        last = min(len(content) - 1, chosen.get(row, len(content)) + rollouts.length)
        times.append(torch.arange(first, max(last, first)))
        keep.append(times[-1] + row * width)
    tops = (
        [_tops(text, start, t) for text, (_, _, start), t in zip(texts, cut, times, strict=True)] if with_tops else []
    )
    return Batch(
        tokens,
        torch.cat(keep),
        torch.cat(times),
        torch.cat([ids for ids, _ in tops]) if tops else None,
        torch.cat([logs for _, logs in tops]) if tops else None,
        torch.tensor(list(chosen), dtype=torch.long),
        torch.tensor(list(chosen.values()), dtype=torch.long),
        sum(len(content) for content, _, _ in cut),
    )


def _end_of(text: TrainingText, max_length: int) -> tuple[Tensor, int, int]:
    """Tokens, the first position whose next token is learnt, and where the cut begins. What is long loses its start."""
    start = max(0, len(text.tokens) - max_length)
    tokens = text.tokens[start:].long()
    return tokens, max(text.prompt_length - 1 - start, 0), start


def _choose_rollouts(
    cut: Sequence[tuple[Tensor, int, int]], rollouts: Rollouts, generator: torch.Generator
) -> dict[int, int]:
    """Row -> the last position of it that stays."""
    lots = torch.rand(len(cut), 2, generator=generator).tolist() if rollouts.share else [(1.0, 0.0)] * len(cut)
    chosen = {}
    for row, ((tokens, first, _), (lot, place)) in enumerate(zip(cut, lots, strict=True)):
        if lot < rollouts.share and len(tokens) - first > 2:
            chosen[row] = first + int(place * (len(tokens) - 1 - first))
    return chosen


def _tops(text: TrainingText, start: int, times: Tensor) -> tuple[Tensor, Tensor]:
    assert text.top_ids is not None and text.top_logprobs is not None, "asked for laws that were not stored"
    return text.top_ids[start + times].long(), text.top_logprobs[start + times].float()


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _mix(seed: int, number: int) -> int:
    """One seed of two numbers, far apart for neighbours."""
    return (seed * 1_000_003 + number * 7_919 + 12_345) % (2**63)


def step_seed(seed: int, step: int) -> int:
    """The seed of everything random in one step."""
    return _mix(seed + 1, step)


def prefetched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Makes the next batch while the current one is used; an error while making it is raised when it is asked for."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        coming = worker.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = worker.submit(next, batches, None)
            yield batch
