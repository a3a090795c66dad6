"""Whose pass it is: a model that is ours for the duration of a pass stays everybody else's in other threads.

A pass sets names in the model's configurations and methods in its modules, which all threads can see. So one pass of a
model waits for another, and whatever was set asks first whether it is called from within a pass: a `model.generate`
that runs in another thread at the same time gets the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forerun.errors import UnsupportedModel

NAME = "forerun"  # of our attention and mask among transformers' implementations

_inside: ContextVar[tuple[int, ...]] = ContextVar("forerun_inside_pass", default=())  # ids of models
_guard = Lock()  # of the two below
_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
_renamed: dict[int, Renamed] = {}  # by the id of a configuration


@dataclass(slots=True)
class Renamed:
    """A configuration that some pass has set; models may share one."""

    config: Any
    original: str  # the implementation it had before
    models: set[int] = field(default_factory=set)  # ids of those that have it in a pass


@contextmanager
def between_passes(model: nn.Module) -> Iterator[None]:
    """While no pass of `model` is under way in any thread: nothing of ours is set in its modules."""
    with _guard:
        lock = _locks.setdefault(model, RLock())
    with lock:
        yield


@contextmanager
def alone(model: nn.Module, configs: Sequence[Any]) -> Iterator[None]:
    """A pass of `model`: its attention is called ours, and no other pass of it runs meanwhile."""
    with between_passes(model):
        try:
            _inside.set((*_inside.get(), id(model)))
            _rename(model, configs)
            yield
        finally:
            _restore(model)


def restore(model: nn.Module) -> None:
    """Give a model its own names back if an interrupt left it with ours."""
    with between_passes(model):
        _restore(model)


@contextmanager
def replacing(changes: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Methods of modules (module, name, ours) for calls from within a pass; they go again, however the pass ends."""
    before = [(module, name, module.__dict__.get(name)) for module, name, _ in changes]
    try:
        for module, name, ours in changes:
            module.__dict__[name] = in_passes(ours, getattr(module, name))
        yield
    finally:
        for module, name, original in before:
            if original is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = original


def in_passes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` where it is called from within a pass of the same thread, `theirs` elsewhere."""

    def chosen(*arguments: Any, **named: Any) -> Any:
        return ours(*arguments, **named) if _inside.get() else theirs(*arguments, **named)

    return chosen


def own_name(config: Any) -> str:
    """The attention implementation that a configuration has outside passes."""
    renamed = _renamed.get(id(config))
    name: str = config._attn_implementation_internal if renamed is None else renamed.original
    return "eager" if name == NAME else name  # a model that was copied while another thread had it in a pass


def own_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a layer would have called, had no pass been under way in another thread."""
    name = own_name(module.config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name == "eager" and eager is None:
        raise UnsupportedModel(
            f"{type(module).__name__} is called by one thread while another decodes with the same model; let one of "
            "them wait, or load the model twice"
        )
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def _rename(model: nn.Module, configs: Sequence[Any]) -> None:
    with _guard:
        for config in configs:
            entry = _renamed.setdefault(id(config), Renamed(config, own_name(config)))
            entry.models.add(id(model))
            config._attn_implementation_internal = NAME


def _restore(model: nn.Module) -> None:
    """Passes of one model do not nest, so whatever an earlier one has left behind goes with this one's."""
    _inside.set(tuple(other for other in _inside.get() if other != id(model)))
    with _guard:
        for entry in [entry for entry in _renamed.values() if id(model) in entry.models]:
            entry.models.discard(id(model))
            if not entry.models:
                entry.config._attn_implementation_internal = entry.original
                del _renamed[id(entry.config)]
