"""Pages in a browser: the server's own, those it was told of, and those of sites that have no business with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forerun.serve.foreign_pages import is_local
from forerun.serve.settings import AddressSettings
from serve.serving import KEY, Server, make_decoder, running

BODY = {"prompt": "abc", "max_tokens": 2}
FRIEND, STRANGER = "https://app.example", "http://evil.example:8000"


def asked(server: Server, origin: str | None, **headers: str) -> Any:
    given = headers if origin is None else {"Origin": origin, **headers}
    return server.client.post("/v1/completions", json=BODY, headers=given)


@pytest.mark.parametrize(
    ("origin", "local"),
    (
        ("http://127.0.0.1:8000", True), ("http://[::1]:8000", True), ("http://localhost:3000", True),
        ("http://mybox", True), ("https://a.localhost", True), ("http://host.docker.internal:80", True),
        (STRANGER, False), ("null", False),
        ("https://127.0.0.1.evil.example", False), ("http://localhost.evil.example", False), ("http://[::1", False),
        ("https://notlocalhost.com", False), ("", False), ("file://", False),
    ),
)  # fmt: skip
def test_addresses_of_pages(origin: str, local: bool) -> None:
    assert is_local(origin) == local


def test_a_site_whose_name_points_here_is_refused(server: Server) -> None:
    """To its browser it is of the server's own origin: Origin and Host agree."""
    for origin in (STRANGER, "null"):
        answer = asked(server, origin, Host="evil.example:8000")
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_page"
        assert "--cors-origin" in answer.json()["error"]["message"]
        assert server.client.get("/v1/models", headers={"Origin": origin}).status_code == 403
    assert asked(server, None).status_code == asked(server, server.url).status_code == 200


@pytest.fixture(scope="module")
def with_a_friend() -> Iterator[Server]:
    with running(make_decoder(), address=AddressSettings(cors_origin=(FRIEND,))) as server:
        yield server


def test_a_page_that_was_named_may_ask(with_a_friend: Server) -> None:
    before = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}
    for origin, status, header in ((FRIEND, 200, FRIEND), (STRANGER, 400, None)):
        answer = with_a_friend.client.options("/v1/completions", headers={"Origin": origin, **before})
        assert answer.status_code == status and answer.headers.get("access-control-allow-origin") == header
    answer = asked(with_a_friend, FRIEND)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == FRIEND
    assert asked(with_a_friend, STRANGER).status_code == 403


@pytest.mark.parametrize(
    "address",
    (AddressSettings(api_key=KEY), AddressSettings(allow_anyone=True), AddressSettings(cors_origin=("*",))),
    ids=("key", "anyone", "all pages"),
)
def test_who_guards_or_opens_the_server_decides(address: AddressSettings) -> None:
    with running(make_decoder(), key=KEY, address=address) as server:
        assert asked(server, STRANGER).status_code == 200
        without = asked(server, STRANGER, Authorization="")
        assert without.status_code == (401 if address.api_key else 200)
