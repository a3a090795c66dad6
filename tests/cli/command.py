"""A command of `forerun`, run in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from forerun.cli.main import cli


class Command:
    """`forerun NAME --device cpu ...` in this process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: str, stdin: str | bytes | None = None, **environment: str) -> Result:
        place = [] if "--help" in arguments else ["--device", "cpu", "--offline"]
        return CliRunner(env=environment).invoke(cli, [self.name, *place, *arguments], input=stdin)
