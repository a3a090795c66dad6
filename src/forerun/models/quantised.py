"""How a model's weights are stored, in words: by Forerun, by whoever quantised it, or plainly."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.scaled import ScaledWeight
from forerun.models.plain import is_memory, is_turned_memory

# By the name that transformers gives a method; all of them bring modules or weights with products of their own.
METHODS = {
    "bitsandbytes": "bitsandbytes",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
    "fp8": "fine-grained fp8",
    "fbgemm_fp8": "FBGEMM fp8",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "quanto": "optimum-quanto",
}
OWN = "text follows the rounded weights"
OTHERS = "run by its own modules, not by fused layers; text follows the quantised weights"


def describe_weights(model: PreTrainedModel) -> str:
    """One line for `forerun doctor`."""
    weights = [module._parameters.get("weight") for module in model.modules() if isinstance(module, nn.Linear)]
    kinds = Counter(filter(None, map(_kind, weights)))
    if method := method_of(model):
        return f"quantised by {METHODS.get(method, method)}{_listed(kinds)}: {OTHERS}"
    if any(isinstance(w, ScaledWeight) or (isinstance(w, NarrowWeight) and w.multiplies_integers) for w in weights):
        return f"rounded on load{_listed(kinds)}: {OWN}"
    if any(isinstance(weight, NarrowWeight) for weight in weights):
        return f"as they are stored{_listed(kinds)}: widened in registers, the results of a float32 copy"
    if kinds:
        return f"of types that torch does not store plainly{_listed(kinds)}: {OTHERS}"
    return f"plain {str(model.dtype).removeprefix('torch.')}"


def method_of(model: PreTrainedModel) -> str | None:
    """By which method a model was quantised before it was loaded; None where transformers knows of none."""
    config: Any = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or type(config).__name__)


def _kind(weight: Any) -> str | None:
    """What a linear layer's weight is, if it is no plain memory."""
    if isinstance(weight, ScaledWeight):
        return weight.scheme.name
    if isinstance(weight, NarrowWeight):
        return weight.format.name
    if weight is None or not isinstance(weight, Tensor) or is_memory(weight) or is_turned_memory(weight):
        return None
    return type(weight).__name__


def _listed(kinds: Counter[str]) -> str:
    return f" ({', '.join(f'{name} x {count}' for name, count in kinds.most_common())})" if kinds else ""
