"""Looks at a server before the load: does it answer, which model, how does it count tokens."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import httpx
import msgspec

from load.completion import PATHS, Api, error_message
from load.connection import Target
from load.errors import LoadError

PREFLIGHT_S: Final = 60.0
"""Longest wait for one of its answers."""
PROBE_WORDS: Final = 48

Counting = Literal["tokenize", "usage", "assumed"]
"""How prompt lengths are known: asked of /tokenize, learnt from `usage`, or one token per word assumed."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _TokenCount(msgspec.Struct):
    count: int | None = None
    tokens: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """How to write a prompt of N tokens for this server."""

    words: tuple[str, ...]
    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    counting: Counting = "assumed"


class Server:
    """The server under test, asked politely: one small request at a time, outside the measurement."""

    def __init__(self, target: Target, api_key: str | None, timeout_s: float = PREFLIGHT_S) -> None:
        scheme = "https" if target.is_tls else "http"
        self._base = f"{scheme}://{target.authority}{target.prefix}"
        headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}
        # The load goes straight to the target; so does this, whatever proxies the environment names.
        self._http = httpx.Client(headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def check_model(self, wanted: str | None) -> str:
        """Return the model to ask for: `wanted`, or the first the server lists.

        Raises LoadError when the server is down, wants a key, or is no OpenAI-compatible server.
        """
        response = self._request("GET", "/v1/models")
        if response.status_code in (401, 403):
            raise LoadError(
                f"{self._base} answers {response.status_code}: {error_message(response.content)}; "
                "give a key with --api-key or HEADWAY_LOAD_API_KEY"
            )
        try:
            listed = msgspec.json.decode(response.content, type=_ModelList).data
        except msgspec.DecodeError:
            listed = []
        if response.status_code == 200 and listed:
            return wanted or listed[0].id
        if wanted is not None and response.status_code == 404:
            return wanted
        kind = response.headers.get("content-type", "no content type")
        if response.status_code >= 500:
            raise LoadError(
                f"{self._base}/v1/models answers {response.status_code}: {error_message(response.content)}"
            )
        raise LoadError(
            f"{self._base}/v1/models answers {response.status_code} ({kind}) and not a list of models: "
            "is this an OpenAI-compatible server?"
        )

    def calibrate(self, words: tuple[str, ...], model: str, api: Api) -> Calibration:
        """Learn how the server counts. Sends a few requests of one output token at most."""
        count = self._tokenizer(model)
        counting: Counting = "usage"
        if count is not None:
            words = single_token_words(words, count)
            counting = "tokenize"
        short = self._prompt_tokens(words[:PROBE_WORDS], model, api)
        long = self._prompt_tokens(words[: 2 * PROBE_WORDS], model, api)
        if short is None or long is None or long <= short:
            return Calibration(words=words, counting="tokenize" if count is not None else "assumed")
        tokens_per_word = (long - short) / PROBE_WORDS
        overhead = max(0, round(short - tokens_per_word * PROBE_WORDS))
        return Calibration(
            words=words, tokens_per_word=tokens_per_word, overhead_tokens=overhead, counting=counting
        )

    def _tokenizer(self, model: str) -> Callable[[str], int] | None:
        def count(text: str) -> int:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            response = self._request("POST", "/tokenize", body)
            try:
                answer = msgspec.json.decode(response.content, type=_TokenCount)
            except msgspec.DecodeError:
                answer = _TokenCount()
            if response.status_code == 200 and answer.count is not None:
                return answer.count
            if response.status_code == 200 and answer.tokens is not None:
                return len(answer.tokens)
            raise LoadError(f"{self._base}/tokenize answers {response.status_code}")

        try:
            count("word")
        except LoadError:
            return None
        return count

    def _prompt_tokens(self, words: Sequence[str], model: str, api: Api) -> int | None:
        text = " ".join(words)
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        )
        response = self._request("POST", PATHS[api], {"model": model, "max_tokens": 1, **content})
        if response.status_code != 200:
            raise LoadError(
                f"{self._base}{PATHS[api]} answers {response.status_code} to a small request: "
                f"{error_message(response.content)}"
            )
        try:
            usage = msgspec.json.decode(response.content, type=_Completion).usage
        except msgspec.DecodeError as error:
            kind = response.headers.get("content-type", "no content type")
            raise LoadError(f"{self._base}{PATHS[api]} answers {kind}, not JSON: {error}") from error
        return usage.prompt_tokens if usage is not None else None

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, self._base + path, json=body)
        except httpx.HTTPError as error:
            raise LoadError(f"no answer from {self._base}{path}: {error or type(error).__name__}") from error


def single_token_words(words: tuple[str, ...], count: Callable[[str], int]) -> tuple[str, ...]:
    """Return the words that are one token each, so that a text of them has as many tokens as words.

    Asks about halves: one call when all are, a few per word that is not. Raises LoadError when few are.
    """
    kept = tuple(_kept(words, count))
    if len(kept) < len(words) // 4:
        raise LoadError("the server's tokenizer splits most English words: give prompts with --prompts")
    return kept


def _kept(words: tuple[str, ...], count: Callable[[str], int]) -> list[str]:
    # A word in front, so that each of them follows a space, as it will in a prompt.
    if count(" ".join(("the", *words))) - count("the") == len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return _kept(words[:middle], count) + _kept(words[middle:], count)
