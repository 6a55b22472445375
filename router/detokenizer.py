"""Token ids -> text, append-only: what was given out is never taken back.

Byte-level and sentencepiece tokenizers map every token to fixed bytes, so text is the concatenation of
table entries put through an incremental UTF-8 decoder: bytes of a character split over tokens wait for
the rest. No window of tokens is decoded again, and nothing depends on how tokens were grouped.
"""

import codecs
from collections.abc import Iterable, Mapping
from typing import Any, Final

_METASPACE: Final = "▁"
_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")


class TokenizerError(Exception):
    """The tokenizer cannot be read, or is of a kind that this router cannot turn into text."""


class TokenPieces:
    """The bytes of every token of a vocabulary. Immutable after construction.

    A generated text continues its prompt, so a piece keeps its leading space wherever it stands: the
    joined pieces are the decoded prompt plus output minus the decoded prompt.
    """

    def __init__(self, tokens: Mapping[str, int], document: Mapping[str, Any]) -> None:
        """Take the vocabulary without added tokens, and the parsed tokenizer.json.

        Raises TokenizerError when the decoder is neither byte-level nor sentencepiece.
        """
        added = document.get("added_tokens") or []
        size = 1 + max([*tokens.values(), *(token["id"] for token in added)], default=-1)
        to_bytes = _piece_decoder(document.get("decoder"))
        raw = [b""] * size
        for token, token_id in tokens.items():
            raw[token_id] = to_bytes(token)
        for token in added:
            raw[token["id"]] = token["content"].encode()
        self.special_ids: Final[dict[str, int]] = {
            token["content"]: token["id"] for token in added if token["special"]
        }
        self._raw = raw
        self._visible = list(raw)
        for token_id in self.special_ids.values():
            self._visible[token_id] = b""
        self._tables: dict[int, list[bytes]] = {}  # one entry: a model has one token that opens calls
        self.begins_with_space: Final = isinstance(to_bytes, _SentencePieces)
        """Encoding puts a space before a text, which decoding takes away."""
        self.max_piece_bytes: Final = max(map(len, raw), default=1)

    def table(self, *, skip_special_tokens: bool = True, shown_special_id: int | None = None) -> list[bytes]:
        """Return per token id its bytes in an answer. Not to be changed."""
        if not skip_special_tokens:
            return self._raw
        if shown_special_id is None:
            return self._visible
        table = self._tables.get(shown_special_id)
        if table is None:
            table = self._tables[shown_special_id] = list(self._visible)
            table[shown_special_id] = self._raw[shown_special_id]
        return table

    def raw(self, token_id: int) -> bytes:
        """Return a token's bytes, special tokens included; b"" for padding beyond the vocabulary."""
        return self._raw[token_id] if token_id < len(self._raw) else b""


class Detokenizer:
    """The text of one output, token by token."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: list[bytes], pending: bytes = b"") -> None:
        """Take the bytes per token id, and those of an incomplete character that came before."""
        self._table = table
        self._decode = _utf8_decoder("replace").decode
        if pending:
            self._decode(pending)

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the characters that these tokens complete; "" while one is incomplete."""
        table = self._table
        size = len(table)
        return self._decode(b"".join([table[i] for i in token_ids if i < size]))

    def feed_bytes(self, data: bytes) -> str:
        """The same for bytes that are not a token's own."""
        return self._decode(data)

    def flush(self) -> str:
        """End the output: an incomplete character becomes one U+FFFD."""
        return self._decode(b"", True)


class _ByteLevelPieces:
    """GPT-2's alphabet: every byte has a printable character."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = (byte for byte in range(256) if byte not in set(printable))
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + offset): byte for offset, byte in enumerate(others)}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode()


class _SentencePieces:
    """Metaspace for spaces; with byte fallback, <0x00> to <0xFF> for single bytes."""

    def __init__(self, *, byte_fallback: bool) -> None:
        self._bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if byte_fallback else {}

    def __call__(self, token: str) -> bytes:
        found = self._bytes.get(token)
        return token.replace(_METASPACE, " ").encode() if found is None else found


def _piece_decoder(decoder: Mapping[str, Any] | None) -> _ByteLevelPieces | _SentencePieces:
    parts = _flattened(decoder)
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return _ByteLevelPieces()
    replaces = any(
        part["type"] == "Replace" and part["pattern"] == {"String": _METASPACE} and part["content"] == " "
        for part in parts
    )
    if replaces or any(p["type"] == "Metaspace" and p["replacement"] == _METASPACE for p in parts):
        return _SentencePieces(byte_fallback="ByteFallback" in kinds)
    raise TokenizerError(
        f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is neither byte-level nor sentencepiece"
    )


def _flattened(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flattened(inner)]
    return [decoder]
