"""Where the draft model of a split target lives: whole on rank 0, or split as the target is, whichever is faster.

A split draft reads less on each process and waits for sums twice a layer; which of the two weighs more depends on the
model and on what lies between the processes, so a few steps are timed both ways.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from forerun.config import DraftSplit, Kernels
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.loading import LoadedModel, check_shards, load_model, load_tokenizer
from forerun.models.scorer import Scorer
from forerun.parallel.coordinator import Coordinator
from forerun.parallel.join import group

PROMPT = 32  # tokens before the steps that are timed
WARM_UP, STEPS, TURNS = 2, 4, 3


def load_draft(
    name: str,
    *,
    split: DraftSplit = "auto",
    use: Kernels | None = None,
    quantize: str | None = None,
    offline: bool = False,
    **loading: Any,
) -> LoadedModel:
    """On rank 0, while the others serve passes: a draft model for a target that is split over them, as `load_model`
    loads it. What was chosen, and why, is in `draft_placement` of the coordinator."""
    ranks = group()
    assert isinstance(ranks, Coordinator)

    def whole() -> LoadedModel:
        return load_model(name, quantize=quantize, offline=offline, **loading)

    if split == "off":
        ranks.draft_placement = "whole on rank 0, as asked"
        return whole()
    try:
        check_split_draft(name, ranks.size, quantize, offline)
    except UnsupportedModel as error:
        if split == "on":
            raise
        ranks.draft_placement = f"whole on rank 0: {error}"
        return whole()
    options = {"size": ranks.size, "dtype": loading.get("dtype"), "device": None, "offline": offline}
    if split == "on":
        ranks.draft_placement = f"split over {ranks.size} processes, as asked"
        return LoadedModel(ranks.load(name, options), load_tokenizer(name, offline=offline))
    return _faster(ranks, whole(), ranks.load(name, options), use)


def placement() -> str | None:
    """In words, where the draft model of this process's target lives, if one was loaded for it."""
    ranks = group()
    return ranks.draft_placement if isinstance(ranks, Coordinator) else None


def check_draft_split(
    asked: DraftSplit, names: Sequence[str], size: int, *, quantize: str | None = None, offline: bool = False
) -> None:
    """Before anything is loaded: whether the draft models that --draft names can be where they are asked to be."""
    if asked == "auto":
        return
    if size == 1:
        raise InvalidArgument(f"--draft-split {asked}: the target is not split; leave it out, or say --tensor-parallel")
    if not names:
        raise InvalidArgument(f"--draft-split {asked}: --draft names no model; leave one of them out")
    if asked == "on":
        for name in names:
            check_split_draft(name, size, quantize, offline)


def check_split_draft(name: str, size: int, quantize: str | None, offline: bool) -> None:
    """Refuse a draft model that cannot be split; only its configuration is read."""
    if quantize is not None:
        raise UnsupportedModel(f"{name!r} is to be quantised ({quantize}), and only whole models are")
    check_shards(name, size, offline=offline)


def _faster(ranks: Coordinator, whole: LoadedModel, parts: Any, use: Kernels | None) -> LoadedModel:
    """Both are timed in turns, so that a moment in which the machine is busy meets both."""
    steps = [_stepper(model, use) for model in (whole.model, parts)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for step, seconds in zip(steps, times, strict=True):
            seconds += [step() for _ in range(STEPS)]
    alone, together = map(median, times)
    ranks.draft_placement = (
        f"{'split over' if together < alone else 'whole on rank 0, not split over'} {ranks.size} processes: "
        f"a step took {1e3 * together:.2f} ms split and {1e3 * alone:.2f} ms whole"
    )
    steps.clear()
    gc.collect()  # their caches and counterparts
    if together < alone:
        return LoadedModel(parts, whole.tokenizer)
    ranks.unload(parts)
    return whole


def _stepper(model: Any, use: Kernels | None) -> Callable[[], float]:
    """Takes one step of one row, and tells how long it took; everything that steps use is compiled before."""
    scorer, row = Scorer(model, use=use), 0
    scorer.admit(row)
    scorer.feed([row], [[1] * PROMPT])

    def step() -> float:
        started = time.perf_counter()
        logits = scorer.score_last([row], [[1]])
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        return time.perf_counter() - started

    for _ in range(WARM_UP):
        step()
    return step
