"""What two runs must share for their answers to belong together, beyond the settings that a record shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from forerun.config import ModelSettings, SpeculationSettings, kernels, num_ranks
from forerun.loading.digest import files_digest

SHOWN = ("model", "draft", "policy", "rule")  # these the settings of a run hold already
ELSEWHERE = ("offline",)  # says where to look, not what is found
WITH_FILES = ("ngram", "shared")  # drafters that are written KIND:NAME, and NAME has files


def pair_identity(options: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Of a target and a drafter as loaded by the options: how they are run, on which device, and their files.

    A record names models without their folders, and a name may stand for other weights tomorrow: so the files count.
    """
    names = [field.name for kind in (ModelSettings, SpeculationSettings) for field in fields(kind)]
    how = {name: options[name] for name in names if name in options and name not in (*SHOWN, *ELSEWHERE)}
    how |= {"device": str(device), "kernels": str(kernels(options["kernels"]))}
    how["tensor_parallel"] = num_ranks(options.get("tensor_parallel", 1))
    drafts = [files_digest(_place(part.strip())) for part in options["draft"].split(",")]
    return how | {"files of the model": files_digest(options["model"]), "files of the draft": drafts}


def _place(draft: str) -> str:
    kind, _, rest = draft.partition(":")
    return rest if kind in WITH_FILES else draft
