"""The way from a client to a replica and back, through HAProxy, Serve and the step stream."""

import json
import re
import socket
import threading

import httpx
import openai
import pytest

from tests.e2e.server import Server, wait_for

pytestmark = pytest.mark.e2e

COMPLETIONS = "/v1/completions"
LONG = {"model": "null", "prompt": "once", "max_tokens": 8000, "stream": True}
"""16 s of tokens: longer than any test waits."""


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_it_says_where_it_serves_and_how_to_try_it(server: Server) -> None:
    first, second = server.announced.splitlines()
    limits = "2 replicas · 1,024 KV blocks of 16 tokens · up to 2 sequences"
    start = r"started in \d+\.\d s \(importing \d+\.\d, loading nothing \d+\.\d\)"
    assert re.fullmatch(
        re.escape(f"Headway serves null at {server.url} · {limits} · no model · ") + start, first
    )
    assert second.startswith(
        f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '"
    )
    body = json.loads(second.partition(" -d '")[2].removesuffix("'")) | {"max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).status_code == 200


def test_the_openai_client_gets_the_same_text_streamed_and_whole(server: Server) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    whole = client(server).chat.completions.create(model="null", messages=messages, max_tokens=40)
    chunks = list(
        client(server).chat.completions.create(model="null", messages=messages, max_tokens=40, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (40, "length")


def test_models_are_listed(server: Server) -> None:
    assert [model.id for model in client(server).models.list()] == ["null"]


def test_an_unknown_model_is_a_404_of_the_openai_kind(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client(server).completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"


def test_more_streams_than_seats_all_end(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"model": "null", "prompt": ["a"] * 1, "max_tokens": 50, "n": 2}
        answers = [http.post(COMPLETIONS, json=body).json() for _ in range(5)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [100] * 5


def occupy(server: Server, count: int, **changes: object) -> list[httpx.Client]:
    """Open `count` long streams and read their first bytes; closing a client hangs up."""
    clients = []
    for _ in range(count):
        http = httpx.Client(base_url=server.url, timeout=30)
        response = http.send(http.build_request("POST", COMPLETIONS, json=LONG | changes), stream=True)
        assert response.status_code == 200
        next(response.iter_raw())
        clients.append(http)
    return clients


def test_hanging_up_frees_seats_and_blocks(server: Server) -> None:
    # Two replicas with two seats: without the hang-ups the last request waits until the streams end.
    for http in occupy(server, 4):
        http.close()
    answer = httpx.post(
        server.url + COMPLETIONS, json={"model": "null", "prompt": "x", "max_tokens": 1}, timeout=10
    )
    assert answer.status_code == 200


def test_hanging_up_on_an_answer_that_is_not_streamed_frees_its_seat(server: Server) -> None:
    """Head and body in packets of their own, as most clients send them: then it was once not noticed."""
    body = json.dumps(LONG | {"stream": False}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            threading.Event().wait(0.05)
            client.sendall(body)
            wait_for(lambda: num_running(server) or None, "the request to run", timeout_s=10)
        wait_for(lambda: num_running(server) == 0 or None, "the seat to be free", timeout_s=6)


def num_running(server: Server) -> int:
    replicas = httpx.get(f"{server.url}/stats").json()["replicas"]
    return sum(load["num_running"] for load in replicas.values())


@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-disconnect-disabled", b"?1"),
        (b"X-Request-Disconnect-Disabled", b"?0"),
        (b"x-request-timeout-seconds", b"0.000001"),
        (b"x-request-timeout-seconds", b"\xff"),
        (b"x-request-id", b"\xff\xfe"),
        (b"serve_multiplexed_model_id", b"\xff"),
        (b"x-session-id", b"\xc3("),
        (b"x-anything", b"\x80"),
    ],
)
def test_headers_that_serve_would_obey_or_stumble_over_are_refused(
    server: Server, header: tuple[bytes, bytes]
) -> None:
    answer = httpx.post(server.url + COMPLETIONS, headers=[header], json=LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")


def test_a_sane_request_id_comes_back_once(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "req-1"})
    assert answer.headers.get_list("x-request-id") == ["req-1"]


def test_an_insane_request_id_is_replaced(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "a b" * 100})
    (request_id,) = answer.headers.get_list("x-request-id")
    assert len(request_id) < 64


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "null", "prompt": "\xff"}', b"[" * 10_000])
def test_bad_json_is_a_400_of_the_openai_kind(server: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + COMPLETIONS, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_stream_is_plain_sse(server: Server) -> None:
    body = json.dumps(LONG | {"max_tokens": 3}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\ncontent-type: text/event-stream; charset=utf-8" in head
    assert b"data: [DONE]\n\n" in rest
