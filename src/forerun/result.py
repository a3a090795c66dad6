"""Everything that a call of `generate` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from torch import Tensor

from forerun.engine import FinishReason, RowResult, Stats
from forerun.engine.row import TokenLogprob
from forerun.engine.stops import decode_settings
from forerun.errors import InvalidArgument
from forerun.math.transfer import int64
from forerun.types import Origin


@dataclass(frozen=True, slots=True, repr=False)
class GenerateResult:
    """The rows of a call of `generate` in the order of the prompts; copies of one prompt are side by side."""

    sequences: (
        Tensor  # [R, L] prompt and output; prompts end in the same column, pads left of them and after the output
    )
    rows: tuple[RowResult, ...]
    stats: Stats
    seconds: float
    num_return_sequences: int
    tokenizer: Any = None

    def __repr__(self) -> str:
        rows = f"{len(self.rows)} row{'s' * (len(self.rows) != 1)}"
        return f"GenerateResult({rows}, {self.stats.brief}, {self.seconds:.2f} s)"

    @property
    def texts(self) -> list[str]:
        """What was written after each prompt, without special tokens; needs a tokenizer at the decoder or the call."""
        if self.tokenizer is None:
            raise InvalidArgument(
                "texts need a tokenizer: give tokenizer= to SpeculativeDecoder or to generate, or decode new_tokens"
            )
        return [decode_text(self.tokenizer, row.tokens) for row in self.rows]

    @property
    def lossy(self) -> str | None:
        """None where the text follows the target's law; else a sentence that names the rule under which it does not."""
        return self.stats.lossy

    @property
    def new_tokens(self) -> list[list[int]]:
        return [list(row.tokens) for row in self.rows]

    @property
    def origins(self) -> list[list[Origin]]:
        return [list(row.origins) for row in self.rows]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [row.finish_reason for row in self.rows]

    @property
    def logprobs(self) -> list[tuple[TokenLogprob, ...] | None]:
        return [row.logprobs for row in self.rows]

    @property
    def errors(self) -> list[str | None]:
        return [row.error for row in self.rows]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """What each row was really decoded with, the drawn seed included."""
        return [_parameters(row) for row in self.rows]

    @property
    def ranking(self) -> list[list[int]]:
        """For each prompt its rows, the best mean log-probability first; needs logprobs (always there for copies)."""
        groups = range(0, len(self.rows), self.num_return_sequences)
        return [sorted(range(g, g + self.num_return_sequences), key=self._badness) for g in groups]

    def _badness(self, row: int) -> float:
        mean = self.rows[row].mean_logprob
        return float("inf") if mean is None else -mean


def decode_text(tokenizer: Any, tokens: Iterable[int], skip_special: bool = True) -> str:
    """Tokens as text, without special ones unless they are wanted, and without tidying."""
    text: str = tokenizer.decode(list(tokens), **decode_settings(tokenizer, skip_special))
    return text


def sequences(rows: Sequence[RowResult], pad: int, like: Tensor) -> Tensor:
    """Prompts end in the same column, as in a left-padded batch; outputs are padded on the right."""
    left = max(like.shape[1], *(len(row.request.prompt) for row in rows))
    right = max(len(row.tokens) for row in rows)
    lines = [
        (
            repeat(pad, left - len(row.request.prompt)),
            row.request.prompt,
            row.tokens,
            repeat(pad, right - len(row.tokens)),
        )
        for row in rows
    ]
    numbers = int64(chain.from_iterable(chain.from_iterable(lines))).view(len(rows), left + right)
    return numbers.to(like.device, like.dtype)


def _parameters(row: RowResult) -> dict[str, Any]:
    params, request = row.request.params, row.request
    shown = {name: getattr(params, name) for name in params.__slots__}
    shown |= {name: getattr(request, name) for name in ("max_new_tokens", "min_new_tokens", "seed", "request_id")}
    return shown | {"stop_ids": sorted(request.stop_ids), "stop_strings": list(request.stop_strings)}
