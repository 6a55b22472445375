import msgspec
import pytest

from replicas.api import ReplicaLoad, TierCredit, TierDemand, TierLoad
from replicas.credits import Account, Capacity, CreditBook
from tests.wire_world import make_request

CAPACITY = Capacity(max_num_seqs=16, block_size=16)
FREE = ReplicaLoad(free_blocks=100)


def make_book(load: ReplicaLoad = FREE, capacity: Capacity = CAPACITY) -> CreditBook:
    book = CreditBook(capacity)
    book.report(load)
    return book


def test_an_idle_replica_grants_its_seats_and_the_look_ahead() -> None:
    account = Account()
    assert make_book().grant(account, [account]) == (TierCredit(0, 16 + 2, 100),)


def test_what_was_submitted_counts_until_it_ends_and_forever_in_the_total() -> None:
    book, account = make_book(), Account()
    book.submitted(account, make_request(1, n=3))
    account.num_open[0] += 3
    assert book.grant(account, [account])[0].num_outputs == 3 + 15
    account.num_open[0] -= 3
    assert book.grant(account, [account])[0].num_outputs == 3 + 18


def test_routers_share_by_what_they_have_queued() -> None:
    book = make_book(capacity=Capacity(max_num_seqs=20, block_size=16, look_ahead=0))
    busy, idle = Account(), Account()
    busy.declare([TierDemand(0, 8)])
    both = [busy, idle]
    assert [book.grant(account, both)[0].num_outputs for account in both] == [18, 2]
    assert [book.grant(account, both)[0].num_blocks for account in both] == [90, 10]
    busy.declare([])
    assert [book.grant(account, both)[0].num_outputs for account in both] == [10, 10]


def test_the_last_seat_is_not_withheld_from_everybody() -> None:
    book = make_book(capacity=Capacity(max_num_seqs=1, block_size=16, look_ahead=0))
    accounts = [Account(), Account()]
    assert [book.grant(account, accounts)[0].num_outputs for account in accounts] == [1, 1]


def test_seats_and_blocks_of_worse_tiers_are_free_for_better_ones() -> None:
    load = ReplicaLoad(free_blocks=5, tiers=(TierLoad(2, 10, 0, 0, held_blocks=40),))
    account = Account()
    account.num_open[2] = 18
    account.num_submitted[2] = 18
    better, worse = make_book(load).grant(account, [account])
    assert better == TierCredit(0, 18, 45)
    assert worse == TierCredit(2, 18, 5)


def test_without_preemption_a_taken_seat_is_taken() -> None:
    load = ReplicaLoad(free_blocks=5, tiers=(TierLoad(2, 10, 0, 0, held_blocks=40),))
    account = Account()
    account.num_open[2] = 17
    book = make_book(load, Capacity(max_num_seqs=16, block_size=16, takes_seats=False))
    assert book.grant(account, [account])[0] == TierCredit(0, 1, 5)


def test_waiting_sequences_and_unreported_submits_hold_blocks() -> None:
    book = make_book(ReplicaLoad(free_blocks=20, tiers=(TierLoad(0, 0, 1, 0, waiting_blocks=3),)))
    account = Account()
    request = make_request(1)
    assert request.num_blocks(16) == 1
    assert book.grant(account, [account])[0].num_blocks == 17
    book.submitted(account, request)
    assert book.grant(account, [account])[0].num_blocks == 1 + 16
    book.report(FREE)  # the submit came during that step: it may not be in it
    assert book.grant(account, [account])[0].num_blocks == 1 + 99
    book.report(FREE)
    assert book.grant(account, [account])[0].num_blocks == 1 + 100


@pytest.mark.parametrize(
    ("n", "resumed", "blocks"),
    [(1, (), 1), (4, (), 4), (1, ((1,) * 30,), 3), (2, ((1,) * 30, (1,) * 20), 5)],
)
def test_blocks_that_a_request_needs(n: int, resumed: tuple[tuple[int, ...], ...], blocks: int) -> None:
    request = msgspec.structs.replace(make_request(1, n=n), resumed_output_ids=resumed)
    assert request.num_blocks(16) == blocks
