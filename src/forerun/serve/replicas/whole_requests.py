"""Of a request that has come whole, a replica asks its proxy for nothing more.

Ray has a replica call the proxy for each request: for the body, and to hear that the client has left. The body travels
with the request here, and when its client leaves, Ray's proxy cancels the request besides. The call alone, by the name
of an actor and through its queue of tasks, takes as long as half of all else that Ray does for a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from forerun.serve.replicas.pipe import BODY

CALL = "receive_asgi_messages"  # of a request: what awaits the proxy's answer


def ask_for_no_more(kind: Any = None) -> None:
    """In a replica's process. `kind`: Ray's class of requests that travel. A later Ray may have none, or another."""
    if kind is None:
        from ray.serve._private import common

        kind = getattr(common, "StreamingHTTPRequest", None)
    theirs = getattr(kind, CALL, None)
    if isinstance(theirs, property) and theirs.fget is not None:
        ask = theirs.fget
        setattr(kind, CALL, property(lambda request: _never if BODY in request.asgi_scope else ask(request)))


async def _never(metadata: object) -> bytes:
    """Until it is cancelled, with the request or at its end."""
    nothing: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    return await nothing
