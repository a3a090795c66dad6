"""`forerun bench decode`: what a token costs plainly and with drafts, by batch and length, beside the hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from forerun.bench.settings import DecodeOptions
from forerun.cli.bench import output_options
from forerun.cli.options import GroupedCommand, options_from, settings_from


@click.command(cls=GroupedCommand)
@options_from(
    DecodeOptions,
    "What is measured",
    model={
        "flags": ("--model", "-m"),
        "metavar": "MODEL|PAIR",
        "show_default": "synthetic:6.7b+0.33b@0.87 on a GPU, synthetic:tiny+mini@0.87 elsewhere",
    },
    draft={"flags": ("--draft", "-d"), "metavar": "MODEL", "show_default": "none"},
    batch_sizes={"show_default": "1,2,4,8,16"},
    prompt_length={"show_default": "448 on a GPU, 32 elsewhere"},
    max_new_tokens={"show_default": "128 on a GPU, 48 elsewhere"},
    seconds={"show_default": "150"},
    device={"metavar": "DEVICE", "show_default": "a GPU where there is one"},
    dtype={"metavar": "TYPE", "show_default": "bfloat16 on a GPU, float32 elsewhere"},
)
@output_options("Draw latency, utilisation, bandwidth and memory, too.")
def decode(output: Path | None, picture: Path | None, **options: Any) -> None:  # fmt: skip
    """Time whole rounds: plain decoding, drafts of 4, 6 and 8 tokens, BASS's rule and auto, batch by batch.

    Shows milliseconds a token of the first and the last row to finish and of all, what share of the measured bandwidth
    and FLOPS the rounds use, how much of a round is not the device's, memory beside weights and cache, and transformers
    with the same pair. Nothing is downloaded: a synthetic pair has random weights, full cost and a known acceptance
    rate. Under three minutes on an H200; Ctrl-C keeps what was measured.
    """
    from forerun.bench.decode.run import run
    from forerun.bench.decode.settings import choose_settings
    from forerun.measure.show import measure

    settings = choose_settings(settings_from(DecodeOptions, options))
    status = measure("decode", output, picture, lambda path, reporter: run(settings, path, reporter))
    click.get_current_context().exit(status)
