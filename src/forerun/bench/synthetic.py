"""Pairs of models with random weights, full compute cost and an acceptance rate that is dialled in.

Every block does all its arithmetic and adds next to nothing to the residual stream, so the final state still holds the
code of the last token; both heads read the next token's law from it, the draft's a little wrongly. Speed depends on the
sizes, acceptance on the noise alone, and no weights have to be fetched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.decoder import SpeculativeDecoder
from forerun.errors import InvalidArgument
from forerun.math.theory import acceptance

PREFIX = "synthetic:"
DEFAULT_ALPHA = 0.87  # a good draft model on easy text: 5.2 tokens a round at 7 drafted
QUIET = 1e-5  # standard deviation of the weights that write to the residual stream, 0.02 elsewhere
CONTEXTS = 1024  # tokens over which the noise is chosen: their mean acceptance is known to about 0.005
STEPS = 8  # of the bigram chain before them: text visits other tokens than chance does
HALVINGS = 24
EXAMPLE = "synthetic:6.7b+0.33b@0.87"


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a Llama."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    vocab: int
    code: int  # dimensions of the residual stream that carry the token


SIZES = {
    "6.7b": Size(layers=32, hidden=4096, mlp=11008, heads=32, vocab=32000, code=64),
    "0.33b": Size(layers=4, hidden=2048, mlp=5504, heads=16, vocab=32000, code=64),
    # Few layers over a large vocabulary: what logits cost in memory.
    "wide": Size(layers=2, hidden=4096, mlp=11008, heads=32, vocab=128256, code=64),
    "narrow": Size(layers=1, hidden=2048, mlp=5504, heads=16, vocab=128256, code=64),
    "tiny": Size(layers=4, hidden=128, mlp=256, heads=4, vocab=512, code=16),
    "mini": Size(layers=1, hidden=64, mlp=128, heads=2, vocab=512, code=16),
}


@dataclass(frozen=True, slots=True)
class SyntheticName:
    """`synthetic:TARGET+DRAFT@ALPHA`, taken apart."""

    target: str
    draft: str
    alpha: float

    def __str__(self) -> str:
        return f"{PREFIX}{self.target}+{self.draft}@{self.alpha:g}"


@dataclass(frozen=True, slots=True)
class SyntheticPair:
    """Two models and what makes them agree."""

    target: Any
    draft: Any
    noise: float
    alpha: float  # expected at temperature 1


@dataclass(frozen=True, slots=True)
class BigramLaw:
    """A bigram law of low rank: the logits after token t are `reads @ tells[t]`."""

    tells: Tensor  # [V, D] rows of length sqrt(D)
    reads: Tensor  # [V, D]
    error: Tensor  # [V, D] what the draft reads wrongly, times the noise

    def logits(self, tokens: Tensor, noise: float = 0.0) -> Tensor:
        """[N] -> [N, V]."""
        return self.tells[tokens] @ (self.reads + noise * self.error).T


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def parse(name: str) -> SyntheticName:
    """Take a name apart; the acceptance rate may be left out."""
    parts = re.fullmatch(r"synthetic:([^+@]+)\+([^+@]+)(?:@([0-9.]+))?", name)
    if parts is None:
        raise InvalidArgument(f"{name!r} is no synthetic pair: write it like {EXAMPLE}")
    target, draft, alpha = parts.groups()
    for size in (target, draft):
        if size not in SIZES:
            raise InvalidArgument(f"{name!r}: there is no size {size!r}; choose among {', '.join(SIZES)}")
    if SIZES[target].vocab != SIZES[draft].vocab:
        raise InvalidArgument(
            f"{name!r}: {target} and {draft} differ in vocabulary; pair 6.7b+0.33b, wide+narrow or tiny+mini"
        )
    try:
        rate = DEFAULT_ALPHA if alpha is None else float(alpha)
    except ValueError:
        raise InvalidArgument(f"{name!r}: {alpha!r} is no number; write it like {EXAMPLE}") from None
    _check_alpha(rate)
    return SyntheticName(target, draft, rate)


def build_pair(
    name: str | SyntheticName,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
) -> SyntheticPair:
    """Both models, built where they will run; the noise is chosen for the wanted acceptance rate at temperature 1."""
    from forerun.loading.load import choose_device, choose_dtype

    wanted = parse(name) if isinstance(name, str) else name
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    size = SIZES[wanted.target]
    law = make_bigram_law(size.vocab, size.code, seed, place)
    noise, alpha = noise_for(law, wanted.alpha, seed)
    target = build_model(size, law, 0.0, device=place, dtype=kind, seed=seed)
    draft = build_model(SIZES[wanted.draft], law, noise, device=place, dtype=kind, seed=seed + 1)
    return SyntheticPair(target, draft, noise, alpha)


def make_bigram_law(vocab: int, dimensions: int, seed: int, device: torch.device | str = "cpu") -> BigramLaw:
    generator = torch.Generator(device).manual_seed(seed)
    tells, reads, error = torch.randn(3, vocab, dimensions, generator=generator, device=device)
    return BigramLaw(tells * dimensions**0.5 / tells.norm(dim=-1, keepdim=True), reads, error)


def noise_for(law: BigramLaw, alpha: float, seed: int = 0) -> tuple[float, float]:
    """The noise whose acceptance rate is `alpha`, and the rate it has; found by halving, since the one falls as the
    other grows."""
    _check_alpha(alpha)
    tokens = _text(law, seed)
    exact = law.logits(tokens)
    wrong = law.tells[tokens] @ law.error.T
    p = exact.softmax(-1)

    def rate(noise: float) -> float:
        return float(acceptance(p, (exact + noise * wrong).softmax(-1)).mean())

    low, high = 0.0, 4.0
    if rate(high) > alpha:
        raise InvalidArgument(f"alpha={alpha}: drafts as bad as that need no draft model; ask for {rate(high):.2f}")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > alpha else (low, middle)
    return low, rate(low)


@torch.no_grad()
def build_model(
    size: Size, law: BigramLaw, noise: float, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Any:
    """A Llama whose head reads `law` with `noise`, made in place and in its type: no copy of it is on the host."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for weight_name, weight in model.named_parameters():
        if weight.dim() == 2:
            writes = weight_name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(0.0, QUIET if writes else 0.02, generator=generator)
    _engrave(model, size, law, noise)
    return model


def measure_alpha(target: Any, draft: Any, *, num_tokens: int = 512, plain: SpeculativeDecoder | None = None) -> float:
    """E[sum min(p, q)] of two models along text that the target itself samples at temperature 1.

    `plain` is a decoder of the target without a drafter, where there is one already.
    """
    rows = 8
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, target.config.vocab_size, (rows, 4), generator=generator).to(target.device)
    decoder = SpeculativeDecoder(target, None) if plain is None else plain
    result = decoder.generate(prompts, max_new_tokens=-(-num_tokens // rows), temperature=1.0, seed=0, eos_token_id=[])
    with torch.inference_mode():
        laws = [
            model(result.sequences).logits[:, prompts.shape[1] - 1 : -1].float().softmax(-1)
            for model in (target, draft)
        ]
    return float(acceptance(*laws).mean())


def _engrave(model: Any, size: Size, law: BigramLaw, noise: float) -> None:
    """The code goes in through the embedding and out through the head; the final norm is undone by the scale."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.zero_()
    embedding[:, : size.code] = law.tells.to(embedding.dtype)
    engrave_head(head, size, law, noise)


@torch.no_grad()
def engrave_head(head: Tensor, size: Size, law: BigramLaw, noise: float) -> None:
    """Let a head [V, H] read the law with `noise`."""
    head.zero_()
    scale = (size.code / size.hidden) ** 0.5  # the norm makes a state of length sqrt(D) one of length sqrt(H)
    head[:, : size.code] = (scale * (law.reads + noise * law.error)).to(head.dtype)


def _text(law: BigramLaw, seed: int) -> Tensor:
    """[CONTEXTS] tokens as sampled text visits them."""
    generator = torch.Generator(law.tells.device).manual_seed(seed + 1)
    tokens = torch.randint(len(law.tells), (CONTEXTS,), generator=generator, device=law.tells.device)
    for _ in range(STEPS):
        tokens = torch.multinomial(law.logits(tokens).softmax(-1), 1, generator=generator)[:, 0]
    return tokens


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise InvalidArgument(f"alpha={alpha}: an acceptance rate must be above 0 and at most 1")
