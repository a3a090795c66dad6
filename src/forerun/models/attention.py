"""Our attention and our mask, registered with transformers under the name `forerun`.

While a pass is under way (`ragged(...)`), the model's layers call `attention` with what `RaggedStates.update`
returned, and the model's mask builder calls `_mask`, which evaluates the model's own mask rule (causal, sliding window,
chunked ...) at each row's own positions. So a window is right at and past its edge for every row.

Packed rows show the model its new keys alone and read the others from the cache; a layer that makes anything of them on
the way to `attention` is not served by that, and says so by `KeysChanged`. Padded rows show it whole rows, and whatever
it makes of them is what it attends to.
Outside a pass the model is as it was: the name is only set for the duration of a pass, and who calls the model
meanwhile from another thread is passed on to the attention and mask that it had (`models.passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from forerun import ops
from forerun.cache.ragged import Layer, RaggedCache, ranges
from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.math.attention import Form, Plan, Scale, attend_whole, choose_form, plan
from forerun.math.ragged_attention import Reach, reach_of
from forerun.models.branches import Branches, new_trees
from forerun.models.families import Family, Layout
from forerun.models.padded import PaddedRows
from forerun.models.passes import NAME, alone, own_attention, own_name
from forerun.types import RaggedRows

if TYPE_CHECKING:
    from forerun.models.cross_attention import CrossStates

# Keywords that layers pass along and that change nothing for one forward without training: the mask already says what a
# window or causality would, positions are in the keys.
HARMLESS = frozenset({
    "sliding_window", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "position_embeddings", "past_key_values", "head_mask", "logits_to_keep",
    "output_router_logits", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "layer_idx", "deterministic",
})  # fmt: skip


class KeysChanged(UnsupportedModel):
    """A layer attends to something else than what the cache holds."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A mask that was never made, because kernels know its rule."""

    stub: Tensor  # [1, 1, N, 0], kept so that nothing else gets its id
    function: Callable[..., Tensor]  # transformers' own, to make the mask from if need be
    reach: Reach
    made: list[Tensor | None] = field(default_factory=list)  # the mask, once somebody needed it


class RaggedStates(Cache):
    """What transformers sees of the cache during one pass: as many keys as the longest row has."""

    is_compileable = False
    is_static = False  # of a pass whose rows the device alone knows: `models.static_pass`

    def __init__(
        self,
        cache: RaggedCache,
        rows: RaggedRows,
        family: Family,
        form: Form,
        device: torch.device,
        use: Kernels = Kernels.OFF,
        trees: Sequence[Sequence[int]] | None = None,  # see `Branches.of`
    ) -> None:
        self.cache, self.rows, self.layout, self.device, self.use = cache, rows, family.layout, device, use
        self.asked_form, self.form = form, choose_form(rows, form)
        # A kernel that takes the model's rule instead of a mask knows rows, and trees among the new tokens alone.
        self.tree = None if trees is None else new_trees(rows, trees)
        self.takes_rules = (trees is None or self.tree is not None) and _takes_rules(rows, family, device, use)
        self._rules: dict[int, Rule] = {}
        self._reach: Reach | None = None
        self._plans: dict[tuple[int, int, int], tuple[Tensor | None, Tensor | None, Plan]] = {}
        self.layers: list[Any] = []
        self.width = max(rows.counts)
        self.longest_past = max(rows.past)
        span = self.get_mask_sizes(self.width)[0]
        self.branches = None if trees is None else Branches.of(rows, trees, span, device)
        self.positions = (
            ranges(rows.past, rows.counts).to(device) if self.branches is None else self.branches.positions
        )  # [N]
        self.addresses = cache.addresses(rows).to(device)  # [N]
        self.padded = PaddedRows.of(rows, cache.capacity, device) if self.layout is Layout.PADDED else None
        self.both_ways = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)  # stands for a mask that hides nothing
        self._masks: dict[int, Tensor | None] = {}  # made in this pass, by id: keeping one keeps its id
        self.alibi_in_scores = family.alibi_in_scores
        self.current: Layer | None = None
        self.returned: tuple[Tensor, Tensor] | None = None  # what the model was given for the keys of `current`
        self.shares_keys = family.shares_keys
        self._earlier: dict[int, tuple[Tensor, Tensor, Layer]] = {}  # by the id of the keys a layer was given
        self.is_unread = False  # whether `attention` is yet to be called for `current`
        self.across: CrossStates | None = None  # of an encoder-decoder model
        self.looks_across = False  # whether `current` is a layer of cross-attention

    @property
    def is_sliding(self) -> list[bool]:
        return [False]  # full rows are kept and the window is masked

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.layout is Layout.PADDED:
            return self._update_padded(key_states, value_states, layer_idx)
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self.check_read()
        self.current = self.cache.write(layer_idx, self.addresses, keys, values, self.use)
        self.looks_across, self.returned, self.is_unread = False, (key_states, value_states), True
        if self.shares_keys:
            self._earlier[id(key_states)] = (*self.returned, self.current)
        return key_states, value_states

    def turn_to(self, key: Tensor, value: Tensor) -> bool:
        """Make the layer that returned these the current one once more, if there is one."""
        keys, values, layer = self._earlier.get(id(key), (None, None, None))
        if key is not keys or value is not values:
            return False
        self.current, self.looks_across = layer, False
        return True

    def check_read(self) -> None:
        """Raise where a layer has cached keys and attended to them by other means than our `attention`."""
        if self.is_unread:
            raise KeysChanged("a layer computes attention in its own module, which packed rows cannot follow")

    def look_across(self, layer: Layer, shown: Tensor) -> None:
        """The next attention reads a source's keys and values; the model is `shown` a stand-in for both."""
        self.current, self.looks_across, self.returned = layer, True, (shown, shown)

    def rotate_and_write(
        self, layer_idx: int, query: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """What `update` does, and the rotation before it: [N, H, D] each; the rotated queries come back."""
        self.current, self.returned = self.cache.room(layer_idx, keys, values), (keys, values)
        return ops.rotate_and_write(query, keys, values, cos, sin, self.addresses, *self.current.flat, self.use)

    def _update_padded(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        assert self.padded is not None
        keys, values = (self.padded.packed(new.transpose(1, 2)) for new in (key_states, value_states))
        layer = self.cache.write(layer_idx, self.addresses, keys, values, self.use)
        keys, values = (self.padded.rows_of(pool) for pool in layer.by_head)
        return keys, values

    def made(self, mask: Tensor | None) -> Tensor | None:
        """Remember a mask as one of ours."""
        self._masks[id(mask)] = mask
        return mask

    def is_ours(self, mask: Tensor | None) -> bool:
        """Whether a layer hands on a mask as it was made."""
        return id(mask) in self._masks

    def rule(self, function: Callable[..., Tensor], window: int) -> Tensor:
        """A stand-in for the mask of a rule that kernels know: layers hand it back to `rule_of`."""
        if self._reach is None:
            self._reach = reach_of(self.rows, self.device)
            if self.tree is not None:
                self._reach = replace(self._reach, tree=self.tree.to(self.device))
        stub = torch.empty(1, 1, len(self.positions), 0, dtype=torch.bool, device=self.device)
        self._rules[id(stub)] = Rule(stub, function, replace(self._reach, window=window))
        return stub

    def is_wide(self, window: int) -> bool:
        """Whether kernels can keep to a window: a tree must fit within it."""
        return self.tree is None or not 0 < window < self.width

    def rule_of(self, mask: Tensor | None) -> Rule | None:
        """The rule that a mask stands for; None where it is a mask."""
        if mask is None or mask.shape[-1]:
            return None
        return self._rules[id(mask)]

    def dense(self, rule: Rule) -> Tensor | None:
        """The mask of a rule, for layers that the kernels do not cover; made once, so that its id stays."""
        if not rule.made:
            rule.made.append(_dense_mask(self, rule.function))
        return rule.made[0]

    def plan(self, mask: Tensor | None, group: int, bias: Tensor | None = None) -> Plan:
        """How to attend under this mask, worked out for the first layer that asks. Keeping the mask keeps its id."""
        key = (id(mask), id(bias), group)
        if key not in self._plans:
            seen = None if mask is None else mask[0, 0]
            if bias is not None:
                seen = self._biased(seen, bias[0].transpose(0, 1))
            self._plans[key] = (mask, bias, plan(self.rows, seen, group, self.device, self.form))
        return self._plans[key][2]

    def _biased(self, seen: Tensor | None, bias: Tensor) -> Tensor:
        """[N, H, S] to be added to the scores; a mask that went without saying has to be said now."""
        if seen is None:
            seen = torch.arange(self.rows.longest, device=self.device) <= self.positions[:, None]
        return bias.masked_fill(~seen[:, None], -torch.inf)

    def attend_biased(self, query: Tensor, layer: Layer, rule: Rule, scale: Scale, bias: Tensor) -> Tensor:
        """[N, H, D] -> [N, H, Dv] with a bias of each head [1, H, N, S], which no kernel of ours takes."""
        how = self.plan(self.dense(rule), query.shape[1] // layer.keys.shape[2], bias)
        return ops.attend(query, *layer.by_head, how, scale)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest_past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.longest_past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if self.layout is Layout.PADDED:
            return self.longest_past + self.width, 0
        return self.rows.longest, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length


_pass: ContextVar[RaggedStates | None] = ContextVar("forerun_pass", default=None)


@contextmanager
def ragged(model: PreTrainedModel, states: RaggedStates) -> Iterator[None]:
    """Let `model` run one pass over ragged rows; its own attention setting comes back afterwards."""
    token = _pass.set(states)
    try:
        with alone(model, _configs(model)):
            yield
    finally:
        _pass.reset(token)


def _configs(model: PreTrainedModel) -> list[Any]:
    found = getattr(model, "_forerun_configs", None)
    if found is None:
        found = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        model._forerun_configs = found
    return found


def forget_configs(model: PreTrainedModel) -> None:
    """Look for them again: modules may have come that have another."""
    model.__dict__.pop("_forerun_configs", None)


def attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # [1, 1, N, S] bool
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,  # [1, Hq, N, S] or, by distance, [1, Hq, 1, L]: see `models.patches.positions`
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: keys and values come from the cache, where `RaggedStates.update` has just put them."""
    states = _pass.get()
    if states is None:  # another thread has the model in a pass, this one does not
        more = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        given = others | {name: value for name, value in more.items() if value is not None}
        theirs: tuple[Tensor, None] = own_attention(module)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given
        )
        return theirs
    if not others.keys() <= HARMLESS:
        _refuse_unknown(module, others)
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    if attention_mask is states.both_ways:
        raise UnsupportedModel(
            f"the tokens of {type(module).__name__} see those that follow them, so this is no decoder; if it can be "
            "one, load it with is_decoder=True"
        )
    if states.padded is not None:
        scale = Scale(factor, softcap, s_aux)
        return _attend_rows(module, query, key, value, attention_mask, position_bias, scale), None
    if states.returned is None or key is not states.returned[0] or value is not states.returned[1]:
        if not states.turn_to(key, value):
            _refuse_changed(module, states.returned, key, value)
    elif states.shares_keys:
        states.turn_to(key, value)
    assert states.current is not None
    states.is_unread, layer = False, states.current
    padding = query.shape[-1] - layer.keys.shape[-1]  # Moonshine pads its heads behind the cache's back
    packed = query[0, ..., : layer.keys.shape[-1]].transpose(0, 1)
    if states.looks_across:
        out = _attend_across(states, packed, layer, Scale(factor, softcap, s_aux))
    else:
        if not states.is_ours(attention_mask):
            raise KeysChanged(
                f"{type(module).__name__} changes its attention mask, which packed rows cannot follow; use "
                "model.generate for this model"
            )
        table = position_bias[0, :, 0] if position_bias is not None and states.is_static else None
        bias = position_bias if table is None else None
        out = _attend(states, packed, layer, attention_mask, Scale(factor, softcap, s_aux, table), bias)
    # Some layers call `view` on it, which transformers' own functions allow.
    return (F.pad(out, (0, padding)) if padding else out).unsqueeze(0).contiguous(), None


def _attend_across(states: RaggedStates, query: Tensor, layer: Layer, scale: Scale) -> Tensor:
    """[N, Hq, D] -> [N, Hq, Dv] over all keys of each row's source."""
    assert states.across is not None
    if states.is_static:
        assert states.across.reach is not None
        return ops.attend_ragged(query, *layer.by_head, states.across.reach, scale, states.asked_form, states.use)
    how = states.across.plan(query.shape[1] // layer.keys.shape[2], states.asked_form, states.device)
    return ops.attend_across(query, *layer.by_head, how, scale, states.use)


def _attend(
    states: RaggedStates, query: Tensor, layer: Layer, mask: Tensor | None, scale: Scale, bias: Tensor | None
) -> Tensor:
    """[N, Hq, D] -> [N, Hq, Dv]: by a kernel where one knows the mask's rule and the layer's shapes."""
    rule = states.rule_of(mask)
    if rule is not None:
        if bias is not None:
            return states.attend_biased(query, layer, rule, scale, bias)
        if states.is_static or ops.has_ragged_attention(query, *layer.by_head, states.use):
            return ops.attend_ragged(query, *layer.by_head, rule.reach, scale, states.asked_form, states.use)
        mask = states.dense(rule)
    how = states.plan(mask, query.shape[1] // layer.keys.shape[2], bias)
    return ops.attend(query, *layer.by_head, how, scale)


def _refuse_unknown(module: nn.Module, asked: dict[str, Any]) -> None:
    unknown = [name for name, value in asked.items() if name not in HARMLESS and value is not None]
    if unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which Forerun does not honour; "
            "use model.generate for this model"
        )


def _attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, scale: Scale
) -> Tensor:
    """Padded rows [B, H, T, D] over the keys and values the model made of whole rows [B, Hk, S, D]: [B, T, H, Dv]."""
    if mask is None:
        raise UnsupportedModel(
            f"{type(module).__name__} attends without a mask, so its rows cannot differ in length; use model.generate "
            "for this model"
        )
    if bias is not None:
        mask = bias + mask
    return attend_whole(query, key, value, mask, scale).transpose(1, 2).contiguous()


def _refuse_changed(module: nn.Module, returned: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor) -> None:
    """Raise unless a layer's keys and values are the cache's, or those with zeros behind every head (Moonshine)."""
    name = type(module).__name__
    if returned is None:
        raise KeysChanged(f"{name} attends to keys that it has not put into the cache; use model.generate")
    zeros = getattr(module, "head_dim_padding", 0)
    wanted = [(*ours.shape[:-1], ours.shape[-1] + zeros) for ours in returned]
    if zeros and [tuple(t.shape) for t in (key, value)] == wanted:
        return
    changed = [n for n, t, ours in zip(("keys", "values"), (key, value), returned, strict=True) if t is not ours]
    raise KeysChanged(
        f"{name} changes its {' and '.join(changed)} after they went into the cache, which packed rows cannot follow; "
        "use model.generate for this model"
    )


def _mask(
    *, mask_function: Callable[..., Tensor] = causal_mask_function, dtype: torch.dtype = torch.float32, **others: Any
) -> Tensor | None:
    """The model's own mask rule at each row's own positions."""
    states = _pass.get()
    if states is None:  # another thread has the model in a pass, this one does not
        made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[own_name(others["config"])](
            mask_function=mask_function, dtype=dtype, **others
        )
        return made
    if states.across is not None and mask_function is bidirectional_mask_function:
        return None  # every source has its own length, which `CrossStates` knows
    if mask_function is bidirectional_mask_function:
        return states.both_ways  # for an encoder, whose output decoders without one ask a mask for all the same
    if states.padded is not None:
        return _padded_mask(states, states.padded, mask_function, dtype)
    if states.takes_rules and (window := known_window(mask_function)) is not None and states.is_wide(window):
        return states.made(states.rule(mask_function, window))
    if states.is_static:
        raise UnsupportedModel("the model's mask rule is none that kernels know, so its passes cannot be recorded")
    return states.made(_dense_mask(states, mask_function))


def _dense_mask(states: RaggedStates, mask_function: Callable[..., Tensor]) -> Tensor | None:
    """[1, 1, N, S] bool, None where nothing needs saying."""
    device = states.device
    if mask_function is causal_mask_function and _needs_no_mask(states):
        return None
    zero = torch.zeros((), dtype=torch.long, device=device)
    if (branches := states.branches) is not None:
        keys = branches.key_positions[branches.owner]
        return (mask_function(zero, zero, states.positions[:, None], keys) & branches.seen)[None, None]
    keys = torch.arange(states.rows.longest, device=device)
    allowed = mask_function(zero, zero, states.positions[:, None], keys[None, :])
    return allowed.expand(len(states.positions), -1)[None, None]


def _takes_rules(rows: RaggedRows, family: Family, device: torch.device, use: Kernels) -> bool:
    """Rows that all begin are a plain causal square, for which the library has a kernel made for nothing else."""
    is_prompt = max(rows.counts) > 1 and not any(rows.past)
    return family.layout is Layout.PACKED and not is_prompt and ops.has_triton(device, use)


def known_window(mask_function: Callable[..., Tensor]) -> int | None:
    """Keys a query sees if the rule is causal (0: all), perhaps within a window; None for a rule of any other kind.

    Rules are told by their code and by what they close over, so that nothing merely similar passes for one of these.
    """
    if mask_function is causal_mask_function:
        return 0
    if getattr(mask_function, "__code__", None) is not _BOTH_CODE:
        return None
    first, *others = _closed_over(mask_function).get("mask_functions") or (None,)
    if others != [causal_mask_function] or getattr(first, "__code__", None) is not _WINDOW_CODE:
        return None
    window = _closed_over(first).get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def _closed_over(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


_BOTH_CODE = sliding_window_causal_mask_function(1).__code__
_WINDOW_CODE = sliding_window_overlay(1).__code__


def _needs_no_mask(states: RaggedStates) -> bool:
    """Plain decoding with no key in reach that belongs to nobody, or rows that begin: causality alone says it all."""
    rows = states.rows
    if states.branches is not None:
        return False
    if max(rows.counts) == 1:
        return states.form is Form.SPLIT or len(set(rows.past)) == 1
    return not any(rows.past)


def _padded_mask(
    states: RaggedStates, padded: PaddedRows, mask_function: Callable[..., Tensor], dtype: torch.dtype
) -> Tensor:
    """[B, 1, T, S] additive: what a family adds to its own scores."""
    zero = torch.zeros((), dtype=torch.long, device=states.device)
    queries, keys = states.positions[padded.tokens], padded.places
    seen = keys >= 0
    if (branches := states.branches) is not None:
        here = keys.clamp(min=0)
        keys = branches.key_positions.gather(1, here)
        on_branch = branches.seen[padded.tokens]
        seen = seen[:, None] & on_branch.gather(2, here[:, None].expand(-1, on_branch.shape[1], -1))
    else:
        seen = seen[:, None]
    rule = mask_function(zero, zero, queries[:, None, :, None], keys[:, None, None, :])
    allowed = rule & seen[:, None]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=states.device).masked_fill_(~allowed, torch.finfo(dtype).min)
    # ALiBi Falcon folds its bias into any 4-D mask and, outside its own SDPA path, adds it once more to the scores.
    # One axis more keeps it out of the mask; the sum broadcasts to the same numbers.
    return mask[None] if states.alibi_in_scores else mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
