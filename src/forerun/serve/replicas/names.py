"""Names by which Ray knows what is ours."""

from __future__ import annotations

APPLICATION = "forerun"
DEPLOYMENT = "Forerun"
ROUTER = "forerun.serve.replicas.router:PrefixRouter"
MIDDLEWARES = "forerun.serve.replicas.proxy:middlewares"
OURS_ALONE = "FORERUN_RAY_IS_OURS"
"""In the environment of a cluster that was started by us, and on which nobody else has applications."""
