"""A trained decoder of few layers that reads its target's encoder and speaks with its target's embedding and head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.drafters.causal_folder import cut_head
from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, check_target, load_drafter


@dataclass(frozen=True)
class DecoderFolder:
    """What a folder of kind `decoder` holds; `beside` makes a model of it once the target is known."""

    name: str
    manifest: DrafterManifest
    config: PreTrainedConfig
    tensors: dict[str, Tensor]
    ids: Tensor | None  # [Vd] int64

    @classmethod
    def load(cls, folder: str | Path) -> DecoderFolder:
        manifest, config, tensors = load_drafter(folder)
        if manifest.kind != "decoder":
            raise InvalidArgument(
                f"drafter {str(folder)!r} is of kind {manifest.kind}, not decoder; use forerun.drafters.from_folder"
            )
        ids = tensors.pop(DRAFT_VOCABULARY, None)
        return cls(str(folder), manifest, config, tensors, None if ids is None else ids.long())

    def beside(self, target: PreTrainedModel) -> tuple[PreTrainedModel, Tensor | None]:
        """A model whose decoder is the folder's and whose other parts are `target`'s, and the ids its head knows."""
        check_target(self.manifest.target, target)
        decoder = self._decoder(target)
        decoder.embed_tokens = target.get_decoder().get_input_embeddings()
        ids = None if self.ids is None else self.ids.to(target.device)
        head: Any = target.get_output_embeddings()
        model: Any = copy.copy(target)  # the class's own wiring around other parts; none of the target's is changed
        model._modules = dict(target._modules)
        model.model = copy.copy(target.base_model)
        model.model._modules = dict(target.base_model._modules)
        model.model.decoder = decoder
        model.set_output_embeddings(head if ids is None else cut_head(head, ids))
        model.config = model.model.config = decoder.config
        return model, ids

    def _decoder(self, target: PreTrainedModel) -> Any:
        config = copy.deepcopy(self.config)
        config._attn_implementation = target.config._attn_implementation
        small = copy.deepcopy(config)
        small.vocab_size, small.pad_token_id = 1, None  # its embedding is the target's: none is made for a moment only
        decoder: Any = type(target.get_decoder())(small)
        decoder.config = config
        prefix = "model.decoder."
        own = {name.removeprefix(prefix): tensor.float() for name, tensor in self.tensors.items()}
        missing, unknown = decoder.load_state_dict(own, strict=False)
        if odd := [*(set(missing) - {"embed_tokens.weight"}), *unknown]:
            raise InvalidArgument(
                f"drafter {self.name!r}: weights do not fit config.json: {', '.join(sorted(odd)[:4])} missing or "
                "unknown; train or fetch the folder again"
            )
        return decoder.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
