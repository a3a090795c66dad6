"""A trained draft model whose embedding, head or both may be its target's."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from forerun.drafters.model_folder import ModelFolder, cut_head
from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import build, check_target, fill
from forerun.models.sharded import refuse_parts_of_sharded


@dataclass(frozen=True)
class CausalFolder(ModelFolder):
    """Of kind `causal`."""

    kind = "causal"

    def beside(self, target: PreTrainedModel) -> tuple[PreTrainedModel, Tensor | None]:
        """The model in its target's type and place, and the ids of its head's outputs (None for all)."""
        check_target(self.manifest.target, target)
        shares = self.manifest.shares
        if shares:
            refuse_parts_of_sharded(f"drafter {self.name!r}", target)
        if shares and self.config.get_text_config(decoder=True).hidden_size != self.manifest.target["hidden_size"]:
            raise InvalidArgument(
                f"drafter {self.name!r} shares {' and '.join(shares)} with its target but is of another width "
                f"({self.config.hidden_size}, the target {self.manifest.target['hidden_size']}); train it again"
            )
        model = self._own_parts().to(device=target.device, dtype=target.dtype)
        if "embedding" in shares:
            model.set_input_embeddings(target.get_input_embeddings())
        head = target.get_output_embeddings() if "head" in shares else model.get_output_embeddings()
        ids = None if self.ids is None else self.ids.to(target.device)
        model.set_output_embeddings(head if ids is None else cut_head(head, ids))
        return model, ids

    def _own_parts(self) -> PreTrainedModel:
        """The model as it was saved; parts that were not are still to come."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config(decoder=True)
        text.tie_word_embeddings = config.tie_word_embeddings = self._is_tied()
        if len(self.manifest.shares) == 2:  # nothing of the vocabulary's size is needed for a moment only
            text.vocab_size, text.pad_token_id = 1, None
        make = partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32, trust_remote_code=False)
        model: PreTrainedModel = build(self.name, self.manifest, self.tensors, make)
        foreign = self._foreign(model)
        fill(model, {name: tensor for name, tensor in self.tensors.items() if name not in foreign}, self.name, foreign)
        return model

    def _is_tied(self) -> bool:
        """A model tied within itself stays so; once a part is the target's, the parts are set one by one."""
        return bool(self.config.get_text_config(decoder=True).tie_word_embeddings) and not self.manifest.shares

    def _foreign(self, model: PreTrainedModel) -> set[str]:
        """Names of parameters that the file need not hold: the target's, and a head tied to the embedding."""
        parts = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
        names = (*self.manifest.shares, "head") if self._is_tied() else self.manifest.shares
        modules = [parts[name] for name in names]
        return {
            f"{path}.{name}"
            for path, module in model.named_modules()
            if any(module is part for part in modules)
            for name, _ in module.named_parameters()
        }
