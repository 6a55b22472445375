"""Model folders with tiny tokenizers of the two kinds there are, made on the spot."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{{ '[' + message['role'] + '] ' + message['content'] | trim }}\n{% endfor %}"
)
IM_START, IM_END = 0, 1
"""Special tokens of the byte-level tokenizer."""


def byte_level_folder(folder: Path, *, chat_template: str | None = CHATML) -> Path:
    """Write a byte-level BPE tokenizer of 300 tokens: special ones, all bytes, a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the capital of France is Paris. hello world " * 5], trainer)
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return _save(folder, tokenizer, config, chat_template)


def sentencepiece_folder(folder: Path) -> Path:
    """Write a llama-like tokenizer: metaspace, byte fallback, BOS added."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdefghijklmnopqrstuvwxyzHP.,![]")
    for piece in pieces:
        vocab[piece] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in ("▁hello", "▁world", "Hello", "Paris"):
        merged = word[0]
        for char in word[1:]:
            merges.append((merged, char))
            merged += char
            vocab.setdefault(merged, len(vocab))
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(folder, tokenizer, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, LLAMA)


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, object], template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def app_token(byte: int) -> int:
    """The id of a printable ASCII byte in the byte-level tokenizer: they follow the special tokens."""
    return byte - ord("!") + 2
