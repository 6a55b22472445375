"""Which requests an engine gives back."""

from replicas.api import FinishReason
from replicas.effects import WithdrawRequest
from replicas.pump import withdrawal
from tests.replicas.fake_runner import engine, request


def test_a_request_that_waits_is_given_back_with_all_its_outputs() -> None:
    built, _ = engine(max_num_seqs=1)
    built.add(request(1, 5, max_tokens=9), "r")
    built.step()
    built.add(request(2, 5, indexes=(0, 1, 2)), "r")
    built.step()
    assert built.withdraw("r", 2)
    assert (built.scheduler.num_running, built.scheduler.num_waiting) == (1, 0)
    assert not built.withdraw("r", 2)


def test_a_request_of_which_anything_has_run_is_kept() -> None:
    built, _ = engine(max_num_seqs=1)
    built.add(request(1, 5, indexes=(0, 1)), "r")
    built.step()
    assert built.scheduler.num_waiting == 1
    assert not built.withdraw("r", 1)


def test_a_request_that_lost_its_seat_is_kept() -> None:
    built, _ = engine(max_num_seqs=1)
    built.add(request(1, 5, max_tokens=9, tier=2), "r")
    built.step()
    built.add(request(2, 5, max_tokens=9, tier=0), "r")
    built.step()
    assert ("r", 1) in built.scheduler
    assert built.scheduler.num_waiting == 1
    assert not built.withdraw("r", 1)


def test_what_is_given_back_finishes_every_output_without_a_token() -> None:
    deltas = withdrawal(WithdrawRequest(owner="r:1", request_id=7, attempt=2, indexes=(0, 2)))
    assert [(d.request_id, d.attempt, d.index, d.token_ids) for d in deltas] == [(7, 2, 0, []), (7, 2, 2, [])]
    assert {delta.finish_reason for delta in deltas} == {FinishReason.ABORT}
