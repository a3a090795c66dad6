"""What is asked and how answers are scored: one file a kind of task, and the table of all of them."""

from __future__ import annotations

from forerun.errors import InvalidArgument
from forerun.eval.tasks.code import HUMANEVAL, MBPP
from forerun.eval.tasks.gsm8k import GSM8K
from forerun.eval.tasks.spec_bench import SPEC_BENCH
from forerun.eval.tasks.summaries import CNN_DAILYMAIL, XSUM
from forerun.eval.tasks.task import Answer, BadRow, Example, Metric, Score, Task, TaskData
from forerun.eval.tasks.wikitext import WIKITEXT2

TASKS = {task.name: task for task in (XSUM, CNN_DAILYMAIL, HUMANEVAL, MBPP, GSM8K, WIKITEXT2, SPEC_BENCH)}
ALL = "all"


def chosen(names: tuple[str, ...]) -> list[Task]:
    """Tasks by name, each once, in the order of the table."""
    unknown = [name for name in names if name not in TASKS and name != ALL]
    if unknown:
        raise InvalidArgument(f"no task {unknown[0]!r}; there are: {', '.join(TASKS)}, and 'all'")
    return [task for name, task in TASKS.items() if name in names or ALL in names]


__all__ = ["ALL", "Answer", "BadRow", "Example", "Metric", "Score", "TASKS", "Task", "TaskData", "chosen"]
