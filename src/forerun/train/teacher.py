"""What the target thought at every position of a text: its most likely tokens and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from forerun.errors import InvalidArgument, NonFiniteLogits
from forerun.train.batches import batches_by_length
from forerun.train.shards import Teach

BATCH_TOKENS = 16384  # padded tokens of one pass
HEAD_ROWS = 2048  # positions whose logits exist at once: a vocabulary of 150,000 takes 1.2 GB of them


def teacher(model: PreTrainedModel, top_k: int) -> Teach:
    """A function that gives `top_ids` [T, K] int32 and `top_logits` [T, K] float16 of texts packed in their order."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if not 1 <= top_k <= vocabulary:
        raise InvalidArgument(f"top_k={top_k}: must be from 1 to the vocabulary's {vocabulary}")

    def teach(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
        return top_logprobs(model, texts, top_k)

    return teach


@torch.inference_mode()
def top_logprobs(
    model: PreTrainedModel, texts: Sequence[Tensor], top_k: int, batch_tokens: int = BATCH_TOKENS
) -> tuple[Tensor, Tensor]:
    """The `top_k` most likely tokens after each position and their log-probabilities at temperature 1."""
    lengths = [len(text) for text in texts]
    by_text: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(texts)
    for batch in batches_by_length(range(len(texts)), lengths, batch_tokens):
        hidden, real = _hidden(model, [texts[i] for i in batch])
        parts = [top.split([lengths[i] for i in batch]) for top in _top(model, hidden[real], top_k)]
        for i, ids, logprobs in zip(batch, *parts, strict=True):
            by_text[i] = ids, logprobs
    return torch.cat([ids for ids, _ in by_text]), torch.cat([logprobs for _, logprobs in by_text])


def _hidden(model: PreTrainedModel, texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What the head reads [B, L, H], and which positions are real [B, L]. Padding is on the right: nobody sees it."""
    tokens = pad_sequence(texts, batch_first=True).to(model.device)
    lengths = torch.tensor([len(text) for text in texts], device=model.device)
    real = torch.arange(tokens.shape[1], device=model.device) < lengths[:, None]
    out = model.base_model(input_ids=tokens, attention_mask=real.long(), use_cache=False)
    return out.last_hidden_state, real


def _top(model: PreTrainedModel, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    head = model.get_output_embeddings()
    ids, logprobs = [], []
    for part in hidden.split(HEAD_ROWS):
        best = torch.log_softmax(head(part).float(), dim=-1).topk(top_k, dim=-1)
        if not bool(best.values.isfinite().all()):
            raise NonFiniteLogits(
                "the target returned NaN or infinite logits for a text it wrote; check its weights and dtype"
            )
        ids.append(best.indices.to(torch.int32).cpu())
        logprobs.append(best.values.half().cpu())
    return torch.cat(ids), torch.cat(logprobs)
