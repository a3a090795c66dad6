"""Positions of each row's own, for decoders that would count them from the longest row's past.

BART and its relatives look learned positions up by the length of the cache, T5 makes its relative bias from it. Both
are told the positions of the new tokens for the duration of a pass; outside a pass the model is as it was. Passes of
fixed shape do without a bias for every query and key: T5's depends on the distance alone, and kernels look it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from forerun.models.passes import replacing
from forerun.models.ragged_states import RaggedStates


class PositionPatches:
    """The parts of one decoder that count positions themselves."""

    def __init__(self, decoder: nn.Module, takes_positions: bool) -> None:
        table: Any = None if takes_positions else getattr(decoder, "embed_positions", None)
        self._table = table if table is not None and "position_ids" in signature(table.forward).parameters else None
        self._biases: list[Any] = [m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)]
        self._buckets: dict[tuple[int, torch.device], Tensor] = {}  # of every distance that counts, by module

    @property
    def is_told(self) -> bool:
        """Whether the decoder has parts that learn positions from here."""
        return self._table is not None or bool(self._biases)

    @contextmanager
    def during_pass(self, states: RaggedStates) -> Iterator[None]:
        told: list[tuple[Any, str, Callable[..., Tensor]]] = [
            (m, "compute_bias", self._by_distance(m) if states.is_static else _bias(m, states)) for m in self._biases
        ]
        if self._table is not None:
            told.append((self._table, "forward", _looked_up(self._table, states)))
        with replacing(told):
            yield

    def _by_distance(self, module: Any) -> Callable[..., Tensor]:
        """In the place of the bias [1, heads, N, S] one that is said once for all tokens: [1, heads, 1, distances]."""
        device: torch.device = module.relative_attention_bias.weight.device
        if (key := (id(module), device)) not in self._buckets:
            back = -torch.arange(module.relative_attention_max_distance + 1, device=device)
            self._buckets[key] = _buckets(module, back)
        buckets = self._buckets[key]

        def compute_bias(*lengths: Any, **options: Any) -> Tensor:
            table: Tensor = module.relative_attention_bias(buckets)  # [L, heads]
            return table.T.float().contiguous()[None, :, None]

        return compute_bias


def _looked_up(table: Any, states: RaggedStates) -> Callable[..., Tensor]:
    forward = table.forward  # as it is: somebody may have wrapped it

    def looked_up(shape_or_ids: Any, past_key_values_length: int = 0, position_ids: Tensor | None = None) -> Tensor:
        shown = states.positions if states.padded is None else states.positions[states.padded.tokens]
        embeddings: Tensor = forward(shape_or_ids, past_key_values_length, position_ids=shown.flatten())
        return embeddings if states.padded is None else embeddings.view(*shown.shape, -1)

    return looked_up


def _bias(module: Any, states: RaggedStates) -> Callable[..., Tensor]:
    """T5's relative bias [1, heads, N, S] at the distances that each new token has to the keys of its own row."""

    def compute_bias(*lengths: Any, **options: Any) -> Tensor:
        distance = _key_positions(states) - states.positions[:, None]
        bias: Tensor = module.relative_attention_bias(_buckets(module, distance))  # [N, S, heads]
        return bias.permute(2, 0, 1).unsqueeze(0)

    return compute_bias


def _buckets(module: Any, distance: Tensor) -> Tensor:
    buckets: Tensor = module._relative_position_bucket(
        distance,
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    return buckets


def _key_positions(states: RaggedStates) -> Tensor:
    """[1, S], or [N, S] where keys of a tree do not lie where they stand."""
    if states.branches is not None:
        return states.branches.key_positions[states.branches.owner]
    span = min(states.get_mask_sizes(states.width)[0], states.cache.capacity)
    return torch.arange(span, device=states.device)[None]
