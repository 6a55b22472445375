import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import Detokenizer, TokenizerError, TokenPieces
from router.text import TextCodec
from tests.router.tiny_tokenizers import IM_END


def encode(codec: TextCodec, text: str) -> list[int]:
    ids: list[int] = codec.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def pieces_of(codec: TextCodec, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec.pieces.table())
    return [detokenizer.feed([token_id]) for token_id in ids] + [detokenizer.flush()]


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<▁"))


@given(text=plain)
def test_byte_level_gives_back_any_text(byte_level: TextCodec, text: str) -> None:
    assert "".join(pieces_of(byte_level, encode(byte_level, text))) == text


@given(prompt=plain.filter(bool), output=plain)
def test_output_is_the_decoded_whole_minus_the_decoded_prompt(
    sentencepiece: TextCodec, prompt: str, output: str
) -> None:
    decode = sentencepiece.tokenizer.decode
    prompt_ids = encode(sentencepiece, prompt)
    output_ids = encode(sentencepiece, output)
    whole = decode(prompt_ids + output_ids)
    assert decode(prompt_ids) + "".join(pieces_of(sentencepiece, output_ids)) == whole


def test_a_leading_space_survives(sentencepiece: TextCodec) -> None:
    ids = [sentencepiece.tokenizer.token_to_id(token) for token in ("▁world", "▁hello")]
    assert pieces_of(sentencepiece, ids) == [" world", " hello", ""]


def test_a_split_character_waits_for_its_last_byte(codec: TextCodec) -> None:
    *_, first, second, third, fourth = encode(codec, "😀")
    assert pieces_of(codec, [first, second, third, fourth]) == ["", "", "", "😀", ""]


def test_a_cut_character_becomes_one_replacement(codec: TextCodec) -> None:
    ids = encode(codec, "😀")[-4:-1]
    assert pieces_of(codec, ids) == ["", "", "", "�"]


def test_a_broken_character_does_not_swallow_what_follows(codec: TextCodec) -> None:
    broken = encode(codec, "😀")[-4:-2]
    assert "".join(pieces_of(codec, broken + encode(codec, "hello")[-1:])).startswith("�")
    assert "".join(pieces_of(codec, broken + encode(codec, "hello"))).endswith("hello")


def test_special_tokens_are_not_visible(byte_level: TextCodec) -> None:
    assert "".join(pieces_of(byte_level, encode(byte_level, "a<|im_end|>b"))) == "ab"
    assert byte_level.pieces.raw(IM_END) == b"<|im_end|>"


def test_ids_in_the_padding_of_the_vocabulary_are_empty(codec: TextCodec) -> None:
    beyond = codec.tokenizer.get_vocab_size() + 5
    assert pieces_of(codec, [beyond]) == ["", ""]
    assert codec.pieces.raw(beyond) == b""


def test_an_added_token_that_is_not_special_is_visible() -> None:
    added = [{"id": 1, "content": "<think>é", "special": False}]
    document = {"added_tokens": added, "decoder": {"type": "ByteLevel"}}
    assert Detokenizer(TokenPieces({"a": 0}, document).table()).feed([0, 1]) == "a<think>é"


def test_metaspace_decoders_are_sentencepiece() -> None:
    document = {"decoder": {"type": "Metaspace", "replacement": "▁"}}
    assert Detokenizer(TokenPieces({"▁a": 0, "<0x41>": 1}, document).table()).feed([0, 1]) == " a<0x41>"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": []}])
def test_other_decoders_are_refused(decoder: object) -> None:
    with pytest.raises(TokenizerError, match="neither byte-level nor sentencepiece"):
        TokenPieces({"a": 0}, json.loads(json.dumps({"decoder": decoder})))
