"""What is measured: batches, lengths, heads, and the tensors for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from forerun.errors import InvalidArgument
from forerun.math.attention import Form, Scale, attend, plan
from forerun.math.ragged_attention import Reach, reach_of, visible
from forerun.types import RaggedRows

BATCHES, QUERIES = (1, 8, 16), (1, 5, 8)
LENGTHS = ((512, 512), (4096, 4096), (64, 4096))
HEADS = ((32, 32), (32, 8))  # a Llama of 7 B, and grouped
SWEPT_BATCH = 8
SIZE = 128  # of a head
ELEMENT = 2  # bytes: bfloat16
SDPA = "sdpa"
TITLES = {SDPA: "masked SDPA", Form.PAD: "PAD", Form.SPLIT: "SPLIT", Form.KEYS: "split keys", Form.AUTO: "auto"}
# A layer's keys must come from memory, as in a model whose other layers ran in between: the calls of one graph go round
# enough layers to push each other out of the last cache (50 MiB on an H200).
COLD_BYTES = 512 << 20
MOST_LAYERS = 64

Call = Callable[[], Tensor]  # one layer's attention


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of attention call."""

    heads: int
    key_heads: int
    batch: int
    queries: int  # new tokens of each row
    shortest: int  # keys of the shortest row, the new ones included
    longest: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Evenly spread from the shortest to the longest."""
        step = (self.longest - self.shortest) / max(self.batch - 1, 1)
        return tuple(round(self.longest - step * row) for row in reversed(range(self.batch)))

    @property
    def live_bytes(self) -> int:
        """Keys and values that some query sees: each must be read once."""
        return 2 * sum(self.lengths) * self.key_heads * SIZE * ELEMENT

    @property
    def operations(self) -> int:
        """Two products over all live keys, for every query."""
        return 4 * sum(self.lengths) * self.queries * self.heads * SIZE

    @property
    def layers(self) -> int:
        return max(1, min(MOST_LAYERS, -(-COLD_BYTES // self.live_bytes)))

    @property
    def rows(self) -> RaggedRows:
        past = tuple(length - self.queries for length in self.lengths)
        return RaggedRows(tuple(range(self.batch)), past, (self.queries,) * self.batch)

    @property
    def title(self) -> str:
        spread = f"{self.longest}" if self.shortest == self.longest else f"{self.shortest}..{self.longest}"
        return f"batch {self.batch}, keys {spread}, {self.queries} new"


def all_cases(
    batches: Sequence[int],
    queries: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    heads: Sequence[tuple[int, int]],
) -> list[Case]:
    """Every combination that means something: one row cannot be spread."""
    cases = [
        Case(q_heads, k_heads, batch, new, shortest, longest)
        for (q_heads, k_heads), batch, (shortest, longest), new in product(heads, batches, lengths, queries)
        if batch > 1 or shortest == longest
    ]
    if not cases:
        raise InvalidArgument("one row cannot have lengths that are spread; ask for a larger batch")
    for case in cases:
        if case.shortest < case.queries:
            raise InvalidArgument(f"{case.shortest} keys do not hold {case.queries} new tokens; ask for longer rows")
    return cases


def to_sweep(cases: Sequence[Case]) -> list[Case]:
    """Those on which other choices of the kernel's numbers are worth trying: rows that differ, most new tokens."""
    most = max(case.queries for case in cases)
    spread = [case for case in cases if case.shortest < case.longest and case.queries == most]
    return [case for case in spread if case.batch == SWEPT_BATCH] or spread


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one case."""

    query: Tensor  # [N, Hq, D]
    keys: tuple[Tensor, ...]  # of each layer, [B, Hk, C, D]
    values: tuple[Tensor, ...]
    reach: Reach
    mask: Tensor  # [N, S] bool, for the library
    rows: RaggedRows

    @classmethod
    def of(cls, case: Case, device: torch.device, layers: int | None = None) -> Inputs:
        """As many layers as make their keys cold, if no number is given."""

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        capacity = -(-case.longest // 64) * 64
        pool = (case.batch, capacity, case.key_heads, SIZE)
        keys, values = (tuple(random(*pool).transpose(1, 2) for _ in range(layers or case.layers)) for _ in range(2))
        rows = case.rows
        mask = torch.zeros(rows.num_tokens, case.longest, dtype=torch.bool, device=device)
        for row, length in enumerate(case.lengths):
            slots = slice(row * case.queries, (row + 1) * case.queries)
            mask[slots, :length] = visible(length, case.queries, 0, None, device)
        query = random(rows.num_tokens, case.heads, SIZE)
        return cls(query, keys, values, reach_of(rows, device), mask, rows)


SCALE = Scale(SIZE**-0.5)


def calls(case: Case, inputs: Inputs, method: str) -> list[Call]:
    """One call a layer."""
    if method == SDPA:
        how = plan(inputs.rows, inputs.mask, case.heads // case.key_heads, inputs.query.device, Form.PAD)
        return [
            partial(attend, inputs.query, k, v, how, SCALE) for k, v in zip(inputs.keys, inputs.values, strict=True)
        ]
    from forerun.kernels.attention.attend import attend_ragged

    return [
        partial(attend_ragged, inputs.query, k, v, inputs.reach, SCALE, Form(method))
        for k, v in zip(inputs.keys, inputs.values, strict=True)
    ]
