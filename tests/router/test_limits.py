"""What requests cost their tenant, and what the application says and logs about it."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from replicas.api import FinishReason
from router.access_log import AccessLine
from router.app import App, build_app
from router.callers import Caller
from router.errors import ApiError
from router.http import Header
from router.tenants import Tenant
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, TEXT, begin, call, get
from tests.router.fake_backend import FakeBackend, FakeGeneration

ACME = Tenant(name="acme", tier="standard", models=("tiny",))
PROMPT = {"prompt": "abc", "max_tokens": 50}
NUM_PROMPT = 3


@dataclass(eq=False)
class Account:
    """Limits that write down every reservation and its end."""

    reserved: list[int] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)
    """Tokens settled; None = cancelled."""
    refusal: ApiError | None = None

    async def reserve(self, tenant: Tenant, tokens: int) -> "Slip":
        assert tenant == ACME
        if self.refusal is not None:
            raise self.refusal
        self.reserved.append(tokens)
        return Slip(self)

    def headers(self, tenant: Tenant) -> list[Header]:
        assert tenant == ACME
        return [(b"x-ratelimit-limit-tokens", b"600")]


@dataclass(eq=False)
class Slip:
    account: Account
    ended: bool = False

    def settle(self, used_tokens: int) -> None:
        self._end(used_tokens)

    def cancel(self) -> None:
        self._end(None)

    def _end(self, used: int | None) -> None:
        if not self.ended:
            self.ended = True
            self.account.ends.append(used)


@pytest.fixture
def account() -> Account:
    return Account()


@pytest.fixture
def lines() -> list[AccessLine]:
    return []


@pytest.fixture
def metered(backend: FakeBackend, byte_level: TextCodec, account: Account, lines: list[AccessLine]) -> App:
    caller = Caller(tier=1, tenant=ACME, key_id="0123456789ab")
    return build_app(backend, byte_level, identify=lambda _: caller, limits=account, access=lines.append)


async def test_the_longest_answer_is_reserved_and_the_true_one_settled(
    metered: App, backend: FakeBackend, account: Account, say: Any
) -> None:
    backend.script = say("hello")
    usage = (await call(metered, TEXT, PROMPT)).json["usage"]
    assert account.reserved == [NUM_PROMPT + 50]
    assert account.ends == [usage["total_tokens"]]


async def test_all_prompts_and_outputs_are_reserved(
    metered: App, backend: FakeBackend, account: Account, say: Any
) -> None:
    backend.script = say("x")
    await call(metered, TEXT, {"prompt": ["abc", "abcde"], "n": 3, "max_tokens": 7})
    assert account.reserved == [3 + 5 + 2 * 3 * 7]


async def test_hanging_up_costs_the_prompt_and_what_was_generated(
    metered: App, backend: FakeBackend, account: Account
) -> None:
    """Case 36."""
    run = begin(metered, TEXT, PROMPT | {"stream": True})
    generation = await backend.started()
    for _ in range(35):
        generation.push([65])
        await run.next_chunk()
    assert account.ends == []  # the slot is held while the stream runs
    run.hang_up()
    await run.finish()
    assert account.ends == [NUM_PROMPT + 35]


async def test_a_request_that_no_replica_takes_costs_nothing(
    metered: App, backend: FakeBackend, account: Account
) -> None:
    backend.full = True
    assert (await call(metered, TEXT, PROMPT)).status == 503
    assert account.ends == [None]


async def test_a_failure_before_the_first_byte_costs_nothing(
    metered: App, backend: FakeBackend, account: Account
) -> None:
    backend.script = lambda generation: generation.push([65], finish=FinishReason.ERROR, error="lost")
    assert (await call(metered, TEXT, PROMPT)).status == 500
    assert account.ends == [None]


async def test_a_failure_within_a_stream_costs_what_was_sent(
    metered: App, backend: FakeBackend, account: Account, lines: list[AccessLine]
) -> None:
    def script(generation: FakeGeneration) -> None:
        generation.push([65, 66])
        generation.push(finish=FinishReason.ERROR, error="lost")

    backend.script = script
    assert (await call(metered, TEXT, PROMPT | {"stream": True})).status == 200
    assert account.ends == [NUM_PROMPT + 2]
    assert [line.outcome for line in lines] == ["failed"]


async def test_a_refused_request_starts_nothing_and_has_the_headers(
    metered: App, backend: FakeBackend, account: Account, lines: list[AccessLine]
) -> None:
    account.refusal = ApiError(429, "no", code="rate_limit_exceeded", retry_after_s=7)
    refused = await call(metered, CHAT, HI)
    assert (refused.status, refused.response_headers["retry-after"]) == (429, "7")
    assert refused.response_headers["x-ratelimit-limit-tokens"] == "600"
    assert backend.generations == []
    [line] = lines
    assert (line.outcome, line.code, line.tenant, line.model) == (
        "refused",
        "rate_limit_exceeded",
        "acme",
        "tiny",
    )


async def test_answers_whole_and_streamed_have_the_headers(
    metered: App, backend: FakeBackend, say: Any
) -> None:
    backend.script = say("x")
    for body in (HI, HI | {"stream": True}):
        assert (await call(metered, CHAT, body)).response_headers["x-ratelimit-limit-tokens"] == "600"


async def test_a_line_tells_who_what_and_how_long_but_not_the_text(
    metered: App, backend: FakeBackend, say: Any, lines: list[AccessLine]
) -> None:
    backend.script = say("secret answer", cached=2)
    await call(metered, TEXT, {"prompt": "secret prompt", "priority": 2, "max_tokens": 99})
    await get(metered, "/secret/path?secret=1")
    await get(metered, "/v1/models/secret")
    await get(metered, "/health")
    served, unknown, model = lines
    assert (served.tenant, served.key_id, served.tier, served.level) == (
        "acme",
        "0123456789ab",
        "standard",
        2,
    )
    assert (served.prompt_tokens, served.cached_tokens, served.outcome) == (13, 2, "ok")
    assert (unknown.route, unknown.status, unknown.outcome) == ("", 404, "refused")
    assert (model.route, model.status) == ("/v1/models/", 404)
    assert "secret" not in repr(lines)


async def test_a_tenant_sees_and_uses_its_own_models_only(
    backend: FakeBackend, byte_level: TextCodec
) -> None:
    stranger = Caller(tenant=Tenant(name="other", tier="batch", models=("huge",)))
    app = build_app(backend, byte_level, identify=lambda _: stranger)
    assert (await get(app, "/v1/models")).json["data"] == []
    for refused in (await get(app, "/v1/models/tiny"), await call(app, CHAT, HI)):
        assert (refused.status, refused.error["code"]) == (403, "model_not_found")
    assert backend.generations == []


async def test_probes_need_no_key(backend: FakeBackend, byte_level: TextCodec) -> None:
    def nobody(_: object) -> Caller:
        raise ApiError(401, "no")

    app = build_app(backend, byte_level, identify=nobody)
    assert [(await get(app, path)).status for path in ("/health", "/version", "/v1/models", "/stats")] == [
        200,
        200,
        401,
        401,
    ]


async def test_two_requests_of_one_id_are_two(
    metered: App, backend: FakeBackend, account: Account, lines: list[AccessLine]
) -> None:
    runs = [begin(metered, TEXT, PROMPT, headers={"x-request-id": "same"}) for _ in range(2)]
    for _ in runs:
        (await backend.started()).stop()
    for run in runs:
        await run.finish()
    assert account.ends == [NUM_PROMPT + 1] * 2
    assert [line.request_id for line in lines] == ["same", "same"]
