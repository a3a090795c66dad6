"""WikiText-2: how well the target predicts a text. Nothing is decoded, so drafts cannot change it."""

from __future__ import annotations

from pathlib import Path

from forerun.eval.tasks.task import Example, Metric, Rows, Task
from forerun.files import read_text


def _parse(paths: tuple[Path, ...]) -> Rows:
    content = read_text(paths[0])
    if not content.strip():
        yield paths[0].name, ValueError("the file is empty")
    else:
        yield paths[0].name, Example("text", content, None)


WIKITEXT2 = Task(
    name="wikitext2",
    title="WikiText-2",
    metrics=(Metric("perplexity", "perplexity", is_share=False),),
    places=(("wikitext2/test.txt",), ("wikitext2.txt",)),
    parse=_parse,
    give="test.txt of WikiText-2",
    is_text=True,
)
