from load.plan import Script, Segment, Turn
from load.words import WORDS, PromptWriter, WordSource


def test_a_segment_has_as_many_words_as_tokens() -> None:
    source = WordSource(WORDS)
    for num_tokens in (1, 2, 6, 7, 100, 5000):
        assert len(source.text(Segment(9, num_tokens)).split(" ")) == num_tokens


def test_more_tokens_than_the_pool_has_words() -> None:
    assert len(WordSource(WORDS).text(Segment(9, 300_000)).split(" ")) == 300_000


def test_equal_segments_are_equal_text_and_others_begin_differently() -> None:
    source = WordSource(WORDS)
    assert source.text(Segment(1, 50)) == WordSource(WORDS).text(Segment(1, 50))
    beginnings = {" ".join(source.text(Segment(i, 50)).split(" ")[:6]) for i in range(2000)}
    assert len(beginnings) == 2000


def test_a_tokenizer_that_splits_words_gets_fewer_of_them() -> None:
    assert len(WordSource(WORDS, tokens_per_word=2.0).text(Segment(1, 100)).split(" ")) == 50


def test_the_template_is_taken_off_the_first_message() -> None:
    writer = PromptWriter(WordSource(WORDS), overhead_tokens=30)
    turn = Turn(5, (Segment(1, 100),))
    (first,) = writer.turn(turn, is_first=True)
    (later,) = writer.turn(turn, is_first=False)
    assert (len(first["content"].split()), len(later["content"].split())) == (70, 100)


def test_the_shared_prefix_is_a_system_message() -> None:
    writer = PromptWriter(WordSource(WORDS))
    (message,) = writer.opening(Script(0, 0, (), system=(Segment(1, 20),)))
    assert message["role"] == "system"
    assert len(message["content"].split()) == 20
