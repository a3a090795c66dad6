"""Loading what the options name: the target, its tokenizer, the drafter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.cli.console import busy
from forerun.cli.options import place_of
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from forerun.decoder import SpeculativeDecoder
    from forerun.drafters.base import Drafter


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the options for model and speculation stand for."""

    model: PreTrainedModel
    tokenizer: Any
    drafter: Drafter | None
    policy: str  # by name, so that every decoder gets a policy of its own
    rule: str
    attention: str
    kernels: str | None = None
    compile: bool = True

    @property
    def has_encoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def decoder(self, keep_rows: int = 0) -> SpeculativeDecoder:
        from forerun.decoder import SpeculativeDecoder

        return SpeculativeDecoder(
            self.model,
            self.drafter,
            policy=self.policy,
            rule=self.rule,
            tokenizer=self.tokenizer,
            attention=self.attention,
            kernels=self.kernels,
            compile=self.compile,
            keep_rows=keep_rows,
        )


def load(options: dict[str, Any], console: Console, encoder_decoder: bool = False) -> Loaded:
    """Cheap mistakes first: policy and tree are read before anything large is."""
    tree = check_speculation(options)
    with busy(console, f"loading {options['model']}"):
        from forerun.drafters import named_drafter
        from forerun.loading import load_model

        where = place_of(options)
        if options["draft"] == "auto":  # which one depends on the target
            model, tokenizer = load_model(options["model"], encoder_decoder=encoder_decoder, **where)
            drafter = named_drafter("auto", model)
        else:
            drafter = named_drafter(options["draft"], option="--draft", **where)
            model, tokenizer = load_model(options["model"], encoder_decoder=encoder_decoder, **where)
    return loaded_with(options, model, tokenizer, drafter, tree)


def check_speculation(options: dict[str, Any]) -> dict[str, Any] | None:
    """Refuse a policy or a tree that does not exist; returns the tree's settings."""
    from forerun.policy import as_policy

    as_policy(options["policy"])
    return make_tree(options.get("tree"))


def loaded_with(
    options: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: Any,
    drafter: Drafter | None,
    tree: dict[str, Any] | None,
) -> Loaded:
    """The pair, drafted with as the options for speculation say."""
    drafter = shaped(drafter, tree, options.get("draft_top_k"))
    how = {name: options[name] for name in ("policy", "rule", "attention", "kernels", "compile")}
    return Loaded(model, tokenizer, drafter, **how)


def make_tree(text: str | None) -> dict[str, Any] | None:
    """Settings of a tree from 'NODES', 'NODESxWIDTH', 'NODES:WAY' or 'NODESxWIDTH:WAY'."""
    from forerun.types import Siblings

    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?(?::(\w+))?", text.strip())
    if match is None or (match[3] is not None and match[3] not in tuple(Siblings)):
        raise InvalidArgument(f"--tree {text!r}: write NODES, NODESxWIDTH or NODESxWIDTH:sampled, such as 12x3")
    given = {"nodes": match[1] and int(match[1]), "width": match[2] and int(match[2]), "siblings": match[3]}
    return {name: value for name, value in given.items() if value is not None}


def shaped(drafter: Drafter | None, tree: dict[str, Any] | None, top_k: int | None) -> Drafter | None:
    """The drafter as --tree and --draft-top-k would have it."""
    if tree is None and top_k is None:
        return drafter
    if drafter is None:
        raise InvalidArgument("--tree and --draft-top-k need a drafter; --draft none has none")
    from forerun.drafters import TopK, with_trees

    grown = drafter if tree is None else with_trees(drafter, **tree)
    return grown if top_k is None else TopK(grown, top_k)
