"""How often rows that need the host get a round beside rows whose rounds the device runs by itself."""

from __future__ import annotations

SHARE = 0.4  # of the device's time for its own rows: what rounds of the others may add to it
MOST_ROUNDS = 8  # rounds of the device's rows that the others wait for at most, however long their own take


class HostShare:
    """Counts the device's time since the last round on the host.

    Both kinds of rounds read all of the target's weights and take turns, so rows that need the host would cost their
    neighbours as much as they take themselves if each had a round in every step.
    """

    def __init__(self) -> None:
        self._host_seconds = 0.0  # of the last round on the host
        self._device_seconds, self._device_rounds = 0.0, 0  # since then

    @property
    def is_due(self) -> bool:
        """Whether the rows that need the host may have their round."""
        return self._device_rounds >= MOST_ROUNDS or self._device_seconds * SHARE >= self._host_seconds

    def add_device_round(self, seconds: float) -> None:
        self._device_seconds += seconds
        self._device_rounds += 1

    def add_host_round(self, seconds: float) -> None:
        self._host_seconds = seconds
        self._device_seconds, self._device_rounds = 0.0, 0
