"""Probability laws: what temperature, top-k, top-p and min-p make of logits, and the forms in which a law is held.

Work is in float64 where the logits are, else in float32. Sums run over tiles of fixed size, so that the bits of a row
do not depend on how many rows are beside it, and a kernel can add up in the same order.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.math.precision import working
from forerun.math.transfer import may_ask
from forerun.types import Law, LawParams

TILE = 1024
# What a sampler may keep of each row it drew from, so that verification need not read the row again: the peak (0 where
# logits are used as they are), the log of the mass after warping, the threshold, the most likely place (-1 for a row
# that was sampled), log q of what it drew.
KEPT = 5
TOP_P_WIDTH = 256  # the nucleus is looked for among that many tokens first, then among eight times as many, and so on


def warp(logits: Tensor, params: LawParams) -> Tensor:
    """Unnormalised log-weights [N, V] after temperature, top-k, top-p and min-p, in that order; -inf where cut.

    Each truncation is a threshold on the weight: a token tied with the last one kept is kept, so that the law does not
    depend on ids. A greedy row is one-hot, at the lowest id among the most likely. The most likely token is never cut.
    """
    weights = working(logits)
    if params.all_greedy:
        return one_hot_log(most_likely(weights), weights)
    sampled = params.temperature > 0
    if params.any_scaled:
        weights = _scale(weights, params.temperature)
    if params.any_top_k:
        weights = _cut(weights, _top_k_threshold(weights, params.top_k * sampled))
    if params.any_top_p:
        weights = _cut(weights, _top_p_threshold(weights, torch.where(sampled, params.top_p, 1.0)))
    if params.any_min_p:
        weights = _cut(weights, weights.amax(dim=-1) + params.min_p.log().to(weights.dtype))
    if params.any_greedy:
        weights = torch.where(sampled.unsqueeze(-1), weights, one_hot_log(most_likely(working(logits)), weights))
    return weights


def most_likely(logits: Tensor) -> Tensor:
    """The lowest id among the best of each row, NaN above all: [N, V] -> [N].

    On a CPU by NumPy: torch takes six times as long for eight rows, and its threads wait for each other.
    """
    is_plain = type(logits) is Tensor and logits.dtype in (torch.float32, torch.float64) and not logits.requires_grad
    if is_plain and logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def one_hot_log(index: Tensor, like: Tensor) -> Tensor:
    """Log-weights of point masses: 0 at `index` [N], -inf elsewhere, shaped like `like` [N, V]."""
    return torch.full_like(like, -torch.inf).scatter_(-1, index.unsqueeze(-1), 0.0)


def _cut(weights: Tensor, threshold: Tensor) -> Tensor:
    return weights.masked_fill(weights < threshold.unsqueeze(-1), -torch.inf)


def _scale(weights: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature, the row's peak moved to 0 first so that tiny temperatures stay finite.

    Rows at temperature 1 (and greedy ones, dealt with later) keep their bits.
    """
    divisor, plain = divisor_of(temperature, weights.dtype)
    shift = weights.amax(dim=-1).masked_fill(plain, 0.0)
    return (weights - shift.unsqueeze(-1)) / divisor.unsqueeze(-1)


def divisor_of(temperature: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What logits are divided by, and whether they are used as they are (temperature 1, or greedy): [N] each."""
    limits = torch.finfo(dtype)
    plain = (temperature == 1) | (temperature == 0)
    return torch.where(plain, 1.0, temperature).clamp(limits.tiny, limits.max).to(dtype), plain


def _top_k_threshold(weights: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest weight of each row; -inf where k is 0 or covers the vocabulary."""
    active = (top_k > 0) & (top_k < weights.shape[-1])
    top_k = top_k * active
    width = max(int(top_k.max()), 1) if may_ask(weights) else weights.shape[-1]
    return _entry(_largest(weights, width), top_k).masked_fill(~active, -torch.inf)


def _top_p_threshold(weights: Tensor, top_p: Tensor) -> Tensor:
    """The weight at which the most likely tokens first hold a mass of `top_p`; -inf where it is 1 or more."""
    active = top_p < 1
    log_mass = log_sum_exp(weights)
    width = TOP_P_WIDTH if may_ask(weights) else weights.shape[-1]
    while True:
        largest = _largest(weights, min(width, weights.shape[-1]))
        held = (largest.double() - log_mass.double().unsqueeze(-1)).exp().cumsum(dim=-1)
        if width >= weights.shape[-1] or not bool((active & (held[:, -1] < top_p)).any()):
            break
        width *= 8
    num_kept = 1 + (held[:, :-1] < top_p.unsqueeze(-1)).sum(dim=-1)
    return _entry(largest, num_kept).masked_fill(~active, -torch.inf)


def _largest(weights: Tensor, number: int) -> Tensor:
    """The largest weights of each row, in order: [N, number]."""
    if number == weights.shape[-1]:
        return weights.sort(dim=-1, descending=True).values
    return weights.topk(number, dim=-1).values


def _entry(sorted_weights: Tensor, count: Tensor) -> Tensor:
    """The last of the `count` [N] largest weights."""
    return sorted_weights.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)


def log_sum_exp(weights: Tensor) -> Tensor:
    """Log of the total mass of log-weights [N, V] -> [N]. NaN where a row holds NaN or +inf, or nothing but -inf."""
    peak = weights.amax(dim=-1)
    mass = tile_sums((weights - peak.unsqueeze(-1)).exp()).sum(dim=-1)
    return peak + mass.log().to(weights.dtype)


def tile_sums(weights: Tensor) -> Tensor:
    """Sums over tiles of TILE entries, the last one possibly shorter: [N, V] -> [N, ceil(V / TILE)] float64."""
    whole = weights.shape[-1] // TILE * TILE
    sums = weights[:, :whole].reshape(weights.shape[0], whole // TILE, TILE).sum(dim=-1, dtype=torch.float64)
    if whole == weights.shape[-1]:
        return sums
    return torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)), dim=-1)


def _in_range(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Ids that can be looked up among `size` entries, and which of them are the tokens' own."""
    ids = tokens.clamp(0, size - 1)
    return ids, ids == tokens


def normalised(weights: Tensor) -> Tensor:
    """Weights [B, V] >= 0 with a sum of 1; a row without any weight stays zero."""
    mass = tile_sums(weights).sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, weights / mass.to(weights.dtype), 0.0)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: from unnormalised weights [B, V] >= 0 and uniforms [B] in [0, 1), token ids [B] int64.

    First the tile, then the token inside it, accumulated in float64. A token of weight 0 is never returned; where
    rounding carries u past the end, the last token of positive weight is. Tiles that hold NaN or infinity count as
    empty, and a row without any positive weight gives 0: both only happen to rows that are flagged as not finite.
    """
    sums = tile_sums(weights).nan_to_num(0.0, posinf=0.0)
    tile, rest = _pick(sums, u * sums.sum(dim=-1))
    column = tile.unsqueeze(-1) * TILE + torch.arange(min(TILE, weights.shape[-1]), device=weights.device)
    inside = weights.gather(-1, column.clamp(max=weights.shape[-1] - 1)).double()
    inside = inside.masked_fill(column >= weights.shape[-1], 0.0)
    return tile * TILE + _pick(inside, rest)[0]


def _pick(weights: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry at which the running sum of `weights` [B, M] passes `goal` [B], and what of the goal is left."""
    running = weights.cumsum(dim=-1)
    column = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, column, 0).amax(dim=-1)
    index = torch.minimum((running <= goal.unsqueeze(-1)).sum(dim=-1), last).unsqueeze(-1)
    before = running.gather(-1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0.0)
    return index.squeeze(-1), goal - before.squeeze(-1)


class LogitLaw:
    """The law that logits and sampling parameters define, held as log-weights and one normaliser a position.

    `index[b, i]` is the row of `logits` that holds position i of batch row b; past a row's length it may hold anything.
    `owner[n]` is the batch row whose parameters shape row n of `logits`. With `vocab_size`, ids at or past it are cut
    before anything else, and the law is 0 on ids the logits do not have.
    """

    def __init__(
        self,
        logits: Tensor,  # [N, V]
        index: Tensor,  # [B, K] int64
        params: LawParams,  # B rows
        owner: Tensor,  # [N] int64
        vocab_size: int | None = None,
        kept: Tensor | None = None,  # [N, 5] float32, see KEPT
    ) -> None:
        self.vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
        self.logits = logits[:, : self.vocab_size]  # as the model gave them
        self.index = index
        self.params = params
        self.owner = owner
        self.kept = kept

    @classmethod
    def dense(cls, logits: Tensor, params: LawParams, vocab_size: int | None = None) -> LogitLaw:
        """From logits [B, K, V], as many positions in every row."""
        rows, width, vocab = logits.shape
        index = torch.arange(rows * width, device=logits.device)
        owner = index // max(width, 1)
        return cls(logits.reshape(rows * width, vocab), index.reshape(rows, width), params, owner, vocab_size)

    def of(self, tokens: Tensor) -> Tensor:
        if self.params.all_greedy:
            return self._best.of(tokens)
        rows = self._index[:, : tokens.shape[1]]
        ids, known = _in_range(tokens, self.logits.shape[-1])
        weights = self._log_weights[rows, ids]
        return (weights - self._log_mass[rows]).exp() * known

    def at(self, position: Tensor) -> Tensor:
        if self.params.all_greedy:
            return self._best.at(position)
        rows = self._row(position)
        return self._widened((self._log_weights[rows] - self._log_mass[rows].unsqueeze(-1)).exp(), 0.0)

    def draw(self, position: Tensor, u: Tensor) -> Tensor:
        """One token a row from the law at `position`: [B] int64 and [B] uniforms -> [B] int64."""
        if self.params.all_greedy:
            return self._best.draw(position, u)
        return draw(self.at(position), u)

    def logits_of(self, tokens: Tensor) -> Tensor:
        """One token a position, before anything is normalised: logits over the temperature, -inf where cut. [B, K]"""
        rows = self._index[:, : tokens.shape[1]]
        ids, known = _in_range(tokens, self.logits.shape[-1])
        return self._cut_logits[rows, ids].masked_fill(~known, -torch.inf)

    def logits_at(self, position: Tensor) -> Tensor:
        """The same for the whole vocabulary at one position a row: [B] int64 -> [B, V]."""
        return self._widened(self._cut_logits[self._row(position)], -torch.inf)

    @property
    def greedy(self) -> Tensor:
        """Rows whose law is one-hot by their temperature: [B] bool."""
        return self.params.temperature == 0

    @cached_property
    def usable(self) -> Tensor:
        """Where the logits hold no NaN or +inf and allow some token: [B, K] bool; the peak is finite there alone."""
        return self.logits.gather(-1, self._most_likely.unsqueeze(-1)).squeeze(-1).isfinite()[self._index]

    def _row(self, position: Tensor) -> Tensor:
        last = self._index.shape[1] - 1
        return self._index.gather(1, position.clamp(0, last).unsqueeze(-1)).squeeze(-1)

    def _widened(self, values: Tensor, fill: float) -> Tensor:
        """[B, ids of the logits] -> [B, V]"""
        missing = self.vocab_size - values.shape[-1]
        return pad(values, (0, missing), value=fill) if missing else values

    @cached_property
    def _index(self) -> Tensor:  # [B, K] what is past a row's length may be read, and then not used
        return self.index.clamp(0, max(self.logits.shape[0] - 1, 0))

    @cached_property
    def _log_weights(self) -> Tensor:  # [N, V]
        return warp(self.logits, self.params.select(self.owner))

    @cached_property
    def _cut_logits(self) -> Tensor:  # [N, V]; a greedy row keeps its best logit
        if not self.params.any_scaled and not self.params.any_greedy:
            return self._log_weights
        divisor, _ = divisor_of(self.params.temperature[self.owner], self._log_weights.dtype)
        scaled = working(self.logits) / divisor.unsqueeze(-1)
        return scaled.masked_fill(self._log_weights == -torch.inf, -torch.inf)

    @cached_property
    def _log_mass(self) -> Tensor:  # [N]
        return log_sum_exp(self._log_weights)

    @cached_property
    def _best(self) -> PointMass:  # the law where all rows are greedy, without a tensor of size [N, V]
        return PointMass(self._most_likely[self._index], self.vocab_size, working(self.logits[:0]).dtype)

    @cached_property
    def _most_likely(self) -> Tensor:  # [N]
        return most_likely(self.logits)


class SparseLaw:
    """A law on few tokens: those named have the probabilities given, all others 0. Padding entries carry 0."""

    def __init__(self, ids: Tensor, probs: Tensor, vocab_size: int) -> None:
        self.ids = ids  # [B, K, S] int64
        self.probs = probs  # [B, K, S]
        self.vocab_size = vocab_size

    def of(self, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        return ((self.ids[:, :width] == tokens.unsqueeze(-1)) * self.probs[:, :width]).sum(dim=-1)

    def at(self, position: Tensor) -> Tensor:
        where = position.clamp(0, self.ids.shape[1] - 1).reshape(-1, 1, 1).expand(-1, 1, self.ids.shape[2])
        ids = self.ids.gather(1, where).squeeze(1).clamp(0, self.vocab_size - 1)
        law = self.probs.new_zeros(ids.shape[0], self.vocab_size)
        return law.scatter_add_(1, ids, self.probs.gather(1, where).squeeze(1))


class TableLaw:
    """A law that is written down: the probability of every token at every position."""

    def __init__(self, probs: Tensor, logits: Tensor | None = None) -> None:
        self.probs = probs  # [B, K, V]
        self._logits = logits  # [B, K, V] unnormalised, where there are any

    def of(self, tokens: Tensor) -> Tensor:
        return _entries(self.probs, tokens)

    def at(self, position: Tensor) -> Tensor:
        return _positions(self.probs, position)

    def logits_of(self, tokens: Tensor) -> Tensor:
        return self.of(tokens).log() if self._logits is None else _entries(self._logits, tokens)

    def logits_at(self, position: Tensor) -> Tensor:
        return self.at(position).log() if self._logits is None else _positions(self._logits, position)


def _entries(table: Tensor, tokens: Tensor) -> Tensor:
    """[B, K, V] and [B, W] tokens of the first W positions -> [B, W]."""
    return table[:, : tokens.shape[1]].gather(2, tokens.clamp(0, table.shape[2] - 1).unsqueeze(-1)).squeeze(-1)


def _positions(table: Tensor, position: Tensor) -> Tensor:
    """[B, K, V] and [B] -> [B, V]."""
    return table[torch.arange(len(table), device=table.device), position.clamp(0, table.shape[1] - 1)]


class PointMass:
    """The law of a draft that was not drawn: prompt lookup, n-grams, a greedy draft model."""

    def __init__(self, tokens: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.tokens = tokens if tokens.dtype == torch.int64 else tokens.long()  # [B, K]
        self.vocab_size = vocab_size
        self.dtype = dtype

    def of(self, tokens: Tensor) -> Tensor:
        return (tokens == self.tokens[:, : tokens.shape[1]]).to(self.dtype)

    def draw(self, position: Tensor, u: Tensor) -> Tensor:
        """The only token there is, whatever the uniform."""
        return self.tokens.gather(1, position.unsqueeze(-1)).squeeze(-1)

    def at(self, position: Tensor) -> Tensor:
        where = position.clamp(0, self.tokens.shape[1] - 1).unsqueeze(-1)
        token = self.tokens.gather(1, where).clamp(0, self.vocab_size - 1)
        law = torch.zeros(token.shape[0], self.vocab_size, dtype=self.dtype, device=token.device)
        return law.scatter_(1, token, 1.0)


class MixedLaw:
    """Each row has a law of its own kind: row b follows `laws[choice[b]]`."""

    def __init__(self, choice: Tensor, laws: tuple[Law, ...]) -> None:
        self.choice = choice  # [B] int64
        self.laws = laws

    def of(self, tokens: Tensor) -> Tensor:
        return self._select([law.of(tokens) for law in self.laws])

    def at(self, position: Tensor) -> Tensor:
        return self._select([law.at(position) for law in self.laws])

    def logits_of(self, tokens: Tensor) -> Tensor:
        return self._select([logits_of(law, tokens) for law in self.laws])

    def logits_at(self, position: Tensor) -> Tensor:
        return self._select([logits_at(law, position) for law in self.laws])

    def _select(self, answers: list[Tensor]) -> Tensor:
        chosen = answers[0]
        for i, answer in enumerate(answers[1:], start=1):
            chosen = torch.where((self.choice == i).unsqueeze(-1), answer, chosen)
        return chosen


class ReducedLaw:
    """A law on a part of the vocabulary: `law` is about places in `ids`, and all other tokens get 0."""

    def __init__(self, law: Law, ids: Tensor, vocab_size: int) -> None:
        self.law = law
        self.ids = ids  # [Vd] int64, ascending
        self.vocab_size = vocab_size

    @cached_property
    def places(self) -> Tensor:
        """[V] int32: where each token lies in `ids`, -1 for those that are not there."""
        places = torch.full((self.vocab_size,), -1, dtype=torch.int32, device=self.ids.device)
        return places.index_copy_(0, self.ids, torch.arange(len(self.ids), dtype=torch.int32, device=self.ids.device))

    def of(self, tokens: Tensor) -> Tensor:
        place = self._place(tokens)
        return self.law.of(place) * (self.ids[place] == tokens)

    def at(self, position: Tensor) -> Tensor:
        law = self.law.at(position)
        return law.new_zeros(law.shape[0], self.vocab_size).index_copy_(1, self.ids, law)

    def logits_of(self, tokens: Tensor) -> Tensor:
        place = self._place(tokens)
        return logits_of(self.law, place).masked_fill(self.ids[place] != tokens, -torch.inf)

    def logits_at(self, position: Tensor) -> Tensor:
        logits = logits_at(self.law, position)
        return logits.new_full((logits.shape[0], self.vocab_size), -torch.inf).index_copy_(1, self.ids, logits)

    def _place(self, tokens: Tensor) -> Tensor:
        return torch.searchsorted(self.ids, tokens.contiguous()).clamp(max=len(self.ids) - 1)


def logits_of(law: Law, tokens: Tensor) -> Tensor:
    """Unnormalised logits of one token a position: [B, K]. A law that has none is known by its log-probabilities."""
    method = getattr(law, "logits_of", None)
    return law.of(tokens).log() if method is None else method(tokens)


def logits_at(law: Law, position: Tensor) -> Tensor:
    """Unnormalised logits at one position a row: [B] -> [B, V]; see `logits_of`."""
    method = getattr(law, "logits_at", None)
    return law.at(position).log() if method is None else method(position)
