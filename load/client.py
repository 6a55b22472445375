"""Sends requests over a pool of keep-alive connections, and waits for their answers."""

import asyncio
import contextlib
import socket
import time
from typing import Final

from load.answer import Answer, Failure
from load.connection import Connection, Target, encode_request, tls_context

CONNECT_TIMEOUT_S: Final = 10.0
SWEEP_S: Final = 0.5
SLOW_SOCKET_BUFFER_BYTES: Final = 4096


class Client:
    """One target's connections. Use as an asynchronous context manager, within one event loop."""

    def __init__(self, target: Target, *, request_timeout_s: float) -> None:
        """A request that has not ended after `request_timeout_s` is given up."""
        self._target = target
        self._timeout_s = request_timeout_s
        self._tls = tls_context(target)
        self._idle: list[Connection] = []
        self._busy: dict[Connection, float] = {}
        """Connections that carry a request, with the instant at which it is given up; oldest first."""
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Client":
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._sweeper is not None
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        for connection in [*self._idle, *self._busy]:
            connection.hang_up()
        # Transports close in callbacks of the loop.
        await asyncio.sleep(0)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        api_key: str | None = None,
        keep_text: bool = False,
        stop_after: int = 0,
        read_bytes_per_s: float = 0.0,
    ) -> Answer:
        """POST a streaming request and return its Answer once it is over. Raises nothing."""
        request = encode_request(self._target, path, body, api_key)
        answer = Answer(time.perf_counter(), keep_text=keep_text, stop_after=stop_after)
        while True:
            connection = await self._connect(answer, is_slow=read_bytes_per_s > 0)
            if connection is None:
                return answer
            was_idle = not connection.is_fresh
            self._busy[connection] = answer.sent_at + self._timeout_s
            try:
                await connection.send(request, answer, read_bytes_per_s)
            except asyncio.CancelledError:
                connection.hang_up()
                raise
            finally:
                self._busy.pop(connection, None)
            if answer.failure is Failure.RESET and was_idle:
                # A server may close an idle connection just as we use it: HTTP asks to try again.
                answer = Answer(answer.sent_at, keep_text=keep_text, stop_after=stop_after)
                continue
            return answer

    def stop(self) -> None:
        """Hang up on everything in flight."""
        for connection in list(self._busy):
            connection.give_up(Failure.STOPPED, "the run was stopped")

    @property
    def num_output_events_in_flight(self) -> int:
        """Output events of the requests that have not ended yet."""
        return sum(connection.num_output_events for connection in self._busy)

    async def _connect(self, answer: Answer, *, is_slow: bool) -> Connection | None:
        while self._idle and not is_slow:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._open(is_slow=is_slow)
        except TimeoutError:
            answer.fail(Failure.CONNECT, f"no connection within {CONNECT_TIMEOUT_S:g} s", time.perf_counter())
        except OSError as error:
            answer.fail(Failure.CONNECT, str(error), time.perf_counter())
        return None

    async def _open(self, *, is_slow: bool) -> Connection:
        loop = asyncio.get_running_loop()
        host, port = self._target.host, self._target.port
        if not is_slow:
            _, connection = await loop.create_connection(
                lambda: Connection(self._release), host, port, ssl=self._tls
            )
            return connection
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        slow = socket.socket(family, kind, protocol)
        try:
            slow.setblocking(False)
            # Before connecting: the window offered to the server follows from it.
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_SOCKET_BUFFER_BYTES)
            await loop.sock_connect(slow, address)
            name = host if self._tls is not None else None
            _, connection = await loop.create_connection(
                lambda: Connection(self._release), sock=slow, ssl=self._tls, server_hostname=name
            )
        except BaseException:
            slow.close()
            raise
        return connection

    def _release(self, connection: Connection) -> None:
        self._idle.append(connection)

    async def _sweep(self) -> None:
        """Give up what is late. One timer for all requests: a timer each would cost more than its use."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.perf_counter()
            for connection, deadline in list(self._busy.items()):
                if deadline > now:
                    break
                connection.give_up(Failure.TIMEOUT, f"no end after {self._timeout_s:g} s")
