"""One round step by step on the host, with everything in it that a row may ask for.

It is the specification of rounds on the device (`engine.device.runner`): both take a batch and give a `VerifiedRound`.
"""

from __future__ import annotations

from torch import Tensor

from forerun import ops
from forerun.cache.base import CacheFull
from forerun.drafters.base import empty_draft
from forerun.engine.branching import kept_of, parents_of
from forerun.engine.commit import VerifiedRound
from forerun.engine.laws import keys_of, law_of, params_of, tokens_of
from forerun.engine.pair import Pair
from forerun.engine.row import Row
from forerun.engine.stats import Seconds
from forerun.errors import RankLost
from forerun.types import BatchView, LawParams


def run(batch: list[Row], view: BatchView, pair: Pair) -> VerifiedRound:
    """Draft, score and verify; a runner lends its recorded pass of the target where that is enough."""
    target, clock = pair.target, pair.clock
    params, keys = _params_of(batch, pair), keys_of(batch, target.device)

    started = clock()
    draft, guesses = pair.drafting.draft(batch, view, params, keys)
    drafted = clock()
    blocks = [[row.history[-1], *tokens] for row, tokens in zip(batch, tokens_of(draft), strict=True)]
    unseen = [row.history[target.length(row.number) : -1] for row in batch]  # of a prompt that came along
    passed = [[*more, *block] for more, block in zip(unseen, blocks, strict=True)]
    trees = parents_of(draft)
    logits = _score(batch, passed, blocks, trees, pair)
    scored = clock()
    law = law_of(batch, blocks, logits, params, trees)
    if draft.tree is None:
        verdict = ops.verify(law, draft, pair.rule, keys, params.all_greedy, target.kernels)
    else:
        verdict = ops.verify_tree(law, draft, keys, target.kernels)
    kept = kept_of(verdict, blocks, trees)  # waits for the device
    verified = clock()

    return VerifiedRound(
        batch,
        blocks,
        kept,
        verdict,
        scored=sum(map(len, passed)),
        round_number=view.round_number,
        seconds=Seconds(draft=drafted - started, score=scored - drafted, verify=verified - scored),
        logits=logits,
        trees=trees,
        evidence=draft.evidence,
        copied=draft.cuttable or (draft.deterministic,) * len(batch),
        guesses=guesses,
    )


def judge_prompts(batch: list[Row], logits: Tensor, pair: Pair) -> VerifiedRound:
    """First tokens, by the logits [B, V] that the passes over the prompts have left: a round without a draft or a pass.

    Everything a row may ask for counts here as in any other round. Waits for the device.
    """
    target, started = pair.target, pair.clock()
    params, keys = _params_of(batch, pair), keys_of(batch, target.device)
    blocks = [[row.history[-1]] for row in batch]
    law, draft = law_of(batch, blocks, logits, params, None), empty_draft(len(batch), target.vocab_size, target.device)
    verdict = ops.verify(law, draft, pair.rule, keys, params.all_greedy, target.kernels)
    kept = kept_of(verdict, blocks, None)
    spent = Seconds(prefill=pair.clock() - started)
    return VerifiedRound(batch, blocks, kept, verdict, scored=len(batch), round_number=0, seconds=spent, logits=logits)


def _params_of(batch: list[Row], pair: Pair) -> LawParams:
    params = params_of(batch, pair.target.device)
    return params if pair.runner is None else pair.runner.covered(params)


def _score(
    batch: list[Row], passed: list[list[int]], blocks: list[list[int]], trees: list[list[int]] | None, pair: Pair
) -> Tensor:
    target, runner = pair.target, pair.runner
    if trees is None and passed == blocks and runner is not None and runner.may_score():
        try:
            return runner.score(batch, blocks)
        except (CacheFull, RankLost):
            raise
        except Exception as error:
            runner.disable(error)
    rows, tails = [row.number for row in batch], [len(block) for block in blocks]
    if trees is None:
        return target.score(rows, passed, tails)
    return target.score(rows, passed, tails, trees)
