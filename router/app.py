"""The router's ASGI application: routes, the outermost error handler, start and end.

Plain ASGI, without middleware: what happens to a request is what `_handle` says, in that order.
"""

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Final
from urllib.parse import unquote

import msgspec

from replicas.api import ModelCard
from router import openapi, sse, ui_files
from router.access_log import AccessSink, access_line, nowhere
from router.answers import ModelEntry, ModelList
from router.body_process import BodyProcess
from router.callers import Caller, Identify, anybody, check_use
from router.completions import NUM_THREADS, PROCESS_BYTES, Completions
from router.errors import ApiError, ClientGoneError, NoReplicaError, internal_error, no_replica
from router.generation import Backend
from router.http import STALL_LIMIT_S, Exchange, Receive, Scope, Send
from router.keys import refuse_key_in_query
from router.limits import Limits, NoLimits
from router.measures import RouterMeasures
from router.stats import Stats
from router.text import TextCodec
from router.tokens import detokenize, tokenize
from router.tracing import Tracing, Untraced
from router.ui import Ui
from router.validation import check_model

_log: Final = logging.getLogger(__name__)
_MODELS: Final = "/v1/models/"
_OPEN: Final = ("/health", "/ready", "/version", "/openapi.json", "/docs")
"""Without a key, as the files of the live page: for probes. They tell nothing of tenants."""

Handler = Callable[[Exchange, Caller], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_app(
    backend: Backend,
    text: TextCodec,
    *,
    identify: Identify = anybody,
    stats: Callable[[], Stats] = Stats,
    limits: Limits | None = None,
    access: AccessSink = nowhere,
    measures: RouterMeasures | None = None,
    ui: Ui | None = None,
    stall_limit_s: float = STALL_LIMIT_S,
    tracing: Tracing | None = None,
) -> App:
    """Return the OpenAI HTTP application over `backend`.

    `identify` and `limits` say who may ask for how much, `stats` answers GET /stats, `access` gets a line
    per request, `measures` counts, `ui` serves the live page, `tracing` records spans. A client that reads
    nothing for `stall_limit_s` is given up.
    """
    measures, tracing = measures or RouterMeasures(), tracing or Untraced()
    limits = limits or NoLimits()
    return _RouterApp(backend, text, identify, stats, limits, access, measures, ui, stall_limit_s, tracing)


class _RouterApp:
    def __init__(
        self,
        backend: Backend,
        text: TextCodec,
        identify: Identify,
        stats: Callable[[], Stats],
        limits: Limits,
        access: AccessSink,
        measures: RouterMeasures,
        ui: Ui | None,
        stall_limit_s: float,
        tracing: Tracing,
    ) -> None:
        self._backend = backend
        self._stats = stats
        self._identify = identify
        self._access = access
        self._stall_limit_s = stall_limit_s
        self._measures = measures
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="router-text")
        self._created = int(time.time())
        self._text = text
        self._process = BodyProcess(text.folder)
        completions = Completions(
            backend=backend,
            text=text,
            pool=self._pool,
            process=self._process,
            limits=limits,
            measures=measures,
            tracing=tracing,
        )
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": completions.chat},
            "/v1/completions": {"POST": completions.complete},
            "/v1/models": {"GET": self._list_models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._health},
            "/openapi.json": {"GET": self._openapi},
            "/docs": {"GET": self._docs},
            "/stats": {"GET": self._show_stats},
            "/version": {"GET": self._version},
        }
        if ui is not None:
            self._routes |= ui.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = Exchange(scope, receive, send, uuid.uuid4().hex, self._stall_limit_s)
            try:
                await self._handle(exchange)
            finally:
                exchange.close()
                self._note_end(exchange)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            # A WebSocket handshake: closing before accepting is the ASGI way to answer 403.
            await send({"type": "websocket.close", "code": 1000})

    async def _handle(self, exchange: Exchange) -> None:
        try:
            exchange.check_headers()
            refuse_key_in_query(exchange.query)
            handler = self._route(exchange)
            is_open = exchange.path in _OPEN or exchange.path in ui_files.PATHS
            caller = Caller() if is_open else self._identify(exchange.headers)
            record = exchange.record
            record.tenant, record.key_id, record.tier = caller.tenant.name, caller.key_id, caller.tenant.tier
            await handler(exchange, caller)
        except ClientGoneError:
            return
        except ApiError as error:
            await _refuse(exchange, error)
        except NoReplicaError:
            await _refuse(exchange, no_replica())
        except Exception:
            _log.exception("request %s failed", exchange.request_id)
            await _refuse(exchange, internal_error())

    def _note_end(self, exchange: Exchange) -> None:
        if exchange.path == "/health" and exchange.status == 200:
            return  # probes come every second
        is_known = exchange.path in self._routes
        began_at = exchange.began_at
        line = access_line(
            exchange.record,
            at=time.time(),
            request_id=exchange.request_id,
            method=exchange.method,
            route=exchange.path if is_known else _MODELS if exchange.path.startswith(_MODELS) else "",
            status=exchange.status,
            client_gone=exchange.client_gone,
            first_byte_s=None if exchange.responded_at is None else exchange.responded_at - began_at,
            duration_s=time.monotonic() - began_at,
        )
        self._measures.note_request(line)
        self._access(line)

    def _route(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith(_MODELS):
            methods = {"GET": self._show_model}
        if methods is None:
            raise ApiError(404, "there is nothing under this URL", code="unknown_url")
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in methods:
            allow = ", ".join(methods)
            raise ApiError(405, f"the method must be {allow}", code="method_not_allowed", allow=allow)
        return methods[method]

    async def _list_models(self, exchange: Exchange, caller: Caller) -> None:
        card = self._card()
        usable = [self._entry(card)] if caller.may_use(card.name) else []
        await exchange.respond(200, msgspec.json.encode(ModelList(data=usable)))

    async def _show_model(self, exchange: Exchange, caller: Caller) -> None:
        card = self._card()
        check_model(unquote(exchange.path.removeprefix(_MODELS)), card)
        check_use(caller, card.name)
        await exchange.respond(200, msgspec.json.encode(self._entry(card)))

    async def _tokenize(self, exchange: Exchange, caller: Caller) -> None:
        await self._answer_about_text(exchange, caller, tokenize)

    async def _detokenize(self, exchange: Exchange, caller: Caller) -> None:
        await self._answer_about_text(exchange, caller, detokenize)

    async def _answer_about_text(
        self, exchange: Exchange, caller: Caller, answer: Callable[[bytes, TextCodec, ModelCard], bytes]
    ) -> None:
        data = await exchange.read_json(PROCESS_BYTES)
        card = self._card()
        check_use(caller, card.name)
        loop = asyncio.get_running_loop()
        await exchange.respond(200, await loop.run_in_executor(self._pool, answer, data, self._text, card))

    async def _openapi(self, exchange: Exchange, caller: Caller) -> None:  # noqa: ARG002 - a Handler
        await exchange.respond(200, openapi.document())

    async def _docs(self, exchange: Exchange, caller: Caller) -> None:  # noqa: ARG002 - a Handler
        await exchange.respond(200, openapi.page(), ((b"content-type", b"text/html; charset=utf-8"),))

    async def _health(self, exchange: Exchange, caller: Caller) -> None:  # noqa: ARG002 - a Handler
        self._card()
        await exchange.respond(200, b'{"status":"ok"}')

    async def _version(self, exchange: Exchange, caller: Caller) -> None:  # noqa: ARG002 - a Handler
        await exchange.respond(200, msgspec.json.encode({"version": _installed_version()}))

    async def _show_stats(self, exchange: Exchange, caller: Caller) -> None:  # noqa: ARG002 - a Handler
        await exchange.respond(200, msgspec.json.encode(self._stats()))

    def _card(self) -> ModelCard:
        card = self._backend.card
        if card is None:
            raise NoReplicaError
        return card

    def _entry(self, card: ModelCard) -> ModelEntry:
        return ModelEntry(id=card.name, created=self._created, max_model_len=card.max_model_len)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.startup":
                # All that is loaded by now stays: a full collection need not look through it, which
                # would hold up every stream for 15 ms.
                gc.freeze()
                await send({"type": "lifespan.startup.complete"})
            elif kind == "lifespan.shutdown":
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._process.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _installed_version() -> str:
    try:
        return version("headway")
    except PackageNotFoundError:
        return "not installed"


async def _refuse(exchange: Exchange, error: ApiError) -> None:
    """Answer with the error in the form that is still possible."""
    exchange.record.code = error.code
    try:
        if exchange.client_gone:
            return
        if exchange.started:
            await exchange.end_stream(sse.error_event(error))
        else:
            await exchange.refuse(error)
    except ClientGoneError:
        return
