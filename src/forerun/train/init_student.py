"""Where a draft begins: random layers, layers of the target, or a draft there already is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.files import parse_json
from forerun.loading.drafter_folder import (
    DRAFT_VOCABULARY,
    DrafterManifest,
    build,
    check_target,
    fill,
    is_drafter_folder,
    load_drafter,
)
from forerun.loading.load import load_draft_weights
from forerun.models.draft_head import DraftHead, check_plain, shortened
from forerun.train.head_loss import SharedHead
from forerun.train.options import TrainOptions
from forerun.train.students import CausalStudent, FeatureStudent, ParallelStudent, Student


@dataclass(frozen=True, slots=True)
class InitialStudent:
    """A draft ready to be trained."""

    student: Student  # float32, on the target's device
    head: SharedHead
    shares: tuple[str, ...]

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [weight for weight in self.student.parameters() if weight.requires_grad]


def init_student(target: PreTrainedModel, options: TrainOptions, tokens: Tensor | None) -> InitialStudent:
    """`tokens` [Vd] are the ids the draft can say, None for all. Random weights come from the options' seed."""
    check_trainable(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        make = _causal if options.kind == "causal" else _with_head
        initial = make(target, options, tokens)
    initial.student.to(target.device).eval()  # drafts are trained as they are used: without dropout
    _check_windows(initial.student, options.max_length)
    return initial


def check_trainable(target: PreTrainedModel) -> None:
    """Raise unless a draft of any kind can be trained for this target."""
    try:
        check_plain(target)
    except UnsupportedModel as error:
        reason = str(error).partition(":")[0]
        raise UnsupportedModel(
            f"{reason}: training reads the target's law off one plain matrix, so no draft can be trained for it; use a "
            "smaller model of its family, or a drafter that needs no training"
        ) from error


def draft_tokens(options: TrainOptions, counts: Counter[int], special: Iterable[int], vocab_size: int) -> Tensor | None:
    """The ids the draft can say: those it begins with, or the most used ones and all special ones."""
    if options.draft_vocabulary is None:
        if options.start is None or not is_drafter_folder(options.start):
            return None
        tokens = load_drafter(options.start)[2].get(DRAFT_VOCABULARY)
        return None if tokens is None else tokens.long()
    always = {token for token in special if 0 <= token < vocab_size}
    size = min(options.draft_vocabulary, vocab_size)
    if size < len(always):
        raise InvalidArgument(
            f"draft_vocabulary={options.draft_vocabulary}: must hold the {len(always)} special tokens at least"
        )
    used = sorted(counts, key=lambda token: (-counts[token], token))
    # Ids nobody used come last, lowest first: the vocabulary has the size that was asked for.
    order = dict.fromkeys([*sorted(always), *used, *range(vocab_size)])
    return torch.tensor(sorted(list(order)[:size]))


def _with_head(target: PreTrainedModel, options: TrainOptions, tokens: Tensor | None) -> InitialStudent:
    head = _draft_head(target, options)
    embedding = target.get_input_embeddings()
    student: Student
    if options.kind == "parallel":
        student = ParallelStudent(head, embedding)
    else:
        student = FeatureStudent(head, embedding, options.unroll)
    return InitialStudent(student, _shared_head(target, tokens), ("embedding", "head"))


def _draft_head(target: PreTrainedModel, options: TrainOptions) -> DraftHead:
    num_blocks = options.heads if options.kind == "parallel" else 0
    if options.start is not None:
        return _head_from(options.start, target, options, num_blocks)
    head = DraftHead.for_target(target, len(options.layers or ()) or options.num_layers, num_blocks)
    _copy_layers(target.base_model, head.body, options.layers or ())
    _balance(head, target)
    return head


@torch.no_grad()
def _balance(head: DraftHead, target: PreTrainedModel) -> None:
    """Let embedding and feature weigh the same at first: a feature may be ten times as large and drown the token."""
    width = head.config.hidden_size
    embedding = target.get_input_embeddings().weight
    some = torch.arange(min(64, len(embedding)), device=target.device)[None]
    feature: Tensor = target.base_model(input_ids=some, use_cache=False).last_hidden_state
    for half, like in ((slice(0, width), embedding), (slice(width, None), feature)):
        scale = float(like.float().square().mean().sqrt().clamp(min=1e-6))
        nn.init.normal_(head.fuse.weight[:, half], std=(2 * width) ** -0.5 / scale)


def _head_from(folder: str, target: PreTrainedModel, options: TrainOptions, num_blocks: int) -> DraftHead:
    manifest, config, tensors = load_drafter(folder)
    if manifest.kind != options.kind or manifest.num_blocks != num_blocks:
        raise InvalidArgument(
            f"{folder!r} is a {manifest.kind} draft with {manifest.num_blocks} heads, and a {options.kind} draft with "
            f"{num_blocks} is to be trained; begin from another folder, or train that kind"
        )
    check_target(manifest.target, target)
    tensors.pop(DRAFT_VOCABULARY, None)
    head = build(folder, manifest, tensors, lambda: DraftHead(config, num_blocks))
    fill(head, tensors, folder)
    return head


def _causal(target: PreTrainedModel, options: TrainOptions, tokens: Tensor | None) -> InitialStudent:
    model, may_share = _causal_model(target, options)
    if may_share and options.share:
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
        student = CausalStudent(model, target.get_input_embeddings())
        return InitialStudent(student, _shared_head(target, tokens), ("embedding", "head"))
    if tokens is not None:
        what, remedy = "has a reduced vocabulary", "share=False"
        if options.draft_vocabulary is not None:
            what, remedy = "has a head of its own", "draft_vocabulary"
        raise InvalidArgument(
            f"{options.start!r} {what}, and a reduced vocabulary needs the target's; leave {remedy} out"
        )
    head = SharedHead(target.get_output_embeddings(), None, model.get_output_embeddings())
    return InitialStudent(CausalStudent(model, None), head, ())


def _causal_model(target: PreTrainedModel, options: TrainOptions) -> tuple[PreTrainedModel, bool]:
    """A causal model in float32, and whether it may share the target's embedding and head."""
    if options.start is not None and is_drafter_folder(options.start):
        contents = load_drafter(options.start)
        return causal_draft(contents, options.start, target), bool(contents[0].shares)
    if options.start is not None:
        model = load_draft_weights(options.start)
        _check_vocabulary(model.config, target, options.start)
        return model, False
    config = target.config.get_text_config(decoder=True)
    if options.config is not None:
        config, shared = _read_config(options.config, target), False
    else:
        config, shared = shortened(config, len(options.layers or ()) or options.num_layers), True
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    check_plain(model)
    if options.layers:
        _copy_layers(target.base_model, model.base_model, options.layers)
    _copy_ends(target, model)
    return model, shared


def causal_draft(
    contents: tuple[DrafterManifest, PreTrainedConfig, dict[str, Tensor]],
    folder: str | Path,
    target: PreTrainedModel,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The causal model in a drafter folder, with its target's embedding and head where it has none."""
    manifest, config, tensors = contents
    if manifest.kind != "causal":
        raise InvalidArgument(f"{str(folder)!r} is a {manifest.kind} draft; begin a causal one from a causal one")
    check_target(manifest.target, target)
    make = partial(AutoModelForCausalLM.from_config, config, dtype=dtype, trust_remote_code=False)
    model: PreTrainedModel = build(folder, manifest, tensors, make)
    _copy_ends(target, model)
    weights = {name: tensor for name, tensor in tensors.items() if name != DRAFT_VOCABULARY}
    fill(model, weights, folder, end_names(model))
    return model


def end_names(model: PreTrainedModel) -> set[str]:
    """Names of the embedding and the head, which a draft may have from its target."""
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if id(weight) in ends}


def _read_config(path: str, target: PreTrainedModel) -> PreTrainedConfig:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
        config = AutoConfig.for_model(**content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"config={path!r} is no transformers configuration ({error})") from error
    _check_vocabulary(config, target, path)
    return config


def _check_vocabulary(config: PreTrainedConfig, target: PreTrainedModel, where: str) -> None:
    size = target.get_output_embeddings().weight.shape[0]
    if config.get_text_config(decoder=True).vocab_size != size:
        raise InvalidArgument(f"{where!r}: its vocabulary is {config.vocab_size}, the target's {size}; make them equal")


def _shared_head(target: PreTrainedModel, tokens: Tensor | None) -> SharedHead:
    return SharedHead(target.get_output_embeddings(), None if tokens is None else tokens.to(target.device))


def _copy_ends(target: PreTrainedModel, model: PreTrainedModel) -> None:
    """Embedding and head of the target, where they fit."""
    for name in ("get_input_embeddings", "get_output_embeddings"):
        mine, its = getattr(model, name)().weight, getattr(target, name)().weight
        if mine.shape == its.shape:
            mine.data.copy_(its.detach())


def _copy_layers(source: nn.Module, body: nn.Module, numbers: Sequence[int]) -> None:
    """Layers by number, and whatever stands outside the layers and fits (the final norm)."""
    theirs, mine = _layers(source), _layers(body)
    if bad := [number for number in numbers if not 0 <= number < len(theirs)]:
        raise InvalidArgument(f"layers={bad}: the target has layers 0 to {len(theirs) - 1}")
    for layer, number in zip(mine, numbers, strict=False):  # none, or one for each
        layer.load_state_dict(theirs[number].state_dict())
    inside = {id(weight) for weight in mine.parameters()}
    outer = dict(source.named_parameters())
    for name, weight in body.named_parameters():
        if id(weight) not in inside and name in outer and outer[name].shape == weight.shape:
            weight.data.copy_(outer[name].detach())


def _layers(model: nn.Module) -> nn.ModuleList:
    config: Any = model.config
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == config.get_text_config(decoder=True).num_hidden_layers:
            return part
    raise UnsupportedModel(f"{type(model).__name__}: its layers were not found; begin from random weights instead")


def _check_windows(student: Student, max_length: int) -> None:
    """The masks of unrolled passes know no window: within it there is none."""
    config = student.network.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if isinstance(student, FeatureStudent) and student.depth > 1 and window is not None and window < max_length:
        raise UnsupportedModel(
            f"the target's attention sees {window} tokens and max_length is {max_length}; set max_length to {window} "
            "or less, or unroll to 1"
        )
