"""Why a model is trusted: a test has proven its class, or it was tried beside its own forward (`trial`)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import transformers
from transformers import PreTrainedModel

from forerun.config import self_check as settings
from forerun.errors import ForerunWarning, UnsupportedModel, kind_and_line
from forerun.models import plain, proven
from forerun.models.bodies import choose, readers
from forerun.models.bodies.base import Body
from forerun.models.bodies.described import DescribedBody
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import scorer_of
from forerun.models.trial.compare import compare

LIBRARIES = "transformers.", "torch.nn.", "forerun."


class Kind(StrEnum):
    PROVEN = "proven"  # the test suite holds this class against `model.generate` with this version of transformers
    PASSED = "checked"  # tried just now
    OFF = "off"  # the caller did not want it


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Why a model is trusted."""

    kind: Kind
    deviation: float = 0.0  # of our logits from the model's own, relative to their spread: the worst of all passes
    allowed: float = 0.0  # what rounding may do

    def __str__(self) -> str:
        if self.kind is Kind.PROVEN:
            return f"proven exact by the test suite with transformers {transformers.__version__}"
        if self.kind is Kind.OFF:
            return "not checked: the self-check is switched off"
        return (
            f"checked against the model's own forward: deviation {self.deviation:.1e}, "
            f"rounding may make {self.allowed:.1e}"
        )


def self_check(scorer: Scorer, wanted: bool = True) -> SelfCheck:
    """Find out whether `scorer` scores as its model does, or raise `UnsupportedModel` with what differs.

    Where fused layers differ and the model's own modules do not, the scorer goes on with the modules, with a warning.
    """
    if not wanted:
        return SelfCheck(Kind.OFF)
    if is_proven(scorer.model) and not _is_described(scorer):
        return SelfCheck(Kind.PROVEN)
    try:
        return tried(scorer)
    except UnsupportedModel as difference:
        if not scorer.is_fused:
            raise
        choose.refuse(scorer.model)
        scorer.renew()
        checked = tried(scorer)
        warnings.warn(
            f"the fused layers are not used, and decoding is slower: {difference}", ForerunWarning, stacklevel=2
        )
        return checked


class Examiner:
    """Tries a target when its decoder is made, and again once modules of other kinds have come into it, or another body
    runs it."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._kinds: frozenset[Any] = frozenset()
        self._bodies: frozenset[type[Body]] = frozenset()
        self.verdict: SelfCheck | None = None

    def __call__(self, scorer: Scorer) -> SelfCheck:
        kinds, body = _foreign_kinds(scorer.model), type(scorer.body)
        if self.verdict is None or not kinds <= self._kinds or body not in self._bodies:
            self.verdict = self_check(scorer, self._wanted)
            self._kinds, self._bodies = self._kinds | kinds, self._bodies | {body}
        return self.verdict


def _is_described(scorer: Scorer) -> bool:
    """Whether fused layers run it as a reader describes them: one model at a time tells whether that is right."""
    return isinstance(scorer.body, DescribedBody) and scorer.model.config.model_type not in readers.PROVEN


def tried(scorer: Scorer) -> SelfCheck:
    """The trial itself; whatever goes wrong in it is a refusal."""
    try:
        agreement = compare(scorer)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(scorer.model).__name__} could not be tried on a few rows ({kind_and_line(error)}), so Forerun "
            "cannot tell whether it decodes as model.generate does; use model.generate for it"
        ) from error
    return SelfCheck(Kind.PASSED, agreement.deviation, agreement.allowed)


def described(model: PreTrainedModel) -> str:
    """What a decoder would do about this model, in words for `forerun doctor`."""
    try:
        return str(self_check(scorer_of(model), settings()))
    except UnsupportedModel as why:
        return f"refused: {why}"


def is_proven(model: PreTrainedModel) -> bool:
    """Whether the census of the test suite found this very class exact, with this very version of transformers and its
    own modules."""
    kind = type(model)
    return (
        transformers.__version__ == proven.TRANSFORMERS
        and kind.__module__.startswith("transformers.models.")
        and kind.__name__ in proven.CLASSES
        and not _foreign_kinds(model)
    )


def _foreign_kinds(model: PreTrainedModel) -> frozenset[Any]:
    """Classes and forwards that somebody has put into a model: another attention may leave out what masks say.

    Linear layers, quantised or adapted, are let through: what they make of a token depends on nothing else, but with
    torch's dynamic quantisation, which has one scale for all tokens of a call.
    """
    kinds = set()
    for module in model.modules():
        kind = type(module)
        forward = plain.own_forward(module)
        is_linear = hasattr(module, "in_features") and not kind.__module__.startswith("torch.ao.")
        homes = kind.__module__, str(getattr(kind.forward, "__module__", ""))
        if not is_linear and (forward is not None or not all(home.startswith(LIBRARIES) for home in homes)):
            kinds.add((kind, kind.forward, forward))
    return frozenset(kinds)
