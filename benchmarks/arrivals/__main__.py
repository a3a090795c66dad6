"""`python -m benchmarks.arrivals`: requests that come and go, with drafts and without."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.arrivals.run import METHODS, Settings, run
from benchmarks.command import add_device, add_outputs, make_parser, run_command
from forerun.bench.decode.pair import LARGE, SMALL
from forerun.loading.load import choose_device
from forerun.measure.show import main


def command(arguments: list[str]) -> int:
    default = Settings()
    parser = make_parser("arrivals", __doc__)
    parser.add_argument("--model", help=f"a target, or a pair [default: {LARGE} on a GPU, {SMALL} elsewhere]")
    parser.add_argument("--draft", help="its draft model, where --model is no pair and has one")
    parser.add_argument(
        "--methods", nargs="+", default=[], help=f"of {', '.join(METHODS)} [default: all that the models allow]"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(default.rates), help="requests a second")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="during which requests arrive")
    parser.add_argument("--prompt", nargs=2, type=int, default=list(default.prompt), help="tokens, from and to")
    parser.add_argument("--output-tokens", nargs=2, type=int, default=list(default.output), help="from and to")
    parser.add_argument(
        "--penalised", nargs="+", type=float, default=list(default.penalised), help="shares of requests with a penalty"
    )
    parser.add_argument("--shared", type=int, default=default.shared, help="tokens with which all prompts begin")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0 is greedy")
    parser.add_argument("--max-rows", type=int, default=default.max_rows, help="rows that decode at once, at most")
    parser.add_argument("--max-draft", type=int, default=default.max_draft, help="tokens drafted a round, at most")
    parser.add_argument(
        "--warm-up-only", action="store_true", help="for --max-rows, --max-draft and --context: serve nothing"
    )
    parser.add_argument("--context", type=int, help="tokens of texts to warm up for [default: those that can come]")
    parser.add_argument("--cold", action="store_true", help="begin without warming up")
    add_device(parser)
    add_outputs(parser, plot="the waits")
    chosen = parser.parse_args(arguments)
    asked = Settings(
        chosen.model, chosen.draft, tuple(chosen.methods), tuple(chosen.rates), chosen.seconds, tuple(chosen.prompt),
        tuple(chosen.output_tokens), tuple(chosen.penalised), chosen.shared, chosen.temperature, chosen.max_rows,
        chosen.max_draft, not chosen.cold, chosen.warm_up_only, chosen.context,
    )  # fmt: skip
    return run_command("arrivals", arguments, chosen, partial(run, asked, choose_device(chosen.device)))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
