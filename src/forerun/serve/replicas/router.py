"""Which replica a request goes to: the one that has its beginning, else the less busy of two."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.serve.replicas.prefixes import PrefixHolders


class PrefixRouter(RequestRouter):
    """Ray's router asks it for candidates in order of preference, and takes the first group in which one has room.

    The hashes of a request, or whatever its client calls its session, come in the header X-Session-Id, which Ray reads.
    """

    def initialize_state(self, slack: int) -> None:
        """`slack`: by how many requests the replica that has a beginning may be busier than another."""
        self._slack = slack
        self._holders: PrefixHolders[ReplicaID] = PrefixHolders()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that holds the prefix, if there is one, then two of the others."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        loads = {one: self.replica_queue_len_cache.get(one) or 0 for one in by_id}
        holder = self._holders.holder(_hashes(pending_request), loads, self._slack)
        others = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where nobody has room
        return [others] if holder is None else [[by_id[holder]], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """From now on the beginning is there."""
        self._holders.note(_hashes(pending_request), replica_id)


def _hashes(request: PendingRequest | None) -> list[str]:
    return [] if request is None else request.metadata.session_id.split()
