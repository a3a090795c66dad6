"""Which body runs a model: transformers' modules, or a fused one where it takes the model and measures faster."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import exp, isqrt, log
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun import kernels
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.errors import ForerunWarning, kind_and_line
from forerun.kernels.cpu.narrow import held, is_narrow
from forerun.models import families
from forerun.models.bodies import whisper
from forerun.models.bodies.base import Body, ForwardPass, FusedBody
from forerun.models.bodies.modules import ModulesBody, Seq2SeqModules
from forerun.models.cross_attention import Sources, SourcesRead, projections
from forerun.types import Source

TIMED = (1, 4, 16)  # new tokens of a pass: plain decoding, a short draft, a batch
PAST = 64  # keys behind them
# Seconds of passes from which on more threads are faster on any quiet machine; and how much slower is no accident.
SOME_SIZE, ODD = 0.01, 1.3
QUOTA = 4.0  # times as long as the fewest threads: no other program's doing
PROMPTS = (64, 256, 1024)  # new tokens of passes that a library's products may run faster, behind as many keys
LONGEST_TIMED = 0.5  # seconds of a pass behind which none of four times the tokens is timed
WHISPER_TIMED, WHISPER_PAST = (1, 4), 16  # windows are short


_refused: WeakSet[PreTrainedModel] = WeakSet()  # see `refuse`


def refuse(model: PreTrainedModel) -> None:
    """From now on the model is run by its own modules: its fused layers differed from them, or could not be built."""
    _refused.add(model)


def choose_body(model: PreTrainedModel, use: Kernels) -> FusedBody | None:
    """The fused body of `model`, where it is to be used and timing it has shown that its kernels compile."""
    if use is Kernels.OFF or model in _refused:
        return None
    try:
        return _choose_body(model, use)
    except Exception as error:
        if not kernels.is_not_built(error):
            raise
        refuse(model)
        what = f"fused layers of {type(model).__name__} could not be built ({kind_and_line(error)})"
        warnings.warn(f"{what}; the model's own modules run, slower", ForerunWarning, stacklevel=4)
        return None


def _choose_body(model: PreTrainedModel, use: Kernels) -> FusedBody | None:
    """A GPU's needs no timing: it saves most of the launches."""
    if whisper.why_not(model) is None:
        wanted = use is Kernels.ON or _is_fastest("fused", measured_whisper(model))
        return whisper.WhisperBody(model, use) if wanted else None
    if kernels.why_not_triton(model.device) is None:
        from forerun.models.bodies import gpu

        wanted = use is Kernels.ON or model.config.get_text_config(decoder=True).model_type in gpu.TIMED
        return gpu.GpuBody(model) if wanted and gpu.why_not(model) is None else None
    if why_not(model) is not None:
        return None
    from forerun.kernels.cpu.threads import most_threads
    from forerun.models.bodies.cpu import CpuBody

    if use is Kernels.ON:
        return CpuBody(model, most_threads(), use)
    times = measured(model)
    threads = min((name for name in times if name != "modules"), key=lambda name: times[name])
    if not _is_fastest(threads, times):
        return None
    body = CpuBody(model, int(threads), use)
    body.longest_pass = longest_pass(model, int(threads))
    if body.longest_pass is not None:
        body.beyond = _library_body(model, use)
    return body


def why_modules(model: PreTrainedModel, use: Kernels) -> str:
    """Why `choose_body` leaves a model on a GPU, or an encoder-decoder model, to its modules: for `forerun doctor`."""
    if use is Kernels.OFF:
        return "kernels are off"
    if model in _refused:
        return "its fused layers differed from them, or could not be built"
    if model.config.is_encoder_decoder:
        return whisper.why_not(model) or "they measured faster"
    if (reason := kernels.why_not_triton(model.device)) is not None:
        return reason
    from forerun.models.bodies import gpu

    return gpu.why_not(model) or "fused layers of its family were not timed; --kernels on takes them"


def _library_body(model: PreTrainedModel, use: Kernels = Kernels.AUTO) -> FusedBody | None:
    """Fused layers with a library's products; None where a model's are left to its modules."""
    from forerun.kernels.cpu.threads import most_threads
    from forerun.models.bodies import cpu_library

    return None if cpu_library.why_not(model) is not None else cpu_library.LibraryBody(model, most_threads(), use)


def choose_shard_body(model: PreTrainedModel, use: Kernels) -> FusedBody | None:
    """The same for a model that is split over processes. Nothing is timed: all of them have to come to the same end."""
    if use is Kernels.OFF or model in _refused:
        return None
    from forerun.models.bodies.shard import local_part

    if kernels.why_not_triton(model.device) is None:
        from forerun.models.bodies import gpu
        from forerun.models.bodies.shard_gpu import ShardGpuBody

        part = local_part(model, gpu.why_not)
        return None if part is None else ShardGpuBody(model, part)
    if kernels.why_not_numba() is not None:
        return None
    from forerun.kernels.cpu.threads import most_threads
    from forerun.models.bodies.shard_cpu import ShardCpuBody

    part = local_part(model, why_not)
    return None if part is None else ShardCpuBody(model, part, most_threads(), use)


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps a model from being fused on a CPU, in words for `forerun doctor`; None where nothing does."""
    if reason := kernels.why_not_numba():
        return reason
    from forerun.models.bodies import cpu

    return cpu.why_not(model)


def _is_fastest(name: str, times: dict[str, float]) -> bool:
    return times[name] < times["modules"]


def measured(model: PreTrainedModel) -> dict[str, float]:
    """Seconds of a few passes by the modules, and by the fused body with 1, 2, 4 ... threads; timed once a machine."""
    from forerun.kernels.cpu.measured import remembered
    from forerun.kernels.cpu.threads import most_threads

    timed: dict[str, float] = remembered(
        f"body {_signature(model)} threads {most_threads()}", lambda: _measure(model, most_threads())
    )
    return timed


def _measure(model: PreTrainedModel, most: int) -> dict[str, float]:
    """For each candidate the sum over `TIMED` of its best pass.

    Where another program had a core all the while (a server's other process imports its modules as this one begins),
    one thread wins, which waits for none: the fused body is then taken with all threads, as on a quiet machine, unless
    they took `QUOTA` times as long. A thread that never got a core was taken none, so the scheduler's count may not
    tell: that a model of some size is slower with more threads does.
    """
    from forerun.kernels.cpu.measured import count_disturbance, disturbances, seconds
    from forerun.models.bodies.cpu import CpuBody

    before = disturbances()
    counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    bodies: dict[str, Body] = {str(count): CpuBody(model, count) for count in counts}
    bodies["modules"] = ModulesBody(model, families.inspect(model, headless=True))
    embeddings = torch.rand(PAST, model.config.get_text_config(decoder=True).hidden_size, dtype=model.dtype)
    steps = {name: _stepper(body, embeddings) for name, body in bodies.items()}
    totals = dict.fromkeys(steps, 0.0)
    for tokens in TIMED:
        for name, time in seconds({name: partial(step, tokens) for name, step in steps.items()}, 3).items():
            totals[name] += time
    best = min(totals[str(count)] for count in counts)
    if best > SOME_SIZE and totals[str(most)] > ODD * best:
        count_disturbance()
    if disturbances() == before:
        return totals
    # Many times slower is no busy moment, but a machine that never has so many cores for us, as under a quota.
    taken = max(count for count in counts if totals[str(count)] <= QUOTA * best)
    return {str(taken): best, "modules": totals["modules"]}


def longest_pass(model: PreTrainedModel, threads: int) -> int | None:
    """New tokens of the longest pass that is the fused body's under `auto`; None: of any. Timed once a machine."""
    from forerun.kernels.cpu.measured import remembered
    from forerun.kernels.cpu.threads import most_threads

    longest: int | None = remembered(
        f"longest tiled pass {_signature(model)} threads {threads} of {most_threads()}",
        lambda: _measure_longest_pass(model, threads),
    )
    return longest


def _measure_longest_pass(model: PreTrainedModel, threads: int) -> int | None:
    """Between a pass where tiles of ours were faster and one where a library was: nearer to the one that was closer.

    Halfway, in powers of two, where that is not known of both.
    """
    from forerun.kernels.cpu.measured import seconds
    from forerun.models.bodies.cpu import CpuBody

    family = families.inspect(model, headless=True)
    library = _library_body(model)
    bodies: dict[str, Body] = {"tiles": CpuBody(model, threads), "library": library or ModulesBody(model, family)}
    ahead: float | None = None  # how far tiles were at `shorter` tokens
    for shorter, tokens in pairwise((max(TIMED), *PROMPTS)):
        if family.context_length is not None and 2 * tokens > family.context_length:
            break
        embeddings = torch.rand(tokens, model.config.get_text_config(decoder=True).hidden_size, dtype=model.dtype)
        steps = {name: partial(_stepper(body, embeddings), tokens) for name, body in bodies.items()}
        times = seconds(steps, 3)
        behind = log(times["tiles"] / times["library"])
        if behind >= 0:
            share = 1 / 2 if ahead is None else ahead / (ahead + behind)
            return round(shorter * exp(share * log(tokens / shorter)))
        ahead = -behind
        if times["tiles"] > LONGEST_TIMED and tokens == PROMPTS[-2]:
            # Not timed, and known all the same: tiles fall behind, and products of integers are the same by both.
            return None if library is None else isqrt(tokens * PROMPTS[-1])
    return None


def measured_whisper(model: PreTrainedModel) -> dict[str, float]:
    """Seconds of a plain step and of a short draft without the head, by the modules and fused; once for a shape and a
    way to store weights."""
    from forerun.kernels.cpu.measured import remembered
    from forerun.kernels.cpu.threads import most_threads

    config = model.config
    shape = f"{_stored(model.get_decoder())} heads {config.decoder_attention_heads} over {config.max_source_positions}"
    timed: dict[str, float] = remembered(
        f"whisper body {shape} threads {most_threads()}", lambda: _measure_whisper(model)
    )
    return timed


def _measure_whisper(model: PreTrainedModel) -> dict[str, float]:
    from forerun.kernels.cpu.measured import seconds

    config, sources = model.config, Sources()
    states = torch.rand(config.max_source_positions, config.d_model, dtype=model.dtype)
    sources.read(0, Source(states=states))
    sources.put([states], projections(model.get_decoder()))
    past = torch.zeros(min(WHISPER_PAST, config.max_target_positions // 2), dtype=torch.long)
    modules = Seq2SeqModules(model, families.inspect_seq2seq(model))
    bodies: dict[str, Body] = {"fused": whisper.WhisperBody(model), "modules": modules}
    steps = {name: _stepper(body, past, sources.read_by([0])) for name, body in bodies.items()}

    def both(step: Callable[[int], None]) -> None:
        for tokens in WHISPER_TIMED:
            step(min(tokens, len(past)))

    timed: dict[str, float] = seconds({name: partial(both, step) for name, step in steps.items()})
    return timed


def _stepper(body: Body, past: Tensor, sources: SourcesRead | None = None) -> Callable[[int], None]:
    """A pass over some new tokens (or embeddings) behind those of `past`, again and again the same."""
    cache = RaggedCache()
    cache.admit(0)

    @torch.inference_mode()
    def run(new: Tensor) -> None:
        body.run(ForwardPass(new, cache.extend([0], [len(new)]), cache, sources=sources))

    def step(tokens: int) -> None:
        run(past[:tokens])
        cache.rewind(0, len(past))

    run(past)
    return step


def _signature(model: PreTrainedModel) -> str:
    """Models of the same shape take the same time, if their weights are stored alike."""
    config = model.config.get_text_config(decoder=True)
    return f"{config.model_type} {_stored(model.base_model)}"


def _stored(module: nn.Module) -> str:
    """Stands for the shapes of all layers' weights, and for how they are stored."""
    layers = [p for name, p in module.named_parameters() if any(part.isdigit() for part in name.split("."))]
    shapes = [(*p.shape, held(p)[0]) if is_narrow(p) else tuple(p.shape) for p in layers]
    return hashlib.sha256(str(shapes).encode()).hexdigest()[:12]
