"""`GpuBody` against transformers' modules: on the CPU through Triton's interpreter, on a GPU for real."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

pytest.importorskip("triton")

from forerun import SpeculativeDecoder, kernels
from forerun.bench.decode.forward import stepper
from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.kernels.attention import cache_write
from forerun.kernels.linear import device, experts, norms, routing
from forerun.math.skinny import Norm
from forerun.models import static_pass
from forerun.models.bodies import gpu, parts, readers
from forerun.models.bodies.base import ForwardPass
from forerun.models.bodies.gpu import GpuBody
from forerun.models.bodies.merging import expert_weights, merged
from forerun.models.scorer import Scorer
from forerun.models.self_check import tried
from forerun.models.static_pass import StaticPass
from support.census import Recipe, build
from support.described import FAMILIES, NAMES, NEW, TEXTS, described_model, expected, feed
from support.interpreter import DEVICE, kernel_tests, on_gpu_alone
from support.recompute import check

pytestmark = kernel_tests()


@pytest.fixture(autouse=True)
def _kernels_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})


@cache
def model_of(name: str) -> PreTrainedModel:
    return described_model(name).to(DEVICE)


def scorer_of(model: PreTrainedModel, feeds: bool = True) -> Scorer:
    scorer = Scorer(model, use=Kernels.ON)
    assert isinstance(scorer.body, GpuBody), gpu.why_not(model)
    if feeds:
        feed(scorer)
    return scorer


def test_all_families_are_here() -> None:
    assert set(FAMILIES) == set(readers.FAMILIES)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.slow
def test_families(family: str) -> None:
    """Ragged prompts in two parts with a cut between them, several new tokens of two rows, then one row alone.

    By one token, which stands for the next ones: they are as dear, and the references go on to the end.
    """
    want = expected(copy.deepcopy(model_of(family)))
    scorer = scorer_of(model_of(family))
    got = scorer.score([0, 1], NEW).split([len(new) for new in NEW])
    for own, right in zip(got, want, strict=True):
        check(own, right)
    scorer.rewind([0], [len(TEXTS[0])])
    check(scorer.score([0], [NEW[0][:1]]), want[0][:1])


def _by_the_references(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Scorer:
    """Run by `GpuBody`, which runs torch alone."""
    body = GpuBody(model)
    monkeypatch.setattr(kernels, "TRITON_DEVICES", frozenset())
    scorer = Scorer(model, use=Kernels.OFF)
    scorer.body = body
    return scorer


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", NAMES)
def test_families_by_the_references(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through torch alone: the description and the order of the steps, without the interpreter's patience."""
    want = expected(copy.deepcopy(model_of(family)))
    scorer = _by_the_references(copy.deepcopy(model_of(family)), monkeypatch)
    feed(scorer)
    for own, right in zip(scorer.score([0, 1], NEW).split([len(new) for new in NEW]), want, strict=True):
        check(own, right)
    scorer.rewind([0], [len(TEXTS[0])])
    check(torch.cat([scorer.score([0], [[token]]) for token in NEW[0]]), want[0])


# Kinds that attend in their own modules, which no recording can hold: only fused layers can be recorded.
NOT_BY_MODULES = frozenset({
    "axk1", "bloom", "codegen", "deepseek_v2", "deepseek_v3", "falcon", "glm4_moe_lite", "gpt_neo", "gptj",
    "longcat_flash", "minicpm3", "mpt", "youtu",
})  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
def test_every_family_can_be_recorded(family: str) -> None:
    """By its fused layers; and by its modules, which run where nobody asks for them, unless it is known not to be."""
    model = copy.deepcopy(model_of(family))
    assert static_pass.why_not(scorer_of(model, feeds=False)) is None
    by_modules = static_pass.why_not(Scorer(model, use=Kernels.OFF)) is None
    assert by_modules == (model.config.get_text_config(decoder=True).model_type not in NOT_BY_MODULES)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["longcat_flash"])
def test_more_rows_than_experts_take_at_a_time(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time here; each lot has its own rows' experts, also where identities were taken out of them before."""
    want = expected(copy.deepcopy(model_of(family)))
    monkeypatch.setattr(experts, "MOST_ROWS", 2)
    scorer = scorer_of(model_of(family))
    for own, right in zip(scorer.score([0, 1], NEW).split([len(new) for new in NEW]), want, strict=True):
        check(own, right)


class HostReads(TorchDispatchMode):
    """Notes operations whose answer, or its size, the host would have to wait for: a recording cannot hold them."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "_unique", "unique_", "masked_select", "is_nonzero", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.name() for name in self.OPERATIONS):
            self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def _host_reads(scorer: Scorer) -> set[str]:
    """Of a pass of fixed shape over two tokens of two empty rows."""
    scorer.cache.reserve([0, 1], [16, 16])
    a_pass, past = StaticPass(scorer), torch.zeros(2, dtype=torch.long, device=DEVICE)
    rows = a_pass.rows(torch.tensor([scorer.cache.slot(row) for row in (0, 1)], device=DEVICE), past, 2, 16)
    tokens = torch.tensor([[3, 4], [5, 6]], device=DEVICE)
    with torch.inference_mode(), HostReads() as reads:
        a_pass.logits(tokens, rows)
    return reads.seen


@pytest.mark.quick("gemma2", "deepseek_v3", "longcat_flash")
@pytest.mark.parametrize("family", NAMES)
def test_nothing_in_a_pass_waits_for_the_host(family: str) -> None:
    scorer = scorer_of(copy.deepcopy(model_of(family)), feeds=False)
    for row in (0, 1):
        scorer.admit(row)
    assert _host_reads(scorer) == set()


def test_control_a_pass_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of experts asks which of them were chosen."""
    scorer = _by_the_references(copy.deepcopy(model_of("mixtral")), monkeypatch)
    for row in (0, 1):
        scorer.admit(row)
    assert _host_reads(scorer)


@pytest.mark.quick("codegen", "gptj", "falcon", "gemma2", "opt", "mixtral", "deepseek_v3", "longcat_flash")
@pytest.mark.parametrize("family", NAMES)
def test_passes_of_fixed_shape(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that attend in their own modules can be recorded, too: the modules have no part in such a pass."""
    want = expected(copy.deepcopy(model_of(family)))
    scorer = _by_the_references(copy.deepcopy(model_of(family)), monkeypatch)
    feed(scorer)
    assert static_pass.why_not(scorer) is None
    scorer.cache.reserve([0, 1], [16, 16])
    a_pass, past = StaticPass(scorer), torch.tensor([len(text) for text in TEXTS], device=DEVICE)
    rows = a_pass.rows(torch.tensor([scorer.cache.slot(row) for row in (0, 1)], device=DEVICE), past, 3, 16)
    tokens = torch.tensor([NEW[0], [*NEW[1], 5, 5]], device=DEVICE)
    with torch.inference_mode():
        got = a_pass.logits(tokens, rows)
    check(got[:3], want[0])
    check(got[3:4], want[1])


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "cohere2"])
@pytest.mark.parametrize("wrong", [
    lambda d: replace(d, is_interleaved=not d.is_interleaved),
    lambda d: replace(d, layers=tuple(replace(layer, is_parallel=not layer.is_parallel) for layer in d.layers)),
    lambda d: replace(d, norm=replace(d.norm, offset=d.norm.offset + 0.5, **_wide(d.norm))),
], ids=["rotation", "residual", "gain"])  # fmt: skip
def test_a_misread_field_is_caught(family: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares logits: whatever a reader gets wrong is refused."""
    model = copy.deepcopy(model_of(family))
    right = readers.describe
    monkeypatch.setattr(readers, "describe", lambda model: wrong(right(model)))
    scorer = _by_the_references(model, monkeypatch)
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        tried(scorer)


def _each_layer(decoder: Any, **changes: Any) -> Any:
    return replace(decoder, layers=tuple(replace(layer, **changes) for layer in decoder.layers))


def _in_attention(decoder: Any, change: Any) -> Any:
    layers = (replace(layer, attention=change(layer.attention)) for layer in decoder.layers)
    return replace(decoder, layers=tuple(layers))


@pytest.mark.parametrize(("family", "wrong"), [
    ("falcon-grouped", lambda d: _in_attention(d, lambda own: replace(own, head_order=None))),
    ("falcon-grouped", lambda d: _each_layer(d, before_mlp=None)),
    ("longcat_flash", lambda d: _each_layer(d, late_experts=None)),
    ("longcat_flash", lambda d: replace(d, layers=tuple(
        replace(layer, late_experts=other.late_experts) for layer, other in zip(d.layers, d.layers[::-1], strict=True)
    ))),
    ("longcat_flash", lambda d: _in_attention(d, lambda own: replace(own, heads=replace(own.heads, multiplier=1.0)))),
    ("gpt_neo", lambda d: _in_attention(d, lambda own: replace(own, window=0))),
    ("hyperclovax", lambda d: replace(d, logit_multiplier=1 / d.logit_multiplier)),
], ids=["heads", "norm", "experts", "experts elsewhere", "latents", "window", "logits"])  # fmt: skip
def test_a_misread_part_is_caught(family: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of what these families alone have."""
    model = copy.deepcopy(model_of(family))
    right = readers.describe
    monkeypatch.setattr(readers, "describe", lambda model: wrong(right(model)))
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        tried(_by_the_references(model, monkeypatch))


def _wide(norm: Any) -> dict[str, bool]:
    return {"wide": True} if isinstance(norm, Norm) else {}


# Launches of a layer, attention's own aside, and of what stands around the layers: with one row, with two.
LAUNCHES = {
    "llama": ((4, 1), (6, 1)),
    "qwen3": ((5, 1), (7, 1)),
    "mixtral": ((9, 0), (9, 1)),
    "qwen2_moe": ((11, 0), (11, 1)),
}
# Of these a layer has one each: router, gate and up, down, and the sum over a row's experts, however many were chosen.
OF_EXPERTS = {"mixtral": 1, "qwen2_moe": 1}


@pytest.mark.parametrize("family", LAUNCHES)
@pytest.mark.slow
def test_launches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch costs two microseconds; none may come unnoticed."""
    counted: list[str] = []

    def count(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        class Counted:
            def __getitem__(self, grid: Any) -> Any:
                counted.append(name)
                return kernel[grid]

        monkeypatch.setattr(module, name, Counted())

    expert_kernels = ("first_kernel", "second_kernel", "sum_kernel")
    for module, names in ((device, ("vector_kernel", "tile_kernel")), (norms, ("norm_kernel", "gate_kernel")),
                          (cache_write, ("_rotate_and_write_kernel", "_write_kernel")),
                          (routing, ("choose_kernel",)), (experts, expert_kernels)):  # fmt: skip
        for name in names:
            count(module, name)
    scorer = scorer_of(model_of(family))
    layers = len(model_of(family).base_model.layers)
    for rows, (each, around) in zip(([0], [0, 1]), LAUNCHES[family], strict=True):
        counted.clear()
        scorer.body.hidden(ForwardPass(torch.tensor([3] * len(rows), device=DEVICE),
                                       scorer.cache.extend(rows, [1] * len(rows)), scorer.cache))  # fmt: skip
        assert len(counted) == each * layers + around
        for name in ("choose_kernel", *expert_kernels):
            assert counted.count(name) == OF_EXPERTS.get(family, 0) * layers, name


def test_weights_stored_by_inputs_are_turned_round_without_a_copy(tmp_path: object) -> None:
    model = copy.deepcopy(model_of("gpt2"))
    before = copy.deepcopy(model.state_dict())
    body = GpuBody(model)
    weight = model.base_model.h[0].attn.c_attn.weight
    assert body.layers[0].qkv.weight.data_ptr() == weight.data_ptr() and weight.T.is_contiguous()
    assert GpuBody(model).layers[0].qkv.weight.data_ptr() == weight.data_ptr(), "turned once"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(DEVICE).state_dict()
    assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
    assert all(torch.equal(loaded[name], before[name]) for name in before)


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
    assert (
        attention.k_proj.weight.untyped_storage().data_ptr() == body.layers[1].qkv.weight.untyped_storage().data_ptr()
    )
    again = GpuBody(model)
    assert again.layers[1].qkv.weight.data_ptr() == body.layers[1].qkv.weight.data_ptr(), (
        "merged once, however many bodies"
    )


def test_a_merged_model_is_saved_whole(tmp_path: object) -> None:
    model = copy.deepcopy(model_of("llama"))
    GpuBody(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(DEVICE)
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in loaded.state_dict().items())


@pytest.mark.slow
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
    assert "xglm is none of" in str(gpu.why_not(build(Recipe("xglm", "XGLMForCausalLM", {})).float().to(DEVICE)))
    post_norm = build(Recipe("opt", "OPTForCausalLM", {"do_layer_norm_before": False})).float().to(DEVICE)
    assert "no norm behind the last layer" in str(gpu.why_not(post_norm))
    model = copy.deepcopy(model_of("llama"))
    assert gpu.why_not(model) is None
    assert "float64" in str(gpu.why_not(copy.deepcopy(model).double()))
    hook = model.lm_head.register_forward_hook(lambda *a: None)
    assert "head" in str(gpu.why_not(model))
    hook.remove()
    model.base_model.layers[0].mlp.register_forward_hook(lambda *a: None)
    assert "mlp has forward hooks" in str(gpu.why_not(model))


def test_a_router_that_answers_in_another_order_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    block = model_of("mixtral").base_model.layers[0].mlp
    parts.read_mlp_or_experts(block)
    forward = type(block.gate).forward
    monkeypatch.setattr(type(block.gate), "forward", lambda self, x: forward(self, x)[::-1])
    with pytest.raises(parts.NotDescribed, match="does not answer with logits, shares and chosen experts"):
        parts.read_mlp_or_experts(block)


def test_longcats_router_with_and_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before transformers 5.18 leave them out; shares and chosen experts in another order are refused."""
    block = model_of("longcat_flash").model.layers[0].mlp
    forward, x = type(block.router).forward, torch.randn(3, block.experts.hidden_size, device=DEVICE)
    want = forward(block.router, x)[-2:]
    for order in (slice(None), slice(-2, None)):
        monkeypatch.setattr(type(block.router), "forward", lambda self, x, order=order: forward(self, x)[order])
        for got, right in zip(parts.read_experts_and_identities(block).route(x), want, strict=True):
            assert torch.equal(got, right)
    monkeypatch.setattr(type(block.router), "forward", lambda self, x: forward(self, x)[-2:][::-1])
    with pytest.raises(parts.NotDescribed, match="does not answer with"):
        parts.read_experts_and_identities(block)


@pytest.mark.slow
def test_tables_are_made_once_for_a_capacity() -> None:
    """A captured pass reads them where they were."""
    scorer = scorer_of(model_of("llama"))
    body = scorer.body
    assert isinstance(body, GpuBody)
    scorer.score([0, 1], NEW)
    before = body._tables[0].data_ptr()
    scorer.score([0, 1], NEW)
    assert body._tables[0].data_ptr() == before
    body._refresh(len(body._tables[0]) + 1)
    assert len(body._tables[0]) > 1024


@pytest.mark.parametrize("replaced", [False, True], ids=["in place", "with the weights"])
def test_tables_follow_what_they_were_made_of(replaced: bool) -> None:
    model = copy.deepcopy(model_of("llama"))
    scorer = Scorer(model, use=Kernels.ON)
    assert isinstance(scorer.body, GpuBody)
    before = scorer.body._tables[0].clone()
    model.model.rotary_emb.inv_freq.mul_(3)
    if replaced:  # in the middle of a call
        model.model.norm.weight.data = model.model.norm.weight.clone()
        scorer.body._refresh(1)
    else:
        assert scorer.has_changed()
        scorer.renew()
    assert isinstance(scorer.body, GpuBody)
    torch.testing.assert_close(scorer.body._tables[0], readers.describe(model).tables[0](len(before)))
    assert not torch.allclose(scorer.body._tables[0], before), "control"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_identities_do_not_meet_what_others_overflow_with() -> None:
    """LongCat's in float16: the first expert is infinite, and of three rows one has chosen it."""
    block = copy.deepcopy(model_of("longcat_flash")).half().model.layers[0].mlp
    block.experts.gate_up_proj[0] *= 2000
    says = parts.read_experts_and_identities(block)
    weights, identity = expert_weights(says.module, says.activation), says.module.num_routed_experts
    chosen = torch.tensor([[1, identity], [identity + 1, identity], [identity, 0]], device=DEVICE)
    shares = torch.tensor([[0.5, 0.25], [0.5, 0.125], [0.25, 0.5]], device=DEVICE)
    inner = torch.randn(3, block.experts.hidden_size, device=DEVICE).half()
    says = replace(says, route=lambda x: (shares, chosen))
    got, want = gpu._with_identities(inner, says, weights), block.experts(inner, chosen, shares)
    assert want[:2].isfinite().all() and not want[2].isfinite().all(), "control"
    torch.testing.assert_close(got[:2], want[:2], rtol=0, atol=2e-3 * float(want[:2].abs().max()))
    assert not got[2].isfinite().all()


MEDIUM = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2", "starcoder2", "olmo2", "granite")


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
@pytest.mark.parametrize("family", MEDIUM)
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
        # In float32 the modules are what they are held against, and any other order of adding is 3e-6 off. With 16
        # bits both errors are draws of roundings: over n numbers the ratio of their norms spreads by 1 / sqrt(n).
        spread = 1 + 4 / want.numel() ** 0.5
        assert (got - want).norm() <= 1.25 * spread * (modules - want).norm() + 1e-5 * want.norm()


@on_gpu_alone
@pytest.mark.parametrize("family", NAMES)
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
