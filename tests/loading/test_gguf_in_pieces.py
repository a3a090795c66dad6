"""GGUF files whose blocks are kept, or quantised, a matrix at a time: the model that transformers makes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from forerun.errors import ModelNotFound, UnsupportedModel
from forerun.kernels.cpu import choice
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading import STORED, load_model, piecewise, quantise, stored
from loading.gguf_writer import Raw, halved, llama_metadata, llama_tensors, plain, tiny_llama, write_gguf
from loading.wide_bytes import older_ones_unseen, wide_bytes
from support.stored import stored_rows

KINDS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
IDS = torch.arange(40).remainder(20)[None]


@pytest.fixture(autouse=True)
def _narrow_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(choice, "narrow_pays", lambda stored: True)


def written(path: Path, tied: bool, more: dict[str, Raw] | None = None, **metadata: Any) -> Path:
    """A Llama with a matrix of every kind of block, one of halves and one of floats."""
    tiny = tiny_llama(tied=tied, hidden=256, inner=256)
    tensors = llama_tensors(tiny)
    for seed, name in enumerate(name for name, raw in tensors.items() if len(raw.shape) == 2):
        form = [*KINDS, "F16", "F32"][seed % (len(KINDS) + 2)]
        if form == "F16":
            tensors[name] = halved(tensors[name])
        elif form != "F32":
            raw, _ = stored_rows(form, *tensors[name].shape, seed)
            tensors[name] = Raw(tensors[name].shape, KINDS[form], raw.numpy().tobytes())
    return write_gguf(path / "tiny.gguf", llama_metadata(tiny) | metadata, tensors | (more or {}))


def loaded(file: Path, patch: pytest.MonkeyPatch, first: bool = False, **options: Any) -> Any:
    """In pieces; or `first`, by transformers, whole, and made narrow afterwards."""
    with patch.context() as context:
        if first:
            context.setattr(piecewise.Piecewise, "of_gguf", lambda *_: None)
        else:  # transformers decodes nothing
            context.setattr("gguf.dequantize", None, raising=False)
            context.setattr("transformers.modeling_gguf_pytorch_utils.dequantize", None, raising=False)
        return load_model(file, device="cpu", **options).model


def bytes_of(weight: Tensor) -> Tensor:
    return weight.raw if isinstance(weight, NarrowWeight) else weight


def check_same(mine: nn.Module, theirs: nn.Module) -> None:
    pairs = list(zip(mine.named_parameters(), theirs.named_parameters(), strict=True))
    for (name, a), (other, b) in pairs:
        assert name == other and type(a) is type(b) and torch.equal(bytes_of(a), bytes_of(b)), name


@pytest.mark.parametrize("is_tied", [True, False])
def test_it_is_the_model_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    file = written(tmp_path, is_tied)
    mine, theirs = (loaded(file, monkeypatch, first, dtype=STORED) for first in (False, True))
    check_same(mine, theirs)
    formats = {weight.format.name for weight in mine.parameters() if isinstance(weight, NarrowWeight)}
    assert formats == {*KINDS, "F16"}
    assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == is_tied
    assert mine.config.to_dict() == theirs.config.to_dict()
    assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert mine.name_or_path == theirs.name_or_path and mine.dtype == theirs.dtype and not mine.training
    assert torch.equal(mine(IDS).logits, theirs(IDS).logits)


def test_factors_of_frequencies_are_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = {"rope_freqs.weight": plain(torch.ones(32))}
    file = written(tmp_path, False, ones)
    mine, theirs = (loaded(file, monkeypatch, first, dtype=STORED) for first in (False, True))
    check_same(mine, theirs)
    assert mine.config.to_dict() == theirs.config.to_dict()


@pytest.mark.parametrize("scheme", ["int8", "w8a8"])
def test_it_is_quantised_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(quantise, "AT_ONCE", 3000)  # some panels of rows at a time
    file = written(tmp_path, False)
    options = {"dtype": "float32", "quantize": scheme}
    mine, theirs = (loaded(file, monkeypatch, first, **options) for first in (False, True))
    check_same(mine, theirs)
    assert sum(isinstance(weight, NarrowWeight) for weight in mine.parameters()) >= 14


def test_no_more_than_a_matrix_is_wide_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: loaded first, all matrices are wide when the first is kept in blocks."""
    tiny = tiny_llama(tied=False, hidden=256, inner=256)
    tensors = {name: halved(raw) if len(raw.shape) == 2 else raw for name, raw in llama_tensors(tiny).items()}
    file = write_gguf(tmp_path / "tiny.gguf", llama_metadata(tiny), tensors)
    whole = 4 * sum(weight.numel() for weight in tiny.parameters())
    most = dict[bool, int]()

    def noting(first: bool) -> Any:
        def noted(*arguments: Any) -> nn.Parameter:
            most[first] = max(most.get(first, 0), wide_bytes())
            return made(*arguments)

        return noted

    made = stored.narrow_parameter
    del tiny, tensors
    for first, module in ((False, piecewise), (True, stored)):
        monkeypatch.setattr(module, "narrow_parameter", noting(first))
        with older_ones_unseen():
            loaded(file, monkeypatch, first, dtype=STORED)
    assert most[False] < 256 * 256 * 4 < 0.9 * whole < most[True]


def test_what_is_no_plain_llama_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = {"blk.0.attn_q.bias": plain(torch.ones(256))}
    sketch = tiny_llama(tied=False, hidden=256, inner=256)
    for folder, more, architecture in (("plain", {}, "llama"), ("bias", bias, "llama"), ("other", {}, "qwen2")):
        (tmp_path / folder).mkdir()
        file = written(tmp_path / folder, False, more, **{"general.architecture": architecture})
        found = piecewise.Piecewise.of_gguf(file, sketch, torch.float32)
        assert (found is not None) == (folder == "plain")


def test_a_vocabulary_longer_than_its_metadata_says_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {name: plain(torch.randn(40, 256)) for name in ("token_embd.weight", "output.weight")}
    model = loaded(written(tmp_path, False, words), monkeypatch, first=True, dtype=STORED)
    whole = load_model(tmp_path / "tiny.gguf", dtype=STORED, device="cpu").model
    check_same(whole, model)
    assert len(whole.lm_head.weight) == whole(IDS).logits.shape[-1] == 40 > whole.config.vocab_size


def test_a_file_that_lacks_a_matrix_or_its_end_is_refused(tmp_path: Path) -> None:
    tiny = tiny_llama(tied=False, hidden=256, inner=256)
    tensors = {name: halved(raw) if len(raw.shape) == 2 else raw for name, raw in llama_tensors(tiny).items()}
    del tensors["blk.1.ffn_up.weight"]
    file = write_gguf(tmp_path / "tiny.gguf", llama_metadata(tiny), tensors)
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weight .*layers\.1\.mlp\.up_proj"):
        load_model(file, dtype=STORED, device="cpu")
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelNotFound, match="fetch it again"):
        load_model(short, dtype=STORED, device="cpu")
