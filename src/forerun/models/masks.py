"""The model's own mask rule (causal, sliding window, chunked ...) evaluated at each row's own positions.

transformers' mask builders call `mask`, registered under the name `forerun`, while a pass is under way. So a window is
right at and past its edge for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from forerun.errors import UnsupportedModel
from forerun.math.attention import Form
from forerun.models.padded import PaddedRows
from forerun.models.passes import own_name
from forerun.models.ragged_states import MaskRule, RaggedStates, current_states


def mask(
    *, mask_function: Callable[..., Tensor] = causal_mask_function, dtype: torch.dtype = torch.float32, **others: Any
) -> Tensor | None:
    """The model's own mask rule at each row's own positions."""
    states = current_states.get()
    if states is None:  # another thread has the model in a pass, this one does not
        theirs: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[own_name(others["config"])](
            mask_function=mask_function, dtype=dtype, **others
        )
        return theirs
    if states.cross is not None and mask_function is bidirectional_mask_function:
        return None  # every source has its own length, which `CrossStates` knows
    if mask_function is bidirectional_mask_function:
        return states.bidirectional  # for an encoder, whose output decoders without one ask a mask for all the same
    if states.padded is not None:
        return padded_mask(states, states.padded, mask_function, dtype)
    takes_rules = states.takes_rules or states.in_blocks
    if takes_rules and (window := known_window(mask_function)) is not None and states.holds_tree(window):
        return states.remember_mask(states.stub_for(mask_function, window))
    if states.is_static:
        raise UnsupportedModel("the model's mask rule is none that kernels know, so its passes cannot be recorded")
    return states.remember_mask(dense_mask(states, mask_function))


def dense_mask(states: RaggedStates, mask_function: Callable[..., Tensor]) -> Tensor | None:
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


def dense_mask_of(states: RaggedStates, rule: MaskRule) -> Tensor | None:
    """The mask of a rule, for layers that the kernels do not cover; made once, so that its id stays."""
    if not rule.dense:
        rule.dense.append(dense_mask(states, rule.function))
    return rule.dense[0]


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


def padded_mask(
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
