"""Modules and weights that are not plain: kernels leave them to torch, and the text is the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from forerun import SpeculativeDecoder
from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.models import plain, proven, static_pass
from forerun.models.bodies.readers import why_not
from forerun.models.scorer import Scorer
from support.tiny import plain_greedy, tiny_model

pytest.importorskip("numba")

PROMPT = [5, 9, 3, 60, 2, 7, 11]
NUMBER = 5


class Quantised(torch.Tensor):
    """Looks like float32, as torchao's and DTensor do, and has no memory at its address."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.dtype, device=kept.device)
        made.kept = kept
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(given[0].kept)
        plain_given = [x.kept if isinstance(x, Quantised) else x for x in given]
        return function(*plain_given, **(named or {}))


class Packed(nn.Module):
    """A linear layer as GPTQ and AWQ have it: `qweight`, and nothing by the name of `weight`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("qweight", (layer.weight.detach() * 64).round().to(torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qweight.to(x.dtype) / 64)


def _quantised(model: Any) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(Quantised(module.weight.detach()), requires_grad=False)


def _packed(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Packed(layer.mlp.up_proj)
    model.lm_head = Packed(model.lm_head)


def _own_forward(model: Any) -> None:
    for layer in model.model.layers:
        own = layer.mlp.down_proj
        own.forward = lambda x, own=own: nn.functional.linear(x, own.weight.round(decimals=1))


def _subclass(model: Any) -> None:
    class Louder(type(model)):  # type: ignore[misc]
        def forward(self, *given: Any, **named: Any) -> Any:
            out = super().forward(*given, **named)
            out.logits = -out.logits
            return out

    model.__class__ = Louder


def _pruned(model: Any) -> None:
    """One layer's MLP is narrower than the configuration says."""
    mlp, keep = model.model.layers[1].mlp, 16
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).weight = nn.Parameter(getattr(mlp, name).weight[:keep].clone(), requires_grad=False)
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, :keep].clone(), requires_grad=False)


def _bias(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj.bias = nn.Parameter(torch.ones(mlp.up_proj.out_features), requires_grad=False)


def _epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 5.0


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def _parametrized(model: Any) -> None:
    class Negative(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return -weight

    nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.o_proj, "weight", Negative())


def _column_major(model: Any) -> None:
    """The same numbers in another order in memory, as a weight has that somebody transposed."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()


def _dynamic(model: Any) -> None:
    made = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    model._modules, model.__dict__ = made._modules, made.__dict__


def _why_no_dynamic() -> str | None:
    """None where a layer of torch's own can be made: builds may have no engine, engines may not know the processor."""
    try:
        torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(1, 1)), {nn.Linear}, dtype=torch.qint8)
    except RuntimeError as error:
        return str(error)
    return None


ODD = [
    _quantised, _packed, _own_forward, _subclass, _pruned, _bias, _epsilon, _activation, _parametrized,
    _column_major, _dynamic,
]  # fmt: skip

READ = (_pruned, _bias, _epsilon)  # readers take these from the modules themselves


def said(decoder: SpeculativeDecoder) -> list[int]:
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=NUMBER).sequences
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it will drop
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_the_text_is_the_models_own(make: Callable[[Any], None]) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    if make is _dynamic and (reason := _why_no_dynamic()):
        pytest.skip(f"torch quantises nothing dynamically on this machine: {reason}")
    make(model)
    want = plain_greedy(model, PROMPT, NUMBER)
    # Dynamic quantisation scales activations over all that is computed at once, so packed rows differ from single ones.
    checked = make is not _dynamic
    decoder = SpeculativeDecoder(model, kernels="on", self_check=checked)  # the default drafter looks at it, too
    assert decoder.engine.target.is_fused == (make in READ)
    assert said(decoder) == want


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(_why_no_dynamic() is not None, reason="torch quantises nothing dynamically on this machine")
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_scales_that_are_those_of_a_whole_pass_are_refused(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft would change the text of its own row, before the decoder is made and after."""
    monkeypatch.setattr(proven, "TRANSFORMERS", transformers.__version__)
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels=kernels, self_check=True)
    said(decoder)
    _dynamic(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=r"^LlamaForCausalLM: Forerun's logits differ"):
            said(decoder)
    with pytest.raises(UnsupportedModel, match=r"^LlamaForCausalLM: Forerun's logits differ"):
        SpeculativeDecoder(model, None, kernels=kernels, self_check=True)


def test_another_family_with_weights_of_another_type() -> None:
    """Few-row products take raw addresses, too."""
    model = copy.deepcopy(tiny_model("opt"))
    _quantised(model)
    assert said(SpeculativeDecoder(model, None, kernels="on")) == plain_greedy(tiny_model("opt"), PROMPT, NUMBER)


def test_hooks_for_all_modules_are_called() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on")
    assert decoder.engine.target.is_fused
    called: list[str] = []
    hooks = torch.nn.modules.module
    handle = hooks.register_module_forward_hook(lambda module, given, made: called.append(type(module).__name__))
    try:
        said(decoder)
    finally:
        handle.remove()
    assert "LlamaMLP" in called
    said(decoder)
    assert decoder.engine.target.is_fused


def test_a_forward_put_into_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on")
    before = said(decoder)
    real = type(model.model.norm).forward
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: -real(self, x))
    assert "norm has a forward of its own" in str(why_not(model))
    assert said(decoder) == plain_greedy(model, PROMPT, NUMBER) != before


def test_weights_that_are_nowhere_are_refused() -> None:
    model = copy.deepcopy(tiny_model("llama")).to("meta")
    with pytest.raises(UnsupportedModel, match="meta device"):
        SpeculativeDecoder(model, None, kernels="on")


@pytest.mark.parametrize("change", [lambda d: d.layers[0].fc1.register_forward_hook(lambda *a: None),
                                    lambda d: d.layers[1].final_layer_norm.__setattr__("eps", 0.3),
                                    lambda d: d.register_forward_hook(lambda *a: None),
                                    lambda d: d.layers[1].compile(backend="eager")])  # fmt: skip
def test_whisper_stands_aside(change: Callable[[Any], None]) -> None:
    from forerun.models.bodies import whisper

    model = copy.deepcopy(tiny_model("whisper"))
    assert whisper.why_not(model) is None
    change(model.get_decoder())
    assert whisper.why_not(model) is not None


class Backend:
    """A compiler that changes nothing, and counts how often what it compiled is run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.runs += 1
            return graph.forward(*given)

        return run


def _compiled_layer(model: Any, backend: Backend) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend=backend)


def _compiled_in_place(model: Any, backend: Backend) -> None:
    model.model.layers[1].compile(backend=backend)


def _compiled_part(model: Any, backend: Backend) -> None:
    model.model.layers[1].mlp.compile(backend=backend)


def _compiled_whole(model: Any, backend: Backend) -> None:
    model.compile(backend=backend)


def _compiled_forward(model: Any, backend: Backend) -> None:
    """As transformers' own pages do it."""
    model.forward = torch.compile(model.forward, backend=backend)


COMPILED = [_compiled_layer, _compiled_in_place, _compiled_part, _compiled_whole, _compiled_forward]


@pytest.mark.quick("_compiled_part")
@pytest.mark.parametrize("compile", COMPILED, ids=lambda compile: compile.__name__)
def test_what_was_compiled_is_run(compile: Callable[[Any, Backend], None]) -> None:
    """Also where that comes to a model which a decoder has fused already."""
    model, backend = copy.deepcopy(tiny_model("llama")), Backend()
    want = plain_greedy(model, PROMPT, NUMBER)
    decoder = SpeculativeDecoder(model, "lookup", kernels="on")
    assert decoder.engine.target.is_fused and said(decoder) == want
    compile(model, backend)
    assert said(decoder) == want and not decoder.engine.target.is_fused
    assert backend.runs > 0
    runs = backend.runs
    assert said(SpeculativeDecoder(model, "lookup", kernels="on")) == want and backend.runs > runs
    assert plain_greedy(model, PROMPT, NUMBER) == want


@pytest.mark.slow
def test_a_model_that_is_wrapped_whole() -> None:
    model, backend = copy.deepcopy(tiny_model("llama")), Backend()
    want = plain_greedy(model, PROMPT, NUMBER)
    wrapped: Any = torch.compile(model, backend=backend)
    decoder = SpeculativeDecoder(wrapped, "lookup", kernels="on")
    assert said(decoder) == want and backend.runs > 0 and not decoder.engine.target.is_fused


def test_compiled_modules_are_not_recorded() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].mlp.compile(backend=Backend())
    assert "layers.1.mlp is compiled" in str(static_pass.why_not(Scorer(model, use=Kernels.OFF)))


def test_hooks_are_not_recorded() -> None:
    """A recording would call them once, when it is made."""
    model = copy.deepcopy(tiny_model("llama"))
    assert static_pass.why_not(Scorer(model, use=Kernels.OFF)) is None
    model.model.layers[1].mlp.register_forward_hook(lambda *given: None)
    assert "layers.1.mlp has forward hooks" in str(static_pass.why_not(Scorer(model, use=Kernels.OFF)))


def test_memory() -> None:
    assert plain.is_memory(torch.ones(3)) and plain.is_memory(nn.Parameter(torch.ones(3)))
    assert not plain.is_memory(Quantised(torch.ones(3)))
    assert not plain.is_memory(torch.ones(3, 2).T)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert not plain.is_memory(freed)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_layer_that_runs_twice(kernels: str) -> None:
    """Its second run would overwrite the keys of its first; transformers' own cache attends to both together."""
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers.append(model.model.layers[1])
    model.config.num_hidden_layers += 1
    with pytest.raises(UnsupportedModel, match=r"layer_idx 1.*deepcopy"):
        said(SpeculativeDecoder(model, None, kernels=kernels))
    model.model.layers[-1] = copy.deepcopy(model.model.layers[-1])
    model.model.layers[-1].self_attn.layer_idx = 2
    want = plain_greedy(model, PROMPT, NUMBER)
    assert said(SpeculativeDecoder(model, None, kernels=kernels)) == want


def test_heads_of_a_size_of_their_own() -> None:
    model = copy.deepcopy(tiny_model("mistral"))
    model.model.layers[1].self_attn.head_dim = 1
    want = plain_greedy(model, PROMPT, NUMBER)
    decoder = SpeculativeDecoder(model, None, kernels="on")
    assert not decoder.engine.target.is_fused
    assert said(decoder) == want
