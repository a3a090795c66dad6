"""Every option of a request that changes its logits or its answer, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from forerun.engine import Request

VOCAB = 97
Change = Callable[[Request], Request]


def penalised(**numbers: Any) -> Change:
    return lambda request: replace(request, params=replace(request.params, **numbers))


def banned(request: Request) -> Request:
    never, first = list(range(0, VOCAB, 3)), list(range(0, VOCAB, 2))
    processors = (
        SuppressTokensLogitsProcessor(never),
        SuppressTokensAtBeginLogitsProcessor(first, len(request.prompt)),
    )
    return replace(request, processors=processors)


OPTIONS: dict[str, Change] = {
    "repetition": penalised(repetition_penalty=1.7),
    "presence": penalised(presence_penalty=1.5),
    "frequency": penalised(frequency_penalty=0.8),
    "bias": penalised(logit_bias={5: 3.0, 11: -math.inf, 40: 1.5}),
    "bans": banned,
    "min_new_tokens": lambda request: replace(request, stop_ids=frozenset(range(0, VOCAB, 4)), min_new_tokens=9),
    "alternatives": lambda request: replace(request, logprobs=3),
    "logprobs": lambda request: replace(request, logprobs=0),
}
