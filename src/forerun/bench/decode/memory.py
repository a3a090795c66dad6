"""What decoding needs beside weights and cache, by draft length."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.bench.decode.calls import Prompt
from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel
from forerun.kernels.captures import capture_stream

TOKENS = 24  # of a call: a few rounds, and every graph is captured


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device, weights and cache taken off."""

    batch: int
    length: int  # of the drafts
    vocabulary: int
    peak: int  # of tensors, capturing included
    held: int  # by tensors after the call, and by graphs whether they run or not
    cache: int

    @property
    def beside(self) -> int:
        return max(self.peak, self.held)


def measure_memory(target: Any, draft: Any, length: int, prompts: Sequence[Prompt], **options: Any) -> Memory:
    """One call of a fresh decoder. Prompts should be short: reading a long one needs more than any round.

    The first decoder of a model merges weights that are multiplied together, a layer at a time: what that needs for a
    moment belongs to loading them.
    """
    device = target.device
    _warm_libraries(target)
    before = _cleared(device)
    decoder = SpeculativeDecoder(target, DraftModel(draft), policy=length, **options)
    _cleared(device)
    ids = torch.tensor(prompts, device=device)
    decoder.generate(ids, max_new_tokens=TOKENS, temperature=1.0, seed=0, eos_token_id=[])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    drafter: Any = decoder.drafter  # its own one, with the rows
    cache = decoder.engine.target.cache.num_bytes() + drafter.scorer.cache.num_bytes()
    runner = decoder.engine.runner
    graphs = 0 if runner is None else runner.recorder.num_bytes()
    held = torch.cuda.memory_allocated(device) - before + graphs
    return Memory(len(prompts), length, int(target.config.vocab_size), peak - cache, held - cache, cache)


def _cleared(device: torch.device) -> int:
    """Bytes that tensors take now; the peak is counted from here on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


@torch.inference_mode()
def _warm_libraries(target: Any) -> None:
    """Workspaces of matrix libraries are theirs, whoever multiplies: one a stream, and captures have their own."""
    head = target.get_output_embeddings().weight
    current = torch.cuda.current_stream(target.device)
    for stream in (current, capture_stream(current.device_index)):
        with torch.cuda.stream(stream):
            for rows in (1, 64):
                torch.nn.functional.linear(head[:rows], head[:64])
    torch.cuda.synchronize(target.device)
