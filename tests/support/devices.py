"""Tests that mean the same on a CPU and on a GPU, where the kernels do the work."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedModel

from support.tiny import draft_of, tiny_model

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = pytest.param("cuda", marks=on_gpu)
each_device = pytest.mark.parametrize("device", ["cpu", GPU])


@lru_cache
def model_on(family: str, device: str) -> PreTrainedModel:
    """A tiny model where it is wanted; on the CPU the one that everybody shares."""
    return tiny_model(family) if device == "cpu" else copy.deepcopy(tiny_model(family)).to(device)


@lru_cache
def draft_on(family: str, device: str) -> PreTrainedModel:
    return draft_of(tiny_model(family)).to(device)
