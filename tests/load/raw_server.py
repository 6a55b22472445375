"""A server that sends exactly the bytes a test wants, after it has read one request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from load.connection import Target

Writer = asyncio.StreamWriter
OnConnection = Callable[[asyncio.StreamReader, Writer], Awaitable[None]]
Handler = Callable[[Writer], Awaitable[None]]


def head(content_type: str = "text/event-stream", status: str = "200 OK", extra: str = "") -> bytes:
    """A response head without a length: the body ends with the connection."""
    return f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{extra}\r\n".encode()


def sized(body: bytes, content_type: str, status: str, extra: str = "") -> bytes:
    """A whole response with a length."""
    return head(content_type, status, f"Content-Length: {len(body)}\r\n{extra}") + body


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return head and body of one request; empty when the client has gone."""
    try:
        top = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = next(
        int(line.split(b":")[1]) for line in top.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return top + await reader.readexactly(length)


@asynccontextmanager
async def accepting(on_connection: OnConnection) -> AsyncIterator[Target]:
    """Listen on a free port; at the end, wait until every connection is closed."""
    ended: list[asyncio.Future[None]] = []

    async def run(reader: asyncio.StreamReader, writer: Writer) -> None:
        end = asyncio.get_running_loop().create_future()
        ended.append(end)
        try:
            await on_connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            end.set_result(None)

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    async with server:
        yield Target(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    await asyncio.gather(*ended)


@asynccontextmanager
async def serving(*handlers: Handler) -> AsyncIterator[Target]:
    """Answer connection i with handler i, the last one from then on; each serves one request and closes."""
    num_connections = 0

    async def on_connection(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal num_connections
        handler = handlers[min(num_connections, len(handlers) - 1)]
        num_connections += 1
        if await read_request(reader):
            await handler(writer)

    async with accepting(on_connection) as target:
        yield target


def sending(*pieces: bytes) -> Handler:
    """A handler that sends these pieces, each flushed on its own."""

    async def handler(writer: Writer) -> None:
        # A client that has heard enough hangs up.
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()

    return handler
