import os
import shutil
from pathlib import Path

from replicas.model_digest import file_key, files_digest


def test_a_copy_with_another_name_and_time_has_the_same_key(tmp_path: Path) -> None:
    first, copy = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(bytes(range(256)) * 8192)
    shutil.copy(first, copy)
    os.utime(copy, (1, 1))
    assert file_key(first) == file_key(copy)


def test_length_and_content_change_the_key(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"x" * 5000)
    keys = {file_key(file)}
    for content in (b"x" * 5001, b"x" * 4999 + b"y", b"y" + b"x" * 4999):
        file.write_bytes(content)
        keys.add(file_key(file))
    assert len(keys) == 4


def test_a_models_digest_covers_config_names_and_weights(tmp_path: Path) -> None:
    config, weights, renamed = (
        tmp_path / "config.json",
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
    )
    config.write_text("{}")
    weights.write_bytes(b"1234")
    renamed.write_bytes(b"1234")
    digests = {
        files_digest(tmp_path, [weights]),
        files_digest(tmp_path, [renamed]),
        files_digest(tmp_path, []),
    }
    config.write_text("{ }")
    digests.add(files_digest(tmp_path, [weights]))
    assert len(digests) == 4
