"""A trained drafter as a folder: what it is, the configuration of its layers, and its tensors.

`forerun.json` says the kind and the target it was made for, `config.json` is transformers' own, `model.safetensors`
holds the weights. Where the draft's vocabulary is reduced, the tensor `draft_vocabulary` names the ids it can say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError, InvalidArgument, ModelNotFound, kind_and_line
from forerun.files import read_json, replace_files
from forerun.loading.sizes import check_layer_counts, check_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

M = TypeVar("M", bound=nn.Module)

FORMAT = 1
KINDS = ("feature", "parallel", "causal", "decoder")
SHARES = ("embedding", "head", "encoder")
COMPARED = {"model_type": str, "hidden_size": int, "vocab_size": int}
MANIFEST, CONFIG, WEIGHTS = "forerun.json", "config.json", "model.safetensors"
DRAFT_VOCABULARY = "draft_vocabulary"  # int32 [Vd], ascending
REMEDY = "train or fetch the folder again"


@dataclass(frozen=True)
class DrafterManifest:
    """What `forerun.json` says."""

    kind: str  # one of KINDS
    num_blocks: int  # tokens a parallel draft can have; 0 for the other kinds
    target: dict[str, Any]  # name, model_type, hidden_size, vocab_size
    shares: tuple[str, ...] = ()  # which of SHARES are the target's own
    provenance: dict[str, Any] = field(default_factory=dict)  # how it was made; free

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"kind={self.kind!r}: a drafter is one of {', '.join(KINDS)}")
        if type(self.num_blocks) is not int or (self.num_blocks > 0) != (self.kind == "parallel"):
            raise InvalidArgument(
                f"num_blocks={self.num_blocks!r} with kind={self.kind!r}: parallel drafters need at least 1, others 0"
            )
        if unknown := set(self.shares) - set(SHARES):
            raise InvalidArgument(f"shares={sorted(unknown)}: only {', '.join(SHARES)} can be shared with the target")
        if missing := set(COMPARED) - set(self.target):
            raise InvalidArgument(f"target lacks {', '.join(sorted(missing))}: use describe_target(model)")
        for name, kind in COMPARED.items():
            if type(self.target[name]) is not kind:
                raise InvalidArgument(f"target has {name}={self.target[name]!r}, which is no {kind.__name__}")


def describe_target(model: PreTrainedModel) -> dict[str, Any]:
    """The manifest's entry `target` for a model."""
    config = model.config.get_text_config(decoder=True)
    weight = getattr(model.get_output_embeddings(), "weight", None)  # of a quantised head it may be a method
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "vocab_size": int(weight.shape[0]) if isinstance(weight, Tensor) else config.vocab_size,
    }


def check_target(made_for: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raise unless `model` has the kind and sizes of the target a drafter was made for.

    Names may differ: one model has many (a folder, a Hub name), and a fine-tuned sister is a fair target.
    """
    target = describe_target(model)
    if all(made_for[name] == target[name] for name in COMPARED if name in made_for):
        return
    raise InvalidArgument(
        f"this drafter was made for {_in_words(made_for)}, the target is {_in_words(target)}; "
        "use the drafter with its own target, or train one for this target"
    )


def _in_words(target: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} {target[name]}" for name in COMPARED if name in target)
    return f"{target.get('name', 'a model')} ({sizes})"


def is_drafter_folder(path: str | Path) -> bool:
    return (Path(path) / MANIFEST).is_file()


def read_kind(folder: str | Path) -> str:
    return _read_manifest(Path(folder) / MANIFEST).kind


def save_drafter(
    folder: str | Path,
    manifest: DrafterManifest,
    config: PreTrainedConfig,
    tensors: Mapping[str, Tensor],
    advice: str = "make room or choose another place",
) -> None:
    """Write everything beside `folder` first, then move it into place; other files of the folder stay."""
    folder = Path(folder)
    _check_tensors(tensors, manifest, str(folder))
    replace_files(folder, lambda beside: _write(beside, manifest, config, tensors), MANIFEST, advice)


def load_drafter(folder: str | Path) -> tuple[DrafterManifest, PreTrainedConfig, dict[str, Tensor]]:
    """What `save_drafter` wrote, checked."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelNotFound(f"no drafter folder {str(folder)!r}; check the path")
    for name in (MANIFEST, CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelNotFound(f"drafter folder {str(folder)!r} has no {name}; {REMEDY}")
    manifest = _read_manifest(folder / MANIFEST)
    config = _read_config(folder)
    tensors = _read_tensors(folder / WEIGHTS)
    _check_tensors(tensors, manifest, str(folder))
    return manifest, config, tensors


def build(folder: str | Path, manifest: DrafterManifest, tensors: Mapping[str, Tensor], make: Callable[[], M]) -> M:
    """What `make` makes of a folder's config.json. Whatever transformers thinks of an odd one is one error.

    It is made on the meta device first, so that one that asks for far more than the folder holds takes no memory.
    """
    try:
        with torch.device("meta"):
            sketch = make()
        lent = 2 * manifest.target["vocab_size"] * manifest.target["hidden_size"]  # embedding and head
        check_size(sketch, lent + sum(tensor.numel() for tensor in tensors.values()), str(folder))
        return make()
    except ForerunError:
        raise
    except Exception as error:  # wrong types and sizes come out as many kinds
        raise InvalidArgument(
            f"{str(Path(folder) / CONFIG)!r} describes no model that can be built ({kind_and_line(error)}); {REMEDY}"
        ) from error


def fill(module: nn.Module, tensors: Mapping[str, Tensor], folder: str | Path, lent: Collection[str] = ()) -> None:
    """Load a folder's tensors: every parameter but those `given` by the target, and nothing else."""
    try:
        missing, unknown = module.load_state_dict(dict(tensors), strict=False)
    except RuntimeError as error:
        raise InvalidArgument(f"drafter {str(folder)!r}: weights do not fit config.json: {error}") from error
    if odd := [*(set(missing) - set(lent)), *unknown]:
        raise InvalidArgument(
            f"drafter {str(folder)!r}: weights do not fit config.json: {', '.join(sorted(odd)[:4])} missing or "
            f"unknown; {REMEDY}"
        )


def _write(folder: Path, manifest: DrafterManifest, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
    config.to_json_file(str(folder / CONFIG), use_diff=False)
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _read_manifest(path: Path) -> DrafterManifest:
    content = read_json(path, REMEDY)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        version = content.get("format") if isinstance(content, dict) else content
        raise InvalidArgument(
            f"{str(path)!r} has format {version!r}, this version of Forerun reads {FORMAT}; update Forerun, or {REMEDY}"
        )
    try:
        return DrafterManifest(
            kind=content["kind"],
            num_blocks=content["num_blocks"],
            target=dict(content["target"]),
            shares=tuple(content["shares"]),
            provenance=dict(content.get("provenance") or {}),
        )
    except KeyError as error:
        raise InvalidArgument(f"{str(path)!r} lacks the entry {error}; {REMEDY}") from error
    except (InvalidArgument, TypeError, ValueError) as error:
        raise InvalidArgument(f"{str(path)!r}: {error}") from error


def _read_config(folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig, PreTrainedConfig

    try:
        check_layer_counts(PreTrainedConfig.get_config_dict(folder, local_files_only=True)[0], str(folder))
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a file that is no configuration
        why = "it wants Python code of its own run" if "trust_remote_code" in str(error) else kind_and_line(error)
        raise InvalidArgument(f"{str(folder / CONFIG)!r} is no model configuration ({why}); {REMEDY}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidArgument(f"{str(path)!r} is truncated or corrupt ({error}); {REMEDY}") from error
    return tensors


def _check_tensors(tensors: Mapping[str, Tensor], manifest: DrafterManifest, where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidArgument(f"drafter {where!r}: {name} holds NaN or infinity; the training diverged, {REMEDY}")
    ids = tensors.get(DRAFT_VOCABULARY)
    if ids is None:
        return
    size = manifest.target["vocab_size"]
    ascending = ids.dim() == 1 and len(ids) > 0 and bool((ids[1:] > ids[:-1]).all())
    if ids.is_floating_point() or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise InvalidArgument(
            f"drafter {where!r}: {DRAFT_VOCABULARY} must be ascending token ids below {size}, without repeats; {REMEDY}"
        )
