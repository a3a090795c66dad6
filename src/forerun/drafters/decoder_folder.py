"""A trained decoder of few layers that reads its target's encoder and uses its target's embedding and head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from forerun.drafters.model_folder import ModelFolder, cut_head
from forerun.loading.drafter_folder import build, check_target, fill


@dataclass(frozen=True)
class DecoderFolder(ModelFolder):
    """Of kind `decoder`."""

    kind = "decoder"

    def beside(self, target: PreTrainedModel) -> tuple[PreTrainedModel, Tensor | None]:
        """A model whose decoder is the folder's and whose other parts are `target`'s, and the ids its head knows."""
        check_target(self.manifest.target, target)
        model = self._own_parts(target).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        ids = None if self.ids is None else self.ids.to(target.device)
        head: Any = target.get_output_embeddings()
        model.base_model.encoder = target.get_encoder()
        model.get_decoder().embed_tokens = target.get_decoder().get_input_embeddings()
        model.set_output_embeddings(head if ids is None else cut_head(head, ids))
        return model, ids

    def _own_parts(self, target: PreTrainedModel) -> Any:
        """The decoder as it was saved, in a model that lacks what the target has."""
        config: Any = copy.deepcopy(self.config)
        config._attn_implementation = target.config._attn_implementation
        config.encoder_layers, config.vocab_size, config.pad_token_id = 0, 1, None  # nothing is made to be thrown away
        config.tie_word_embeddings = False
        model: Any = build(self.name, self.manifest, self.tensors, lambda: type(target)(config))
        fill(model, {name: tensor.float() for name, tensor in self.tensors.items()}, self.name, _foreign(model))
        return model


def _foreign(model: Any) -> set[str]:
    """Names of what the target lends: all but the decoder's layers."""
    names = model.state_dict().keys()
    return {n for n in names if not n.startswith("model.decoder.") or n.endswith("embed_tokens.weight")}
