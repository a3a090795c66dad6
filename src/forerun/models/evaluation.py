"""No dropout while anybody decodes with a model, and the mode it had before once nobody does any more.

Several engines may decode with one model in turns, and models may share modules. So modules are counted: the first
that needs one in evaluation mode puts it there, and the last to end gives it back to whoever trains it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from threading import RLock
from typing import Self

from torch import nn

_guard = RLock()  # of what follows; an evaluation that nobody holds any more may end while another begins
_evaluations: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # of modules in training
_counting: list[object] = []  # by whom counts are being changed: one that was read may be about to be written
_late: list[list[nn.Module]] = []  # given back meanwhile, by the collector: it may run in the thread that counts


class Evaluation:
    """These models are in evaluation mode until `end`, the end of a `with`, or until nobody holds this any more."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        held: list[nn.Module] = []
        self._finish = weakref.finalize(self, _give_back, held)
        self._finish.atexit = False
        _take(models, held)

    def end(self) -> None:
        """The second time nothing happens."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _take(models: Iterable[nn.Module], held: list[nn.Module]) -> None:
    with _guard:
        _counting.append(held)
        try:
            for model in models:
                for module in model.modules():
                    if module.training or (_evaluations and module in _evaluations):
                        held.append(module)
                        _evaluations[module] = _evaluations.get(module, 0) + 1
                        module.training = False
        finally:
            _counting.pop()
            _give_back_late()


def _give_back(held: list[nn.Module]) -> None:
    with _guard:
        _late.append(held)
        _give_back_late()


def _give_back_late() -> None:
    """Give back what waits, unless somebody counts, who does it afterwards."""
    while _late and not _counting:  # asked again after counting: more may have come at the very end of it
        _counting.append(_late)
        try:
            while _late:
                for module in _late.pop():
                    _evaluations[module] -= 1
                    if not _evaluations[module]:
                        del _evaluations[module]
                        module.training = True
        finally:
            _counting.pop()
