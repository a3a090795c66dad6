"""What users may ask of `forerun bench`, `bench decode` and `bench serve`: names, defaults and help in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from forerun.arguments import above, at_least, finite, refuse
from forerun.config import DraftSplit, Kernels, kernels
from forerun.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What to compare."""

    model: str = "embedded"
    """Hub name, folder, GGUF file or 'embedded'."""
    draft: str | None = None
    """A smaller model with the same tokenizer, or any drafter that `forerun generate` takes; adds forerun-draft and,
    of a model, assisted."""
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
    """How drafts are verified; see `forerun generate --help`. The output says so where a rule is lossy."""
    repeats: int = 1
    """Measure everything that many times."""
    minutes: float = 15.0
    """Choose the number of prompts to take about that long."""
    kernels: Kernels = field(default_factory=kernels)
    """Compiled products on a CPU, Triton kernels on a GPU: 'auto', 'on' or 'off'."""
    quantize: tuple[str, ...] = ()
    """Also Forerun with weights rounded while they are loaded: int8, w8a8, w8a8-g32, int4 or fp8. They are other
    models."""
    prompt_lengths: tuple[int, ...] = ()
    """Also time prompts of so many tokens, with one new token."""
    peer: Literal["llama.cpp"] | None = None
    """Compare with this program instead of transformers; --model must be a GGUF file or 'embedded'."""
    llama_server: str | None = None
    """The llama-server to run, for --peer llama.cpp."""
    tensor_parallel: int = 1
    """Split the target over N processes of this machine, one a device; transformers then runs on all of them, too."""
    draft_split: DraftSplit = "auto"
    """Of a split target: whether a draft model is split as well ('on'), which assisted needs, or runs on the first
    process alone ('off'); 'auto' times a few steps of both while it starts."""

    def __post_init__(self) -> None:
        from forerun.rules import parse

        if self.tensor_parallel > 1 and self.quantize:
            schemes = ",".join(self.quantize)
            raise InvalidArgument(f"quantize={schemes}: a model split over processes is not quantised")
        if self.tensor_parallel > 1 and self.peer is not None:
            refuse("peer", self.peer, "reads GGUF files, and those are not split over processes")

        at_least(self, 1, "max_new_tokens", "repeats", "prompts_per_category", "batch_sizes", "tensor_parallel")
        if self.prompt_lengths:
            at_least(self, 2, "prompt_lengths")
        if self.llama_server is not None and self.peer is None:
            refuse("llama_server", self.llama_server, "is for peer='llama.cpp' (--peer llama.cpp)")
        at_least(self, 0, "temperature", remedy="0 is greedy")
        above(self, 0, "minutes")
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
        at_least(self, 1, "batch_sizes", "prompt_length")
        above(self, 0, "seconds")
        finite(self, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What to ask of a server, and how much of it at a time."""

    concurrency: tuple[int, ...] | None = None
    """Requests under way at the same time: a new one is sent when one has ended."""
    ramp: float = 0.0
    """Let those of --concurrency begin one after the other over so many seconds, not all at once."""
    rates: tuple[float, ...] = ()
    """Requests a second, arriving at random (a Poisson process); inf sends all at once."""
    requests: int = 100
    """At most so many requests at each level of load."""
    seconds: float = 30.0
    """Send no request later than that, at each level; those under way may end."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Which of the interface's two ways to ask."""
    prompt_length: int | None = None
    """Send so many random token ids instead of texts; needs --endpoint completions."""
    shortest_prompt: int | None = None
    """Send from so many ids to --prompt-length of them, at random."""
    max_new_tokens: int = 128
    """Of every request."""
    shortest_answer: int | None = None
    """Ask for from so many tokens to --max-new-tokens, at random."""
    ignore_eos: bool = True
    """Ask for all of them, whatever the model says; servers without vLLM's field need --no-ignore-eos."""
    temperature: float = 0.0
    """0 is greedy."""
    speculation: tuple[str, ...] = ()
    """on, off, or both in turns, for servers that take `speculation` per request, as Forerun's do."""
    goodput: tuple[str, ...] = ()
    """Milliseconds within which a request counts as good: ttft:500,tpot:50,e2e:5000."""
    seed: int = 0
    """For arrivals, ids and sampling."""

    def __post_init__(self) -> None:
        """Refuse what no server could be asked for."""
        at_least(self, 1, "concurrency", "requests", "prompt_length", "max_new_tokens")
        at_least(self, 1, "shortest_prompt", "shortest_answer")
        at_least(self, 0, "temperature", remedy="0 is greedy")
        at_least(self, 0, "ramp", remedy="0 sends the first of all streams at once")
        above(self, 0, "seconds")
        finite(self, "temperature", "ramp", "seconds")  # a record is JSON, which has no infinity
        if self.ramp and self.rates and self.concurrency is None:
            refuse("ramp", self.ramp, "is of --concurrency, which is not asked for")
        if self.ramp >= self.seconds:
            refuse("ramp", self.ramp, f"must end before the last request is sent, after --seconds {self.seconds:g}")
        if self.shortest_prompt is not None and self.shortest_prompt > (self.prompt_length or 0):
            refuse("shortest_prompt", self.shortest_prompt, "--prompt-length must be given, and be no shorter")
        if self.shortest_answer is not None and self.shortest_answer > self.max_new_tokens:
            refuse("shortest_answer", self.shortest_answer, "must not be above --max-new-tokens")
        for rate in self.rates:
            if not rate > 0:
                refuse("rates", self.rates, "must be above 0")
        for mode in self.speculation:
            if mode not in ("on", "off"):
                refuse("speculation", self.speculation, "give on, off, or on,off")
        if self.prompt_length is not None and self.endpoint != "completions":
            refuse("prompt_length", self.prompt_length, "a chat has no token ids: say --endpoint completions")
        _ = self.limits

    @property
    def limits(self) -> dict[str, float]:
        """Seconds, by measure, that a good request keeps to."""
        limits = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            try:
                limits[name] = float(value) / 1000
            except ValueError:
                name = ""
            if name not in ("ttft", "tpot", "e2e") or not 0 < limits[name] < math.inf:
                refuse("goodput", self.goodput, "write milliseconds such as ttft:500,tpot:50,e2e:5000")
        return limits
