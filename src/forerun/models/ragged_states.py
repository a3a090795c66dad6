"""What transformers sees of the caches during one pass over ragged rows.

Packed rows show the model its new keys alone; our attention reads the others from the cache. Padded rows show it whole
rows, and whatever the model makes of them is what it attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from forerun import ops
from forerun.cache.base import CacheLayer, KeyValueCache, RowsRead, ranges
from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.math.attention import AttentionPlan, Form, choose_form, plan, plan_across
from forerun.math.banded_attention import Bands, bands
from forerun.math.ragged_attention import Reach, reach_of
from forerun.math.transfer import to_device
from forerun.models.branches import Branches, new_trees
from forerun.models.families import Family, Layout
from forerun.models.padded import PaddedRows
from forerun.types import RaggedRows

# Keys nobody looks at: layers hand them to our attention, which reads the cache. Without length, so that whatever a
# model derives from them is as good as free.
PLACEHOLDER = torch.empty(1, 1, 0, 1)


LONG = 64  # new tokens of a row from which on fewer keys are worth more calls, on a CPU


class KeysChanged(UnsupportedModel):
    """A layer attends to something else than what the cache holds."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """A mask that was never made, because kernels know its rule."""

    stub: Tensor  # [1, 1, N, 0], kept so that nothing else gets its id
    function: Callable[..., Tensor]  # transformers' own, to make the mask from if need be
    reach: Reach
    dense: list[Tensor | None] = field(default_factory=list)  # the mask, once somebody needed it
    bands: list[Bands] = field(default_factory=list)  # the same for attention block by block


class RaggedStates(Cache):
    """What transformers sees of the cache during one pass: as many keys as the longest row has."""

    is_compileable = False
    is_static = False  # of a pass whose rows the device alone knows: `models.static_pass`
    in_blocks = False  # whether new tokens attend block by block under rules that are known

    def __init__(
        self,
        cache: KeyValueCache,
        rows: RaggedRows,
        family: Family,
        form: Form,
        device: torch.device,
        use: Kernels = Kernels.OFF,
        trees: Sequence[Sequence[int]] | None = None,  # see `Branches.of`
    ) -> None:
        self.cache, self.rows, self.layout, self.device, self.use = cache, rows, family.layout, device, use
        self.rows_read = cache.read(rows, device)
        self.asked_form, self.form = form, choose_form(self.rows_read.rows, form)
        # A kernel that takes the model's rule instead of a mask knows rows, and trees among the new tokens alone.
        self.tree = None if trees is None else new_trees(rows, trees)
        self.takes_rules = (trees is None or self.tree is not None) and _takes_rules(rows, family, device, use)
        self.in_blocks = trees is None and not self.takes_rules and _is_long(rows, family, device)
        self._rules: dict[int, MaskRule] = {}
        self._reach: Reach | None = None
        self._plans: dict[tuple[int, int, int], tuple[Tensor | None, Tensor | None, AttentionPlan]] = {}
        self.layers: list[Any] = []
        self.width = max(rows.counts)
        self.longest_past = max(rows.past)
        span = self.get_mask_sizes(self.width)[0]
        self.branches = None if trees is None else Branches.of(rows, trees, span, device)
        self.positions = (
            to_device(ranges(rows.past, rows.counts), device) if self.branches is None else self.branches.positions
        )  # [N]
        self.addresses = to_device(cache.addresses(rows), device)  # [N]
        self.padded = PaddedRows.of(rows, cache, device) if self.layout is Layout.PADDED else None
        # Stands for a mask that hides nothing.
        self.bidirectional = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._masks: dict[int, Tensor | None] = {}  # made in this pass, by id: keeping one keeps its id
        self.alibi_in_scores = family.alibi_in_scores
        self.current: CacheLayer | None = None
        self.returned: tuple[Tensor, Tensor] | None = None  # what the model was given for the keys of `current`
        self.shares_keys, self.key_copies = family.shares_keys, family.key_copies
        self._counting_layers = family.counting_layers
        self._earlier: dict[int, tuple[Tensor, Tensor, CacheLayer]] = {}  # by the id of the keys a layer was given
        self._written: set[int] = set()  # layers that have put their keys into the cache
        self.is_unread = False  # whether `attention` is yet to be called for `current`
        self.cross: CrossStates | None = None  # of an encoder-decoder model
        self.is_cross_attention = False  # whether `current` is a layer of cross-attention

    @property
    def is_sliding(self) -> list[bool]:
        return [False]  # full rows are kept and the window is masked

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._enter(layer_idx)
        if self.layout is Layout.PADDED:
            return self._update_padded(key_states, value_states, layer_idx)
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self.check_read()
        self.current = self.cache.write(layer_idx, self.addresses, keys, values, self.use)
        self.is_cross_attention, self.returned, self.is_unread = False, (key_states, value_states), True
        if self.shares_keys:
            self._earlier[id(key_states)] = (*self.returned, self.current)
        return key_states, value_states

    def _enter(self, layer_idx: int) -> None:
        """A layer begins to write its keys; the second one of a number would overwrite the first one's."""
        if layer_idx in self._written:
            raise UnsupportedModel(
                f"two layers of the model keep their keys at one place of the cache, as layer_idx {layer_idx}, as a "
                "layer does that runs twice; give each a module (copy.deepcopy) and a layer_idx of its own"
            )
        self._written.add(layer_idx)

    def return_to(self, key: Tensor, value: Tensor) -> bool:
        """Make the layer that returned these the current one once more, if there is one."""
        keys, values, layer = self._earlier.get(id(key), (None, None, None))
        if key is not keys or value is not values:
            return False
        self.current, self.is_cross_attention = layer, False
        return True

    def check_read(self) -> None:
        """Raise where a layer has cached keys and attended to them by other means than our `attention`."""
        if self.is_unread:
            raise KeysChanged("a layer computes attention in its own module, which packed rows cannot follow")

    def attend_to_source(self, layer: CacheLayer, shown: Tensor) -> None:
        """The next attention reads a source's keys and values; the model is `shown` a stand-in for both."""
        self.current, self.is_cross_attention, self.returned = layer, True, (shown, shown)

    def rotate_and_write(
        self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """What `update` does, and the rotation before it: [N, H, D] each; the rotated queries come back."""
        self._enter(layer_idx)
        self.current, self.returned = self.cache.layer(layer_idx, keys, values), (keys, values)
        return ops.rotate_and_write(query, keys, values, cos, sin, self.addresses, *self.current.flat, use=self.use)

    def _update_padded(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        assert self.padded is not None
        kept = (new[:, :: self.key_copies].transpose(1, 2) for new in (key_states, value_states))
        keys, values = map(self.padded.packed, kept)
        layer = self.cache.write(layer_idx, self.addresses, keys, values, self.use)
        keys, values = (self.padded.rows_of(pool) for pool in layer.by_head)
        if self.key_copies > 1:
            keys, values = (each.repeat_interleave(self.key_copies, dim=1) for each in (keys, values))
        return keys, values

    def remember_mask(self, mask: Tensor | None) -> Tensor | None:
        """Remember a mask as one of ours."""
        self._masks[id(mask)] = mask
        return mask

    def is_known_mask(self, mask: Tensor | None) -> bool:
        """Whether a layer hands on a mask as it was made."""
        return id(mask) in self._masks

    def stub_for(self, function: Callable[..., Tensor], window: int) -> Tensor:
        """A stand-in for the mask of a rule that kernels know: layers hand it back to `rule_of`."""
        if self._reach is None:
            self._reach = reach_of(self.rows, self.device, table=self.cache.table)
            if self.tree is not None:
                self._reach = replace(self._reach, tree=self.tree.to(self.device))
        stub = torch.empty(1, 1, len(self.positions), 0, dtype=torch.bool, device=self.device)
        self._rules[id(stub)] = MaskRule(stub, function, replace(self._reach, window=window))
        return stub

    def bands(self, rule: MaskRule, like: Tensor) -> Bands:
        """What queries see under a rule, block by block; worked out for the first layer that asks."""
        if not rule.bands:
            rule.bands.append(bands(self.rows_read.rows, rule.reach.window, like))
        return rule.bands[0]

    def holds_tree(self, window: int) -> bool:
        """Whether kernels can keep to a window: a tree must fit within it."""
        return self.tree is None or not 0 < window < self.width

    def rule_of(self, mask: Tensor | None) -> MaskRule | None:
        """The rule that a mask stands for; None where it is a mask."""
        if mask is None or mask.shape[-1]:
            return None
        return self._rules[id(mask)]

    def plan(self, mask: Tensor | None, group: int, bias: Tensor | None = None) -> AttentionPlan:
        """How to attend under this mask, worked out for the first layer that asks. Keeping the mask keeps its id."""
        key = (id(mask), id(bias), group)
        if key not in self._plans:
            seen = None if mask is None else mask[0, 0]
            if bias is not None:
                seen = self._biased(seen, bias[0].transpose(0, 1))
            self._plans[key] = (mask, bias, plan(self.rows_read.rows, seen, group, self.device, self.form))
        return self._plans[key][2]

    def _biased(self, seen: Tensor | None, bias: Tensor) -> Tensor:
        """[N, H, S] to be added to the scores; a mask that went without saying has to be said now."""
        if seen is None:
            seen = torch.arange(self.rows.longest, device=self.device) <= self.positions[:, None]
        return bias.masked_fill(~seen[:, None], -torch.inf)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """A layer that adds it to 0, 1, 2 .. gets what makes the sum its tokens' positions: [N], row by row."""
        if layer_idx not in self._counting_layers:
            return self.longest_past
        if self.padded is not None and len(self.padded.tokens) > 1:
            raise UnsupportedModel(
                f"layer {layer_idx} of the model counts positions from the length of the cache, which is the same for "
                "all padded rows; use model.generate for it"
            )
        return self.positions - torch.arange(len(self.positions), device=self.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.longest_past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if self.layout is Layout.PADDED:
            return self.longest_past + self.width, 0
        return self.rows.longest, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length


current_states: ContextVar[RaggedStates | None] = ContextVar("forerun_states", default=None)
"""Those of the pass under way in this thread."""


def _takes_rules(rows: RaggedRows, family: Family, device: torch.device, use: Kernels) -> bool:
    """Rows that all begin are a plain causal square, for which the library has a kernel made for nothing else."""
    is_prompt = max(rows.counts) > 1 and not any(rows.past)
    return family.layout is Layout.PACKED and not is_prompt and ops.why_not_triton(device, use) is None


def _is_long(rows: RaggedRows, family: Family, device: torch.device) -> bool:
    return family.layout is Layout.PACKED and device.type == "cpu" and max(rows.counts) >= LONG


@dataclass(slots=True)
class CrossStates:
    """transformers' `cross_attention_cache` during one pass: asking a layer for its keys says whose turn it is."""

    states: RaggedStates
    cache: KeyValueCache
    slots: tuple[int, ...]  # of the sources, one a group of neighbouring rows
    lengths: tuple[int, ...]  # of the sources
    counts: tuple[int, ...]  # new tokens of each group
    fixed_reach: Reach | None = None  # in the place of those three where only the device knows them
    layers: list[_CrossLayer] = field(init=False)
    _read: RowsRead | None = None
    _reach: Reach | None = None
    _plans: dict[int, AttentionPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = [_CrossLayer(self, index) for index in range(len(self.cache.layers))]

    @property
    def rows(self) -> RaggedRows:
        """Sources as rows, of which the text that reads them is the end: there may be less of a source than of it."""
        past = tuple(length - count for length, count in zip(self.lengths, self.counts, strict=True))
        return RaggedRows(self.slots, past, self.counts)

    @property
    def reach(self) -> Reach:
        """The same for kernels; made for the first layer that asks."""
        if self.fixed_reach is not None:
            return self.fixed_reach
        if self._reach is None:
            self._reach = replace(reach_of(self.rows, self.states.device, table=self.cache.table), across=True)
        return self._reach

    @property
    def read(self) -> RowsRead:
        """The same for attention in torch, which wants each source in one piece."""
        if self._read is None:
            self._read = self.cache.read(self.rows, self.states.device)
        return self._read

    def plan(self, group: int, form: Form, device: torch.device) -> AttentionPlan:
        if group not in self._plans:
            slots = self.read.rows.slots
            self._plans[group] = plan_across(slots, self.lengths, self.counts, group, device, form)
        return self._plans[group]


@dataclass(slots=True)
class _CrossLayer:
    cross: CrossStates
    index: int

    @property
    def keys(self) -> Tensor:
        self.cross.states.attend_to_source(self.cross.cache.layers[self.index], PLACEHOLDER)
        return PLACEHOLDER

    @property
    def values(self) -> Tensor:
        return PLACEHOLDER
