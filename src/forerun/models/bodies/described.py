"""What bodies that run a description have in common, whatever the device: embeddings, logits, weights that move."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from transformers import PreTrainedModel

from forerun import ops
from forerun.models import plain
from forerun.models.bodies import readers
from forerun.models.bodies.base import FusedBody
from forerun.models.bodies.untouched import text_model


class DescribedBody(FusedBody):
    """A body that runs `decoder`, which a reader has read off the model's modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._read()

    def _read(self) -> None:
        """Take the description, and the weights where they lie now."""
        self.decoder = readers.describe(self.model)
        self._take_weights()
        self._addresses = [plain.asks_address(weight) for weight in text_model(self.model).parameters()]
        self._places = self._where()

    @abstractmethod
    def _take_weights(self) -> None:
        """Lay out the weights of `decoder`."""

    @abstractmethod
    def _why_not(self) -> str | None:
        """What keeps the model, as it is now, from being run by this; None where nothing does."""

    def _check_weights(self) -> None:
        """Weights may have moved since the last pass, or have become something at whose address nothing lies."""
        if self._places != self._where():
            if reason := self._why_not():
                plain.refuse_change(reason)
            self._read()

    def _where(self) -> list[int]:
        return [address() for address in self._addresses]

    def _embedded(self, new: Tensor, positions: Tensor) -> Tensor:
        """[N] ids or [N, H] embeddings -> hidden states before the first layer; positions [N] int64."""
        spec = self.decoder
        x: Tensor = new if new.is_floating_point() else self.model.base_model.get_input_embeddings()(new)
        x = x if spec.embedding_multiplier == 1 else x * spec.embedding_multiplier
        x = x if spec.embedding_norm is None else ops.normed(x, spec.embedding_norm)
        if spec.positions is None:
            return x
        return x + spec.positions[positions + spec.position_offset if spec.position_offset else positions]

    def _scaled(self, logits: Tensor) -> Tensor:
        """What the model does to its head's logits, in place."""
        if self.decoder.logit_multiplier != 1:
            logits.mul_(self.decoder.logit_multiplier)
        if self.decoder.logit_softcap is not None:
            logits.div_(self.decoder.logit_softcap).tanh_().mul_(self.decoder.logit_softcap)
        return logits
