"""A model of the Hub as a folder of this machine: those of its files that a model is made of, fetched where needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.files import parse_json
from forerun.loading.tensor_files import ADAPTER, GENERATION, INDEX, WHOLE


def fetched_file(name: str, file: str, options: Mapping[str, Any], revision: str | None = None) -> Path | None:
    """One file; None where the repository has none of that name, or it is not here and nothing may be fetched."""
    places = _fetched(name, [file], options, revision)
    return Path(places[0]) if places else None


def fetched_folder(name: str, config: Any, options: Mapping[str, Any]) -> Path | None:
    """Where a repository's safetensors files lie; None where transformers makes the model of others.

    All of them are of the commit that the configuration is of. transformers would fetch the same files, a little later.
    """
    if getattr(config, "transformers_weights", None):
        return None
    commit = getattr(config, "_commit_hash", None)
    for file in (ADAPTER, GENERATION):  # whoever reads the folder looks whether they are there
        fetched_file(name, file, options, commit)
    if (whole := fetched_file(name, WHOLE, options, commit)) is not None:
        return whole.parent
    if (index := fetched_file(name, INDEX, options, commit)) is None:
        return None
    shards = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return index.parent if len(_fetched(name, shards, options, commit)) == len(shards) else None


def _fetched(name: str, files: list[str], options: Mapping[str, Any], revision: str | None) -> list[str]:
    """Where those of these files lie that are to be had, fetched several at a time."""
    from transformers.utils.hub import cached_files

    places = cached_files(
        name,
        files,
        local_files_only=options["local_files_only"],
        revision=revision or options["revision"],
        _raise_exceptions_for_missing_entries=False,
    )
    return places or []
