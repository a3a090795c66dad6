"""What speculative decoding should gain: the formulas of Leviathan et al. (arXiv:2211.17192) and their general form.

alpha is the chance that a draft token is kept where it was reached, gamma the draft length, c the time of one draft
step over that of one target step, c_hat the same for arithmetic operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from forerun.errors import InvalidArgument


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a token drawn from q is kept: the overlap of the laws, 1 - TV. [..., V] each -> [...]."""
    return p.minimum(q).sum(dim=-1)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens gained per round: (1 - alpha^(gamma + 1)) / (1 - alpha), gamma + 1 at alpha = 1."""
    if not 0 <= alpha <= 1:
        raise InvalidArgument(f"alpha={alpha!r}: an acceptance rate must be in [0, 1]")
    if gamma < 0:
        raise InvalidArgument(f"gamma={gamma!r}: a draft length must be >= 0; 0 is plain decoding")
    return sum(alpha**i for i in range(gamma + 1))  # the sum has no hole at alpha = 1


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """How many times faster than one token a target step."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """How many times more arithmetic per token than plain decoding."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_draft_length(alpha: float, c: float, max_length: int) -> int:
    """The draft length of the greatest walltime factor, the shortest among equals; 0 where drafting does not pay."""
    return best_length([alpha**i for i in range(1, max_length + 1)], lambda length: length * c + 1)


def best_length(survival: Sequence[float], cost: Callable[[int], float]) -> int:
    """The draft length k of most tokens per cost: (1 + survival_1 + ... + survival_k) / cost(k), for measured curves.

    `survival[i - 1]` is the chance that token i and all before it are kept; `cost(k)` is that of a round of k drafted.
    """
    gains = list(accumulate(survival, initial=1.0))
    rates = [gain / cost(length) for length, gain in enumerate(gains)]
    return rates.index(max(rates))
