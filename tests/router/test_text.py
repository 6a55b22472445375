import json
from pathlib import Path

import pytest

from router.chat_template import ChatTemplateError
from router.detokenizer import TokenizerError
from router.protocol import ChatBody, ChatMessage, ContentPart
from router.text import TextCodec, TooManyTokensError
from tests.router.tiny_tokenizers import IM_START, byte_level_folder, sentencepiece_folder

BOS = 1
"""Of the sentencepiece tokenizer."""


def chat_text(codec: TextCodec, *messages: ChatMessage) -> str:
    text: str = codec.tokenizer.decode(
        codec.encode_chat(ChatBody(messages=messages), 1000), skip_special_tokens=False
    )
    return text


def test_a_completion_prompt_gets_the_bos_that_the_tokenizer_adds(sentencepiece: TextCodec) -> None:
    [ids] = sentencepiece.encode_prompts(["hello"], 100)
    assert ids == [BOS, sentencepiece.tokenizer.token_to_id("▁hello")]


def test_a_completion_prompt_that_begins_with_bos_gets_no_second(sentencepiece: TextCodec) -> None:
    [ids] = sentencepiece.encode_prompts(["<s>hello"], 100)
    assert ids.count(BOS) == 1


def test_two_bos_in_the_text_are_kept(sentencepiece: TextCodec) -> None:
    [ids] = sentencepiece.encode_prompts(["<s><s>hello"], 100)
    assert ids.count(BOS) == 2


def test_a_chat_has_the_one_bos_of_its_template(sentencepiece: TextCodec) -> None:
    ids = sentencepiece.encode_chat(ChatBody(messages=[ChatMessage(role="user", content="hello")]), 100)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_an_empty_prompt_has_only_what_the_tokenizer_adds(codec: TextCodec) -> None:
    [ids] = codec.encode_prompts([""], 100)
    assert ids == ([BOS] if codec.bos_token == "<s>" else [])


def test_prompts_keep_their_order(byte_level: TextCodec) -> None:
    encoded = byte_level.encode_prompts(["hello", "", "world"], 100)
    assert [byte_level.tokenizer.decode(ids) for ids in encoded] == ["hello", "", "world"]


def test_text_parts_are_joined_by_a_newline(byte_level: TextCodec) -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert "user\na\nb<|im_end|>" in chat_text(byte_level, ChatMessage(role="user", content=parts))


def test_developer_becomes_system_for_templates_that_do_not_know_it(byte_level: TextCodec) -> None:
    assert "<|im_start|>system\nx" in chat_text(byte_level, ChatMessage(role="developer", content="x"))


def test_a_role_that_the_template_refuses_is_an_error(sentencepiece: TextCodec) -> None:
    with pytest.raises(ChatTemplateError, match="Only user and assistant"):
        sentencepiece.encode_chat(ChatBody(messages=[ChatMessage(role="system", content="x")]), 100)


def test_a_text_that_cannot_fit_is_refused_untokenised(byte_level: TextCodec) -> None:
    longest = byte_level.pieces.max_piece_bytes
    with pytest.raises(TooManyTokensError) as caught:
        byte_level.encode_prompts(["a", "x" * (longest * 50 + 1)], 50)
    assert caught.value.at_least == 51


def test_add_bos_token_overrides_the_tokenizer_file(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    config = {"bos_token": "<|im_start|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    [ids] = TextCodec.from_folder(folder).encode_prompts(["hi"], 100)
    assert ids[0] == IM_START


def test_add_bos_token_false_overrides_too(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path)
    config = {"bos_token": "<s>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    [ids] = TextCodec.from_folder(folder).encode_prompts(["hello"], 100)
    assert BOS not in ids


def test_the_template_may_live_in_the_config(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, chat_template=None)
    assert TextCodec.from_folder(folder).template is None
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value in ("D", templates):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        template = TextCodec.from_folder(folder).template
        assert template is not None
        assert template.render([]) == "D"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_folder_is_an_error_that_names_the_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
