"""What Forerun makes of a model: exact, refused with a reason, or something that must not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from forerun import SpeculativeDecoder
from forerun.errors import UnsupportedModel
from forerun.math.laws import PointMass
from forerun.models.self_check import tried
from forerun.models.seq2seq import scorer_of
from forerun.types import Draft, DraftContext, Siblings, TreeShape
from support.census import VOCAB, Recipe, build
from support.tiny import check_stock

NEW = 12  # tokens
LENGTHS = 3, 20, 9  # of the prompts
DRAFT_LENGTH = 4
# A text decides something only where the best token stands clear of the second: rounding is a millionth of this in
# float64. In float32 logits of one position differ by up to 7e-5 between passes of different shapes.
LEAST_GAP = {torch.float64: 1e-6, torch.float32: 1e-3}


class Outcome(StrEnum):
    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"  # another text than `model.generate`'s, or an error that is no refusal
    UNDECIDED = "undecided"  # the model itself says nothing that could be got wrong


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome for one recipe."""

    recipe: Recipe
    outcome: Outcome
    reason: str = ""
    layout: str = ""  # of an exact one
    takes_trees: bool = False


@dataclass(frozen=True, slots=True)
class Texts:
    """Three rows, and what `model.generate` makes of each of them alone."""

    inputs: tuple[dict[str, Tensor], ...]  # of each row
    prompts: tuple[tuple[int, ...], ...]  # what each row's text begins with
    answers: tuple[tuple[int, ...], ...]
    least_gap: float  # between the best logit and the second, over all of them


def judge(recipe: Recipe) -> Finding:
    """Build the model, decode with it, and compare."""
    return judge_model(recipe, build(recipe))


def judge_model(recipe: Recipe, model: PreTrainedModel) -> Finding:
    """The same for a model that is there: as its text says, and as the self-check says, which must agree with it."""
    finding = judge_text(recipe, model)
    if finding.outcome not in (Outcome.EXACT, Outcome.WRONG):
        return finding
    try:
        tried(scorer_of(model))
    except UnsupportedModel as why:
        if finding.outcome is Outcome.WRONG:
            return replace(finding, outcome=Outcome.REFUSED, reason=str(why))
        return replace(finding, outcome=Outcome.WRONG, reason=f"exact, and yet the self-check refuses it: {why}")
    return finding


def judge_text(recipe: Recipe, model: PreTrainedModel) -> Finding:
    """Without the self-check, so that what is exact is exact without it."""
    try:
        decoder = _decoder(model, None)
        texts = answers_of(model)
        if (doubt := _doubt(texts, model.dtype)) is not None:
            return Finding(recipe, Outcome.UNDECIDED, doubt)
        fault = _fault("plain", _decoded(decoder, texts), texts)
        layout = decoder.engine.target.family.layout.value  # as it turned out in the first pass
        fault = fault or _fault("with drafts", _decoded(_decoder(model, Foresight(texts)), texts), texts)
        if fault is not None:
            return Finding(recipe, Outcome.WRONG, fault, layout)
    except UnsupportedModel as why:
        return Finding(recipe, Outcome.REFUSED, str(why))
    except Exception as error:
        return Finding(recipe, Outcome.WRONG, f"{type(error).__name__}: {error}")
    try:
        fault = _fault("with trees", _decoded(_decoder(model, ForesightTrees(texts)), texts), texts)
    except UnsupportedModel:
        return Finding(recipe, Outcome.EXACT, "", layout, False)
    except Exception as error:
        return Finding(recipe, Outcome.WRONG, f"with trees: {type(error).__name__}: {error}")
    if fault is not None:
        return Finding(recipe, Outcome.WRONG, fault, layout)
    return Finding(recipe, Outcome.EXACT, "", layout, True)


def proven_classes(findings: Sequence[Finding]) -> frozenset[str]:
    """Classes of which some model was exact and none was anything but exact or refused."""
    exact = {f.recipe.class_name for f in findings if f.outcome is Outcome.EXACT}
    return frozenset(exact - {f.recipe.class_name for f in findings if f.outcome in (Outcome.WRONG, Outcome.UNDECIDED)})


def assert_exact_or_refused(finding: Finding) -> None:
    """Exact, or refused with a sentence that names the model's class."""
    assert finding.outcome in (Outcome.EXACT, Outcome.REFUSED), (
        f"{finding.recipe.name}: {finding.outcome}, {finding.reason}"
    )
    if finding.outcome is Outcome.REFUSED:
        named = finding.reason[0].isupper() or finding.reason.startswith(finding.recipe.class_name)  # xLSTM...
        assert len(finding.reason) > 40 and named, f"no clear reason: {finding.reason!r}"


def answers_of(model: PreTrainedModel) -> Texts:
    """The oracle, row by row, without padding."""
    check_stock(model)
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, VOCAB, (1, length), generator=generator) for length in LENGTHS]
    if model.config.is_encoder_decoder:
        inputs: list[dict[str, Tensor]] = [_source(model, row, generator) for row in rows]
        prompts = [(1,)] * len(rows)
    else:
        inputs = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
        prompts = [tuple(row[0].tolist()) for row in rows]
    answers, gaps = [], []
    for given in inputs:
        out: Any = GenerationMixin.generate(
            model, **given, do_sample=False, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
        )
        answers.append(tuple(out.sequences[0, -NEW:].tolist()))
        best = torch.stack(out.logits).squeeze(1).double().topk(2, dim=-1).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
    return Texts(tuple(inputs), tuple(prompts), tuple(answers), min(gaps))


def _source(model: PreTrainedModel, row: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """What an encoder reads in one row: text, frames or samples of sound."""
    name = model.main_input_name
    if name == "input_features":
        config = model.config
        frames = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {name: frames.to(model.dtype)}
    if name == "input_values":
        return {name: torch.randn(1, 4000, generator=generator).to(model.dtype)}
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def _doubt(texts: Texts, dtype: torch.dtype) -> str | None:
    """Why these texts would be right by accident, too."""
    if texts.least_gap < LEAST_GAP[dtype]:
        return f"the best two logits are {texts.least_gap:.1e} apart, which rounding may turn round"
    distinct = {token for answer in texts.answers for token in answer}
    if len(distinct) < 6 or len(set(texts.answers)) < len(texts.answers):
        return f"texts that hardly depend on anything: {texts.answers}"
    return None


def _decoder(model: PreTrainedModel, drafter: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, drafter, policy=DRAFT_LENGTH, self_check=False)


def _decoded(decoder: SpeculativeDecoder, texts: Texts) -> list[tuple[int, ...]]:
    """The three rows in one ragged batch."""
    inputs: dict[str, Any] = _batch(texts.inputs)
    result = decoder.generate(**inputs, max_new_tokens=NEW, temperature=0.0)
    return [tuple(row[-NEW:]) for row in result.sequences.tolist()]


def _batch(inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts padded on the left; features are of one size."""
    if "input_ids" not in inputs[0]:
        return {name: torch.cat([row[name] for row in inputs]) for name in inputs[0]}
    width = max(row["input_ids"].shape[1] for row in inputs)
    padded = {
        name: [torch.nn.functional.pad(row[name], (width - row[name].shape[1], 0), value=0) for row in inputs]
        for name in ("input_ids", "attention_mask")
    }
    return {name: torch.cat(rows) for name, rows in padded.items()}


def _fault(how: str, got: Sequence[tuple[int, ...]], texts: Texts) -> str | None:
    for row, (ours, theirs) in enumerate(zip(got, texts.answers, strict=True)):
        if ours != theirs:
            place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            return f"{how}, row {row}: token {place} is {ours[place]}, not {theirs[place]}"
    return None


class Foresight:
    """Drafts the answers, every third token of them wrong: in every other round a cut back within the draft."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def propose(self, context: DraftContext) -> Draft:
        rows = [self.guess(h, room) for h, room in zip(context.histories, context.max_lengths, strict=True)]
        width = max(map(len, rows), default=0)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long).view(len(rows), width)
        return Draft(tokens, torch.tensor([len(row) for row in rows]), PointMass(tokens, context.vocab_size), True)

    def guess(self, history: Sequence[int], room: int) -> list[int]:
        text, place = self._known(history)
        return [_other(t) if (place + i) % 3 == 2 else t for i, t in enumerate(text[place : place + room])]

    def _known(self, history: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The answer that a row is about, and how much of it is there."""
        for prompt, answer in zip(self.texts.prompts, self.texts.answers, strict=True):
            place = len(history) - len(prompt)
            if tuple(history) == (*prompt, *answer[:place]):
                return answer, place
        return (), 0

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""


class ForesightTrees(Foresight):
    """Drafts a wrong token before each right one, as its sibling."""

    makes_trees = True

    def propose(self, context: DraftContext) -> Draft:
        texts = [self.guess(h, room) for h, room in zip(context.histories, context.max_lengths, strict=True)]
        rows = [[t for right in text for t in (_other(right), right)] for text in texts]
        width = max(map(len, rows), default=0)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long).view(len(rows), width)
        parents = torch.tensor([2 * (i // 2) - 1 for i in range(width)], dtype=torch.long).expand(len(rows), width)
        tree = TreeShape(parents, (Siblings.TOP,) * len(rows))
        lengths = torch.tensor([len(row) for row in rows])
        return Draft(tokens, lengths, PointMass(tokens, context.vocab_size), True, tree=tree)


def _other(token: int) -> int:
    return token % (VOCAB - 1) + 1
