"""A model that no test has proven is tried before it is trusted: its own forward beside ours on a few ragged rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from forerun.cache.ragged import RaggedCache
from forerun.config import self_check as settings
from forerun.errors import ForerunWarning, UnsupportedModel, kind_and_line
from forerun.models import plain, proven
from forerun.models.bodies import choose, readers
from forerun.models.bodies.base import Body
from forerun.models.bodies.described import DescribedBody
from forerun.models.cross_attention import Sources
from forerun.models.encoder import EncoderOutput
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer, scorer_of
from forerun.types import Source

PROMPTS = (5, 14, 9)  # tokens of each row
DRAFTS = (3, 5, 4)  # tokens scored behind them
KEPT = (2, 0, 4)  # of the drafts: cut in the middle, whole, and not at all
STEPS = (4, 3, 5)  # tokens scored after the cut
SOURCES = (6, 11, 8)  # encoder states that each row reads
PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # all but cuDNN's
LARGEST = 0.5  # deviation that is ever put down to rounding: beyond it, nothing could be told from a mistake
SourcedText = tuple[int, tuple[int, ...]]  # whose source is read, and a text
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
    except UnsupportedModel as found:
        if not scorer.is_fused:
            raise
        choose.refuse(scorer.model)
        scorer.renew()
        checked = tried(scorer)
        warnings.warn(f"the fused layers are not used, and decoding is slower: {found}", ForerunWarning, stacklevel=2)
        return checked


class Examiner:
    """Tries a target when its decoder is made, and again once modules of other kinds have come into it, or another body
    runs it."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._kinds: frozenset[Any] = frozenset()
        self._bodies: frozenset[type[Body]] = frozenset()
        self.found: SelfCheck | None = None

    def __call__(self, scorer: Scorer) -> SelfCheck:
        kinds, body = _foreign_kinds(scorer.model), type(scorer.body)
        if self.found is None or not kinds <= self._kinds or body not in self._bodies:
            self.found = self_check(scorer, self._wanted)
            self._kinds, self._bodies = self._kinds | kinds, self._bodies | {body}
        return self.found


def _is_described(scorer: Scorer) -> bool:
    """Whether fused layers run it as a reader describes them: one model at a time tells whether that is right."""
    return isinstance(scorer.body, DescribedBody) and scorer.model.config.model_type not in readers.PROVEN


def tried(scorer: Scorer) -> SelfCheck:
    """The comparison itself; whatever goes wrong in it is a refusal."""
    try:
        return _compare(scorer)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(scorer.model).__name__} could not be tried on a few rows ({kind_and_line(error)}), so Forerun "
            "cannot tell whether it decodes as model.generate does; use model.generate for it"
        ) from error


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
    found = set()
    for module in model.modules():
        kind = type(module)
        own = plain.own_forward(module)
        is_linear = hasattr(module, "in_features") and not kind.__module__.startswith("torch.ao.")
        homes = kind.__module__, str(getattr(kind.forward, "__module__", ""))
        if not is_linear and (own is not None or not all(home.startswith(LIBRARIES) for home in homes)):
            found.add((kind, kind.forward, own))
    return frozenset(found)


@torch.inference_mode()
def _compare(scorer: Scorer) -> SelfCheck:
    """Try ragged rows: prompts, drafts behind them, a cut back, new tokens there, copies of a prompt, single tokens."""
    texts = Texts.of(scorer)
    with _aside(scorer):
        passes = _run(scorer, texts)
    oracle = Oracle(scorer, texts, [text for one in passes for text in one.texts])
    allowed, worst = _allowed(oracle.noise(), scorer.model), 0.0
    for one in passes:
        found = [_deviation(ours, oracle.logits(*text)) for ours, text in zip(one.logits, one.texts, strict=True)]
        # Single tokens are too few for a median of each row.
        groups = [torch.cat(found)] if max(map(len, found)) == 1 else found
        deviation = max(_typical(group, scorer.model.dtype) for group in groups)
        if not deviation <= allowed:  # NaN is no agreement
            raise UnsupportedModel(
                f"{type(scorer.model).__name__}: Forerun's logits differ from the model's own in {one.what} (relative "
                f"deviation {deviation:.1e}, rounding may make {allowed:.1e}), so its text would be another one; "
                f"{_remedy(scorer)}"
            )
        worst = max(worst, deviation)
    return SelfCheck(Kind.PASSED, worst, allowed)


def _remedy(scorer: Scorer) -> str:
    """An implementation of attention may leave out what the model asks for, which Forerun applies: transformers 5.17's
    `sdpa` does so with Gemma 2's soft caps. Falcon's ALiBi is added twice by the other."""
    kind = scorer.model.config.get_text_config(decoder=True)._attn_implementation
    if kind == "eager" or scorer.family.alibi_in_scores:
        return "use model.generate for it"
    return "load it with attn_implementation='eager' and try again, or use model.generate for it"


@dataclass(frozen=True, slots=True)
class Texts:
    """Random tokens for every row, and what each row's decoder reads across."""

    prompts: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, ...], ...]
    states: tuple[Tensor, ...]  # [S, H] each, none for a causal model

    @classmethod
    def of(cls, scorer: Scorer) -> Texts:
        """Always the same ones, from a generator of their own."""
        generator = torch.Generator().manual_seed(20)
        plain = _plain_tokens(scorer)

        def draw(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
            chosen = (torch.randint(len(plain), (length,), generator=generator).tolist() for length in lengths)
            return tuple(tuple(plain[i] for i in row) for row in chosen)

        states: tuple[Tensor, ...] = ()
        if isinstance(scorer, Seq2SeqScorer):
            drawn = (torch.randn(length, scorer.encoder.width, generator=generator) for length in SOURCES)
            states = tuple(one.to(scorer.device, scorer.model.dtype) for one in drawn)
        return cls(draw(PROMPTS), draw(DRAFTS), draw(STEPS), states)


def _plain_tokens(scorer: Scorer) -> list[int]:
    """Ids that stand for nothing but text: no padding, no image, no end."""
    special: set[int] = set()
    for config in (scorer.model.config, scorer.model.config.get_text_config(decoder=True)):
        for name, value in vars(config).items():
            if "token" in name:
                special |= set(_whole_numbers(value))
    return [token for token in range(scorer.vocab_size) if token not in special]


def _whole_numbers(value: Any) -> Iterator[int]:
    """Those in a setting, however deep: configurations keep whatever config.json has."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(part)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of ours: what it was about, its logits, and the texts that they belong to."""

    what: str
    logits: list[Tensor]  # [n, V] of each row
    texts: list[SourcedText]  # of each row; the last n tokens were scored


def _run(scorer: Scorer, texts: Texts) -> list[Pass]:
    rows = [0, 1, 2]
    for row in rows:
        _admit(scorer, row, row, texts)
    done = [_scored(scorer, "the prompts' pass", rows, [()] * 3, texts.prompts)]
    done.append(_scored(scorer, "a pass of drafts behind ragged rows", rows, texts.prompts, texts.drafts))
    kept = tuple(
        (*prompt, *draft[:count]) for prompt, draft, count in zip(texts.prompts, texts.drafts, KEPT, strict=True)
    )
    scorer.rewind(rows, [len(text) for text in kept])
    done.append(_scored(scorer, "a step after a cut back", rows, kept, texts.steps))
    scorer.release(0)  # the last row moves into its place
    whole = tuple((*text, *step) for text, step in zip(kept, texts.steps, strict=True))
    for row in (3, 4):
        _admit(scorer, row, 0, texts)
    scorer.feed([3, 4], [texts.prompts[0]] * 2)
    rows, sources = [2, 4, 1, 3], [2, 0, 1, 0]
    past = [whole[2], texts.prompts[0], whole[1], texts.prompts[0]]
    blocks = [texts.steps[0], texts.drafts[2], texts.drafts[0], texts.steps[1]]
    done.append(_scored(scorer, "a pass with rows that were copied or moved", rows, past, blocks, sources))
    past = [(*text, *block) for text, block in zip(past, blocks, strict=True)]
    ones = [block[:1] for block in blocks]
    done.append(_scored(scorer, "a step of one token a row", rows, past, ones, sources))
    if scorer.body.beyond is not None:
        past = [(*text, *block) for text, block in zip(past, ones, strict=True)]
        with _as_if_long(scorer.body):
            done.append(_scored(scorer, "a pass as long prompts have it", rows, past, blocks, sources))
    return done


@contextmanager
def _as_if_long(body: Body) -> Iterator[None]:
    """Every pass is run by whoever runs long ones."""
    longest, body.longest_pass = body.longest_pass, 0
    try:
        yield
    finally:
        body.longest_pass = longest


def _admit(scorer: Scorer, row: int, source: int, texts: Texts) -> None:
    scorer.admit(row)
    if texts.states:
        scorer.read(row, Source(states=texts.states[source]))


def _scored(
    scorer: Scorer,
    what: str,
    rows: Sequence[int],
    past: Sequence[tuple[int, ...]],
    blocks: Sequence[tuple[int, ...]],
    sources: Sequence[int] | None = None,
) -> Pass:
    logits = scorer.score(rows, blocks).split([len(block) for block in blocks])
    texts = [(*text, *block) for text, block in zip(past, blocks, strict=True)]
    return Pass(what, list(logits), list(zip(rows if sources is None else sources, texts, strict=True)))


@contextmanager
def _aside(scorer: Scorer) -> Iterator[None]:
    """A cache of the check's own, so that nothing of it stays behind."""
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


class Oracle:
    """The model's own forward, row by row, without padding and without a cache.

    A text that others begin with is not read again: what comes behind a token has no part in its logits.
    """

    def __init__(self, scorer: Scorer, texts: Texts, asked: Sequence[SourcedText]) -> None:
        self.model: Any = scorer.model
        self.texts = texts
        self._takes_positions = "position_ids" in signature(self.model.forward).parameters
        self._known: dict[SourcedText, Tensor] = {}
        for source, text in sorted(asked, key=lambda one: len(one[1]), reverse=True):
            self.logits(source, text)

    def logits(self, source: int, text: tuple[int, ...]) -> Tensor:
        """[n, V] after each token."""
        source = source if self.texts.states else 0
        for (other, longer), found in self._known.items():
            if other == source and longer[: len(text)] == text:
                return found[: len(text)]
        self._known[source, text] = self._forward(source, text)
        return self._known[source, text]

    def _forward(self, source: int, text: tuple[int, ...]) -> Tensor:
        """Not by cuDNN's attention, which plans every new shape first: a tenth of a second for each."""
        with sdpa_kernel(PLANLESS):
            return self._run(source, text)

    def _run(self, source: int, text: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([text], device=self.model.device)
        if self.texts.states:
            read = EncoderOutput(last_hidden_state=self.texts.states[source][None])
            found: Tensor = self.model(encoder_outputs=read, decoder_input_ids=ids, use_cache=False).logits[0]
        else:
            # As `generate` does: some classes count positions in another way where they are not told.
            told = {"position_ids": torch.arange(len(text), device=ids.device)[None]} if self._takes_positions else {}
            mask = torch.ones_like(ids)
            found = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **told).logits[0]
        return found

    def noise(self) -> Tensor:
        """[n] how far logits move when every embedding is moved by as much as it may have been rounded."""
        source, text = max(self._known, key=lambda one: len(one[1]))
        generator = torch.Generator().manual_seed(21)
        unit = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)

        def disturb(module: Any, inputs: Any, out: Tensor) -> Tensor:
            signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
            return out * (1 + unit * signs)

        reads = self.model.get_decoder() if self.texts.states else self.model
        hook = reads.get_input_embeddings().register_forward_hook(disturb)
        try:
            return _deviation(self._forward(source, text), self._known[source, text])
        finally:
            hook.remove()


def _deviation(ours: Tensor, theirs: Tensor) -> Tensor:
    """[n] root mean square of the difference over the vocabulary, relative to the spread of the model's own logits."""
    theirs = theirs[-len(ours) :].double()
    told = theirs.isfinite()
    apart = torch.where(told, ours.double() - theirs, 0.0)
    apart = torch.where(told == ours.isfinite(), apart, torch.inf)
    count = told.sum(-1)
    mean = torch.where(told, theirs, 0.0).sum(-1, keepdim=True) / count[:, None]
    spread = torch.where(told, theirs - mean, 0.0).square().sum(-1)
    return (apart.square().sum(-1) / spread.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _typical(deviations: Tensor, dtype: torch.dtype) -> float:
    """Of a row's positions in a pass. A mask, a position or a key that is wrong is wrong for nearly all of them.

    With 16 bits a router may send single tokens to other experts, which says nothing: hence the median there.
    """
    return float(deviations.max() if torch.finfo(dtype).bits >= 32 else deviations.median())


def _allowed(noise: Tensor, model: PreTrainedModel) -> float:
    """What rounding may do to logits, relative to their spread.

    `noise` tells how much one rounding of the input has become at the output; every layer rounds again, and errors of
    random signs grow with the square root of their number. Many modules compute in float32 whatever the model's dtype.
    There is room: with 32 bits mistakes are a thousand times larger than what is allowed, with 16 bits a few times.
    """
    bits, most = torch.finfo(model.dtype), float(noise.max())
    layers: int = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or 1
    unit = max(bits.eps, torch.finfo(torch.float32).eps) * math.sqrt(layers)
    if bits.bits >= 32:
        return max(512 * unit, 32 * most)
    return min(max(2 * unit, 3 * float(noise.median())), LARGEST)
