"""How long a family's first call takes in a new process, on a machine that has run the family before."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.families.shapes import build
from forerun.decoder import SpeculativeDecoder
from forerun.measure.timing import timed

TOKENS, BEFORE, CONTEXT = 8, 64, 2048


def first_calls(family: str, device: torch.device) -> tuple[float, float]:
    """Seconds of the first call in two processes, one after the other: kernels that the first has to build lie on disk
    for the second. Both have imported everything before; what a model takes to load or to build is not counted."""
    context = get_context("forkserver")  # a process that has used a GPU cannot be forked
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        before, again = (processes.submit(seconds_of_first_call, family, str(device)).result() for _ in range(2))
    return before, again


def seconds_of_first_call(family: str, device: str) -> float:
    """From a model that is there to the end of a short call: the decoder, its kernels and its recordings."""
    place = torch.device(device)
    model = build(family, place, CONTEXT)
    ids = torch.randint(5, 30000, (1, BEFORE), generator=torch.Generator().manual_seed(1)).to(place)

    def call() -> object:
        decoder = SpeculativeDecoder(model, None, kernels="on")
        return decoder.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)

    return timed(place, call)[1]
