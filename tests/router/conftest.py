from pathlib import Path

import pytest

from router.text import TextCodec
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
def model_folder(tmp_path: Path) -> Path:
    return byte_level_folder(tmp_path / "model")
