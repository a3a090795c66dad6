"""Continuations counted beforehand from text, kept in one file and looked up by binary search."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from forerun.arguments import integer, refuse
from forerun.drafters.base import Drafter
from forerun.drafters.compatible import DIGEST, vocabulary_digest
from forerun.drafters.device_ngram import DeviceNgrams, why_not
from forerun.errors import ForerunWarning, InvalidArgument, ModelNotFound, TokenizerMismatch
from forerun.files import write_whole
from forerun.math.laws import SparseLaw
from forerun.math.ngram import Ngrams, digits_of, draft_ngrams, find, pack
from forerun.math.transfer import int64
from forerun.models.scorer import Scorer
from forerun.types import Draft, DraftContext

FORMAT = "forerun.ngram.1"

Integers = NDArray[np.integer]
PARTS = "contexts", "starts", "tokens", "counts"


class NgramTable(Drafter):
    """Drafts from n-gram counts, backing off from the longest context that was seen to the plain frequency of tokens.

    Only the most frequent continuations of a context are kept, and drafts are drawn from exactly those: q is a sparse
    law, shaped by the row's own temperature, top-k, top-p and min-p (a greedy row gets the most frequent one).
    Evidence is the number of tokens of context behind the first drafted token.

    Rounds that a GPU runs by itself draft from a copy on the device; those of the host are drafted for by numpy.
    """

    fills_drafts = True

    def __init__(self, table: Ngrams, *, tokenizer: str | None = None) -> None:
        self.table, self.tokenizer = table, tokenizer
        self.order, self.vocab_size = table.order, table.vocab_size
        self._largest = int(table.tokens.max())
        self._has_warned = False

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
        for length, context in enumerate(pack(digits, powers).T):
            # Near the start of a text a context may be shorter than `length`: that one is counted at its own level.
            full = digits[:, length - 1] > 0 if length else slice(None)
            least = min_count if length else 1
            levels.append(_count_level(context[full], following[full], vocab_size, least, max_continuations))
        return cls(_table(_merge(levels), order, vocab_size), tokenizer=tokenizer)

    def save(self, path: str | Path) -> None:
        """Write the table as one safetensors file."""
        about = {"format": FORMAT, "order": str(self.order), "vocab_size": str(self.vocab_size)}
        if self.tokenizer is not None:
            about["tokenizer"] = self.tokenizer
        tensors = {name: getattr(self.table, name).numpy() for name in PARTS}
        write_whole(Path(path), lambda beside: save_file(tensors, beside, metadata=about))

    @classmethod
    def load(cls, path: str | Path, *, tokenizer: str | None = None) -> NgramTable:
        """Read what `save` wrote. Where both the file and the caller name a tokenizer, they must agree."""
        about, arrays = _read(Path(path))
        stored = about.get("tokenizer")
        if tokenizer is not None and stored is not None and stored != tokenizer:
            raise TokenizerMismatch(
                f"{path} was counted with tokenizer {stored!r}, not {tokenizer!r}: count a table with the latter"
            )
        return cls(_table(arrays, int(about["order"]), int(about["vocab_size"])), tokenizer=stored)

    def bind(self, target: Scorer, tokenizer: Any = None) -> None:
        """Refuse a target with other ids before anything is decoded: in a chain one draft that fails ends them all."""
        self._check_target(target.vocab_size)
        known, stored = vocabulary_digest(tokenizer), self.tokenizer
        if known is not None and stored is not None and stored.startswith(DIGEST) and stored != known:
            raise TokenizerMismatch(
                "the n-gram table was counted with another vocabulary than the target's: count one from text of the "
                "target's tokenizer with `forerun train ngram`"
            )
        if target.device.type == "cuda" and (reason := why_not(self.table, target.device)) and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{reason} is drafted from on the host, slower", ForerunWarning, stacklevel=2)

    def device_draft(self) -> DeviceNgrams:
        return DeviceNgrams(self.table)

    def propose(self, context: DraftContext) -> Draft:
        """Draw as many tokens as each row may have, one position after the other."""
        self._check_target(context.vocab_size)
        recent, known = self._recent(context.histories)
        width = max(context.max_lengths, default=0)
        tokens, ids, probs = draft_ngrams(self.table, recent, known, context.params, context.uniforms[:, :width])
        on = context.device
        return Draft(
            tokens=tokens.to(on),
            lengths=torch.tensor(context.max_lengths, dtype=torch.int64, device=on),
            law=SparseLaw(ids.to(on), probs.to(on), context.vocab_size),
            deterministic=context.params.all_greedy,
            evidence=tuple(find(self.table, digits_of(self.table, recent, known))[1].tolist()),
        )

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""

    def _check_target(self, vocab_size: int) -> None:
        if self._largest >= vocab_size:
            raise TokenizerMismatch(
                f"the n-gram table holds token {self._largest}, the target's vocabulary ends at {vocab_size - 1}: "
                "count a table from text of the target's tokenizer"
            )

    def _recent(self, histories: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The last tokens of each row that a context may have, [B, order - 1], and how many of them there are."""
        width = self.order - 1
        last = [list(history[max(len(history) - width, 0) :]) for history in histories]
        padded = [[0] * (width - len(tokens)) + tokens for tokens in last]
        return torch.tensor(padded, dtype=torch.int64).view(len(last), width), int64(map(len, last))


def _powers(order: int, vocab_size: int) -> Integers:
    """What each digit of a context is worth, [order - 1]; contexts must fit in 63 bits."""
    order, vocab_size = integer("order", order, 1), integer("vocab_size", vocab_size, 1)
    if (vocab_size + 1) ** (order - 1) >= 2**63:
        most = max(n for n in range(1, 64) if (vocab_size + 1) ** (n - 1) < 2**63)
        raise InvalidArgument(f"order={order}: with {vocab_size} tokens a table can have order {most} at most")
    return np.array([(vocab_size + 1) ** i for i in range(order - 1)], dtype=np.int64)


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


def _merge(levels: Sequence[tuple[Integers, Integers, Integers]]) -> list[Integers]:
    """One table of the contexts of all lengths: arrays of `PARTS`."""
    context, tokens, counts = (np.concatenate(part) for part in zip(*levels, strict=True))
    by_context = context.argsort(kind="stable")
    contexts, starts = np.unique(context[by_context], return_index=True)
    starts = np.append(starts, len(context))
    return [contexts, starts, tokens[by_context].astype(np.int32), counts[by_context].astype(np.int32)]


def _table(arrays: Sequence[Integers], order: int, vocab_size: int) -> Ngrams:
    """From arrays of `PARTS`."""
    contexts, starts, tokens, counts = map(torch.from_numpy, arrays)
    powers = int64((vocab_size + 1) ** i for i in range(order))
    return Ngrams(contexts, starts, tokens, counts, powers, order, vocab_size, most=int(starts.diff().max()))


def _read(path: Path) -> tuple[dict[str, str], list[Integers]]:
    """Metadata and arrays of a table's file, checked."""
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
            arrays = [file.get_tensor(name) for name in PARTS]
            powers = _powers(int(about["order"]), int(about["vocab_size"]))
            _check(arrays, len(powers) + 1, int(about["vocab_size"]))
    except (SafetensorError, KeyError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{path}: damaged n-gram table ({error}); count and save it again") from error
    return about, arrays


def _check(arrays: Sequence[Integers], order: int, vocab_size: int) -> None:
    """Anything that would make a look-up go astray; ValueError says which."""
    contexts, starts, tokens, counts = arrays
    kinds = [str(numbers.dtype) for numbers in arrays]
    checks = {
        "numbers are integers": kinds == ["int64", "int64", "int32", "int32"],
        "contexts ascend from 0": contexts[0] == 0 and bool((np.diff(contexts) > 0).all()),
        "contexts fit the order": contexts[-1] < (vocab_size + 1) ** (order - 1),
        "one start a context": len(starts) == len(contexts) + 1 and starts[0] == 0 and starts[-1] == len(tokens),
        "every context has continuations": bool((np.diff(starts) > 0).all()),
        "one count a token": len(tokens) == len(counts) and bool((counts > 0).all()),
        "the most frequent come first": bool(np.isin(np.flatnonzero(np.diff(counts) > 0) + 1, starts).all()),
        "tokens are in the vocabulary": bool(((tokens >= 0) & (tokens < vocab_size)).all()),
    }
    for what, holds in checks.items():
        if not holds:
            raise ValueError(f"not true: {what}")
