"""Loading what the options name: the target, its tokenizer, the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.cli.console import busy
from forerun.cli.settings import AUTO, make_drafter, make_policy, make_tree, shaped

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from forerun.decoder import SpeculativeDecoder
    from forerun.drafters.base import Drafter
    from forerun.policy.base import Policy

LOADING = ("device", "dtype", "offline")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the options for model and speculation stand for."""

    model: PreTrainedModel
    tokenizer: Any
    drafter: Drafter | None
    policy: str | int | Policy
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
    policy, tree = make_policy(options["policy"]), make_tree(options.get("tree"))
    with busy(console, f"loading {options['model']}"):
        from forerun.loading import load_model

        where = {name: options[name] for name in LOADING}
        named = options["draft"] != AUTO
        drafter = make_drafter(options["draft"], **where) if named else None
        model, tokenizer = load_model(options["model"], encoder_decoder=encoder_decoder, **where)
        if not named:
            from forerun.drafters import default_drafter

            drafter = default_drafter(model)
    drafter = shaped(drafter, tree, options.get("draft_top_k"))
    how = (options[name] for name in ("rule", "attention", "kernels", "compile"))
    return Loaded(model, tokenizer, drafter, policy, *how)
