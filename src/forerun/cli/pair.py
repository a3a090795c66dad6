"""Loading what the options name: the target, its tokenizer, the drafter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from forerun.cli.console import busy, note
from forerun.cli.options import place_of
from forerun.config import num_ranks
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from forerun.decoder import SpeculativeDecoder
    from forerun.drafters.base import Drafter


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """What the options for model and speculation stand for."""

    model: PreTrainedModel
    tokenizer: Any
    drafter: Drafter | None
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `SpeculativeDecoder`; the policy is a name, so that every decoder gets a policy of its own."""

    @property
    def has_encoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def decoder(self, keep_rows: int = 0) -> SpeculativeDecoder:
        from forerun.decoder import SpeculativeDecoder

        return SpeculativeDecoder(
            self.model, self.drafter, tokenizer=self.tokenizer, keep_rows=keep_rows, **self.settings
        )

    def plain_decoder(self) -> SpeculativeDecoder:
        """The same without drafts."""
        return replace(self, drafter=None, settings=self.settings | {"policy": 0}).decoder()


def load(
    options: dict[str, Any], console: Console, encoder_decoder: bool = False, keeps_stored: bool = True
) -> LoadedPair:
    """A text model with its drafter.

    On a CPU its weights stay as narrow as they are stored, unless it is to be compared with transformers running it:
    that would use our products as well.
    """
    with loading(options, console):
        from forerun.drafters import named_drafter
        from forerun.loading import load_model

        check_split(options)
        size = options.get("tensor_parallel", 1)
        place = stored_place(options) if keeps_stored and not is_split(size) else place_of(options)
        rounding = {name: options.get(name) for name in ("quantize", "quantize_head")}
        asked: dict[str, Any] = {"encoder_decoder": encoder_decoder, **rounding}
        draft: dict[str, Any] = {"option": "--draft", "quantize": options.get("draft_quantize"), **place}
        if is_split(size):  # first, because other ranks go no further than this
            model, tokenizer = load_split(options["model"], size, place)
            drafter = named_drafter(options["draft"], model, **draft, load_model=_draft_loader(options))
            _tell_of_placement(console)
        elif options["draft"] == "auto":  # which one depends on the target
            model, tokenizer = load_model(options["model"], **asked, **place)
            drafter = named_drafter("auto", model, **draft)
            _tell_of_copy(model, drafter, console)
        else:
            drafter = named_drafter(options["draft"], **draft)
            model, tokenizer = load_model(options["model"], **asked, **place)
    return loaded_with(options, model, tokenizer, drafter)


def check_split(options: dict[str, Any]) -> None:
    """Before anything is loaded: whether the options fit a target that is split, and its draft model can be if it must.
    Whether the target itself can is for whoever starts the processes to look at."""
    size = options.get("tensor_parallel", 1)
    if is_split(size):
        if (scheme := options.get("quantize")) is not None:
            raise InvalidArgument(f"--quantize {scheme}: a model split over processes is not quantised")
        if (head := options.get("quantize_head")) is not None:
            option = "--quantize-head" if head else "--no-quantize-head"
            raise InvalidArgument(f"{option}: a model split over processes is not quantised; leave it out")
    if (asked := options.get("draft_split", "auto")) != "auto":
        from forerun.drafters.named import draft_models
        from forerun.parallel.draft import check_draft_split

        names, scheme = draft_models(options["draft"]), options.get("draft_quantize")
        check_draft_split(asked, names, num_ranks(size), quantize=scheme, offline=options["offline"])


def _draft_loader(options: dict[str, Any]) -> Any:
    """Loads draft models of a split target where --draft-split says."""
    from forerun.config import Kernels
    from forerun.parallel import load_draft

    use = None if options["kernels"] is None else Kernels(options["kernels"])
    return partial(load_draft, split=options.get("draft_split", "auto"), use=use)


def _tell_of_placement(console: Console) -> None:
    from forerun.parallel.draft import placement

    if (told := placement()) is not None:
        note(console, f"draft model: {told}")


def _tell_of_copy(model: PreTrainedModel, drafter: Drafter | None, console: Console) -> None:
    """A copy of the weights that nobody asked for is told of."""
    if drafter is not None and drafter.needs_clock:
        from forerun.drafters.self_draft import copy_size
        from forerun.loading.quantise import matrices

        size = copy_size(matrices(model), 8) / 2**20
        note(console, f"drafts with a copy of the model in 8 bits, {size:.0f} MiB more; --draft lookup does without")


def stored_place(options: dict[str, Any]) -> dict[str, Any]:
    """Where the target runs, with weights as narrow as they are stored unless another type is asked for."""
    from forerun.loading import STORED

    place = place_of(options)
    return place | ({"dtype": STORED} if place["dtype"] is None and options["kernels"] != "off" else {})


def is_split(size: int) -> bool:
    """Whether the target is to be split over processes: by --tensor-parallel, or because torchrun started several."""
    return num_ranks(size) > 1


def load_split(name: str, size: int, place: dict[str, Any]) -> tuple[Any, Any]:
    """The target and its tokenizer on rank 0. The other ranks serve passes and then end."""
    from forerun.loading import load_tokenizer
    from forerun.parallel.start import sharded_target

    return sharded_target(name, size, place), load_tokenizer(name, offline=place["offline"])


@contextmanager
def loading(options: dict[str, Any], console: Console) -> Iterator[None]:
    """While the model is loaded. Cheap mistakes first: policy and tree are read before anything large is."""
    check_speculation(options)
    with busy(console, f"loading {options['model']}"):
        yield


def check_speculation(options: dict[str, Any]) -> None:
    """Refuse a policy or a tree that is not one."""
    from forerun.policy import as_policy

    as_policy(options["policy"])
    make_tree(options["tree"])


def loaded_with(options: dict[str, Any], model: PreTrainedModel, tokenizer: Any, drafter: Drafter | None) -> LoadedPair:
    """The pair, drafted with as the options for speculation say."""
    drafter = shaped(drafter, make_tree(options["tree"]), options["draft_top_k"])
    names = ("policy", "rule", "attention", "kernels", "cache_tokens", "cache_dtype", "compile")
    settings = {name: options[name] for name in names}
    return LoadedPair(model, tokenizer, drafter, settings)


def make_tree(text: str | None) -> dict[str, Any] | None:
    """Settings of a tree from 'NODES', 'NODESxWIDTH', 'NODES:WAY' or 'NODESxWIDTH:WAY'."""
    from forerun.types import Siblings

    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?(?::(\w+))?", text.strip())
    if match is None or (match[3] is not None and match[3] not in tuple(Siblings)):
        raise InvalidArgument(f"--tree {text!r}: write NODES, NODESxWIDTH or NODESxWIDTH:sampled, such as 12x3")
    parts = {"nodes": match[1] and int(match[1]), "width": match[2] and int(match[2]), "siblings": match[3]}
    return {name: value for name, value in parts.items() if value is not None}


def shaped(drafter: Drafter | None, tree: dict[str, Any] | None, top_k: int | None) -> Drafter | None:
    """The drafter as --tree and --draft-top-k would have it."""
    if tree is None and top_k is None:
        return drafter
    if drafter is None:
        raise InvalidArgument("--tree and --draft-top-k need a drafter; --draft none has none")
    from forerun.drafters import TopK, with_trees

    grown = drafter if tree is None else with_trees(drafter, **tree)
    return grown if top_k is None else TopK(grown, top_k)
