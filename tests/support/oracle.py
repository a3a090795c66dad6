"""What tests of losslessness share: a pair of Markov models whose joint law is known, and goodness-of-fit checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.math.laws import LogitLaw, draw
from forerun.types import Keys, LawParams


@dataclass(frozen=True)
class MarkovPair:
    """A target and a draft model. Both laws depend on the previous token and on the position, so that a row off by one,
    in either direction, is another law.
    """

    target: Tensor  # [L, V, V] float64: position (modulo L), previous token, next token
    draft: Tensor  # [L, V, V]

    @classmethod
    def random(cls, vocab: int, positions: int = 4, seed: int = 0, concentration: float = 0.5) -> MarkovPair:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            dirichlet = torch.distributions.Dirichlet(torch.full((vocab,), concentration, dtype=torch.float64))
            return cls(dirichlet.sample((positions, vocab)), dirichlet.sample((positions, vocab)))

    @property
    def vocab(self) -> int:
        return int(self.target.shape[-1])

    def target_laws(self, tokens: Tensor, start: int = 0) -> Tensor:
        """The target's law after `start` and each token of a path: [B, K] -> [B, K + 1, V]."""
        return self._along(self.target, tokens, start)

    def draft_laws(self, tokens: Tensor, start: int = 0) -> Tensor:
        """The draft's law of each token of a path: [B, K] -> [B, K, V]."""
        return self._along(self.draft, tokens, start)[:, : tokens.shape[1]]

    def sample_draft(self, u: Tensor, start: int = 0) -> Tensor:
        """Paths drawn from the draft model with the library's own sampler: uniforms [B, K] -> tokens [B, K]."""
        previous = torch.full((u.shape[0],), start)
        tokens = []
        for i in range(u.shape[1]):
            previous = draw(self.draft[i % len(self.draft)][previous], u[:, i])
            tokens.append(previous)
        return torch.stack(tokens, dim=1)

    def joint(self, length: int, start: int = 0) -> Tensor:
        """The target's joint law of its first `length` tokens: [V, ..., V]."""
        paths = all_paths(self.vocab, length)
        laws = self.target_laws(paths, start)[:, :length]
        mass = laws.gather(-1, paths.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
        return mass.reshape([self.vocab] * length)

    @staticmethod
    def _along(table: Tensor, tokens: Tensor, start: int) -> Tensor:
        context = torch.nn.functional.pad(tokens, (1, 0), value=start)
        position = torch.arange(context.shape[1]) % len(table)
        return table[position, context]


def all_paths(vocab: int, length: int) -> Tensor:
    """Every sequence of tokens, in lexicographic order: [V ** length, length] int64."""
    if length == 0:
        return torch.zeros(1, 0, dtype=torch.int64)
    return torch.cartesian_prod(*[torch.arange(vocab)] * length).reshape(-1, length)


def law_of(probabilities: Tensor, params: SamplingParams | None = None) -> LogitLaw:
    """The library's law with these probabilities, [B, K, V]: the logarithm as logits, plain sampling by default."""
    one = LawParams.stack([params or SamplingParams(temperature=1.0)])
    return LogitLaw.dense(probabilities.log(), one.select(torch.zeros(probabilities.shape[0], dtype=torch.int64)))


def keys_for(rows: int, seed: int = 0, round_: int = 0, position: int = 0) -> Keys:
    """Keys of `rows` requests of one seed."""
    full = torch.full((rows,), 0)
    return Keys(seed=full + seed, request_id=torch.arange(rows), round=full + round_, position=full + position)


def counts_of(tokens: Tensor, vocab: int) -> Tensor:
    """How often each path occurs: [N, K] -> [V ** K] float64."""
    code = torch.zeros(tokens.shape[0], dtype=torch.int64)
    for column in tokens.unbind(dim=1):
        code = code * vocab + column
    return torch.bincount(code, minlength=vocab ** tokens.shape[1]).double()


def chi_square_ok(counts: Tensor, expected: Tensor) -> bool:
    """Pearson's test at six standard deviations. Cells expected less than 5 times are merged; impossible ones fail."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if bool((counts[expected == 0] > 0).any()):
        return False
    small = expected < 5
    observed = torch.cat((counts[~small], counts[small].sum().reshape(1)))
    wanted = torch.cat((expected[~small], expected[small].sum().reshape(1)))
    if wanted[-1] < 5 and len(wanted) > 1:  # what is left over joins the smallest cell
        smallest = int(wanted[:-1].argmin())
        observed[smallest] += observed[-1]
        wanted[smallest] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    if freedom == 0:
        return True
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return bool(statistic < freedom + 6 * (2 * freedom) ** 0.5)


def total_variation(counts: Tensor, expected: Tensor) -> float:
    """Distance between two laws given by unnormalised weights."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    return float((counts / counts.sum() - expected / expected.sum()).abs().sum() / 2)


def fits(counts: Tensor, law: Tensor) -> bool:
    """Whether counts look drawn from `law` (need not be normalised): chi-square and total variation."""
    number = counts.sum()
    expected = law.double() / law.sum() * number
    close = total_variation(counts, expected) < 4 * (counts.numel() / float(number)) ** 0.5
    return chi_square_ok(counts, expected) and close
