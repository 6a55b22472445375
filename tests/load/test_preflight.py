from typing import Any

import pytest

from load.connection import Target, parse_target
from load.errors import LoadError
from load.preflight import Server, single_token_words
from load.words import WORDS
from tests.load.http_server import Answer, answering

MODELS = {"object": "list", "data": [{"id": "m1"}, {"id": "m2"}]}


def check(target: Target, wanted: str | None = None, key: str | None = None) -> str:
    with Server(target, key) as server:
        return server.check_model(wanted)


def test_the_first_model_listed_is_the_default() -> None:
    with answering(lambda *_: (200, MODELS)) as target:
        assert check(target) == "m1"
        assert check(target, "m2") == "m2"


def test_nobody_listens() -> None:
    with answering(lambda *_: (200, MODELS)) as target:
        pass
    with pytest.raises(LoadError, match="no answer from http://127"):
        check(target)


def test_a_key_is_wanted() -> None:
    def rule(_: str, __: dict[str, Any], key: str | None) -> Answer:
        return (200, MODELS) if key == "Bearer k" else (401, {"error": {"message": "no key"}})

    with answering(rule) as target:
        assert check(target, key="k") == "m1"
        with pytest.raises(LoadError, match="401: no key; give a key"):
            check(target)


def test_a_server_that_cannot_yet_is_quoted() -> None:
    loading = {"error": {"message": "the model is\nloading"}}
    with answering(lambda *_: (503, loading)) as target, pytest.raises(LoadError) as refused:
        check(target)
    assert str(refused.value).endswith("/v1/models answers 503: the model is loading")


def test_html_is_no_model_list() -> None:
    with answering(lambda *_: (200, "<html>welcome")) as target, pytest.raises(LoadError, match="text/html"):
        check(target)


def test_a_server_without_a_list_is_believed_when_the_model_is_named() -> None:
    with answering(lambda *_: (404, {"detail": "Not Found"})) as target:
        assert check(target, "m") == "m"
        with pytest.raises(LoadError, match="404"):
            check(target)


def counting(tokens_per_word: float, overhead: int, *, has_tokenize: bool) -> Any:
    def rule(path: str, body: dict[str, Any], _: str | None) -> Answer:
        if path == "/tokenize" and has_tokenize:
            words = body["prompt"].split()
            return 200, {"count": sum(2 if word == "work" else 1 for word in words)}
        if path == "/tokenize":
            return 404, {}
        words = body["messages"][0]["content"].split()
        return 200, {
            "choices": [],
            "usage": {"prompt_tokens": round(len(words) * tokens_per_word) + overhead},
        }

    return rule


def test_overhead_and_words_are_learnt_from_usage() -> None:
    with answering(counting(1.25, 31, has_tokenize=False)) as target, Server(target, None) as server:
        calibration = server.calibrate(WORDS, "m", "chat")
    assert calibration.counting == "usage"
    assert (calibration.tokens_per_word, calibration.overhead_tokens) == (1.25, 31)


def test_words_of_several_tokens_are_dropped_when_the_server_can_tell() -> None:
    with answering(counting(1.0, 9, has_tokenize=True)) as target, Server(target, None) as server:
        calibration = server.calibrate(WORDS, "m", "chat")
    assert calibration.counting == "tokenize"
    assert set(WORDS) - set(calibration.words) == {"work"}
    assert (calibration.tokens_per_word, calibration.overhead_tokens) == (1.0, 9)


def test_a_server_that_counts_nothing_is_taken_at_a_token_per_word() -> None:
    with answering(lambda *_: (200, {"choices": []})) as target, Server(target, None) as server:
        calibration = server.calibrate(WORDS, "m", "chat")
    assert (calibration.counting, calibration.tokens_per_word) == ("assumed", 1.0)


def test_a_server_that_refuses_the_small_request_is_named() -> None:
    def rule(path: str, _: dict[str, Any], __: str | None) -> Answer:
        return (404, {}) if path == "/tokenize" else (400, {"error": {"message": "no such model"}})

    with (
        answering(rule) as target,
        Server(target, None) as server,
        pytest.raises(LoadError, match="no such model"),
    ):
        server.calibrate(WORDS, "m", "chat")


def test_single_token_words_asks_little_when_all_are() -> None:
    asked = []

    def count(text: str) -> int:
        asked.append(text)
        return len(text.split())

    assert single_token_words(WORDS, count) == WORDS
    assert len(asked) == 2


def test_a_tokenizer_that_splits_everything_is_refused() -> None:
    with pytest.raises(LoadError, match="--prompts"):
        single_token_words(WORDS, lambda text: len(text))


@pytest.mark.parametrize(
    ("url", "authority", "prefix", "is_tls"),
    [
        ("http://a:1", "a:1", "", False),
        ("http://a:1/v1/", "a:1", "", False),
        ("https://a/x/v1", "a:443", "/x", True),
        ("http://[::1]:7", "[::1]:7", "", False),
    ],
)
def test_urls(url: str, authority: str, prefix: str, is_tls: bool) -> None:
    target = parse_target(url)
    assert (target.authority, target.prefix, target.is_tls) == (authority, prefix, is_tls)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:1",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://a?x=1",
        "http://u@a",
        "http://a:0",
        "http://[::1",
        "http://a..b",
    ],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(LoadError, match=r"URL|port"):
        parse_target(url)
