"""`--task`: what an encoder-decoder model of many trades is asked to do, by its own configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from forerun.cli.prompts import Prompt


def asked_for(model: PreTrainedModel, task: str, prompts: Sequence[Prompt], console: Console) -> list[Prompt]:
    """The prompts with the task's prefix in front. What else its configuration asks for is named, not used."""
    known: dict[str, dict[str, Any]] = getattr(model.config, "task_specific_params", None) or {}
    if task not in known:
        names = f"it knows {', '.join(sorted(known))}" if known else "it knows none; leave --task out"
        raise InvalidArgument(
            f"--task {task!r}: no task of {model.config.name_or_path or type(model).__name__}; {names}"
        )
    settings = dict(known[task])
    prefix = settings.pop("prefix", "")
    if settings:
        told = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        console.print(f"--task {task}: prefix {prefix!r}; not used: {told}", style="dim", markup=False, highlight=False)
    return [prefix + _text(prompt) for prompt in prompts]


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise InvalidArgument("--task takes texts, not conversations with roles")
    return prompt
