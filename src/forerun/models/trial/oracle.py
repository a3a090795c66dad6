"""The model's own forward, without a cache: what a trial holds ours against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from inspect import signature
from itertools import cycle, groupby, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from forerun.models.encoder import EncoderOutput
from forerun.models.trial.rounding import deviation
from forerun.models.trial.texts import SourcedText

PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # all but cuDNN's


class OracleLogits:
    """What the model says after each token of some texts, and so of all texts that these begin with."""

    def __init__(self, known: dict[SourcedText, Tensor]) -> None:
        self._known = known  # [n, V] of each

    def after(self, asked: SourcedText) -> Tensor:
        """[n, V] after each token."""
        return next(logits[: len(asked[1])] for read, logits in self._known.items() if _begins_with(read, asked))


class Oracle:
    """Runs a model on texts, each read from its first token on.

    A text that others begin with is not read again: what comes behind a token has no part in its logits.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[Tensor], asked: Iterable[SourcedText]) -> None:
        self.model: Any = model
        self._states = states  # of each source, none for a causal model
        self._takes_positions = "position_ids" in signature(self.model.forward).parameters
        self._texts: list[SourcedText] = []
        for text in sorted(asked, key=lambda one: len(one[1]), reverse=True):
            if not any(_begins_with(longer, text) for longer in self._texts):
                self._texts.append(text)

    def together(self) -> OracleLogits:
        """All texts in one call, or in one for each length of a source.

        None is padded, which some models take amiss: a short one goes on with its own tokens, which nobody looks at.
        """
        known: dict[SourcedText, Tensor] = {}
        for _, group in groupby(sorted(self._texts, key=self._source_length), self._source_length):
            texts = list(group)
            longest = max(len(text) for _, text in texts)
            filled = [(source, tuple(islice(cycle(text), longest))) for source, text in texts]
            known |= dict(zip(texts, self._forward(filled), strict=True))
        return OracleLogits(known)

    def alone(self) -> OracleLogits:
        """One call for each text, as `generate` reads a single prompt."""
        return OracleLogits(
            {text: self._longest_alone if text == self._texts[0] else self._alone(text) for text in self._texts}
        )

    @cached_property
    def noise(self) -> Tensor:
        """[n] how far logits move when every embedding is moved by as much as it may have been rounded."""
        generator = torch.Generator().manual_seed(21)
        unit = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)

        def disturb(module: Any, inputs: Any, out: Tensor) -> Tensor:
            signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
            return out * (1 + unit * signs)

        reads = self.model.get_decoder() if self._states else self.model
        undisturbed = self._longest_alone
        hook = reads.get_input_embeddings().register_forward_hook(disturb)
        try:
            return deviation(self._alone(self._texts[0]), undisturbed)
        finally:
            hook.remove()

    @cached_property
    def _longest_alone(self) -> Tensor:
        return self._alone(self._texts[0])

    def _alone(self, text: SourcedText) -> Tensor:
        return self._forward([text])[0]

    def _source_length(self, text: SourcedText) -> int:
        return len(self._states[text[0]]) if self._states else 0

    def _forward(self, texts: Sequence[SourcedText]) -> Tensor:
        """[B, n, V]. Not by cuDNN's attention, which plans every new shape first: a tenth of a second for each."""
        ids = torch.tensor([text for _, text in texts], device=self.model.device)
        with sdpa_kernel(PLANLESS):
            if self._states:
                read = EncoderOutput(last_hidden_state=torch.stack([self._states[source] for source, _ in texts]))
                logits: Tensor = self.model(encoder_outputs=read, decoder_input_ids=ids, use_cache=False).logits
            else:
                # As `generate` does: some classes count positions in another way where they are not told.
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
                position_keywords = {"position_ids": positions} if self._takes_positions else {}
                mask = torch.ones_like(ids)
                logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, **position_keywords).logits
        return logits


def _begins_with(longer: SourcedText, text: SourcedText) -> bool:
    return longer[0] == text[0] and longer[1][: len(text[1])] == text[1]
