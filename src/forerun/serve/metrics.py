"""What Prometheus is told, under vLLM's names, so that its dashboards and benchmarks read it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from forerun.engine import Stats
from forerun.serve.admission import RequestAdmission
from forerun.serve.backend import State

LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass(slots=True)
class Times:
    """Seconds by one clock; of tokens, those of the rounds they came in."""

    arrived: float
    started: float | None = None
    waited: float = 0.0  # from then until the engine had room for it
    first: float | None = None
    last: float | None = None


class EngineCollector(Collector):
    """What the engine counts by itself, read when somebody asks."""

    def __init__(self, state: Callable[[], State], values: tuple[str, str]) -> None:
        self._state, self.values = state, values

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, meaning, number in (
            ("vllm:num_preemptions", "Sequences that had to wait again.", state.num_preempted),
            ("vllm:prefix_cache_queries", "Tokens of prompts whose keys were looked for.", state.num_prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens of prompts whose keys were there.", state.num_prefix_hits),
        ):
            counter = CounterMetricFamily(name, meaning, labels=LABELS)
            counter.add_metric(self.values, number)
            yield counter
        if state.cache_usage is not None:
            usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the cache in use, 1 is all.", labels=LABELS)
            usage.add_metric(self.values, state.cache_usage)
            yield usage


class TimesOfTokens(Collector):
    """A histogram to which many equal values are added at once: tokens are too many to be added one by one."""

    def __init__(self, values: tuple[str, str]) -> None:
        self.values = values
        self._counts, self._sum = [0] * (len(PER_TOKEN) + 1), 0.0

    def observe(self, seconds: float, number: int) -> None:
        self._counts[bisect_left(PER_TOKEN, seconds)] += number
        self._sum += seconds * number

    def collect(self) -> Iterator[Metric]:
        name, what = "vllm:inter_token_latency_seconds", "Between tokens; those of one round share its time."
        bounds = [*map(floatToGoString, PER_TOKEN), "+Inf"]
        family = HistogramMetricFamily(name, what, labels=LABELS)
        family.add_metric(self.values, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Metrics:
    """Counts of one server. Everything is written by the event loop's thread."""

    def __init__(
        self, model_name: str, admission: RequestAdmission, state: Callable[[], State], label: str = "0"
    ) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, label)
        self.registry.register(EngineCollector(state, self._values))
        self._running = self._gauge("vllm:num_requests_running", "Sequences that decode.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait their turn.")
        # Whose turn has come may wait in the engine, too. It was asked a moment before: somebody may have left since.
        self._running.set_function(lambda: max(admission.num_running - state().num_waiting, 0))
        self._waiting.set_function(lambda: admission.num_waiting + min(admission.num_running, state().num_waiting))
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens that were generated.")
        self._success = Counter(
            "vllm:request_success", "Sequences that ended, by how.", (*LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._first = self._seconds("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._between = TimesOfTokens(self._values)
        self.registry.register(self._between)
        self._per_token = self._seconds(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, by sequence.", PER_TOKEN
        )
        self._whole = self._seconds("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self._queued = self._seconds("vllm:request_queue_time_seconds", "Waiting for a turn and for room.")
        self._prefill = self._seconds("vllm:request_prefill_time_seconds", "From then to the first token.")
        self._decode = self._seconds("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._inference = self._seconds(
            "vllm:request_inference_time_seconds", "From the end of waiting to the last token."
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were emitted.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were emitted, by position.",
            (*LABELS, "position"), registry=self.registry,
        )  # fmt: skip
        self._drafted_at = Counter(
            "forerun:spec_decode_num_draft_tokens_per_pos", "Tokens that were drafted, by position.",
            (*LABELS, "position"), registry=self.registry,
        )  # fmt: skip
        self._rounds = self._counter("forerun:rounds", "Passes of the target, counted for each sequence in them.")

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self.registry)

    def see_tokens(self, last: float | None, now: float, number: int) -> None:
        """Of a sequence, after those at `last`. Each took its share of the time between."""
        if last is not None:
            self._between.observe((now - last) / number, number)

    def count(self, num_prompt_tokens: int, num_tokens: int, times: Times, outcome: str) -> None:
        """A sequence that has ended: stop, length, abort or error. What it was made of is told by `count_tokens`."""
        self.count_end(num_prompt_tokens, times, outcome)
        self.count_times(times, num_tokens)

    def count_end(self, num_prompt_tokens: int, times: Times, outcome: str) -> None:
        """The same without its times, where how long it waited in the engine is not known yet."""
        self._success.labels(*self._values, outcome).inc()
        if times.started is not None:  # nobody has read the prompt of one that left before its turn
            self._prompt_tokens.inc(num_prompt_tokens)

    def count_tokens(self, num_tokens: int, stats: Stats) -> None:
        """Of one sequence or several: tokens and the rounds that made them, which dashboards divide by each other."""
        self._generation_tokens.inc(num_tokens)
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_tokens)
        self._rounds.inc(stats.rounds)
        for position, number in enumerate(stats.num_accepted_tokens_per_pos):
            self._accepted_at.labels(*self._values, str(position)).inc(number)
        for position, number in enumerate(stats.num_draft_tokens_per_pos):
            self._drafted_at.labels(*self._values, str(position)).inc(number)

    def count_times(self, times: Times, num_tokens: int) -> None:
        """Of a sequence that has ended, where it has had a token."""
        if times.started is None or times.first is None or times.last is None:
            return
        begun = min(times.started + times.waited, times.first)
        self._queued.observe(begun - times.arrived)
        self._first.observe(times.first - times.arrived)
        self._prefill.observe(times.first - begun)
        self._decode.observe(times.last - times.first)
        self._inference.observe(times.last - begun)
        self._whole.observe(times.last - times.arrived)
        if num_tokens > 1:
            self._per_token.observe((times.last - times.first) / (num_tokens - 1))

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, LABELS, registry=self.registry).labels(*self._values)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, LABELS, registry=self.registry).labels(*self._values)

    def _seconds(self, name: str, meaning: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, meaning, LABELS, registry=self.registry, buckets=buckets).labels(*self._values)
