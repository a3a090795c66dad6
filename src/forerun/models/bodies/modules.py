"""transformers' own modules over ragged rows: the specification of the other bodies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.math.attention import Form
from forerun.models.attention import ragged
from forerun.models.bodies.base import Body, ForwardPass, PassOutput
from forerun.models.encoder import EncoderOutput, encoder_width
from forerun.models.families import Family, Layout
from forerun.models.patches.linear import LinearPatches
from forerun.models.patches.positions import PositionPatches
from forerun.models.patches.rotary import RotaryPatches
from forerun.models.ragged_states import CrossStates, KeysChanged, RaggedStates
from forerun.types import RaggedRows


class ModulesBody(Body):
    """A causal model as transformers wrote it; `family.layout` becomes padded where packed rows turn out not to do.

    `linear` is the choice of kernels for linear layers, `use` for everything else.
    """

    _can_pad = True

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        form: Form = Form.AUTO,
        use: Kernels = Kernels.OFF,
        linear: Kernels = Kernels.OFF,
    ) -> None:
        model.eval()
        self.model, self.family, self.form, self.kernels = model, family, form, use
        self.decoder = self._decoder()  # what lies below the head
        self._linear = LinearPatches(model, linear, self._never_run())
        self._rotary = RotaryPatches(model, use)
        self._picks_logits = _takes(model, "logits_to_keep")
        inner = model.get_decoder()  # which `decoder` may merely wrap
        self.takes_positions = _takes(self.decoder, "position_ids") or (
            _takes(inner, "position_ids") and _hands_on(self.decoder)
        )
        self._positions = PositionPatches(inner, self.takes_positions)
        if not (self.takes_positions or self._positions.is_told or family.by_place):
            raise UnsupportedModel(
                f"{type(model).__name__} counts positions from the length of the cache, which is the same for "
                "all rows; use model.generate for it"
            )

    def _decoder(self) -> nn.Module:
        base: nn.Module = self.model.base_model
        return base

    def _never_run(self) -> nn.Module | None:
        """A part of the model that passes leave out."""
        return None

    def run(self, call: ForwardPass) -> PassOutput:
        """Repeated with padded rows where the model turns out to make more of its keys than packed rows can follow.

        The cache holds the same in both layouts, so nothing that was computed before is lost.
        """
        try:
            return self._run(call)
        except KeysChanged:
            if not self._can_pad:
                raise
            self.family = replace(self.family, layout=Layout.PADDED)
        return self._run(call)

    def _run(self, call: ForwardPass) -> PassOutput:
        if not self._reaches_too_far(call.rows):
            return self._pass(call)
        parts = [self._pass(one) for one in _one_by_one(call)]
        logits = None if not call.wants_logits else torch.cat([p.logits for p in parts if p.logits is not None])
        return PassOutput(
            torch.cat([p.hidden for p in parts if p.hidden is not None]) if call.wants_hidden else None,
            logits if logits is None or call.keep is None else logits[call.keep],
        )

    def _reaches_too_far(self, rows: RaggedRows) -> bool:
        """Whether padding would take places past the end of a family's tables of places, though no row gets there."""
        limit = self.family.context_length
        if not self.family.by_place or limit is None or len(rows.slots) == 1:
            return False
        return max(rows.past) + max(rows.counts) > limit

    @property
    def picks_logits(self) -> bool:
        """Whether the head runs on the positions that are asked for alone."""
        return self._picks_logits and self.family.layout is Layout.PACKED

    def _pass(self, call: ForwardPass) -> PassOutput:
        model, new = self.model, call.new
        states = RaggedStates(call.cache, call.rows, self.family, self.form, new.device, self.kernels, call.trees)
        if call.sources is not None:
            states.cross = call.sources.cross_states(states)
        positions, padded = states.positions, states.padded
        new, positions = (x[None] if padded is None else x[padded.tokens] for x in (new, positions))
        options: dict[str, Any] = {}
        if picks := padded is None and call.keep is not None and self._picks_logits:
            options["logits_to_keep"] = call.keep
        outputs: list[Any] = []  # what the decoder gave
        with (
            ragged(model, states),
            self._linear.during_pass(new.shape[:2].numel()),
            self._rotary.during_pass() if padded is None else nullcontext(),
            self.watching(outputs) if call.wants_logits and call.wants_hidden else nullcontext(),
        ):
            out = self.call(model if call.wants_logits else self.decoder, states, new, positions, **options)
            states.check_read()
        if not call.wants_logits:
            return PassOutput(_packed(out.last_hidden_state, states) if call.wants_hidden else None, None)
        hidden = _packed(outputs[0].last_hidden_state, states) if outputs else None
        logits = _packed(out.logits, states)
        return PassOutput(hidden, logits if call.keep is None or picks else logits[call.keep])

    def call(self, module: nn.Module, states: RaggedStates, new: Tensor, positions: Tensor, **options: Any) -> Any:
        """Call `module` (the whole model, or `decoder`) on rows as `states` lays them out, within a pass."""
        options["inputs_embeds" if new.is_floating_point() else "input_ids"] = new
        if self.takes_positions:
            options["position_ids"] = positions
        if self.family.places_by_mask and states.padded is not None:
            options["attention_mask"] = (states.padded.places >= 0).long()
        with self._positions.during_pass(states):
            return module(past_key_values=states, use_cache=True, **options)

    @contextmanager
    def watching(self, outputs: list[Any]) -> Iterator[None]:
        """Collect what the decoder returns while the whole model runs."""
        # Some families (OPT) call what lies within their base model directly, so both are watched.
        bodies = {id(body): body for body in (self.decoder, self.model.get_decoder()) if body is not self.model}
        hooks = [body.register_forward_hook(lambda *call: outputs.append(call[-1])) for body in bodies.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Seq2SeqModules(ModulesBody):
    """The decoder of an encoder-decoder model; what its cross-attention reads has been made before the pass."""

    _can_pad = False  # positions and sources are told to packed rows

    def __init__(self, model: PreTrainedModel, family: Family, *options: Any, **named: Any) -> None:
        super().__init__(model, family, *options, **named)
        # In the place of the encoder's states, which nobody reads: cross-attention's keys lie in a cache.
        self._no_states = torch.zeros(1, 1, encoder_width(model), device=model.device, dtype=model.dtype)

    def _decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.get_decoder()
        return decoder

    def _never_run(self) -> nn.Module:
        encoder: nn.Module = self.model.get_encoder()
        return encoder

    def call(self, module: nn.Module, states: RaggedStates, new: Tensor, positions: Tensor, **options: Any) -> Any:
        assert states.cross is not None
        is_whole = module is self.model
        prefix = "decoder_" if is_whole else ""
        options[f"{prefix}input_ids"] = new
        if self.takes_positions:
            options[f"{prefix}position_ids"] = positions
        if is_whole:
            options["encoder_outputs"] = EncoderOutput(last_hidden_state=self._no_states)
        else:
            options["encoder_hidden_states"] = self._no_states
        with self._positions.during_pass(states):
            return module(past_key_values=_BothCaches(states, states.cross), use_cache=True, **options)


class _BothCaches(EncoderDecoderCache):
    """What transformers sees during one pass."""

    def __init__(self, states: RaggedStates, cross: CrossStates) -> None:
        self.self_attention_cache, self.cross_attention_cache = states, cross
        self.is_updated = dict.fromkeys(range(len(cross.layers)), True)


def _takes(module: nn.Module, name: str) -> bool:
    return name in signature(module.forward).parameters


def _hands_on(module: nn.Module) -> bool:
    """Whether a module passes keywords on that it does not know."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in signature(module.forward).parameters.values())


def _one_by_one(call: ForwardPass) -> Iterator[ForwardPass]:
    """A pass of its own for each row. Only families that take neither trees nor sources need it."""
    rows = call.rows
    parts = zip(rows.slots, rows.past, rows.counts, call.new.split(list(rows.counts)), strict=True)
    for slot, past, count, new in parts:
        yield replace(call, new=new, rows=RaggedRows((slot,), (past,), (count,)), keep=None)


def _packed(out: Tensor, states: RaggedStates) -> Tensor:
    """What a model gave for each new position, pads left out: [1, N, ..] or [B, T, ..] -> [N, ..]."""
    return out[0] if states.padded is None else states.padded.packed(out)
