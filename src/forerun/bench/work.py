"""What a step must do whatever the program, counted from the model; and what a machine can do, to hold it against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured on this machine, in the same run."""

    bytes_per_second: float
    operations_per_second: float
    buffer_bytes: int  # that were read for it


@dataclass(frozen=True, slots=True)
class Work:
    """What one step must do, whatever the program."""

    weight_bytes: int  # all weights but an embedding that is only looked up in
    operations_per_token: int  # by weights
    bytes_per_key: int  # of keys and values in the cache
    operations_per_key: int  # and token, in attention

    def least_seconds(self, limits: Limits, batch: int, tokens: int, past: int) -> float:
        """The longer of reading and calculating, which may overlap."""
        keys = sum(past + i + 1 for i in range(tokens))  # seen by a row's new tokens together
        read = self.weight_bytes + batch * (past + tokens) * self.bytes_per_key
        operations = batch * (tokens * self.operations_per_token + keys * self.operations_per_key)
        return max(read / limits.bytes_per_second, operations / limits.operations_per_second)


def work_of(model: Any) -> Work:
    """From the model's parameters and shape."""
    config = model.config.get_text_config(decoder=True)
    weights = {p.data_ptr(): p for p in model.parameters()}
    head, embedding = model.get_output_embeddings(), getattr(model.get_input_embeddings(), "weight", None)
    if embedding is not None and (head is None or head.weight.data_ptr() != embedding.data_ptr()):
        weights.pop(embedding.data_ptr(), None)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Work(
        weight_bytes=sum(p.numel() * p.element_size() for p in weights.values()),
        operations_per_token=2 * sum(p.numel() for p in weights.values() if p.ndim > 1),
        bytes_per_key=layers * 2 * kv_heads * size * model.dtype.itemsize,
        operations_per_key=layers * 4 * heads * size,
    )
