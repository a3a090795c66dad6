"""What a logits processor keeps between calls, as values that can be compared: enough to notice counters and flags.

A processor may be an object, a function, a bound method or a `partial`, and may hold other objects. Their plain values
are looked at: attributes, slots, variables of an enclosing function, arguments that were bound, random generators.
Objects of libraries (models, tokenizers, bars that show progress) are not looked into, nor large tensors: this happens
at every position, and what a library keeps is most often what it need not work out again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase, SequenceBiasLogitsProcessor

PLAIN = (bool, int, float, str)
CONTAINERS = (list, dict, set, tuple)
SMALL = 64  # entries of a container, or numbers of a tensor, up to which what lies in it is compared
DEEP = 4  # containers within each other that are looked into
MOST_PARTS = 64  # objects that are looked at
CALLABLES = (LogitsProcessor, LogitsProcessorList, FunctionType, MethodType, partial)
LIBRARIES = sys.stdlib_module_names | {"forerun", "numpy", "tokenizers", "torch", "transformers"}
INSTALLED = {"site-packages", "dist-packages"}  # folders of other libraries
WITH_STATE = "transformers.generation.logits_process"  # where a watermark's state comes from


@dataclass(frozen=True, slots=True)
class ProcessorState:
    """The plain values and small tensors of a processor's parts, by part and name."""

    values: dict[tuple[int, str], Any]
    tensors: dict[tuple[int, str], str]

    @classmethod
    def of(cls, processor: Any) -> ProcessorState:
        state, seen, waiting = cls({}, {}), set[int](), [processor]
        while waiting and len(seen) < MOST_PARTS:
            part = waiting.pop(0)
            if id(part) in seen or isinstance(part, SequenceBiasLogitsProcessor):
                continue  # the latter, and banned words: tables made once from the vocabulary's size
            seen.add(id(part))
            for name, value in _held_by(part):
                if isinstance(value, PLAIN + CONTAINERS):
                    state.values[id(part), name] = _copied(value)
                elif isinstance(value, Tensor) and _is_small(value):
                    state.tensors[id(part), name] = repr(value.tolist())  # in which NaN is equal to itself
                elif isinstance(value, torch.Generator | Random):
                    state.values[id(part), name] = _numbers_drawn(value)
                if _is_part(value) or isinstance(part, MethodType):  # whose object is the processor
                    waiting.append(value)
        return state

    def differs(self, later: ProcessorState) -> bool:
        """Whether a call between the two has changed something. What was not there may be made when it is needed."""
        parts = {part for part, _ in self.values}
        values = {key: value for key, value in later.values.items() if key[0] in parts}
        both = self.tensors.keys() & later.tensors.keys()
        return self.values != values or any(self.tensors[key] != later.tensors[key] for key in both)


def _held_by(part: Any) -> Iterator[tuple[str, Any]]:
    """All that a part keeps, by name."""
    if isinstance(part, MethodType):
        yield from (("self", part.__self__), ("function", part.__func__))
        return
    if isinstance(part, partial):
        yield from (("function", part.func), *((str(i), value) for i, value in enumerate(part.args)))
        yield from part.keywords.items()
    elif isinstance(part, FunctionType):
        for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # nothing was assigned yet
                continue
    elif isinstance(part, LogitsProcessorList):
        yield from ((str(i), value) for i, value in enumerate(part))
    yield from getattr(part, "__dict__", {}).items()
    for kind in type(part).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(part, name):
                yield name, getattr(part, name)


def _is_part(value: Any) -> bool:
    """Whether an object's own values are a processor's, too: those of other processors and of the caller's classes."""
    if isinstance(value, CALLABLES):
        return True
    if isinstance(value, type | nn.Module | PreTrainedTokenizerBase):
        return False
    home = type(value).__module__
    return home == WITH_STATE or not _is_librarys(home)


def _is_small(tensor: Tensor) -> bool:
    """Whether it is a few numbers on the host. Those of sparse and quantised tensors cannot be listed."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return is_plain and tensor.device.type == "cpu" and tensor.numel() <= SMALL


@cache
def _is_librarys(home: str) -> bool:
    """Whether a module of this name came with Python or was installed."""
    name = home.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name in LIBRARIES or not INSTALLED.isdisjoint(Path(file).parts)


def _numbers_drawn(generator: torch.Generator | Random) -> Any:
    return generator.getstate() if isinstance(generator, Random) else generator.get_state().numpy().tobytes()


def _copied(value: Any, depth: int = DEEP) -> Any:
    """What is compared of a value: of a small container all that lies in it, of objects in it which they are."""
    if not isinstance(value, CONTAINERS):
        return value if isinstance(value, PLAIN) else id(value)
    if len(value) > SMALL or isinstance(value, set) or not depth:
        return copy.copy(value)
    if isinstance(value, dict):
        return {key: _copied(entry, depth - 1) for key, entry in value.items()}
    return [_copied(entry, depth - 1) for entry in value]
