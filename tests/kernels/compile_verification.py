"""Compile what verification launches for compute capability 9.0, which needs no GPU. A program of its own.

Launches are caught with the arguments they have on a CPU, so that whatever the host code passes is what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from forerun.config import SamplingParams
from forerun.kernels import ngram, tuning
from forerun.kernels.verify import sample, verify
from forerun.kernels.verify import tree as verify_trees
from forerun.math.laws import LogitLaw, ReducedLaw
from forerun.math.ngram import Ngrams
from forerun.math.sigmoid import Sigmoid
from forerun.types import Draft, Keys, Law, LawParams, Rule, Siblings, TreeShape

KINDS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1",
}  # fmt: skip
MOST_SHARED = 227 << 10  # bytes of one multiprocessor that one program may have
SMALL = replace(  # large tensors are unrolled, and compiling them takes half a minute
    tuning.TUNING, groups=1024, hot=32, super=128, few=64, sample=512, listed=1024, scan=1024
)
seen: list[str] = []


def compile_launch(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of `JITFunction.run`: what it would compile."""
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | {name: named.pop(name) for name in names if name in named}
    signature = {p.name: _kind(given[p.name], p.is_constexpr) for p in kernel.params}
    constants = {
        place: value for i, name in enumerate(names) for place, value in _constants((i,), given[name], signature[name])
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=named)
    assert made.metadata.shared <= MOST_SHARED, (kernel.__name__, made.metadata.shared)
    seen.append(kernel.__name__)


def _kind(value: Any, is_constant: bool = False) -> Any:
    if is_constant or (isinstance(value, int) and value == 1):  # Triton makes a constant of every 1
        return "constexpr"
    if isinstance(value, tuple):
        kinds = [_kind(each) for each in value]
        return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _constants(place: tuple[int, ...], value: Any, kind: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Where constants stand, inside tuples as well."""
    if isinstance(kind, tuple):
        for i, (each, its_kind) in enumerate(zip(value, kind, strict=True)):
            yield from _constants((*place, i), each, its_kind)
    elif kind == "constexpr":
        yield place, value


def judge(rule: Any, params: SamplingParams, dtype: torch.dtype, kept: bool, own: tuning.Tuning) -> None:
    rows, width, vocab = 2, 5, 3000
    stacked = LawParams.stack([params, replace(params, temperature=0.7)])
    logits = torch.empty(rows, width + 1, vocab, dtype=dtype)
    law = LogitLaw.dense(logits[:, 1:], stacked)
    law.kept = torch.empty(rows * width, 5) if kept else None
    numbers = torch.arange(rows)
    draft = Draft(torch.zeros(rows, width, dtype=torch.int64), torch.full((rows,), width), law)
    keys = Keys(numbers, numbers, numbers, numbers)
    verify.verify_packed(LogitLaw.dense(logits, stacked), draft, rule, keys, tuning=own)


def judge_trees(params: SamplingParams, dtype: torch.dtype, way: Siblings, is_told: bool, has_fewer: bool) -> None:
    """`is_told`: the device alone knows which rows drew nothing. `has_fewer`: the draft has a smaller vocabulary."""
    rows, nodes, vocab = 2, 24, 3000
    stacked = LawParams.stack([params, replace(params, temperature=0.7)])
    ints = torch.zeros(rows, nodes, dtype=torch.int64)
    law: Law = LogitLaw(torch.empty(13, vocab, dtype=dtype), ints, stacked, ints[0, :13])
    law = ReducedLaw(law, torch.arange(vocab), vocab) if has_fewer else law
    is_top = stacked.temperature == 0 if is_told else None
    tree = TreeShape(ints, (way,) * rows, 5, 3, is_top)
    numbers = torch.arange(rows)
    target = LogitLaw.dense(torch.empty(rows, nodes + 1, vocab, dtype=dtype), stacked)
    draft, keys = Draft(ints, ints[:, 0], law, tree=tree), Keys(numbers, numbers, numbers, numbers)
    assert verify_trees.why_not(target, draft) is None
    verify_trees.verify_packed(target, draft, keys, SMALL)


def main() -> None:
    JITFunction.run = compile_launch  # type: ignore[method-assign]
    tuning.starts_early = lambda device: True
    plain, cut = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)
    judge(Rule.TOKEN, plain, torch.float32, True, SMALL)
    judge(Rule.TOKEN, cut, torch.bfloat16, False, SMALL)
    judge(Rule.BLOCK, replace(cut, top_k=50), torch.float16, True, SMALL)
    judge(Rule.COUPLED, plain, torch.bfloat16, True, SMALL)
    judge(Sigmoid(), plain, torch.float32, True, SMALL)
    judge(Sigmoid(), plain, torch.float32, True, replace(SMALL, last_draws=False))
    judge_trees(plain, torch.bfloat16, Siblings.SAMPLED, False, True)
    judge_trees(cut, torch.float32, Siblings.SAMPLED, True, False)
    judge_trees(SamplingParams(temperature=0.0), torch.bfloat16, Siblings.TOP, False, False)
    uniforms = torch.zeros(2, dtype=torch.float64)
    sample.sample(torch.empty(2, 3000), LawParams.stack([plain] * 2), uniforms, SMALL)
    longs, ints = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
    table = Ngrams(longs, longs, ints, ints, longs, 3, 3000, 8)
    ngram.draft_ngrams(
        table, torch.zeros(2, 9, dtype=torch.int64), longs, LawParams.stack([plain] * 2), uniforms[:, None]
    )
    names = ("chunk", "small_top_k", "estimate", "collect", "resolve", "sum", "pick", "_compare", "_draft", "node")
    assert {f"{name}_kernel" for name in names} <= set(seen), seen


if __name__ == "__main__":
    main()
