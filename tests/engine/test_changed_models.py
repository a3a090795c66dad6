"""A model that is changed between two calls: the next call says what the changed model says, or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from forerun import Chain, DraftModel, EarlyExit, PromptLookup, SpeculativeDecoder, Tree
from forerun.config import Kernels
from forerun.engine.device import choose
from forerun.engine.device.recorder import Recorder
from forerun.errors import UnsupportedModel
from forerun.kernels.cpu.narrow import narrow_parameter
from forerun.math.blocks import FORMATS
from forerun.models import fingerprint, scorer, static_pass
from forerun.models.bodies import gpu, readers
from forerun.models.bodies.gpu import GpuBody
from forerun.models.fingerprint import Fingerprint, checksum
from forerun.models.scorer import Scorer
from support.tiny import draft_of, plain_greedy, tiny_model

pytest.importorskip("numba")

PROMPT = [5, 9, 3, 60, 2, 7, 11]
NUMBER = 6


def _swap_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(tiny_model("llama", 5).model.layers[1])


def _swap_linear(model: Any) -> None:
    old = model.model.layers[0].mlp.up_proj
    new = nn.Linear(old.in_features, old.out_features, bias=True)
    nn.init.normal_(new.weight, std=0.5)
    model.model.layers[0].mlp.up_proj = new.requires_grad_(False)


def _new_parameter(model: Any) -> None:
    down = model.model.layers[1].mlp.down_proj
    down.weight = nn.Parameter(torch.randn_like(down.weight), requires_grad=False)


def _new_norm(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.randn_like(model.model.norm.weight))


def _new_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def _untie(model: Any) -> None:
    model.set_input_embeddings(copy.deepcopy(tiny_model("llama", 6).get_input_embeddings()))


def _assign(model: Any) -> None:
    model.load_state_dict(tiny_model("llama", 7).state_dict(), assign=True)


def _load(model: Any) -> None:
    model.load_state_dict(tiny_model("llama", 7).state_dict())


def _data(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data = torch.randn_like(model.model.layers[0].self_attn.v_proj.weight)


def _turn(model: Any) -> None:
    """Of a square weight neither the address nor the size changes."""
    square = model.model.layers[0].self_attn.q_proj.weight
    assert square.shape[0] == square.shape[1]
    square.data = square.data.t()


def _in_place(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1)


def _angles(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3)


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: -made)


def _pre_hook_on_the_model(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, given: (-given[0],))


def _own_forward(model: Any) -> None:
    layer = model.model.layers[1].self_attn.o_proj
    layer.forward = lambda x: -nn.functional.linear(x, layer.weight)


def _setting(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def _fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def _double(model: Any) -> None:
    model.double()


def _half(model: Any) -> None:
    model.to(torch.bfloat16)


def _resize(model: Any) -> None:
    model.resize_token_embeddings(120)


CHANGES = [
    _swap_layer, _swap_linear, _new_parameter, _new_norm, _new_head, _untie, _assign, _load, _data, _turn,
    _in_place, _angles, _hook, _pre_hook_on_the_model, _own_forward, _setting, _fewer_layers, _double, _half, _resize,
]  # fmt: skip


def said(decoder: SpeculativeDecoder, number: int = NUMBER) -> list[int]:
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=number).sequences
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_ids_that_a_model_has_gained_may_be_used_at_once(family: str) -> None:
    """In the first call behind the change, as prompts, sources, beginnings and biases."""
    model = copy.deepcopy(tiny_model(family))
    if family == "t5":
        model.generation_config.decoder_start_token_id = 0
    decoder = SpeculativeDecoder(model, PromptLookup())
    torch.manual_seed(3)
    model.resize_token_embeddings(120)
    ids = torch.tensor([[5, 110, 119, 110]])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUMBER)
    assert decoder.generate(ids, max_new_tokens=NUMBER).sequences.tolist() == wanted.tolist()
    assert decoder.generate(ids, max_new_tokens=2, logit_bias={118: 1e4}).new_tokens == [[118, 118]]


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.quick(every=2)
def test_the_next_call_says_what_the_changed_model_says(change: Callable[[Any], None], kernels: str) -> None:
    """Kept rows are of the old model: they are not gone on with."""
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels=kernels, keep_rows=1)
    before = plain_greedy(model, PROMPT, NUMBER)
    assert said(decoder) == before
    change(model)
    with torch.no_grad():
        after = plain_greedy(model, PROMPT, NUMBER)
    assert after != before or change in (_double, _resize), "control: this change is one"
    assert said(decoder) == after
    inside = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUMBER, do_sample=False, custom_generate=decoder.as_custom_generate()
    )
    assert inside[0, len(PROMPT) :].tolist() == after


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_weights_that_have_gone_to_nowhere(kernels: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels=kernels)
    said(decoder)
    model.to("meta")
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="weights on the meta device"):
            said(decoder)


@pytest.fixture
def gpu_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scorers take the body of a GPU, which the references of its kernels run here: it holds merged weights."""

    def chosen(model: PreTrainedModel, use: Kernels) -> GpuBody | None:
        return GpuBody(model) if model.dtype in gpu.DTYPES and readers.why_not(model) is None else None

    monkeypatch.setattr(scorer, "choose_body", chosen)


@pytest.mark.usefixtures("gpu_body")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.quick(every=3)
def test_the_body_of_a_gpu_follows(change: Callable[[Any], None]) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="off", keep_rows=1)
    assert isinstance(decoder.engine.target.body, GpuBody)
    before = said(decoder)
    assert before == plain_greedy(model, PROMPT, NUMBER)
    change(model)
    with torch.no_grad():
        after = plain_greedy(model, PROMPT, NUMBER)
    assert said(decoder) == after


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds are recorded as on a GPU, and what was recorded is called again. The last number is the model's:
    nothing that was recorded of an earlier one may be run."""
    made = [0]

    def captured(self: Recorder, work: Callable[[], None]) -> Callable[[], None]:
        number = made[-1]

        def replay() -> None:
            assert number == made[-1], "a recording of the model as it was"
            work()

        return replay

    monkeypatch.setattr(Recorder, "captures", True)
    monkeypatch.setattr(Recorder, "_captured", captured)
    monkeypatch.setattr(choose, "why_nothing", static_pass.why_not)
    return made


@pytest.mark.usefixtures("gpu_body")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.quick(every=4)
def test_no_recording_of_a_model_is_run_once_it_has_changed(
    change: Callable[[Any], None], recordings: list[int]
) -> None:
    """On a GPU: `test_device_graphs.py`."""
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, DraftModel(draft_of(model)), policy=2, kernels="off")
    assert said(decoder) == plain_greedy(model, PROMPT, NUMBER)
    runner = decoder.engine.runner
    assert runner is not None and not runner.is_disabled and runner.recorder.num_recordings > 0
    change(model)
    if change not in (_load, _in_place):  # which write where the weights lie: what was recorded reads the new ones
        recordings.append(1)
    with torch.no_grad():
        after = plain_greedy(model, PROMPT, NUMBER)
    assert said(decoder) == after


@pytest.mark.parametrize("layers", [slice(None), slice(1, 2)], ids=["all", "one"])
def test_angles_that_every_layer_keeps_for_itself(layers: slice) -> None:
    """GPT-J's, of which the fused layers hold one table: where one layer's is another, the modules run."""
    model = copy.deepcopy(tiny_model("gptj"))
    decoder = SpeculativeDecoder(model, None, kernels="on")
    before = said(decoder)
    assert decoder.engine.target.is_fused and before == plain_greedy(model, PROMPT, NUMBER)
    for layer in model.transformer.h[layers]:
        layer.attn.embed_positions.mul_(3)
    after = plain_greedy(model, PROMPT, NUMBER)
    assert after != before, "control"
    assert said(decoder) == after
    assert decoder.engine.target.is_fused == (layers == slice(None))


def test_a_model_that_stays_is_not_made_ready_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by calls of ours nor by calls of its own, nor by looking at its hidden states."""
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on", keep_rows=1)
    body = decoder.engine.target.body
    said(decoder)
    plain_greedy(model, PROMPT, 3)
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    model.requires_grad_(True).requires_grad_(False)
    monkeypatch.setattr(decoder.engine.target, "admit", lambda row: pytest.fail("the kept row was not gone on with"))
    said(decoder)
    assert decoder.engine.target.body is body and decoder.engine.target.is_fused
    assert Scorer(model, use=Kernels.ON).is_fused, "hooks that collect hidden states do no harm"


DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: DraftModel(draft_of(model)),
    "early exit": lambda model: EarlyExit(1),
    "tree": lambda model: Tree(DraftModel(draft_of(model)), width=2, nodes=4),
    "chain": lambda model: Chain(PromptLookup(), DraftModel(draft_of(model))),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.filterwarnings("error")
def test_drafters_follow(kind: str) -> None:
    """No drafter stumbles over the new target: that would be a warning."""
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, DRAFTERS[kind](model), policy=2, kernels="off", keep_rows=1)
    said(decoder)
    _assign(model)
    model.double()
    assert said(decoder) == plain_greedy(model, PROMPT, NUMBER)


@pytest.mark.parametrize("change", [_assign, _half], ids=lambda change: change.__name__)
@pytest.mark.filterwarnings("error")
def test_a_draft_model_that_changes(change: Callable[[Any], None]) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    draft = copy.deepcopy(model)
    decoder = SpeculativeDecoder(model, DraftModel(draft), policy=2, kernels="on", keep_rows=1)
    said(decoder)
    change(draft)
    assert said(decoder) == plain_greedy(model, PROMPT, NUMBER)
    assert type(decoder.drafter) is DraftModel and not decoder.drafter.has_changed()


def test_changed_while_a_call_is_running() -> None:
    """The fused body reads memory by its address: what lies there must still be what it was."""
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on")
    stream = decoder.stream(torch.tensor([PROMPT]), max_new_tokens=NUMBER)
    next(stream)
    model.to(torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="changed while a call was running"):
        list(stream)
    assert said(decoder) == plain_greedy(model, PROMPT, NUMBER)


def test_training_goes_on_where_it_was() -> None:
    model = copy.deepcopy(tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5))
    decoder = SpeculativeDecoder(model, None, kernels="off")
    want = plain_greedy(model, PROMPT, NUMBER)
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    assert said(decoder) == want
    assert [module.training for module in model.modules()] == modes
    stream = decoder.stream(torch.tensor([PROMPT]), max_new_tokens=NUMBER)
    next(stream)
    stream.close()
    assert [module.training for module in model.modules()] == modes


def test_refused_until_it_is_one_again() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on")
    want = said(decoder)
    model.config.layer_types = ["linear_attention", "full_attention"]
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="linear_attention"):
            said(decoder)
    del model.config.layer_types
    assert said(decoder) == want


class TestFingerprint:
    def test_every_change_of_places_is_noticed(self) -> None:
        for change in CHANGES:
            model = copy.deepcopy(tiny_model("llama"))
            seen = Fingerprint(model)
            assert seen.fits(model)
            change(model)
            assert seen.fits(model) == (change in (_load, _in_place)), change.__name__

    def test_values_change_the_sum(self) -> None:
        model = copy.deepcopy(tiny_model("llama"))
        before = checksum(model)
        assert checksum(model) == before
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data[3, 5] += 1e-6
        assert checksum(model) != before
        weight.data[3, 5] -= 1e-6
        swapped = weight[[1, 0, *range(2, len(weight))]].clone()
        before = checksum(model)
        weight.data.copy_(swapped)
        assert checksum(model) != before, "rows in another order"

    @pytest.mark.parametrize("shape", [(32, 6), (3, 5), (7,), (4, 2, 3), (0, 4), ()])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
    def test_rows_of_any_size(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Read eight bytes at a time where a row has a multiple of them."""
        module = nn.Module()
        module.table = nn.Buffer(torch.ones(shape, dtype=dtype))
        before = checksum(module)
        assert checksum(module) == before
        for number in range(module.table.numel()):
            module.table.data.view(-1)[number] += 1
            assert checksum(module) != before
            module.table.data.view(-1)[number] -= 1
        assert checksum(module) == before

    def test_rows_that_are_kept_with_odd_tables(self) -> None:
        """T5's bias has a row of twelve bytes for six heads."""
        model = copy.deepcopy(tiny_model("t5", num_heads=6)).to(torch.bfloat16)
        decoder = SpeculativeDecoder(model, None, keep_rows=2)
        for _ in range(2):
            assert len(decoder.generate(torch.tensor([PROMPT]), max_new_tokens=2).sequences[0]) == 3

    def test_values_that_tables_are_made_of(self) -> None:
        """Of buffers and other tensors, not of parameters, which are read where they lie."""
        model = nn.BatchNorm1d(2)
        model.table = torch.ones(2)
        seen = Fingerprint(model)
        with torch.no_grad():
            model.weight.add_(1)
        assert seen.fits(model)
        model.table.add_(1)
        assert not seen.fits(model)
        seen = Fingerprint(model)
        model.running_mean.add_(1)
        assert not seen.fits(model)

    def test_tensors_whose_changes_nobody_counts(self) -> None:
        model = nn.Module()
        with torch.inference_mode():
            model.table = nn.Buffer(torch.ones(2))
        assert Fingerprint(model).fits(model)

    def test_a_new_module_at_an_old_address(self) -> None:
        """Nothing is kept alive, so addresses of the old are free for the new."""
        model = nn.Sequential(nn.Linear(2, 2))
        seen = Fingerprint(model)
        for _ in range(50):
            model[0] = nn.Identity()
            model[0] = nn.Linear(2, 2)
            assert not seen.fits(model)

    def test_a_square_weight_that_was_turned(self) -> None:
        """It begins where it did and is as large; only the order of its numbers is another."""
        model = nn.Linear(3, 3)
        seen = Fingerprint(model)
        model.weight.data = model.weight.data.t()
        assert not seen.fits(model)

    def test_packed_bytes_that_were_replaced(self) -> None:
        model = nn.Linear(32, 2, bias=False)
        stored = FORMATS[8]  # Q8_0
        model.weight = narrow_parameter(torch.zeros(2, stored.size, dtype=torch.uint8), stored)
        seen = Fingerprint(model)
        assert seen.fits(model)
        model.weight.raw = model.weight.raw.clone()
        assert not seen.fits(model)

    def test_settings_within_settings(self) -> None:
        for change in (
            lambda model: model.config.rope_parameters.update(rope_theta=5.0),
            lambda model: model.config.nested[0].append(2),
            lambda model: model.config.nested[0].__setitem__(0, True),
            lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
            lambda model: model.model.layers[0].listed.reverse(),
        ):
            model = copy.deepcopy(tiny_model("llama"))
            model.config.nested, model.model.layers[0].listed = [[1]], [1, 2]
            seen = Fingerprint(model)
            assert seen.fits(model)
            change(model)
            assert not seen.fits(model)

    def test_comparing_is_for_what_is_another_object(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls leave no trace; what was replaced by its equal is compared once."""
        model = copy.deepcopy(tiny_model("llama"))
        decoder = SpeculativeDecoder(model, None)
        for _ in range(2):  # the first call may leave marks
            said(decoder)
        walks: list[int] = []
        monkeypatch.setattr(fingerprint, "_walk", lambda model, walk=fingerprint._walk: walks.append(1) or walk(model))
        assert said(decoder) == said(decoder)
        assert not walks
        attention = model.model.layers[0].self_attn
        attention.scaling = float(str(attention.scaling))
        said(decoder)
        assert len(walks) == 1
        said(decoder)
        assert len(walks) == 1

    def test_hooks_for_all_modules(self) -> None:
        model = nn.Linear(2, 2)
        seen = Fingerprint(model)
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
        try:
            assert not seen.fits(model)
        finally:
            handle.remove()
        assert seen.fits(model)
