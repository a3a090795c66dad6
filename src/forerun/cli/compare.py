"""The same text three ways: transformers' `model.generate`, our plain decoding, and with drafts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from forerun.cli.run import run
from forerun.config import SamplingParams
from forerun.engine.request import Request, check_fits
from forerun.engine.stops import StopRule
from forerun.keywords import SAMPLING, is_sampled
from forerun.measure import reference
from forerun.measure.progress import Reporter
from forerun.measure.reference import Difference, difference
from forerun.measure.table import NOTHING, Table
from forerun.measure.timing import timed
from forerun.models.families import context_length
from forerun.models.sharded import is_sharded

if TYPE_CHECKING:
    from forerun.cli.pair import LoadedPair
    from forerun.decoder import GenerateResult

WARM_UP = 16  # tokens decoded each way before anything is timed
TRANSFORMERS, PLAIN, DRAFTS = "model.generate", "Forerun, plain", "Forerun, drafts"
# Settings that transformers does not have; beside them its text would follow another law.
OURS_ALONE = ("presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Timed:
    """One way of decoding the prompts."""

    name: str
    seconds: float
    num_tokens: int
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Plain ways first, the speculative one last."""

    ways: tuple[Timed, ...]
    speculative: GenerateResult
    greedy: bool
    differences: dict[str, list[Difference]] | None  # by the name of the other way; None where texts need not agree
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        last = self.ways[-1]
        return {
            "warm_up_tokens": WARM_UP,
            "ways": [
                {"name": w.name, "seconds": w.seconds, "tokens": w.num_tokens, "tokens_per_second": w.rate,
                 "speedup_of_drafts": last.rate / w.rate if w.rate else None}
                for w in self.ways
            ],
            "identical": (
                None if self.differences is None else {name: not each for name, each in self.differences.items()}
            ),
            "differences": {name: [asdict(d) for d in each] for name, each in (self.differences or {}).items()},
            "lossy": self.speculative.lossy,
            "notes": list(self.notes),
        }  # fmt: skip


def compare(
    loaded: LoadedPair, prompts: Sequence[Sequence[int]], keywords: dict[str, Any], reporter: Reporter
) -> TextComparison:
    """Warm up and time each way in turn. Loading, tokenising and first calls are not in the times; prompts are."""
    ways: list[Timed] = []
    notes = []
    room = _room(loaded, prompts)
    if keywords["max_new_tokens"] > room:
        keywords = keywords | {"max_new_tokens": room}
        notes.append(f"all texts end after {room} tokens, where the longest prompt has filled the context")
    reporter.start("comparing", total=3)
    warm_up = keywords | {"max_new_tokens": min(WARM_UP, room)}
    if missing := [name for name in OURS_ALONE if keywords.get(name)]:
        notes.append(f"transformers has no {' and no '.join(missing)}: its row is left out")
    elif is_sharded(loaded.model) and keywords.get("max_time") is not None:
        notes.append("transformers ends by each process's own clock, and a split target needs all: its row is left out")
    else:
        if keywords.get("repetition_penalty") and len({len(prompt) for prompt in prompts}) > 1:
            notes.append("transformers counts the padding of shorter prompts as repeated tokens: its texts may differ")
        reporter.start(TRANSFORMERS)
        _transformers(loaded, prompts, warm_up)
        ways.append(_transformers(loaded, prompts, keywords))
    reporter.advance()
    done = []
    for name, decoder in ((PLAIN, loaded.plain_decoder()), (DRAFTS, loaded.decoder())):
        reporter.start(name)
        run(decoder, prompts, warm_up)
        done.append(run(decoder, prompts, keywords))
        ways.append(_timed(name, done[-1]))
        reporter.advance()
    params = done[-1].rows[0].request.params
    differences = None
    if params.is_greedy and keywords.get("max_time") is None:
        differences = _differences(loaded, prompts, ways, params)
    return TextComparison(tuple(ways), done[-1], params.is_greedy, differences, tuple(notes))


def _room(loaded: LoadedPair, prompts: Sequence[Sequence[int]]) -> int:
    """New tokens that fit behind every prompt: where the context ends we stop, and transformers goes on or fails."""
    config: Any = loaded.model.config.get_text_config(decoder=True)
    limit = None if loaded.has_encoder else context_length(config)
    if limit is None:
        return sys.maxsize
    longest = max(prompts, key=len)
    check_fits(longest, limit)
    return limit - len(longest)


def _timed(name: str, done: GenerateResult) -> Timed:
    return Timed(name, done.seconds, done.stats.num_emitted_tokens, [list(row.tokens) for row in done.rows])


def _transformers(loaded: LoadedPair, prompts: Sequence[Sequence[int]], keywords: dict[str, Any]) -> Timed:
    """One padded batch, with the settings the user gave and none of the model's own defaults."""
    model = loaded.model
    pad = loaded.tokenizer.pad_token_id or 0
    # A text to continue is padded on the left, one that an encoder reads on the right.
    padded = partial(pad_sequence, batch_first=True, padding_side="right" if loaded.has_encoder else "left")
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids, mask = padded(rows, padding_value=pad), padded([torch.ones_like(row) for row in rows])
    settings = {"seed": keywords.get("seed"), "pad_token_id": pad, **_their_words(keywords, loaded.tokenizer)}
    with reference.neutral_defaults(model):
        out, seconds = timed(model.device, lambda: reference.generate(model, ids, mask, **settings))
        ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    start = 1 if loaded.has_encoder else ids.shape[1]  # a decoder's text begins with its start token
    stops = tuple(settings.get("stop_strings", ()))
    copies = len(out) // len(prompts)
    tokens = []
    for place, row in enumerate(out.tolist()):
        begins = row[:1] if loaded.has_encoder else prompts[place // copies]
        stopped = _until_stop(row[start:], pad if ends else None, begins, stops, loaded.tokenizer) if stops else None
        tokens.append(_until_end(row[start:], ends) if stopped is None else stopped)
    return Timed(TRANSFORMERS, seconds, sum(map(len, tokens)), tokens)


def _their_words(keywords: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Our keywords in transformers' terms, its hidden defaults switched off."""
    settings = {name: value for name, value in keywords.items() if name not in ("seed", "logit_bias", *OURS_ALONE)}
    if is_sampled(keywords):
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0} | settings
    else:
        settings = {name: value for name, value in settings.items() if name not in SAMPLING} | {"do_sample": False}
    if keywords.get("logit_bias"):
        settings["sequence_bias"] = [[[token], float(bias)] for token, bias in keywords["logit_bias"].items()]
    if keywords.get("stop_strings"):
        settings["tokenizer"] = tokenizer
    return settings


def _until_stop(
    tokens: list[int], pad: int | None, prompt: Sequence[int], stops: tuple[str, ...], tokenizer: Any
) -> list[int] | None:
    """A row that a stop string has ended up to there; None where none has.

    What follows is `pad`, which the end token may serve as: then our rule only says where padding begins. Without an
    end token transformers pads nothing, writes on, and leaves all to the rule.
    """
    longest = len(tokens) + 1
    rule = StopRule(Request(prompt=tuple(prompt), max_new_tokens=longest, stop_strings=stops), longest, tokenizer)
    padding = next((count for count, token in enumerate(reversed(tokens)) if token != pad), len(tokens))
    first = 1 if pad is None else max(len(tokens) - padding, 1)
    for end in range(first, len(tokens) + 1):  # a stop may be completed by the very token that pads
        if rule.cut(tokens[: end - 1], tokens[end - 1 : end])[1] is not None:
            return tokens[:end]
    return None


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """A row up to its end token; what follows is padding."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def _differences(
    loaded: LoadedPair, prompts: Sequence[Sequence[int]], ways: Sequence[Timed], params: SamplingParams
) -> dict[str, list[Difference]]:
    """Where the text with drafts parts from each plain one, ties of the logits told from faults."""
    *others, last = ways
    differences: dict[str, list[Difference]] = {way.name: [] for way in others}
    for row, prompt in enumerate(prompts):
        if all(way.tokens[row] == last.tokens[row] for way in others):
            continue
        model, start = loaded.model, prompt
        if loaded.has_encoder:
            model, start = reference.Reading(loaded.model, prompt), [reference.decoder_start(loaded.model)]
        for way in others:
            parted = difference(model, start, last.tokens[row], way.tokens[row], row=row, params=params)
            if parted is not None:
                differences[way.name].append(parted)
    return differences


def comparison_table(comparison: TextComparison) -> Table:
    """Times side by side; ratios are of tokens per second, since sampled texts differ in length."""
    bases = comparison.ways[:-1]
    headings = ("", "seconds", "tokens", "tokens/s", *(f"against {base.name}" for base in bases))
    rows = []
    for way in comparison.ways:
        ratios = (f"{way.rate / base.rate:.2f} x" if base.rate else NOTHING for base in bases)
        rows.append((way.name, f"{way.seconds:.2f}", str(way.num_tokens), f"{way.rate:.1f}", *ratios))
    return Table("The same prompts, decoded in turn", headings, tuple(rows))


def explanations(comparison: TextComparison) -> list[str]:
    """What was measured, and whether the texts agree."""
    lines = [
        "Measured once each: decoding all prompts as one batch, the pass over the prompts included, after a warm-up of "
        f"{WARM_UP} tokens each way; loading and tokenising are left out.",
        *comparison.notes,
    ]
    if comparison.greedy and comparison.differences is None:
        return [*lines, "A time limit ends each way's texts at another place: whether they agree is not judged."]
    if not comparison.greedy and comparison.speculative.lossy:
        return [*lines, f"LOSSY: {comparison.speculative.lossy}. Speed bought so is no speed-up of the same text."]
    if not comparison.greedy:
        return [*lines, "Sampled texts follow the same law and are different draws; `forerun check` tests the law."]
    return [*lines, *(_agreement(name, each) for name, each in (comparison.differences or {}).items())]


def _agreement(name: str, differences: list[Difference]) -> str:
    if not differences:
        return f"Text with drafts and {name}: identical."
    faults = [d for d in differences if not d.is_tie]
    first = (faults or differences)[0]
    where = f"prompt {first.row + 1}, token {first.position + 1}"
    if not faults:
        return (
            f"Text with drafts and {name}: {len(differences)} part at a numerical tie ({where}: the two best logits "
            f"lie {first.gap:.1g} apart, within the model's own rounding)."
        )
    return (
        f"Text with drafts and {name}: DIFFERENT in {len(faults)} prompts, no tie ({where}, {first.gap_in_words}). "
        "Please run `forerun check` and report it."
    )
