from dataclasses import dataclass, field

from replicas.api import GenerateRequest
from replicas.engine import Engine
from replicas.step_record import StepNews, StepRecord, StepWatch
from replicas.step_recorder import MAX_RECORDS, MAX_SHARE, MIN_INTERVAL_S, WATCH_S, StepRecorder
from tests.replicas.fake_runner import Clock, engine, request


@dataclass
class Line:
    """An engine, its recorder, and one who watches both."""

    engine: Engine
    clock: Clock
    recorder: StepRecorder
    cursor: int = 0
    waiting: list[GenerateRequest] = field(default_factory=list)

    def watch(self) -> StepNews:
        report = self.recorder.read(StepWatch(self.cursor))
        self.cursor = report.cursor
        return report

    def step(self) -> StepRecord:
        """Run a step and return its record."""
        self.clock.now += 0.5
        self.engine.step()
        self.recorder.note(self.engine.last_step, self.engine.load(), self.clock.now)
        (record,) = self.watch().records
        return record


def line(**changes: object) -> Line:
    clock = Clock()
    built, _ = engine(clock, **changes)
    watched = Line(built, clock, StepRecorder(clock, Clock()))
    watched.watch()
    return watched


def test_a_rider_starts_decodes_and_ends() -> None:
    watched = line()
    watched.engine.add(request(1, 10, max_tokens=3), "a")
    first = watched.step()
    assert [(rider.seat, rider.num_prompt_tokens, rider.max_output_tokens) for rider in first.started] == [
        (0, 10, 3)
    ]
    assert [(chunk.seat, chunk.num_tokens, chunk.num_left) for chunk in first.chunks] == [(0, 10, 0)]
    second = watched.step()
    assert (second.started, second.chunks, second.idle, second.finished) == ((), (), (), ())
    third = watched.step()
    assert [(gone.seat, gone.reason, gone.num_output_tokens) for gone in third.finished] == [(0, "length", 3)]
    assert [first.number, second.number, third.number] == [0, 1, 2]


def test_a_long_prompt_shows_every_chunk() -> None:
    watched = line(max_num_batched_tokens=16)
    watched.engine.add(request(1, 40, max_tokens=2), "a")
    chunks = [watched.step().chunks for _ in range(3)]
    assert [[(chunk.num_tokens, chunk.num_left) for chunk in step] for step in chunks] == [
        [(16, 24)],
        [(16, 8)],
        [(8, 0)],
    ]


def test_a_better_tier_takes_a_seat_and_the_preempted_one_comes_back() -> None:
    watched = line(max_num_seqs=1)
    watched.engine.add(request(1, 8, max_tokens=5, tier=2), "a")
    key = watched.step().started[0].key
    watched.engine.add(request(2, 8, max_tokens=1), "a")
    taken = watched.step()
    assert [(gone.seat, gone.reason) for gone in taken.left] == [(0, "preempted")]
    assert [(rider.seat, rider.tier) for rider in taken.started] == [(0, 0)]
    back = watched.step().started[0]
    assert (back.key, back.num_preemptions, back.num_output_tokens) == (key, 1, 2)


def test_a_seat_given_up_in_a_step_left_out_is_taken_again() -> None:
    watched = line(max_num_seqs=1)
    watched.engine.add(request(1, 8, max_tokens=2), "a")
    watched.engine.add(request(2, 8, max_tokens=5), "a")
    watched.step()
    watched.engine.step()
    record = watched.step()
    assert [(gone.seat, gone.reason) for gone in record.left] == [(0, "length")]
    assert [rider.seat for rider in record.started] == [0]
    assert record.finished == ()


def test_an_abort_frees_the_seat_although_no_step_follows() -> None:
    watched = line()
    watched.engine.add(request(1, 8, max_tokens=5), "a")
    watched.step()
    watched.engine.abort("a", 1)
    watched.recorder.note(None, watched.engine.load(), 9.0)
    (record,) = watched.watch().records
    assert (record.number, [gone.reason for gone in record.left]) == (-1, ["abort"])
    watched.recorder.note(None, watched.engine.load(), 10.0)
    assert watched.watch().records == ()


def test_finished_rows_of_a_static_batch_stay_and_idle() -> None:
    watched = line(batching="static", max_num_seqs=2)
    watched.engine.add(request(1, 4, max_tokens=1), "a")
    watched.engine.add(request(2, 4, max_tokens=3), "a")
    watched.engine.add(request(3, 4, max_tokens=3), "a")
    assert [gone.seat for gone in watched.step().finished] == [0]
    assert [watched.step().idle for _ in range(2)] == [(0,), (0,)]
    assert [rider.seat for rider in watched.step().started] == [0]


def test_seats_are_taken_again_the_lowest_first() -> None:
    watched = line()
    for number in range(1, 4):
        watched.engine.add(request(number, 4, max_tokens=5 - number), "a")
    assert [rider.seat for rider in watched.step().started] == [0, 1, 2]
    assert [gone.seat for gone in watched.step().finished] == [2]
    assert [gone.seat for gone in watched.step().finished] == [1]
    watched.engine.add(request(9, 4, max_tokens=5), "a")
    assert [rider.seat for rider in watched.step().started] == [1]


def test_who_begins_to_watch_later_is_told_who_sits_where() -> None:
    watched = line()
    watched.engine.add(request(1, 8, max_tokens=5), "a")
    watched.step()
    report = watched.recorder.read(StepWatch())
    assert report.riders is not None
    assert [(rider.seat, rider.num_output_tokens) for rider in report.riders] == [(0, 1)]
    assert report.cursor == watched.cursor


def test_nothing_is_due_unless_somebody_goes_on_watching() -> None:
    clock = Clock()
    recorder = StepRecorder(clock, Clock())
    assert not recorder.is_due(0.0, is_last=True)
    recorder.read(StepWatch())
    assert recorder.is_due(0.0, is_last=False)
    assert not recorder.is_due(WATCH_S, is_last=False)


def test_a_watch_that_lapsed_begins_anew() -> None:
    watched = line()
    watched.engine.add(request(1, 8, max_tokens=9), "a")
    watched.step()
    watched.clock.now += WATCH_S
    report = watched.watch()
    assert (report.records, report.riders) == ((), ())
    assert [rider.num_output_tokens for rider in watched.step().started] == [2]


def test_a_watcher_that_missed_too_much_begins_anew() -> None:
    watched = line()
    behind = watched.cursor
    watched.engine.add(request(1, [1], max_tokens=200), "a")
    for _ in range(150):
        watched.step()
    assert len(watched.recorder.read(StepWatch(behind)).records) == 150
    for number in range(2, 2 + MAX_RECORDS // 150 + 1):
        watched.engine.add(request(number, [number], max_tokens=200), "a")
        for _ in range(150):
            watched.step()
    report = watched.recorder.read(StepWatch(behind))
    assert (report.records, report.cursor) == ((), watched.cursor)
    assert report.riders is not None


def test_a_record_that_was_dear_delays_the_next() -> None:
    watched = line()
    watched.engine.add(request(1, [1], max_tokens=9), "a")
    watched.engine.step()
    cost_s = 0.001

    class Slow(Clock):
        def __call__(self) -> float:
            self.now += cost_s
            return self.now

    recorder = StepRecorder(Clock(), Slow())
    recorder.read(StepWatch())
    recorder.note(watched.engine.last_step, watched.engine.load(), 0.0)
    assert not recorder.is_due(0.99 * cost_s / MAX_SHARE, is_last=False)
    assert recorder.is_due(1.01 * cost_s / MAX_SHARE, is_last=False)
    assert recorder.is_due(0.0, is_last=True)


def test_records_of_fast_steps_keep_their_distance() -> None:
    watched = line()
    watched.engine.add(request(1, [1], max_tokens=9), "a")
    watched.step()
    assert not watched.recorder.is_due(watched.clock.now + 0.99 * MIN_INTERVAL_S, is_last=False)
    assert watched.recorder.is_due(watched.clock.now + 1.01 * MIN_INTERVAL_S, is_last=False)
