"""Models with adapters: the text is that of the adapted model, whoever put the adapter in and whenever."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from forerun import DraftModel, SpeculativeDecoder
from forerun.errors import UnsupportedModel
from support.tiny import plain_greedy, tiny_model

peft = pytest.importorskip("peft")

PROMPT = [5, 9, 3, 60, 2, 7, 11]
NUMBER = 6


def lora(**more: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"],
                           init_lora_weights=False, task_type="CAUSAL_LM", **more)  # fmt: skip


def wrapped(**more: Any) -> Any:
    return peft.get_peft_model(copy.deepcopy(tiny_model("llama")), lora(**more)).eval()


def said(decoder: SpeculativeDecoder) -> list[int]:
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=NUMBER).sequences
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_wrapped_model(kernels: str) -> None:
    model = wrapped()
    want = plain_greedy(model, PROMPT, NUMBER)
    assert want != plain_greedy(tiny_model("llama"), PROMPT, NUMBER), "control: the adapter does something"
    decoder = SpeculativeDecoder(model, DraftModel(wrapped()), policy=2, kernels=kernels)
    assert said(decoder) == want
    inside = model.generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=NUMBER, do_sample=False,
        custom_generate=decoder.as_custom_generate(),
    )  # fmt: skip
    assert inside[0, len(PROMPT) :].tolist() == want


def test_adapters_come_change_and_go() -> None:
    """Each step is seen by the next call; rows that were kept before it are not gone on with."""
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on", keep_rows=1)
    texts = {"plain": said(decoder)}

    def check(name: str) -> None:
        texts[name] = plain_greedy(model, PROMPT, NUMBER)
        assert said(decoder) == texts[name], name

    check("plain")
    model.add_adapter(lora(), adapter_name="one")
    check("one")
    model.add_adapter(lora(), adapter_name="two")
    model.set_adapter("two")
    check("two")
    model.set_adapter("one")
    check("one")
    model.disable_adapters()
    check("plain")
    model.enable_adapters()
    check("one")
    model.delete_adapter("one")
    model.delete_adapter("two")
    check("plain")
    assert len(set(map(tuple, texts.values()))) == 3, "control: they differ"


def test_merged_and_unloaded() -> None:
    model = wrapped()
    decoder = SpeculativeDecoder(model, None, kernels="on", keep_rows=1)
    want = said(decoder)
    model.merge_adapter()
    assert said(decoder) == want
    merged = model.merge_and_unload()
    assert said(decoder) == want == plain_greedy(merged, PROMPT, NUMBER)
    assert decoder.engine.target.is_fused, "plain modules again: fused again"


REFUSED = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_prompts_of_its_own_are_refused(kind: str) -> None:
    model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), REFUSED[kind]())
    with pytest.raises(UnsupportedModel, match=r"before every prompt.*LoRA"):
        SpeculativeDecoder(model)
    with pytest.raises(UnsupportedModel, match="before every prompt"):
        DraftModel(model)


def test_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped()
    monkeypatch.setattr(model.peft_config["default"], "peft_type", "POLY")
    with pytest.raises(UnsupportedModel, match=r"POLY.*merge_and_unload"):
        SpeculativeDecoder(model)


def test_one_that_comes_later_is_refused() -> None:
    model = wrapped()
    decoder = SpeculativeDecoder(model, None, kernels="off")
    model.add_adapter("later", lora(alora_invocation_tokens=[3, 4]))
    with pytest.raises(UnsupportedModel, match="activated LoRA"):
        said(decoder)
