from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from replicas.api import FinishReason, TokenDelta, TokenLogprobs
from router.output import Emission, OutputOptions, OutputText
from router.text import TextCodec
from tests.router.tiny_tokenizers import IM_END


def ids_of(codec: TextCodec, text: str) -> list[int]:
    ids: list[int] = codec.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def delta(
    ids: list[int],
    finish: FinishReason | None = None,
    stop_token_id: int | None = None,
    *,
    logprobs: bool = False,
) -> TokenDelta:
    values = [TokenLogprobs(-float(token_id)) for token_id in ids] if logprobs else None
    return TokenDelta(1, 0, 0, ids, finish, values, stop_token_id)


def output(codec: TextCodec, *stops: str, min_tokens: int = 0) -> OutputText:
    return OutputText(codec.pieces, OutputOptions(stops=stops, min_tokens=min_tokens))


def feed_each(out: OutputText, ids: list[int]) -> list[Emission]:
    emissions = []
    for token_id in ids:
        emissions.append(out.feed(delta([token_id])))
        if out.finish_reason is not None:
            break
    return emissions


def test_nothing_of_a_stop_string_is_emitted(byte_level: TextCodec) -> None:
    out = output(byte_level, "STOPPED")
    emissions = feed_each(out, ids_of(byte_level, "well STOPPED now"))
    assert "".join(e.text for e in emissions) == "well "
    assert emissions[-1].finish_reason is FinishReason.STOP


def test_a_stop_string_may_begin_and_end_inside_tokens(byte_level: TextCodec) -> None:
    ids = ids_of(byte_level, "hello world")
    assert len(ids) < 6
    out = output(byte_level, "lo wo")
    feed_each(out, ids)
    assert out.text == "hel"


def test_text_that_only_looked_like_a_stop_string_is_released(byte_level: TextCodec) -> None:
    out = output(byte_level, "STOPPED")
    for token_id in ids_of(byte_level, "a STOPP"):
        out.feed(delta([token_id]))
    assert out.text == "a "
    out.feed(delta(ids_of(byte_level, "!")))
    assert out.text == "a STOPP!"


def test_held_text_is_released_at_the_end(byte_level: TextCodec) -> None:
    out = output(byte_level, "STOPPED")
    out.feed(delta(ids_of(byte_level, "a STOP")))
    assert out.feed(delta([], FinishReason.LENGTH)) == Emission("STOP", (), FinishReason.LENGTH)


def test_tokens_after_a_stop_string_are_not_counted(byte_level: TextCodec) -> None:
    out = output(byte_level, "x")
    out.feed(delta(ids_of(byte_level, "zzxzzz")))
    assert (out.text, out.num_tokens) == ("zz", 3)


def test_a_stop_string_within_min_tokens_is_ordinary_text(byte_level: TextCodec) -> None:
    out = output(byte_level, "x", min_tokens=2)
    out.feed(delta(ids_of(byte_level, "zxzx")))
    assert (out.text, out.num_tokens, out.finish_reason) == ("zxz", 4, FinishReason.STOP)


def test_a_stop_token_is_counted_but_not_shown(byte_level: TextCodec) -> None:
    out = output(byte_level)
    [letter] = ids_of(byte_level, "z")
    emission = out.feed(delta([letter, letter], FinishReason.STOP, letter))
    assert emission == Emission("z", (), FinishReason.STOP)
    assert out.num_tokens == 2


def test_a_character_cut_by_length_is_one_replacement(codec: TextCodec) -> None:
    out = output(codec)
    emissions = feed_each(out, ids_of(codec, "😀")[-4:-1])
    assert "".join(e.text for e in emissions) == ""
    assert out.feed(delta([], FinishReason.LENGTH)).text == "�"


def test_the_parts_of_a_character_travel_with_it(codec: TextCodec) -> None:
    out = output(codec)
    ids = ids_of(codec, "😀")[-4:]
    emissions = [out.feed(delta([token_id], logprobs=True)) for token_id in ids]
    assert [len(e.entries) for e in emissions] == [0, 0, 0, 4]
    assert [entry.offset for entry in out.entries] == [0, 0, 0, 0]


def test_tokens_of_a_stop_string_have_no_logprobs(byte_level: TextCodec) -> None:
    out = output(byte_level, "yx")
    ids = ids_of(byte_level, "zyx")
    out.feed(delta(ids, logprobs=True))
    assert [(entry.token_id, entry.offset) for entry in out.entries] == [(ids[0], 0)]


def test_the_stop_token_has_no_logprobs(byte_level: TextCodec) -> None:
    out = output(byte_level)
    [letter] = ids_of(byte_level, "z")
    emission = out.feed(delta([letter, IM_END], FinishReason.STOP, IM_END, logprobs=True))
    assert [entry.token_id for entry in emission.entries] == [letter]


token_ids = st.lists(st.integers(0, 299), min_size=1, max_size=30)
stop_sets = st.lists(st.text("abc he", min_size=1, max_size=3), max_size=3).map(tuple)


@given(ids=token_ids, cuts=st.sets(st.integers(1, 29)), stops=stop_sets, min_tokens=st.integers(0, 5))
def test_how_tokens_are_grouped_changes_nothing(
    byte_level: TextCodec, ids: list[int], cuts: set[int], stops: tuple[str, ...], min_tokens: int
) -> None:
    def run(bounds: list[int]) -> OutputText:
        out = output(byte_level, *stops, min_tokens=min_tokens)
        for start, end in pairwise(bounds):
            last = FinishReason.LENGTH if end == len(ids) else None
            out.feed(delta(ids[start:end], last, logprobs=True))
            if out.finish_reason is not None:
                break
        return out

    one, many = run([0, len(ids)]), run([0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)])
    assert one.text == many.text
    assert one.entries == many.entries
    assert (one.num_tokens, one.finish_reason) == (many.num_tokens, many.finish_reason)
    if one.finish_reason is FinishReason.STOP and not min_tokens:
        assert not any(stop in one.text for stop in stops)
