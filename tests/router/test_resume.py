from replicas.api import FinishReason, TokenDelta
from router.resume import Transcript, without_output
from tests.wire_world import make_request


def token(index: int, *token_ids: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(1, 0, index, list(token_ids), finish)


def test_the_next_attempt_goes_on_after_what_was_generated() -> None:
    request = make_request(1, n=3)
    transcript = Transcript(request.indexes)
    transcript.take(token(0, 10, 11))
    transcript.take(token(1, 20, finish=FinishReason.STOP))
    transcript.take(token(0, 12))
    resumed = transcript.next_attempt(request)
    assert (resumed.attempt, resumed.indexes) == (1, (0, 2))
    assert resumed.resumed_output_ids == ((10, 11, 12), ())
    assert (resumed.prompt_ids, resumed.sampling) == (request.prompt_ids, request.sampling)


def test_a_request_without_output_starts_afresh() -> None:
    request = make_request(1, n=2)
    assert Transcript(request.indexes).next_attempt(request).resumed_output_ids == ()


def test_attempts_add_up() -> None:
    request = make_request(1)
    transcript = Transcript(request.indexes)
    transcript.take(token(0, 10))
    request = transcript.next_attempt(request)
    transcript.take(token(0, 11))
    resumed = transcript.next_attempt(request)
    assert (resumed.attempt, resumed.resumed_output_ids) == (2, ((10, 11),))


def test_what_a_later_attempt_finds_cached_is_not_reported() -> None:
    transcript = Transcript((0, 1))
    first, later = token(0, 10), token(0, 11)
    first.num_cached_tokens, later.num_cached_tokens = 3, 4
    transcript.take(first)
    transcript.take(later)
    assert (first.num_cached_tokens, later.num_cached_tokens) == (3, None)


def test_all_outputs_finished_leaves_none_running() -> None:
    transcript = Transcript((0, 1))
    transcript.take(token(1, 5, finish=FinishReason.LENGTH))
    assert transcript.running == (0,)
    transcript.take(token(0, 5, finish=FinishReason.LENGTH))
    assert transcript.running == ()


def test_an_output_that_is_dropped_is_not_resumed() -> None:
    request = make_request(1, n=3)
    transcript = Transcript(request.indexes)
    transcript.take(token(0, 10))
    transcript.take(token(2, 30))
    transcript.drop(1)
    resumed = transcript.next_attempt(request)
    assert (resumed.indexes, resumed.resumed_output_ids) == ((0, 2), ((10,), (30,)))
    less = without_output(resumed, 0)
    assert (less.indexes, less.resumed_output_ids) == ((2,), ((30,),))


def test_an_output_can_leave_a_request_that_has_generated_nothing() -> None:
    less = without_output(make_request(1, n=2), 1)
    assert (less.indexes, less.resumed_output_ids) == ((0,), ())
