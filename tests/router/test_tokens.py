"""/tokenize and /detokenize say what the other endpoints do."""

from typing import Any

import pytest

from router.app import App
from router.completions import PROCESS_BYTES
from tests.router.asgi_client import CHAT, HI, TEXT, call, get
from tests.router.fake_backend import CARD, FakeBackend
from tests.router.tiny_tokenizers import IM_END, IM_START, app_token


@pytest.mark.parametrize(
    ("path", "asked", "more"),
    [
        (TEXT, {"prompt": "héllo"}, {}),
        (TEXT, {"prompt": "héllo"}, {"add_special_tokens": False}),
        (CHAT, HI, {}),
        (CHAT, HI, {"add_generation_prompt": False}),
        (CHAT, HI, {"chat_template_kwargs": {"a": 1}}),
    ],
)
async def test_tokens_are_those_that_usage_counts(
    app: App, backend: FakeBackend, say: Any, path: str, asked: dict[str, Any], more: dict[str, Any]
) -> None:
    backend.script = say("x")
    answer = (await call(app, path, asked | more)).json
    found = (await call(app, "/tokenize", asked | more)).json
    assert found["count"] == answer["usage"]["prompt_tokens"]
    assert tuple(found["tokens"]) == backend.generations[0].prompt_ids
    assert found["max_model_len"] == CARD.max_model_len


async def test_ids_spell_their_text(app: App) -> None:
    ids = [IM_START, app_token(ord("a")), IM_END]
    assert (await call(app, "/detokenize", {"tokens": ids})).json == {"prompt": "<|im_start|>a<|im_end|>"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": []}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "a", "tools": []}, 400),
        ("/tokenize", {"prompt": "a" * 100_000}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"prompt": "a" * PROCESS_BYTES}, 413),
        ("/detokenize", {"tokens": [320]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {}, 400),
    ],
)
async def test_what_cannot_be_answered_is_refused(app: App, path: str, body: Any, status: int) -> None:
    refused = await call(app, path, body)
    assert refused.status == status
    assert refused.error["message"]


async def test_readiness_follows_the_replicas(app: App, backend: FakeBackend) -> None:
    assert (await get(app, "/ready")).status == 200
    backend.card = None
    assert (await get(app, "/ready")).status == 503
