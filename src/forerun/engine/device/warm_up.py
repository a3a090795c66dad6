"""Doing ahead of time what rows, drafts and contexts up to given sizes can meet: every recording, every kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from forerun.config import SamplingParams
from forerun.engine.device.choose import describe
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import POSITIONS, SMALLEST_KEY_BOUND, bucket, key_bound, next_power_of_two
from forerun.engine.host_round import judge_prompts
from forerun.engine.pair import Pair
from forerun.engine.request import Request
from forerun.engine.row import Row
from forerun.errors import RankLost

# Batches of one of these kinds have recordings of their own; all others share one that suits every kind.
KINDS = (SamplingParams(temperature=1.0), SamplingParams())
MOST_READ = 16384  # tokens of a prompt that is read for nobody
ALTERNATIVES = (0, 8, 32)  # whose log-probabilities may be wanted: the next of these are looked up

Report = Callable[[int, int], None]
"""Told how many rounds have been recorded, and how many there are."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was done ahead of time."""

    seconds: float
    num_rounds: int  # that were recorded; 0 where nothing can be
    remark: str = ""  # why nothing was recorded
    num_compiled: int = 0  # variants of kernels; a second process on the machine finds them on disk


def sizes_up_to(rows: int) -> list[int]:
    """Of row tables, the largest first: scratch memory is then as large as it gets before anything is recorded."""
    return [1 << exponent for exponent in reversed(range(next_power_of_two(rows).bit_length()))]


def bounds_up_to(context: int) -> list[int]:
    """On the keys of a row, the largest first; a round under way as a row ends may write past its end."""
    most = key_bound(context + 2 * POSITIONS[-1])
    bounds = [most]
    while bounds[-1] > SMALLEST_KEY_BOUND:
        bounds.append(bounds[-1] // 2)
    return bounds


def prompts_up_to(context: int) -> list[int]:
    """Lengths of prompts whose passes, which are not recorded, meet every variant of their kernels.

    Such a pass has thousands of tokens. How many keys lie before them changes numbers that kernels are given, not their
    code: prompts longer than a few passes need not be read for it.
    """
    longest = max(min(context, MOST_READ) - 1, 1)
    doubled = [1 << exponent for exponent in range(1, longest.bit_length())]
    return sorted({min(length, longest) for size in doubled for length in (size, size + 2, size + size // 2)})


def record(
    pair: Pair,
    rows: int,
    lengths: Sequence[int],
    context: int,
    row_of: Callable[[Request], Row],
    report: Report | None = None,
) -> tuple[int, str]:
    """All that can be recorded: how many rounds those are, and what is said where there are none."""
    runner, drafting = pair.runner, pair.drafting
    remark, is_split = describe(runner, pair.target, drafting.drafter, pair.rule), pair.target.counterparts is not None
    if runner is None or runner.is_disabled or not (runner.whole_rounds or is_split):
        return 0, remark
    dummy = Request(prompt=(0, 0), max_new_tokens=1)
    asked = [replace(dummy, params=params) for params in KINDS]
    asked += [replace(asked[0], logprobs=number) for number in ALTERNATIVES]
    likes = list(map(row_of, asked))
    try:
        if is_split:
            count = record_passes(runner, rows, lengths, context, report)
        else:
            count = record_all(runner, rows, lengths, context, likes, copies=drafting.finds_copies, report=report)
        bound = bounds_up_to(context)[0]
        if drafting.passes is not None:
            drafting.passes.prepare(sizes_up_to(rows), bound)
        runner.record_prompts(bound, with_head=pair.first_from_prompt)
        if pair.first_from_prompt:
            penalised = replace(asked[0], params=replace(asked[0].params, repetition_penalty=1.1))
            _rehearse_first_tokens(pair, [*likes, row_of(penalised)])
        return count, remark
    except RankLost:
        raise
    except Exception as error:
        runner.disable(error)
        return 0, str(error)


def _rehearse_first_tokens(pair: Pair, likes: Sequence[Row]) -> None:
    """Compile what judges the ends of prompts, which is not recorded, for rows like these.

    One row has code of its own, and so have multiples of sixteen.
    """
    target = pair.target
    for like, size in product(likes, (1, 2, 16)):
        logits = torch.zeros(size, target.vocab_size, dtype=target.model.dtype, device=target.device)
        judge_prompts([like] * size, logits, pair)


def record_all(
    runner: Runner,
    rows: int,
    lengths: Sequence[int],
    context: int,
    likes: Sequence[Row],
    *,
    copies: bool = False,
    report: Report | None = None,
) -> int:
    """All rounds of up to `rows` rows with drafts of `lengths` tokens; returns how many there are.

    `likes` are rows, one of each kind; the first also stands for all kinds at once, and so do those that want
    log-probabilities. With `copies` the host finds drafts, too.
    """
    bounds = bounds_up_to(context)
    runner.expect(bounds[0], lengths)
    drafts = _drafts(runner, lengths, copies)
    rounds = [
        partial(runner.prepare, size, number, bound, like, for_all=for_all, steps=steps)
        for size, (number, steps) in product(sizes_up_to(rows), drafts)
        for place, like in enumerate(likes)
        for for_all in ((True, False) if place == 0 else (like.request.logprobs is not None,))
        for bound in (bounds if for_all and place == 0 else bounds[:1])  # the target's pass is the same for all kinds
    ]
    passes = [
        partial(runner.prepare_pass, size, bucket(number + 1), is_second=is_second)
        for size, number in product(sizes_up_to(rows), sorted({0, *lengths}, reverse=True))
        for is_second in ((True,) if runner.drafts else (False, True))  # drafts of the host are scored by passes alone
    ]
    # What scores most comes first: scratch memory that has to grow makes what was recorded before useless.
    plan = [*rounds, *passes] if runner.drafts else [*passes, *rounds]
    for place, record in enumerate(plan):
        record()
        if report is not None:
            report(place + 1, len(plan))
    return len(plan)


def record_passes(runner: Runner, rows: int, lengths: Sequence[int], context: int, report: Report | None = None) -> int:
    """The same of a target whose passes alone are recorded."""
    runner.expect(bounds_up_to(context)[0], lengths)
    plan = list(product(sizes_up_to(rows), sorted({bucket(number + 1) for number in (0, *lengths)}, reverse=True)))
    for place, (size, count) in enumerate(plan):
        runner.prepare_pass(size, count, is_second=False)
        if report is not None:
            report(place + 1, len(plan))
    return len(plan)


def _drafts(runner: Runner, lengths: Sequence[int], copies: bool) -> list[tuple[int, int | None]]:
    """Lengths of drafts, the longest first, and where some rows copy, what is drawn for the others.

    Copies of half the length and of all of it are enough: a position that is scored for nothing costs little.
    """
    most, drawn = max(lengths, default=0), [(number, None) for number in sorted({0, *lengths}, reverse=True)]
    if not runner.drafts:
        return [*((number, 0) for number in sorted(lengths, reverse=True) if number and copies), (0, None)]
    if not (most and copies):
        return list(drawn)
    half = min(number for number in lengths if 2 * number >= most)
    pairs = {(number, steps) for number in (half, most) for steps in (0, half, most) if steps <= number}
    return [*drawn, *sorted(pairs, reverse=True)]
