from typing import Any

import pytest

from router.app import App, build_app
from router.text import TextCodec
from tests.router.fake_backend import FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import byte_level_folder, sentencepiece_folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.from_folder(byte_level_folder(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.from_folder(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def codec(request: pytest.FixtureRequest) -> TextCodec:
    chosen: TextCodec = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def app(backend: FakeBackend, byte_level: TextCodec) -> App:
    return build_app(backend, byte_level)


@pytest.fixture
def say(byte_level: TextCodec) -> Any:
    """A script: every generation says `text`, token by token, in all its outputs, then stops."""

    def script_for(text: str, *, cached: int | None = None) -> Any:
        ids = byte_level.tokenizer.encode(text, add_special_tokens=False).ids

        def script(generation: FakeGeneration) -> None:
            for token_id in ids:
                for index in range(generation.n):
                    generation.push([token_id], index=index, cached=cached)
            for index in range(generation.n):
                generation.stop(index=index)

        return script

    return script_for
