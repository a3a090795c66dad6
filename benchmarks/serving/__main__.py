"""`python -m benchmarks.serving`: clients of a server, with drafts and without, beside the engine alone."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from benchmarks.command import add_device, make_parser, run_command
from benchmarks.serving.run import Settings, run
from forerun.bench.decode.pair import LARGE, SMALL
from forerun.loading.load import choose_device
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = make_parser("serving", __doc__)
    parser.add_argument("--model", help=f"a target, or a pair [default: {LARGE} on a GPU, {SMALL} elsewhere]")
    parser.add_argument("--draft", help="its draft model, where --model is no pair")
    parser.add_argument("--streams", nargs="*", type=int, default=list(default.streams), help="open at a time")
    parser.add_argument(
        "--bare", nargs="*", type=int, default=list(default.bare), help="of these, the engine alone, too"
    )
    parser.add_argument(
        "--stream-seconds", type=float, default=default.stream_seconds, help="of each number of streams"
    )
    parser.add_argument("--ramp", type=float, default=default.ramp, help="seconds over which streams begin one by one")
    parser.add_argument("--prompt", type=int, default=default.prompt, help="tokens of a stream's prompt")
    parser.add_argument("--output-tokens", type=int, default=default.output, help="new tokens of a stream")
    parser.add_argument("--rates", nargs="*", type=float, default=list(default.rates), help="requests a second")
    parser.add_argument("--rate-seconds", type=float, default=default.rate_seconds, help="of each rate")
    parser.add_argument("--max-rows", type=int, default=default.max_rows, help="rows that decode at once, at most")
    parser.add_argument("--max-draft", type=int, default=default.max_draft, help="tokens drafted a round, at most")
    parser.add_argument("--cache-tokens", type=int, help="keys of so many tokens, all rows together, at most")
    parser.add_argument("--seconds", type=float, help="begin no load later than that")
    add_device(parser)
    parser.add_argument("--output", type=Path, help="the record [default: a new file in benchmarks/results]")
    parser.set_defaults(plot=None)
    chosen = parser.parse_args(arguments)
    asked = Settings(
        chosen.model, chosen.draft, tuple(chosen.streams), tuple(chosen.bare), chosen.stream_seconds, chosen.ramp,
        chosen.prompt, chosen.output_tokens, tuple(chosen.rates), chosen.rate_seconds, max_rows=chosen.max_rows,
        max_draft=chosen.max_draft, cache_tokens=chosen.cache_tokens, seconds=chosen.seconds,
    )  # fmt: skip
    return run_command("serving", arguments, chosen, partial(run, asked, choose_device(chosen.device)))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
