"""What users may ask of `forerun bench` and `forerun bench decode`: names, defaults and help in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import Kernels, kernels
from forerun.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What to compare."""

    model: str = "embedded"
    """Hub name, folder, GGUF file or 'embedded'."""
    draft: str | None = None
    """A smaller model with the same tokenizer; adds the methods that need one."""
    methods: tuple[str, ...] = ()
    """To compare with model.generate: lookup, assisted, forerun-plain, forerun, forerun-draft, forerun-random."""
    categories: tuple[str, ...] = ()
    """Which kinds of prompts, parts of MT-bench such as 'coding' included."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Rows decoded together."""
    prompts_per_category: int | None = None
    """How many prompts of each category."""
    max_new_tokens: int = 128
    """For every prompt; end tokens are ignored."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """For sampling."""
    rule: str = "token"
    """How drafts are judged; see `forerun generate --help`. The output says so where a rule is lossy."""
    repeats: int = 1
    """Measure everything that many times."""
    minutes: float = 15.0
    """Choose the number of prompts to take about that long."""
    kernels: Kernels = field(default_factory=kernels)
    """Compiled products on a CPU, Triton kernels on a GPU: 'auto', 'on' or 'off'."""

    def __post_init__(self) -> None:
        from forerun.rules import parse

        for name in ("max_new_tokens", "repeats", "prompts_per_category"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidArgument(f"{name}={value}: must be at least 1")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise InvalidArgument(f"batch_sizes={self.batch_sizes}: give one or more sizes of at least 1")
        if self.temperature < 0:
            raise InvalidArgument(f"temperature={self.temperature}: must be >= 0; 0 is greedy")
        if self.minutes <= 0:
            raise InvalidArgument(f"minutes={self.minutes}: must be above 0")
        parse(self.rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What to measure of whole rounds; None leaves it to the device and to `quick`."""

    model: str | None = None
    """A synthetic pair, TARGET+DRAFT@ALPHA of 6.7b, 0.33b, wide, narrow, tiny, mini, or a target together with
    --draft."""
    draft: str | None = None
    """A smaller model with the same tokenizer, for a --model that is no pair."""
    batch_sizes: tuple[int, ...] | None = None
    """Rows decoded together."""
    prompt_length: int | None = None
    """Tokens of a prompt, at most."""
    max_new_tokens: int | None = None
    """Of every row; end tokens are ignored."""
    seconds: float | None = None
    """Begin no part later than that; the most important ones come first."""
    quick: bool = False
    """Batches of 1 and 8, short texts, one turn."""
    seed: int = 0
    """For prompts and sampling."""
    device: str | None = None
    """cpu, cuda, cuda:0 ..."""
    dtype: str | None = None
    """float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        if self.batch_sizes is not None and (not self.batch_sizes or min(self.batch_sizes) < 1):
            raise InvalidArgument(f"batch_sizes={self.batch_sizes}: give one or more sizes of at least 1")
        if self.prompt_length is not None and self.prompt_length < 1:
            raise InvalidArgument(f"prompt_length={self.prompt_length}: must be at least 1")
        if self.seconds is not None and self.seconds <= 0:
            raise InvalidArgument(f"seconds={self.seconds}: must be above 0")
