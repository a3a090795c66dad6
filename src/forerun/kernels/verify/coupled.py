"""The coupled rule in Triton; the reference is `math.verify.coupled_rule`.

The target's own draw at a position depends on nothing but the position, so all of them are drawn at once, by the
passes that draw a draft's tokens (`kernels.verify.sample`); one more launch compares them with the draft.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.law import NONE
from forerun.kernels.random import draft_uniforms
from forerun.kernels.truncate.summary import Logits
from forerun.kernels.tuning import TUNING, Tuning
from forerun.kernels.verify.acceptance import at
from forerun.kernels.verify.draw import HEAD
from forerun.kernels.verify.sample import draw_packed
from forerun.math.laws import KEPT, LogitLaw
from forerun.types import Draft, Keys, Rule

SMALLEST = 16  # positions a variant is compiled for


def verify_coupled(target: LogitLaw, draft: Draft, keys: Keys, tuning: Tuning = TUNING) -> Tensor:
    """As `verify.verify_packed`: [B, 3 + K + 1] int64."""
    batch, positions = len(draft.lengths), draft.width + 1
    device = draft.lengths.device
    index = target.index[:, :positions].clamp(0, len(target.logits) - 1)  # past a row's length anything may stand
    owner = torch.arange(batch, device=device).repeat_interleave(positions, output_size=batch * positions)
    rows = Logits(target.logits, index.reshape(-1, 1), target.params.select(owner))
    uniforms = draft_uniforms(keys, positions, Rule.COUPLED).flatten()
    kept = torch.empty(batch * positions, KEPT, dtype=torch.float32, device=device)
    drawn = draw_packed(rows, uniforms, kept, tuning)
    out = torch.empty(batch, HEAD.value + positions, dtype=torch.int64, device=device)
    _compare_kernel[(batch,)](
        drawn, draft.tokens, draft.tokens.stride(0), draft.lengths, out, positions,
        BLOCK=max(SMALLEST, triton.next_power_of_2(positions)), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("positions",))
def _compare_kernel(
    drawn_ptr,  # [B * P, 4] int64, see `draw_packed`
    tokens_ptr, tokens_stride,  # [B, P - 1] int64
    lengths_ptr,  # [B] int64
    out_ptr,  # [B, 3 + P] int64, out
    positions,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: the draft is kept for as long as it is what the target drew."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + row)
    there = i <= length
    drawn_row = drawn_ptr + (row * positions + i) * (HEAD + 1)
    drawn = tl.load(drawn_row + 1, mask=there, other=-1)
    finite = tl.load(drawn_row + 2, mask=there, other=1)
    bits = tl.load(drawn_row + HEAD, mask=there, other=0)
    token = tl.load(tokens_ptr + row * tokens_stride + i, mask=i < length, other=-1)
    n = tl.min(tl.where((i < length) & (token == drawn) & (finite != 0), NONE, i), axis=0)
    out = out_ptr + row * (HEAD + positions)
    tl.store(out, n.to(tl.int64))
    tl.store(out + 1, at(drawn, i, n))
    tl.store(out + 2, tl.min(tl.where(i <= n, finite, 1), axis=0))
    tl.store(out + HEAD + i, tl.where(i <= n, bits, 0), mask=i < positions)
