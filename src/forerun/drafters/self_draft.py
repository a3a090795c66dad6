"""The target's own weights, quantised, as the draft: no second model to find, and the text is the full target's."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.arguments import integer, refuse
from forerun.config import Kernels
from forerun.config import kernels as kernels_asked
from forerun.drafters.within_target import WithinTarget
from forerun.errors import InvalidArgument
from forerun.kernels import why_not_numba
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.scaled import ScaledWeight
from forerun.loading.quantise import EIGHT_BITS, FOUR_BITS, INTEGER_GROUPS, check_scheme, format_of, matrices, quantise
from forerun.loading.rounding import round_weights
from forerun.math.blocks import BlockFormat
from forerun.models.offloaded import is_offloaded
from forerun.models.plain import stored_bytes
from forerun.models.quantised import method_of

SCHEMES = {8: EIGHT_BITS, 4: FOUR_BITS}
REMEDY = "must be 8 or 4"
WORTHWHILE = 0.75  # a copy must be at most this share of what it copies: decoding takes the time of reading weights
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # whose steps on a CPU are known to be the reading
SMALLEST = 64 << 20  # bytes: weights that a processor's caches hold are not what a step waits for
FREE_SHARE = 8  # a copy that nobody asked for takes at most this part of the memory that is free
ACCEPTANCE, DRAFTED = 0.9, 3  # what is counted on before anything was drafted; .97 was measured with 8 bits
PROMISE = 1.2  # times plain decoding that products alone must promise: the rest of a step gains nothing


class SelfDraft(WithinTarget):
    """Drafts with a copy of the target whose weights have 8 or 4 `bits`, over the target's own cache.

    Each decoder makes a copy of its own, of the linear layers and, on a CPU, the embedding and head; `copy_bytes` is
    what it holds.
    """

    def __init__(self, bits: int = 8, *, stop_below: float | None = None) -> None:
        super().__init__(stop_below=stop_below)
        self.bits, self.copy_bytes = integer("bits", bits, remedy=REMEDY), 0
        if self.bits not in SCHEMES:
            refuse("bits", bits, REMEDY)

    def __repr__(self) -> str:
        held = f", {self.copy_bytes / 2**20:.0f} MiB" if self.copy_bytes else ""
        return f"SelfDraft(bits={self.bits}{held})"

    def made_of(self, target: PreTrainedModel) -> PreTrainedModel:
        scheme, name = scheme_for(self.bits, target.device), f"SelfDraft(bits={self.bits})"
        check_scheme(scheme, target.device, target.dtype, asked=name)
        if (method := method_of(target)) is not None:
            raise InvalidArgument(f"{name}: the target was quantised by {method} already; use another drafter")
        if is_offloaded(target):
            raise InvalidArgument(
                f"{name}: weights of the target are offloaded to the CPU or the disk, and a copy is made of those in "
                "memory; load the target whole, or use another drafter, such as PromptLookup()"
            )
        model = _sharing_weights(target)
        encoder = model.get_encoder() if target.config.is_encoder_decoder else None  # it reads with the target's
        weights = matrices(model, encoder)
        before, after = sum(map(stored_bytes, weights)), copy_size(weights, self.bits)
        if after > WORTHWHILE * before:
            raise InvalidArgument(
                f"{name}: the target's weights are stored in {before / 2**20:.0f} MiB already, and a copy would take "
                f"{after / 2**20:.0f}, so it would draft no faster; load the target wider (on a CPU with "
                "dtype='float32'), or use another drafter, such as PromptLookup()"
            )
        if target.device.type == "cuda":
            round_weights(model, scheme, target.device, type(target).__name__)
        else:
            quantise(model, scheme, type(target).__name__, without=encoder, asked=name)
        self.copy_bytes = sum(map(stored_bytes, filter(is_rounded, matrices(model, encoder))))
        return model


def scheme_for(bits: int, device: torch.device) -> str:
    """How a copy is quantised. A processor with SDOT multiplies integers three times as fast as it widens them to
    floats; x86 does both at the speed it reads with, and floats are kept a little more often. What the processor has
    decides, not a timing: drafts have a part in what a seed draws."""
    if bits == 8 and device.type == "cpu" and why_not_numba() is None:
        from forerun.kernels.cpu.panels import DOT_PRODUCTS, WAY

        return INTEGER_GROUPS if WAY == DOT_PRODUCTS else EIGHT_BITS
    return SCHEMES[bits]


def unasked(target: PreTrainedModel) -> SelfDraft | None:
    """A copy in 8 bits for a target on a CPU whose user named no drafter, where it is sure to be worth its memory.

    Large weights of a known family, products that measure so much faster with 8 bits that drafts pay at a modest
    acceptance, and memory to spare. Whether drafts are asked for is then the policy's choice, round by round.
    """
    if target.device.type != "cpu" or target.dtype != torch.float32 or target.config.model_type not in FAMILIES:
        return None
    if is_offloaded(target):  # it would not fit, and has nothing to be timed by
        return None
    if kernels_asked(None) is Kernels.OFF or why_not_numba() is not None or method_of(target) is not None:
        return None
    weights = matrices(target)
    size = sum(map(stored_bytes, weights))
    if size < SMALLEST or copy_size(weights, 8) > min(WORTHWHILE * size, free_bytes() / FREE_SHARE):
        return None
    largest = max(weights, key=Tensor.numel)
    if _promise(largest.format if isinstance(largest, NarrowWeight) else None) < PROMISE:
        return None
    drafter = SelfDraft(8)
    drafter.needs_clock = True
    return drafter


def copy_size(weights: Iterable[Tensor], bits: int) -> int:
    """Bytes that a copy of these weights takes, scales left out."""
    return sum(weight.numel() for weight in weights) * bits // 8


def free_bytes() -> int:
    """Memory that the system could give now, pages it only keeps for files included; 0 where it does not say."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(r"MemAvailable:\s*(\d+) kB", meminfo)
    return int(match[1]) * 1024 if match else 0


def _promise(stored: BlockFormat | None) -> float:
    """How many times as fast as plain decoding drafts would be, by timed products with weights `stored` so."""
    from forerun.kernels.cpu.choice import NARROW_SIZE, narrow_times

    copied = narrow_times(format_of(scheme_for(8, torch.device("cpu")), NARROW_SIZE))
    step, verify = ((copied if stored is None else narrow_times(stored))[rows][stored is None] for rows in ("1", "4"))
    tokens = (1 - ACCEPTANCE ** (DRAFTED + 1)) / (1 - ACCEPTANCE)
    return tokens * step / (DRAFTED * copied["1"][0] + verify)


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules once more, over the same parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def is_rounded(weight: Tensor) -> bool:
    """Whether a weight is the copy's own."""
    return isinstance(weight, NarrowWeight | ScaledWeight)
