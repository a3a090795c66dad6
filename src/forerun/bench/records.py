"""Records of format 1, which `forerun plan` and `forerun eval` still write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.bench import outputs
from forerun.errors import ForerunError, InvalidArgument
from forerun.files import write_whole
from forerun.measure import record
from forerun.measure.provenance import Machine, Provenance

FORMAT = 1
Agreement = outputs.Agreement


def write(found: Any, path: Path, summary: Mapping[str, Any] | None = None) -> None:
    content = {"format": FORMAT, **asdict(found), "summary": summary or {}}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def content_of(path: Path) -> dict[str, Any]:
    content = record.content_of(path)
    if (found := content.get("format")) != FORMAT:
        raise InvalidArgument(
            f"{str(path)!r} has record format {found!r} and this version reads {FORMAT}; measure again"
        )
    return content


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except ForerunError:
        raise
    except Exception as error:
        raise InvalidArgument(f"{str(path)!r} is a damaged record ({type(error).__name__}: {error})") from error


def provenance_of(content: Mapping[str, Any]) -> Provenance:
    origin = content["provenance"]
    return Provenance(**origin | {"machine": Machine(**origin["machine"])})
