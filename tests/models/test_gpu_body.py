"""`GpuBody` against transformers' modules: on the CPU through Triton's interpreter, on a GPU for real."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("triton")

from forerun import SpeculativeDecoder, kernels
from forerun.bench.decode.forward import stepper
from forerun.config import Kernels
from forerun.models.bodies import gpu
from forerun.models.bodies.gpu import GpuBody
from forerun.models.bodies.merging import merged
from forerun.models.scorer import Scorer
from support.interpreter import DEVICE, kernel_tests, on_gpu_alone
from support.recompute import check
from support.tiny import tiny_model

pytestmark = kernel_tests()

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TEXTS = ([5, 11, 3, 60, 7, 7, 21, 40, 2, 19, 33, 9], [8, 90, 4])
NEW = ([31, 6, 17], [44])


@pytest.fixture(autouse=True)
def _kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})


@cache
def model_of(family: str) -> PreTrainedModel:
    if family == "qwen2":
        return _qwen2().to(DEVICE)
    return copy.deepcopy(tiny_model(family)).to(DEVICE)


def _qwen2() -> PreTrainedModel:
    """With biases, and a window in every second layer."""
    config = Qwen2Config(
        vocab_size=97, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(0.3 * torch.randn_like(weight))
    return model


def scorer_of(model: PreTrainedModel) -> Scorer:
    scorer = Scorer(model, use=Kernels.ON)
    assert isinstance(scorer.body, GpuBody), gpu.why_not(model)
    for row, text in enumerate(TEXTS):
        scorer.admit(row)
        scorer.feed([row], [text])
    return scorer


@torch.no_grad()
def expected(model: PreTrainedModel) -> list[Tensor]:
    texts = [torch.tensor([[*text, *new]], device=DEVICE) for text, new in zip(TEXTS, NEW, strict=True)]
    return [model(text, use_cache=False).logits[0][-len(new) :] for text, new in zip(texts, NEW, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(every=4)
def test_families(family: str) -> None:
    want = expected(copy.deepcopy(model_of(family)))
    got = scorer_of(model_of(family)).score([0, 1], NEW).split([len(new) for new in NEW])
    for own, right in zip(got, want, strict=True):
        check(own, right)


def test_merging_leaves_the_modules_as_they_were() -> None:
    model = copy.deepcopy(model_of("qwen3"))
    before, want = copy.deepcopy(model.state_dict()), expected(model)
    body = GpuBody(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    for own, right in zip(expected(model), want, strict=True):
        assert torch.equal(own, right)
    attention = model.base_model.layers[1].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == body.layers[1].qkv.untyped_storage().data_ptr()
    again = GpuBody(model)
    assert again.layers[1].qkv.data_ptr() == body.layers[1].qkv.data_ptr(), "merged once, however many bodies"


def test_a_merged_model_is_saved_whole(tmp_path: object) -> None:
    model = copy.deepcopy(model_of("llama"))
    GpuBody(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(DEVICE)
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in loaded.state_dict().items())


def test_replaced_weights_are_seen() -> None:
    model = copy.deepcopy(model_of("llama"))
    scorer = scorer_of(model)
    with torch.no_grad():
        attention = model.base_model.layers[0].self_attn
        attention.k_proj.weight.data = 0.5 * attention.k_proj.weight
        attention.v_proj.weight.mul_(2.0)
    for row in range(len(TEXTS)):
        scorer.release(row)
        scorer.admit(row)
        scorer.feed([row], [TEXTS[row]])
    got = scorer.score([0, 1], NEW).split([len(new) for new in NEW])
    for own, right in zip(got, expected(model), strict=True):
        check(own, right)
    assert not any(weight.is_inference() for weight in model.parameters()), "merged anew in the middle of a pass"


def test_parts_with_and_without_bias() -> None:
    parts = [torch.nn.Linear(8, n, bias=bias, device=DEVICE) for n, bias in ((4, True), (6, False), (2, True))]
    x = torch.randn(3, 8, device=DEVICE)
    want = torch.cat([part(x) for part in parts], dim=-1)
    weight, bias = merged(parts)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), want)


def test_what_is_refused() -> None:
    assert "gpt2 is none of" in str(gpu.why_not(copy.deepcopy(tiny_model("gpt2")).to(DEVICE)))
    model = copy.deepcopy(model_of("llama"))
    assert gpu.why_not(model) is None
    assert "float64" in str(gpu.why_not(copy.deepcopy(model).double()))
    hook = model.lm_head.register_forward_hook(lambda *a: None)
    assert "head" in str(gpu.why_not(model))
    hook.remove()
    model.base_model.layers[0].mlp.register_forward_hook(lambda *a: None)
    assert "mlp has forward hooks" in str(gpu.why_not(model))


@pytest.mark.slow
def test_tables_are_made_once_for_a_capacity() -> None:
    """A captured pass reads them where they were."""
    scorer = scorer_of(model_of("llama"))
    body = scorer.body
    assert isinstance(body, GpuBody)
    scorer.score([0, 1], NEW)
    before = body._rotary.data_ptr()
    scorer.score([0, 1], NEW)
    assert body._rotary.data_ptr() == before
    body._refresh(len(body._rotary) + 1)
    assert len(body._rotary) > 1024


def medium(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Large enough for every tile and for cut sums."""
    kind = type(model_of(family))
    config = copy.deepcopy(model_of(family).config)
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 512, 1376, 8
    config.num_key_value_heads, config.head_dim = 4, 64
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.normal_(float("norm" in name), 0.05)
    return model.to(DEVICE, dtype)


@on_gpu_alone
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_further_from_float32_than_the_modules(family: str, dtype: torch.dtype) -> None:
    model = medium(family, dtype)
    exact = copy.deepcopy(model).float()
    for rows, new in ((1, 1), (1, 8), (8, 8), (3, 5), (9, 9)):
        texts = [torch.randint(1, 90, (1, 40 + 7 * row + new), device=DEVICE) for row in range(rows)]
        want, modules = (
            torch.cat([m(text, use_cache=False).logits[0, -new:].float() for text in texts]) for m in (exact, model)
        )
        scorer = Scorer(model, use=Kernels.ON)
        for row in range(rows):
            scorer.admit(row)
        scorer.feed(range(rows), [text[0, :-new].tolist() for text in texts])
        got = scorer.score(range(rows), [text[0, -new:].tolist() for text in texts]).float()
        # In float32 the modules are what they are held against, and any other order of adding is 3e-6 off.
        assert (got - want).norm() <= 1.25 * (modules - want).norm() + 1e-5 * want.norm()


@on_gpu_alone
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    model = copy.deepcopy(model_of(family))
    for text in TEXTS:
        ids = torch.tensor([text], device=DEVICE)
        want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        decoder = SpeculativeDecoder(model, None, kernels="on")
        assert isinstance(decoder.engine.target.body, GpuBody)
        assert torch.equal(decoder.generate(ids, max_new_tokens=40, do_sample=False).sequences, want)


@on_gpu_alone
@torch.no_grad()
def test_a_captured_pass_gives_the_same_bits() -> None:
    for rows, positions in ((1, 1), (1, 8), (8, 8)):
        step = stepper(medium("llama", torch.bfloat16), rows, positions)
        first = step().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for _ in range(50):
            graph.replay()
            assert torch.equal(out, first)
