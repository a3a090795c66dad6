"""What a config file of `serve deploy` names: `forerun.cli.deployed:app`."""

from __future__ import annotations

from typing import Any

import click

from forerun.cli.options import settings_from
from forerun.cli.replicas import check_queue, check_ray, maker, share_of
from forerun.cli.serve import serve
from forerun.config import api_key
from forerun.errors import InvalidArgument
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings

EVERYWHERE = "0.0.0.0"


def app(asked: dict[str, Any]) -> Any:
    """The application of a config file: its `args` are options of `forerun serve`, without their dashes.

    Whoever can reach Ray's proxies can reach it, so it needs $FORERUN_API_KEY where the replicas start, or
    `allow_anyone: true`. The file's own `deployments` may override what is said here of resources and numbers.
    """
    options = parsed(asked)
    options["api_key"] = options["api_key"] or api_key()
    address = settings_from(AddressSettings, {**options, "host": EVERYWHERE})
    limits, replicas = settings_from(ServiceSettings, options), settings_from(ReplicaSettings, options)
    check_queue(limits)
    check_ray()
    from forerun.serve.replicas.deployment import application

    share = share_of(options, limits, options["device"] or "cpu", 1.0)
    return application(maker(options, limits), address, limits, replicas, share)


def parsed(asked: dict[str, Any]) -> dict[str, Any]:
    """As the command line would read them: the same names, defaults and complaints. Null is as leaving it out."""
    known = {param.name: param for param in serve.params}
    words: list[str] = []
    for name, value in asked.items():
        if name not in known:
            raise InvalidArgument(f"args: {name}: `forerun serve` has no --{name.replace('_', '-')}")
        if value is None:
            continue
        if isinstance(value, list) and None in value:
            raise InvalidArgument(f"args: {name}: null in a list: give values, or leave all of it out")
        is_flag = getattr(known[name], "is_flag", False)
        if is_flag != isinstance(value, bool):
            raise InvalidArgument(f"args: {name}: {value!r}: must be {'true or false' if is_flag else 'a value'}")
        if is_flag:
            words += [*known[name].opts[:1]] if value else [*known[name].secondary_opts[:1]]
        elif name == "model":
            words.append(str(value))
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [known[name].opts[0], str(one)]
    try:
        return serve.make_context("serve", words).params
    except click.UsageError as error:
        raise InvalidArgument(f"args: {error.format_message()}") from error
