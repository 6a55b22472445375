"""GGUF -> a folder of fp32 safetensors, through transformers' own reader."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from replicas.errors import ModelError
from replicas.model_bars import report_bars
from replicas.progress import Progress

_FREE_SPACE_MARGIN = 64 << 20


def dequantize(file: Path, folder: Path, progress: Progress) -> None:
    """De-quantise `file` and publish the result as `folder`, in one rename.

    Two processes may do so at the same time: the first rename wins, both results are equal. Raises
    ModelError, leaving nothing behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        with report_bars(f"de-quantising {file.name} (first use only)", progress):
            _convert(file, scratch)
        _publish(scratch, folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"model {file}: cannot write {folder}: {reason}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError if `folder`'s disk cannot take `num_bytes` and some more."""
    num_bytes += _FREE_SPACE_MARGIN
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({num_bytes >> 20} MiB are needed)")


def _convert(file: Path, scratch: Path) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:  # the readers raise whatever the bytes lead them to
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"model {file}: cannot be read as GGUF: {reason[:200]}") from error
    check_space(scratch, sum(p.numel() * p.element_size() for p in model.parameters()))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # nothing is quantised any more
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)


def _publish(scratch: Path, folder: Path) -> None:
    os.chmod(scratch, 0o755)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
