"""`forerun plan --devices N`: how a target should be laid out over N devices. Nothing is measured or loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import settings_from, typed_options
from forerun.config import num_ranks
from forerun.errors import InvalidArgument
from forerun.plan.devices import DeviceLayout, DeviceSettings, ModelShape, layouts

if TYPE_CHECKING:
    from forerun.measure.table import Table
    from forerun.plan.simulate import Waiting

HONOURED = {"target", "dtype", "offline", "as_json", *(field.name for field in fields(DeviceSettings))}


def plan_devices(target: str, options: dict[str, Any], as_json: bool) -> None:
    """Print the prediction."""
    context = click.get_current_context()
    others = [name for name in context.params if name not in HONOURED]
    if typed := typed_options(context, others):
        raise InvalidArgument(f"{', '.join(typed)}: --devices predicts by formulas and measures nothing; leave it out")
    if num_ranks() > 1:
        raise InvalidArgument("--devices predicts by formulas, which one process computes: start it without torchrun")
    from forerun.cli.console import out_console
    from forerun.loading import load_outline
    from forerun.measure.table import print_tables
    from forerun.plan.simulate import simulate

    settings = settings_from(DeviceSettings, options)
    shape = ModelShape.of(load_outline(target, dtype=options["dtype"] or "bfloat16", offline=options["offline"]))
    fitting = layouts(shape, settings)
    waits = [] if settings.rate is None else [simulate(shape, settings, layout) for layout in fitting]
    if as_json:
        record = {"prediction": True, "settings": asdict(settings), "model": asdict(shape)}
        click.echo(json.dumps(record | {"layouts": list(map(asdict, fitting)), "simulation": list(map(asdict, waits))}))
        return
    tables = [_layout_table(target, fitting, settings)] + ([_waiting_table(waits, settings)] if waits else [])
    console = out_console()
    print_tables(tables, console)
    console.print(_advice(fitting, waits), markup=False, highlight=False, soft_wrap=True)


def _name(layout: DeviceLayout) -> str:
    copies = "one copy" if layout.copies == 1 else f"{layout.copies} copies"
    return f"{copies}, whole" if layout.split == 1 else f"{copies}, split over {layout.split}"


def _layout_table(target: str, fitting: list[DeviceLayout], settings: DeviceSettings) -> Table:
    from forerun.measure.table import Table

    rows = tuple(
        (
            _name(layout),
            f"{layout.weight_bytes / 1e9:.1f}",
            f"{layout.key_tokens}",
            f"{layout.rows}",
            f"{layout.round_seconds * 1e3:.2f}",
            f"{layout.collective_seconds / layout.round_seconds:.0%}",
            f"{layout.row_tokens_per_second:.0f}",
            f"{layout.tokens_per_second:.0f}",
        )
        for layout in fitting
    )
    headings = (
        "layout", "GB of weights a device", "tokens of keys a copy", "rows a copy", "ms a round", "of it collectives",
        "tokens/s a row", "tokens/s in all",
    )  # fmt: skip
    return Table(f"{target} on {settings.devices} devices, PREDICTED by formulas", headings, rows)


def _waiting_table(waits: list[Waiting], settings: DeviceSettings) -> Table:
    from forerun.measure.table import Table

    rows = tuple(
        (
            _name(one.layout),
            *(f"{seconds * 1e3:.0f}" for seconds in one.first_token),
            *(f"{seconds * 1e3:.1f}" for seconds in one.each_token),
            f"{one.tokens_per_second:.0f}",
            "yes" if one.is_overloaded else "no",
        )
        for one in waits
    )
    headings = ("layout", "ms to first token", "95 %", "ms a token", "95 %", "tokens/s", "overloaded")
    return Table(f"{settings.rate:g} requests a second, {waits[0].served} of them SIMULATED", headings, rows)


def _advice(fitting: list[DeviceLayout], waits: list[Waiting]) -> str:
    quick = max(fitting, key=lambda layout: layout.row_tokens_per_second)
    most = max(fitting, key=lambda layout: layout.tokens_per_second)
    lines = [f"Predicted: each row is fastest with {_name(quick)}; most tokens in all come from {_name(most)}."]
    if waits:
        bearing = [one for one in waits if not one.is_overloaded]
        if not bearing:
            lines.append("At this rate all of them are overloaded: requests would wait longer and longer.")
            return "\n".join(lines)
        best = min(bearing, key=lambda one: one.first_token[1] + 100 * one.each_token[1])
        lines.append(f"At this rate an answer of 100 tokens is there soonest (95 %) with {_name(best.layout)}.")
    return "\n".join(lines)
