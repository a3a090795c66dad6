"""What the model says that reads rounded keys: transformers' own cache, which rounds what is put into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from forerun.math.scaled import Scheme, rounded_rows

# So few steps that the law of the model with rounded keys is another one than the model's, to some hundred samples.
COARSE = Scheme("coarse", torch.int8, 1.0, (-1.0, 1.0))


class RoundedCache(DynamicCache):
    """transformers' own cache, which rounds what is put into it."""

    def __init__(self, scheme: Scheme | None) -> None:
        super().__init__()
        self.scheme = scheme

    def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> Any:
        return super().update(self._rounded(keys), self._rounded(values), *more, **named)

    def _rounded(self, states: Tensor) -> Tensor:
        if self.scheme is None:
            return states
        raw, scales = rounded_rows(states, self.scheme)
        return (raw.double() * scales.double().unsqueeze(-1)).to(states.dtype)
