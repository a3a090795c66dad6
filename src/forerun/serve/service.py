"""What every server has: one model, the engine behind it, and the queue in front of it."""

from __future__ import annotations

from forerun.serve.admission import RequestAdmission
from forerun.serve.backend import Backend
from forerun.serve.errors import shutting_down
from forerun.serve.metrics import Metrics
from forerun.serve.model import Card
from forerun.serve.settings import ServiceSettings


class Service:
    """`max_rows` requests are under way at a time. Metrics bear the label `engine`."""

    def __init__(
        self, card: Card, backend: Backend, settings: ServiceSettings, max_rows: int, engine: str = "0"
    ) -> None:
        self.card, self.backend, self.settings = card, backend, settings
        self.admission = RequestAdmission(max_rows, settings.max_queued, settings.max_queued_tokens)
        self.metrics = Metrics(card.name, self.admission, lambda: backend.state, engine)
        self.longest_round = settings.timeout  # seconds: as long as a request may take, unless more is known
        self.is_draining = self._is_closed = False

    async def open(self) -> None:
        """In the event loop that is going to use it."""
        await self.backend.open()

    def close(self, drain: bool = True) -> None:
        """Once: whoever comes first says how."""
        self.is_draining = True
        if not self._is_closed:
            self._is_closed = True
            self.backend.close(drain)

    async def look(self) -> bool:
        """Whether the engine is alive, now; what metrics tell of it is as new."""
        return (await self.backend.look()).is_alive

    async def wait_for_round_end(self) -> None:
        """Until the engine has come to the end of a round."""
        await self.backend.wait_for_round_end()

    @property
    def is_alive(self) -> bool:
        """As it was seen last."""
        return self.backend.state.is_alive

    def check_is_open(self) -> None:
        if self.is_draining:
            raise shutting_down()
