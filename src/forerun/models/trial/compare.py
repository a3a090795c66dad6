"""The trial of a model: its logits beside ours, and what differs in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forerun.cache.ragged import RaggedCache
from forerun.errors import UnsupportedModel
from forerun.models.cross_attention import Sources
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.models.trial.oracle import Oracle, OracleLogits
from forerun.models.trial.passes import Scored, run
from forerun.models.trial.rounding import allowed, deviation, surely_allowed, typical
from forerun.models.trial.texts import Texts


@dataclass(frozen=True, slots=True)
class LogitAgreement:
    """How well a scorer's logits are its model's own."""

    deviation: float  # relative to the logits' spread: the worst of all passes
    allowed: float  # what rounding may do


@torch.inference_mode()
def compare(scorer: Scorer) -> LogitAgreement:
    """Score a few ragged rows, and raise `UnsupportedModel` with what differs from the model's own forward.

    The model reads all texts at once. What disagrees with that, or cannot be run so, is asked about again text by text:
    some models' batches differ from their single rows, and those are what counts.
    """
    texts = Texts(scorer)
    with _aside(scorer):
        done = run(scorer, texts)
    oracle = Oracle(scorer.model, texts.states, [text for one in done for text in one.texts])
    try:
        return _judge(scorer, done, oracle.together(), oracle)
    except Exception:
        return _judge(scorer, done, oracle.alone(), oracle)


def _judge(scorer: Scorer, done: Sequence[Scored], model_logits: OracleLogits, oracle: Oracle) -> LogitAgreement:
    """What this model makes of rounding is measured only where what any model may is not enough."""
    deviations = [_deviation(one, model_logits, scorer.model.dtype) for one in done]
    limit = surely_allowed(scorer.model)
    if not all(one <= limit for one in deviations):  # NaN is no agreement
        limit = allowed(oracle.noise, scorer.model)
    for one, apart in zip(done, deviations, strict=True):
        if not apart <= limit:
            raise UnsupportedModel(
                f"{type(scorer.model).__name__}: Forerun's logits differ from the model's own in {one.what} (relative "
                f"deviation {apart:.1e}, rounding may make {limit:.1e}), so its text would be another one; "
                f"{_remedy(scorer)}"
            )
    return LogitAgreement(max(deviations), limit)


def _deviation(one: Scored, model_logits: OracleLogits, dtype: torch.dtype) -> float:
    """Of the row that differs most. Single tokens are too few for a median of each row."""
    apart = [deviation(ours, model_logits.after(text)) for ours, text in zip(one.logits, one.texts, strict=True)]
    groups = [torch.cat(apart)] if max(map(len, apart)) == 1 else apart
    return max(typical(group, dtype) for group in groups)


def _remedy(scorer: Scorer) -> str:
    """An implementation of attention may leave out what the model asks for, which Forerun applies: transformers 5.17's
    `sdpa` does so with Gemma 2's soft caps. Falcon's ALiBi is added twice by the other."""
    kind = scorer.model.config.get_text_config(decoder=True)._attn_implementation
    if kind == "eager" or scorer.family.alibi_in_scores:
        return "use model.generate for it"
    return "load it with attn_implementation='eager' and try again, or use model.generate for it"


@contextmanager
def _aside(scorer: Scorer) -> Iterator[None]:
    """A cache of the trial's own, so that nothing of it stays behind."""
    cache, scorer.cache = scorer.cache, RaggedCache()
    reader = scorer if isinstance(scorer, Seq2SeqScorer) else None
    sources = None if reader is None else reader.sources
    if reader is not None:
        reader.sources = Sources()
    try:
        yield
    finally:
        scorer.cache = cache
        if reader is not None and sources is not None:
            reader.sources = sources
