"""Continuations counted beforehand from text, kept in one file and looked up by binary search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.arguments import integer, refuse
from forerun.drafters.base import Drafter
from forerun.drafters.compatible import DIGEST, vocabulary_digest
from forerun.errors import InvalidArgument, ModelNotFound, TokenizerMismatch
from forerun.files import write_whole
from forerun.math.laws import SparseLaw, warp
from forerun.models.scorer import Scorer
from forerun.types import Draft, DraftContext, LawParams

FORMAT = "forerun.ngram.1"

Integers = NDArray[np.integer]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Counts:
    """Continuations of every context, the most frequent first (the lower id among equals).

    A context of tokens t1 (newest), t2, ... is the number (t1 + 1) + (t2 + 1) * (V + 1) + ..., so contexts of all
    lengths share one sorted array, a missing token is the digit 0, and the empty context is 0.
    """

    contexts: Integers  # [N] int64, strictly ascending, contexts[0] == 0
    starts: Integers  # [N + 1] int64, context n owns entries starts[n] to starts[n + 1]
    tokens: Integers  # [M] int32
    counts: Integers  # [M] int32, > 0


class NgramTable(Drafter):
    """Drafts from n-gram counts, backing off from the longest context that was seen to the plain frequency of tokens.

    Only the most frequent continuations of a context are kept, and drafts are drawn from exactly those: q is a sparse
    law, shaped by the row's own temperature, top-k, top-p and min-p (a greedy row gets the most frequent one).
    Evidence is the number of tokens of context behind the first drafted token.

    The table stays on the CPU, and so does the drawing: arrays this small gain nothing from a GPU, whose memory is
    better spent on the model, and numpy handles them in a quarter of torch's time.
    """

    def __init__(self, counts: Counts, *, order: int, vocab_size: int, tokenizer: str | None = None) -> None:
        self.order, self.vocab_size = integer("order", order, 1), integer("vocab_size", vocab_size, 1)
        self.tokenizer = tokenizer
        self._counts = counts
        self._slots = np.arange(np.diff(counts.starts).max())  # as many as the richest context has
        self._powers = _powers(order, vocab_size)
        self._largest = int(counts.tokens.max())

    @classmethod
    def count(
        cls,
        sequences: Iterable[Sequence[int]],
        order: int = 3,
        *,
        vocab_size: int,
        min_count: int = 1,
        max_continuations: int = 8,
        tokenizer: str | None = None,
    ) -> NgramTable:
        """Count n-grams of up to `order` tokens; those of two or more seen less than `min_count` times are dropped.

        `tokenizer` is any fingerprint of the tokenizer the ids come from; `load` compares it, and a decoder with a
        tokenizer compares one of `vocabulary_digest`.
        """
        min_count = integer("min_count", min_count, 1)
        max_continuations = integer("max_continuations", max_continuations, 1)
        powers = _powers(order, vocab_size)
        digits, following = _positions(sequences, order, vocab_size)
        levels = []
        for length, context in enumerate(_pack(digits, powers).T):
            # Near the start of a text a context may be shorter than `length`: that one is counted at its own level.
            full = digits[:, length - 1] > 0 if length else slice(None)
            least = min_count if length else 1
            levels.append(_count_level(context[full], following[full], vocab_size, least, max_continuations))
        return cls(_merge(levels), order=order, vocab_size=vocab_size, tokenizer=tokenizer)

    def save(self, path: str | Path) -> None:
        """Write the table as one safetensors file."""
        about = {"format": FORMAT, "order": str(self.order), "vocab_size": str(self.vocab_size)}
        if self.tokenizer is not None:
            about["tokenizer"] = self.tokenizer
        table = self._counts
        tensors = {"contexts": table.contexts, "starts": table.starts, "tokens": table.tokens, "counts": table.counts}
        write_whole(Path(path), lambda beside: save_file(tensors, beside, metadata=about))

    @classmethod
    def load(cls, path: str | Path, *, tokenizer: str | None = None) -> NgramTable:
        """Read what `save` wrote. Where both the file and the caller name a tokenizer, they must agree."""
        about, counts = _read(Path(path))
        stored = about.get("tokenizer")
        if tokenizer is not None and stored is not None and stored != tokenizer:
            raise TokenizerMismatch(
                f"{path} was counted with tokenizer {stored!r}, not {tokenizer!r}: count a table with the latter"
            )
        return cls(counts, order=int(about["order"]), vocab_size=int(about["vocab_size"]), tokenizer=stored)

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Refuse a target with other ids before anything is decoded: in a chain one draft that fails ends them all."""
        self._check_target(target.vocab_size)
        known, stored = vocabulary_digest(tokenizer), self.tokenizer
        if known is not None and stored is not None and stored.startswith(DIGEST) and stored != known:
            raise TokenizerMismatch(
                "the n-gram table was counted with another vocabulary than the target's: count one from text of the "
                "target's tokenizer with `forerun train ngram`"
            )

    def propose(self, context: DraftContext) -> Draft:
        """Draw as many tokens as each row may have, one position after the other."""
        self._check_target(context.vocab_size)
        recent = [self._recent(history) for history in context.histories]
        digits = np.array(recent, dtype=np.int64).reshape(len(context.rows), self.order - 1)
        width = max(context.max_lengths, default=0)
        uniforms = context.uniforms[:, :width].cpu().numpy()
        tokens, ids, probs = self._walk(digits, _on_cpu(context.params), uniforms)
        on = context.device
        return Draft(
            tokens=torch.from_numpy(tokens).to(on),
            lengths=torch.tensor(context.max_lengths, dtype=torch.int64, device=on),
            law=SparseLaw(torch.from_numpy(ids).to(on), torch.from_numpy(probs).to(on), context.vocab_size),
            deterministic=context.params.all_greedy,
            evidence=tuple(self._find(digits)[1].tolist()),
        )

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""

    def _check_target(self, vocab_size: int) -> None:
        if self._largest >= vocab_size:
            raise TokenizerMismatch(
                f"the n-gram table holds token {self._largest}, the target's vocabulary ends at {vocab_size - 1}: "
                "count a table from text of the target's tokenizer"
            )

    def _recent(self, history: Sequence[int]) -> list[int]:
        """The newest tokens as digits, newest first, 0 from the first one on that the table cannot know."""
        digits = [0] * (self.order - 1)
        for i in range(min(len(digits), len(history))):
            token = history[-1 - i]
            if not 0 <= token < self.vocab_size:
                break
            digits[i] = token + 1
        return digits

    def _walk(self, digits: Integers, params: LawParams, uniforms: Floats) -> tuple[Integers, Integers, Floats]:
        """Tokens [B, K] drawn with `uniforms` [B, K], and the law of each: ids and probs [B, K, S]."""
        shape = (*uniforms.shape, len(self._slots))
        tokens, ids, probs = np.zeros(shape[:2], np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        rows = np.arange(len(uniforms))
        for i in range(uniforms.shape[1]):
            ids[:, i], weights = self._continuations(self._find(digits)[0])
            probs[:, i] = _shape(weights, params)
            drawn = _draw(probs[:, i], uniforms[:, i])
            tokens[:, i] = ids[rows, i, drawn]
            digits = np.concatenate([tokens[:, i : i + 1] + 1, digits], axis=1)[:, : self.order - 1]
        return tokens, ids, probs

    def _find(self, digits: Integers) -> tuple[Integers, Integers]:
        """Index of the longest known context of each row and its length, [B] each."""
        wanted = _pack(digits, self._powers)
        contexts = self._counts.contexts
        nearest = np.minimum(np.searchsorted(contexts, wanted), len(contexts) - 1)
        known = contexts[nearest] == wanted  # the empty context always is
        known[:, 1:] &= digits > 0
        length = (known * np.arange(self.order)).max(axis=1)
        return nearest[np.arange(len(digits)), length], length

    def _continuations(self, index: Integers) -> tuple[Integers, Floats]:
        """Continuations of contexts [B] and their counts, [B, S] each; unused slots, the last ones, weigh 0."""
        entry = self._counts.starts[index][:, None] + self._slots
        used = entry < self._counts.starts[index + 1][:, None]
        entry = np.minimum(entry, len(self._counts.tokens) - 1)
        return self._counts.tokens[entry], np.where(used, self._counts.counts[entry], 0.0)


def _shape(weights: Floats, params: LawParams) -> Floats:
    """Counts [B, S] -> probabilities [B, S] under each row's temperature, top-k, top-p and min-p."""
    return np.asarray(warp(torch.from_numpy(weights).log(), params).softmax(dim=-1))


def _draw(probs: Floats, uniforms: Floats) -> Integers:
    """Inverse CDF over a few entries that never increase, so that those of probability 0 come last: [B, S] -> [B]."""
    running = probs.cumsum(axis=1)
    # A float64 below 1 times the total never rounds up to the total, so the last entry is not passed.
    passed: Integers = (running <= uniforms[:, None] * running[:, -1:]).sum(axis=1)
    return passed


def _on_cpu(params: LawParams) -> LawParams:
    return replace(
        params,
        temperature=params.temperature.cpu(),
        top_k=params.top_k.cpu(),
        top_p=params.top_p.cpu(),
        min_p=params.min_p.cpu(),
    )


def _powers(order: int, vocab_size: int) -> Integers:
    """What each digit of a context is worth, [order - 1]; contexts must fit in 63 bits."""
    order, vocab_size = integer("order", order, 1), integer("vocab_size", vocab_size, 1)
    if (vocab_size + 1) ** (order - 1) >= 2**63:
        most = max(n for n in range(1, 64) if (vocab_size + 1) ** (n - 1) < 2**63)
        raise InvalidArgument(f"order={order}: with {vocab_size} tokens a table can have order {most} at most")
    return np.array([(vocab_size + 1) ** i for i in range(order - 1)], dtype=np.int64)


def _pack(digits: Integers, powers: Integers) -> Integers:
    """Digits [R, order - 1] -> the contexts of length 0, 1, ... as numbers, [R, order]."""
    contexts = np.zeros((len(digits), len(powers) + 1), np.int64)
    np.cumsum(digits * powers, axis=1, out=contexts[:, 1:])
    return contexts


def _positions(sequences: Iterable[Sequence[int]], order: int, vocab_size: int) -> tuple[Integers, Integers]:
    """Every position of every text: the digits before it [T, order - 1] and the token there [T]."""
    texts = [_ids(text, place) for place, text in enumerate(sequences)]
    following = np.concatenate([np.empty(0, np.int64), *texts])
    if not len(following):
        raise InvalidArgument("sequences hold no tokens: an n-gram table needs text to count")
    low, high = int(following.min()), int(following.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidArgument(f"sequences hold token {wrong}: ids must be in 0 to {vocab_size - 1} (vocab_size - 1)")
    digits = np.empty((len(following), order - 1), np.int64)
    for i in range(1, order):
        digits[:, i - 1] = np.concatenate([np.pad(text + 1, (i, 0))[: len(text)] for text in texts])
    return digits, following


def _ids(text: Sequence[int], place: int) -> Integers:
    """One text's token ids. Numpy would cut fractions off, and read digits."""
    try:
        ids = np.asarray(text)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        refuse(f"sequences[{place}]", text, "must be a list of token ids")
    return ids.astype(np.int64)


def _count_level(
    context: Integers, following: Integers, vocab_size: int, min_count: int, max_continuations: int
) -> tuple[Integers, Integers, Integers]:
    """Contexts, continuations and counts, [M] each, the best continuations of each context in order."""
    contexts, index = np.unique(context, return_inverse=True)
    pairs, counts = np.unique(index * vocab_size + following, return_counts=True)
    pairs, counts = pairs[counts >= min_count], counts[counts >= min_count]
    best = np.lexsort((pairs, -counts, pairs // vocab_size))
    owner = pairs[best] // vocab_size
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    best = best[rank < max_continuations]
    return contexts[pairs[best] // vocab_size], pairs[best] % vocab_size, counts[best]


def _merge(levels: Sequence[tuple[Integers, Integers, Integers]]) -> Counts:
    """One table of the contexts of all lengths."""
    context, tokens, counts = (np.concatenate(part) for part in zip(*levels, strict=True))
    by_context = context.argsort(kind="stable")
    contexts, starts = np.unique(context[by_context], return_index=True)
    starts = np.append(starts, len(context))
    return Counts(contexts, starts, tokens[by_context].astype(np.int32), counts[by_context].astype(np.int32))


def _read(path: Path) -> tuple[dict[str, str], Counts]:
    """Metadata and tensors of a table's file, checked."""
    if not path.is_file():
        raise ModelNotFound(
            f"{path}: no such file; make one with `forerun train ngram`, or NgramTable.count(...).save(path)"
        )
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise InvalidArgument(
                    f"{path}: format {about.get('format')!r} is not {FORMAT!r}; use a file written by NgramTable.save"
                )
            counts = Counts(*(file.get_tensor(name) for name in ("contexts", "starts", "tokens", "counts")))
            powers = _powers(int(about["order"]), int(about["vocab_size"]))
            _check_counts(counts, len(powers) + 1, int(about["vocab_size"]))
    except (SafetensorError, KeyError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path}: damaged n-gram table ({error}); count and save it again") from error
    return about, counts


def _check_counts(counts: Counts, order: int, vocab_size: int) -> None:
    """Anything that would make a look-up go astray; ValueError says which."""
    contexts, starts, tokens = counts.contexts, counts.starts, counts.tokens
    kinds = [str(numbers.dtype) for numbers in (contexts, starts, tokens, counts.counts)]
    checks = {
        "numbers are integers": kinds == ["int64", "int64", "int32", "int32"],
        "contexts ascend from 0": contexts[0] == 0 and bool((np.diff(contexts) > 0).all()),
        "contexts fit the order": contexts[-1] < (vocab_size + 1) ** (order - 1),
        "one start a context": len(starts) == len(contexts) + 1 and starts[0] == 0 and starts[-1] == len(tokens),
        "every context has continuations": bool((np.diff(starts) > 0).all()),
        "one count a token": len(tokens) == len(counts.counts) and bool((counts.counts > 0).all()),
        "tokens are in the vocabulary": bool(((tokens >= 0) & (tokens < vocab_size)).all()),
    }
    for what, holds in checks.items():
        if not holds:
            raise ValueError(f"not true: {what}")
