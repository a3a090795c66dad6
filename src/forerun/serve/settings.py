"""What a server is started with. Nothing heavy is imported here: the command line makes its options from this."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.arguments import above, at_least, finite, header_key, refuse

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ROUND_SECONDS = 60.0
"""A round reads two thousand tokens of prompts at most, and decodes a few; nothing is compiled any more."""
ROWS = {"cuda": 128, "cpu": 16}
"""By device: by then a round costs more with every further row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressSettings:
    """Where the server listens, and who may ask."""

    host: str = "127.0.0.1"
    """The address to listen at. One that others can reach needs an API key, or --allow-anyone."""
    port: int = 8000
    """0 takes any that is free; the line that says the server is ready names it."""
    api_key: str | None = None
    """Clients must send it: `Authorization: Bearer KEY`. Prefer the environment: other users see command lines."""
    allow_anyone: bool = False
    """Listen at an address that others can reach, without a key."""
    cors_origin: tuple[str, ...] = ()
    """Pages from these origins may call the server from a browser; '*' for all."""
    ssl_keyfile: str | None = None
    """The key of the certificate, for https."""
    ssl_certfile: str | None = None
    """The certificate, for https."""
    log_level: str = "info"
    """critical, error, warning, info or debug. Prompts and texts are never logged."""

    def __post_init__(self) -> None:
        """Refuse what would listen where nobody meant it to."""
        if self.api_key:
            object.__setattr__(self, "api_key", header_key("api_key", self.api_key))
        if not 0 <= self.port < 65536:
            refuse("port", self.port, "must be from 0 to 65535")
        if self.host not in LOOPBACK and not self.api_key and not self.allow_anyone:
            refuse("host", self.host, "others can reach this address: set an API key, or say --allow-anyone")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            refuse("ssl_certfile", self.ssl_certfile, "https needs --ssl-certfile and --ssl-keyfile, both")
        if self.log_level not in ("critical", "error", "warning", "info", "debug"):
            refuse("log_level", self.log_level, "choose critical, error, warning, info or debug")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What is served, and how much at a time."""

    served_model_name: str | None = None
    """What clients call the model."""
    max_rows: int | None = None
    """Sequences that decode at the same time; others wait their turn."""
    max_queued: int = 512
    """Sequences that may wait. Beyond that requests are answered with 503 and the time to come back."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens that may wait."""
    max_body_bytes: int = 8 * 2**20
    """Requests with larger bodies are answered with 413."""
    timeout: float = 600.0
    """Seconds a request may take, waiting included; then it is answered with 408."""
    drain_seconds: float = 60.0
    """After SIGTERM, requests under way may take so long to end; a second SIGTERM ends them at once."""

    def __post_init__(self) -> None:
        """Refuse what would serve nobody."""
        at_least(self, 1, "max_rows", "max_body_bytes")
        at_least(self, 0, "max_queued", "max_queued_tokens", "drain_seconds")
        above(self, 0, "timeout")
        finite(self, "timeout", "drain_seconds")

    def rows(self, device: str) -> int:
        """Sequences that decode at a time on such a device."""
        return self.max_rows or ROWS.get(device, ROWS["cpu"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """How many copies of the model serve behind one address."""

    replicas: int | None = None
    """Serve by N copies of the model on Ray Serve, each with its share of the cores or GPUs of its own; see
    docs/scale.md."""
    max_replicas: int | None = None
    """Add copies, up to M, while requests queue up, and take them away when they do not."""
    round_seconds: float | None = None
    """Replace a copy whose engine has been in one round for so long."""

    def __post_init__(self) -> None:
        """Refuse bounds that hold nothing."""
        at_least(self, 1, "replicas", "max_replicas")
        above(self, 0, "round_seconds")
        finite(self, "round_seconds")
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 0):
            refuse("max_replicas", self.max_replicas, f"must be at least --replicas {self.replicas}")
        if self.max_replicas is not None and self.replicas is None:
            refuse("max_replicas", self.max_replicas, "needs --replicas N, the least there are at any time")

    @property
    def most(self) -> int:
        """Copies that a machine has to have room for."""
        return self.max_replicas or self.replicas or 1
