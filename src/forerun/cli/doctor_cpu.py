"""What `forerun doctor` says about the compiled products on a CPU: whether, how many threads, what was measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun import kernels
from forerun.config import Kernels
from forerun.config import kernels as setting
from forerun.errors import UnsupportedModel
from forerun.processes import usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BRINGS = (
    "until then torch's products are used; with Numba steps of few tokens take a half to a quarter of the time "
    "(measured on two Neoverse-N1 cores)"
)
PROBE = (16, 256)  # new tokens and old ones of the pass after which a model's extra memory is looked at


@dataclass(frozen=True, slots=True)
class Product:
    """Which product a shape of weight gets, for each number of rows that was timed."""

    shape: str  # "1536x576"
    threads: int
    ours: list[int]  # numbers of rows where ours was the faster one
    torchs: list[int]


@dataclass(frozen=True, slots=True)
class TimedBody:
    """A stack of layers that was timed: a pass of 1, of 4 and of 16 tokens together."""

    what: str  # family and a digest of the shapes
    modules_ms: float
    fused_ms: dict[str, float]  # by number of threads


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """How the model that was asked about will run."""

    name: str
    fused: bool
    why: str
    measured: TimedBody | None
    extra_bytes: int  # scratch memory and rotary tables; weights are read where they lie


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """All that is known about the compiled products here."""

    setting: Kernels
    available: bool
    missing: str | None
    threads: int
    why_threads: str
    threading_layer: str | None
    cache_file: str | None
    products: list[Product]
    bodies: list[TimedBody]
    model: ModelKernels | None = None


def examine_cpu(name: str | None = None, model: PreTrainedModel | None = None) -> CpuKernels:
    """Look, and try one small product; with a `model` also measure it, unless that was done before."""
    import torch

    if (reason := kernels.why_not_numba()) is not None:
        known = None if model is None else ModelKernels(str(name), False, f"no kernels: {reason}", None, 0)
        count = torch.get_num_threads()
        return CpuKernels(setting(), False, f"{reason}; {BRINGS}", count, _why(count), None, None, [], [], known)
    from forerun.kernels.cpu import measured, threads

    try:
        asked = None if model is None else _of_model(str(name), model)
    except UnsupportedModel as why:
        asked = ModelKernels(str(name), False, f"refused: {why}", None, 0)
    count = threads.most_threads()
    return CpuKernels(
        setting=setting(),
        available=True,
        missing=None,
        threads=count,
        why_threads=_why(count),
        threading_layer=_tried(),
        cache_file=str(measured.path()),
        products=[_product(key, times) for key, times in _entries("product")],
        bodies=[_body(key, times) for key, times in _entries("body")],
        model=asked,
    )


def _why(count: int) -> str:
    cores = usable_cores()
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name) == str(count):
            return f"{name}={count}"
    if count == cores:
        return "all cores this process may use"
    return f"torch's own number; {cores} cores may be used"


def _tried() -> str:
    """Numba's threading layer, which is only known once something has run."""
    import torch

    from forerun.kernels.cpu import linear, threads

    linear.linear(torch.ones(1, 16), torch.ones(4, 16), None, threads.most_threads())
    return threads.layer_name()


def _entries(kind: str) -> list[tuple[str, Any]]:
    from forerun.kernels.cpu.measured import known

    return sorted((key.removeprefix(f"{kind} "), times) for key, times in known().items() if key.startswith(f"{kind} "))


def _product(key: str, times: dict[str, list[float]]) -> Product:
    from forerun.kernels.cpu.choice import is_gain

    shape, _, threads = key.partition(" threads ")
    wins = {int(rows): is_gain(*pair) for rows, pair in times.items()}
    ours, torchs = (sorted(rows for rows, won in wins.items() if won is wanted) for wanted in (True, False))
    return Product(shape, int(threads), ours, torchs)


def _body(key: str, times: dict[str, float]) -> TimedBody:
    fused = {name: 1000 * time for name, time in times.items() if name != "modules"}
    return TimedBody(key.partition(" threads ")[0], 1000 * times["modules"], fused)


def _of_model(name: str, model: PreTrainedModel) -> ModelKernels:
    from forerun.models.bodies import choose
    from forerun.models.scorer import Scorer

    if (reason := choose.why_not(model)) is not None:
        scorer = Scorer(model)  # times the products of its layers, where they are to be used
        return ModelKernels(name, False, f"layer by layer, not fused: {reason}", None, 0)
    from forerun.models.bodies.cpu import CpuBody

    timed = _body(name, choose.measured(model))
    scorer = Scorer(model)
    if not isinstance(scorer.body, CpuBody):
        why = "kernels are off" if scorer.kernels is Kernels.OFF else "the modules measured faster"
        return ModelKernels(name, False, why, timed, 0)
    scorer.admit(0)
    new, old = PROBE
    scorer.feed([0], [[1] * old])
    scorer.score([0], [[1] * new])
    why = f"all layers in one call, {_count(scorer.body.num_threads, 'thread')}"
    if scorer.body.longest_pass is not None:
        whose = "its modules" if scorer.body.beyond is None else "a library's products"
        why += f"; by {whose} beyond {scorer.body.longest_pass} tokens a pass, where they measured faster"
    bodies = [body for body in (scorer.body, scorer.body.beyond) if isinstance(body, CpuBody)]
    return ModelKernels(name, True, why, timed, sum(body.extra_bytes for body in bodies))


def lines(cpu: CpuKernels) -> list[tuple[str, str]]:
    """What, and how it is here: rows for a table."""
    rows = [("CPU kernels", _summary(cpu)), ("CPU threads", f"{cpu.threads} ({cpu.why_threads})")]
    if cpu.cache_file is not None:
        measured = f"{_count(len(cpu.bodies), 'model')}, {_count(len(cpu.products), 'shape')} of weight"
        rows.append(("measured here", f"{measured}: {cpu.cache_file}"))
    if cpu.model is not None:
        rows.append((cpu.model.name, _model_line(cpu.model)))
    if cpu.model is None and cpu.available:
        rows += [("layers of " + body.what, _times(body)) for body in cpu.bodies]
    rows += [("weight " + product.shape, _rows_line(product)) for product in cpu.products]
    return rows


def _summary(cpu: CpuKernels) -> str:
    if not cpu.available:
        return f"missing ({cpu.missing})"
    return f"Numba, threading layer {cpu.threading_layer}, setting {cpu.setting}; needs no compiler"


def _model_line(model: ModelKernels) -> str:
    times = f"; {_times(model.measured)}" if model.measured else ""
    memory = f"; no copy of weights, {model.extra_bytes / 2**20:.1f} MiB of scratch and tables" if model.fused else ""
    return f"{model.why}{times}{memory}"


def _times(body: TimedBody) -> str:
    fused = ", ".join(f"{time:.1f} ms with {_count(count, 'thread')}" for count, time in body.fused_ms.items())
    return f"passes of 1 + 4 + 16 tokens: modules {body.modules_ms:.1f} ms, fused {fused}"


def _rows_line(product: Product) -> str:
    parts = [
        f"{whose} for {', '.join(map(str, rows))} rows"
        for whose, rows in (("ours", product.ours), ("torch's", product.torchs))
        if rows
    ]
    return "; ".join(parts) + f" ({_count(product.threads, 'thread')})"


def _count(number: int | str, what: str) -> str:
    return f"{number} {what}" if str(number) == "1" else f"{number} {what}s"
