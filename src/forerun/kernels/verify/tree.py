"""Verification of token trees in Triton, from logits to paths. The reference is `math.tree`; keys and tokens alike.

Two launches, more where something is cut: the pass over the rows of both laws (`summary`), and `node_kernel`, which
decides every node of every tree at once and then walks.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from forerun.kernels.arguments import KeyRows
from forerun.kernels.counters import counters
from forerun.kernels.law import TILE
from forerun.kernels.truncate.summary import Logits, summarise
from forerun.kernels.tuning import TUNING, Tuning, overlapping
from forerun.kernels.verify.acceptance import LOGITS, NO_DRAFT
from forerun.kernels.verify.draft_law import Proposal, proposal_of, why_not_logits
from forerun.kernels.verify.nodes import BOTH, DRAWN, HEAD, OUTCOME, TOP, TreeCase, TreeTensors, TreeWork, node_kernel
from forerun.math.laws import LogitLaw
from forerun.types import Draft, Keys, Law, Siblings, Verdict

SMALLEST = 32  # nodes that a variant is compiled for: one for each thread of a warp
BEHIND = Proposal(NO_DRAFT.value)  # of trees in which nothing was drawn


def why_not(target: Law, draft: Draft) -> str | None:
    """What the kernels do not cover, in words; None where they cover everything, as the reference does."""
    tree = draft.tree
    if not isinstance(target, LogitLaw):
        return f"a target law of type {type(target).__name__}"
    if reason := why_not_logits(target.logits):
        return reason
    if tree is None or tree.width is None or tree.depth is None:
        return "a tree whose depth and width the host does not know"
    if not len(draft.lengths) or not draft.width:
        return "no trees"
    if any(x.stride(-1) != 1 for x in (draft.tokens, tree.parents, target.index)):
        return "rows of tokens that are not contiguous"
    proposal = _proposal(draft)
    if proposal is None or (proposal is not BEHIND and proposal.kind != LOGITS.value):
        return f"siblings drawn from a law of type {type(draft.law).__name__}, or its numbers"
    return None


def verify_tree(target: LogitLaw, draft: Draft, keys: Keys, tuning: Tuning = TUNING) -> Verdict:
    """`math.tree.verify_tree` where `why_not` has no objection. All fields are views of one small tensor."""
    packed = verify_packed(target, draft, keys, tuning)
    finite = packed.view(torch.bool)[:, 2 * packed.element_size()]
    return Verdict(packed[:, 0], packed[:, 1], finite, path=packed[:, HEAD.value :])


def verify_packed(target: LogitLaw, draft: Draft, keys: Keys, tuning: Tuning = TUNING) -> Tensor:
    """[B, 3 + D] int64: kept tokens, next token, whether finite, and the nodes of the path, -1 behind its end."""
    tree, proposal, device = draft.tree, _proposal(draft), target.logits.device
    assert tree is not None and tree.width is not None and tree.depth is not None and proposal is not None
    batch, positions = len(draft.lengths), draft.width + 1
    deepest, width = min(draft.width, tree.depth), min(draft.width, tree.width)
    wanted = Logits(target.logits, target.index[:, :positions], target.params)
    drawn = proposal.logits or wanted
    summaries = summarise(wanted, draft.lengths, proposal.logits, tuning)
    num_tiles, nodes = triton.cdiv(wanted.vocab, TILE.value), batch * positions
    out = torch.empty(batch, HEAD.value + deepest, dtype=torch.int64, device=device)
    outcomes = out.new_empty(nodes, OUTCOME.value)
    sums = torch.empty(nodes, num_tiles, dtype=torch.float64, device=device)
    scales = torch.empty(nodes, width, 2, dtype=torch.float32, device=device)
    refused = out.new_empty(nodes, width)
    work = TreeWork(out, outcomes, sums, scales, refused, counters(batch, device), num_tiles)
    ways, is_top = _ways(draft)
    tensors = TreeTensors(
        draft.tokens, draft.tokens.stride(0), tree.parents, tree.parents.stride(0), draft.lengths,
        draft.lengths if is_top is None else is_top, draft.lengths if proposal.places is None else proposal.places,
    )  # fmt: skip
    case = TreeCase(
        NODES=max(SMALLEST, triton.next_power_of_2(draft.width)),
        CHUNKS=triton.next_power_of_2(summaries.chunks),
        ALL=triton.next_power_of_2(num_tiles),
        TILES=min(tuning.node_tiles, triton.next_power_of_2(num_tiles)),
        WIDTH=width,
        KIND=proposal.kind,
        WAYS=ways,
        REDUCED=proposal.places is not None,
        SCALED=wanted.params.any_scaled or drawn.params.any_scaled,
        CUT=wanted.is_cut or drawn.is_cut,
        GREEDY=wanted.params.any_greedy or drawn.params.any_greedy,
    )
    node_kernel[(batch, positions)](
        wanted.argument, drawn.argument, *wanted.counts, *drawn.counts, tensors, summaries, summaries.chunks,
        batch * positions, KeyRows(keys.seed, keys.request_id, keys.round, keys.seed), work, deepest,
        CASE=case, **overlapping(device, tuning), num_warps=tuning.node_warps,
    )  # fmt: skip
    return out


def _proposal(draft: Draft) -> Proposal | None:
    """What siblings were drawn from; `BEHIND` where none was."""
    assert draft.tree is not None
    return proposal_of(draft.law) if Siblings.SAMPLED in draft.tree.ways else BEHIND


def _ways(draft: Draft) -> tuple[int, Tensor | None]:
    tree = draft.tree
    assert tree is not None
    if Siblings.SAMPLED not in tree.ways:
        return TOP.value, None
    if tree.is_top is not None:
        return BOTH.value, tree.is_top
    is_top = [way is Siblings.TOP for way in tree.ways]
    if not any(is_top):
        return DRAWN.value, None
    return BOTH.value, torch.tensor(is_top, device=draft.tokens.device)
