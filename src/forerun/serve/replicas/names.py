"""Names by which Ray knows what is ours, and how much it says."""

from __future__ import annotations

from typing import Any

from forerun.serve.settings import AddressSettings

APPLICATION = "forerun"
DEPLOYMENT = "Forerun"
ROUTER = "forerun.serve.replicas.router:PrefixRouter"
MIDDLEWARES = "forerun.serve.replicas.proxy:middlewares"
OURS_ALONE = "FORERUN_RAY_IS_OURS"
"""In the environment of a cluster that was started by us, and on which nobody else has applications."""


def log_level(address: AddressSettings) -> str:
    """What Ray calls information is for those who look for a fault."""
    return "WARNING" if address.log_level == "info" else address.log_level.upper()


def logging_config(address: AddressSettings) -> dict[str, Any]:
    return {"log_level": log_level(address), "enable_access_log": address.log_level == "debug"}
