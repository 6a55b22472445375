"""StepRecorder: what each step did, seat by seat, for those who watch. Pure; nothing while nobody does.

A seat is a row of the picture and no part of the scheduling: sequences are given the lowest free one in the
order in which they start. Records hold what changed. A record costs the engine's time, so the next one is
made only when that cost is less than MAX_SHARE of the time between the two: under load steps are left out,
and what happened in them shows in the next record.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from replicas.api import FinishReason, ReplicaLoad
from replicas.sequence import Sequence, SequenceStatus
from replicas.step import Step
from replicas.step_record import Chunk, Departure, Rider, StepNews, StepRecord, StepWatch

WATCH_S: Final = 2.0
"""Without a StepWatch for this long nobody watches any more."""
MAX_SHARE: Final = 0.003
"""Of the engine's time, spent on records: the carrier of the records needs as much again."""
MIN_INTERVAL_S: Final = 0.004
"""Records of faster steps would show more columns than anybody can see."""
MAX_RECORDS: Final = 1024
"""What a watcher may miss before it begins anew."""
PREEMPTED: Final = "preempted"


class StepRecorder:
    """Not thread-safe: replicas/pump.py holds its lock around every call."""

    def __init__(self, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        """`clock`: the engine's, in seconds; `cpu_clock`: CPU seconds of the engine's thread. A record that
        was interrupted for long has not cost much."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._cursor = 1
        """Number of the next record."""
        self._watched_until = float("-inf")
        self._next_at = float("-inf")
        self._forget_seats()

    def _forget_seats(self) -> None:
        self._seats: dict[Sequence, int] = {}
        self._rows: dict[Sequence, int] = {}
        """Finished rows that a static batch still computes -> their seats."""
        self._free: list[int] = []
        self._num_seats = 0

    def is_due(self, now: float, is_last: bool) -> bool:
        """Whether to record a step that ends now. The last one before the engine idles always is."""
        return now < self._watched_until and (is_last or now >= self._next_at)

    def read(self, watch: StepWatch) -> StepNews:
        """Return what came after a cursor, or the state of now where that is too long ago."""
        now = self._clock()
        if now >= self._watched_until:
            self._records.clear()
            self._cursor += 1  # no cursor of before fits
            self._forget_seats()
        self._watched_until = now + WATCH_S
        missed = self._cursor - 1 - watch.after
        if not 0 <= missed <= len(self._records):
            riders = tuple(self._rider(sequence, seat, now) for sequence, seat in self._seats.items())
            return StepNews(self._cursor - 1, (), riders)
        return StepNews(self._cursor - 1, tuple(islice(self._records, len(self._records) - missed, None)))

    def note(self, step: Step | None, load: ReplicaLoad, sent_at: float) -> None:
        """Record a step that has just ended; None = none was run, but sequences may have ended.

        `sent_at` is wall-clock time. O(running sequences), some 30 ns each.
        """
        now, started_at = self._clock(), self._cpu_clock()
        if step is not None or self._seats:
            self._note(step, load, sent_at, now)
        cost_s = self._cpu_clock() - started_at
        self._next_at = now + max(MIN_INTERVAL_S, cost_s / MAX_SHARE)

    def _note(self, step: Step | None, load: ReplicaLoad, sent_at: float, now: float) -> None:
        running = SequenceStatus.RUNNING
        entries = step.sequences if step is not None else []
        gone = [sequence for sequence in self._seats if sequence.status is not running]
        computed = {entry.sequence for entry in entries} if gone or self._rows else set()
        self._give_up_rows(computed)
        # Those who ended in a step that was left out have no part in this one, but others their seats.
        left = [s for s in gone if _left_before_the_step(s) or s not in computed]
        departures = tuple(self._leave(sequence) for sequence in left)
        started = [
            e.sequence for e in entries if e.sequence not in self._seats and e.sequence not in self._rows
        ]
        # A step that was launched ahead may still hold what was aborted since.
        started = [sequence for sequence in started if not _left_before_the_step(sequence)]
        riders = tuple(self._take_seat(sequence, now) for sequence in started)
        chunks = self._chunks(step) if step is not None else ()
        idle = self._idle_seats(step)
        finished = [s for s in self._seats if s.status is not running] if gone or started else []
        record = StepRecord(
            number=step.number if step is not None else -1,
            at=sent_at,
            step_ms=load.step_ms if step is not None else 0.0,
            num_waiting=load.num_waiting,
            num_used_blocks=load.num_blocks - load.free_blocks,
            overloaded=load.overloaded,
            left=departures,
            started=riders,
            chunks=chunks,
            idle=idle,
            finished=tuple(self._leave(sequence) for sequence in finished),
        )
        self._give_up_rows(set())
        if step is not None or record.left or record.finished:
            self._records.append(record)
            self._cursor += 1

    def _chunks(self, step: Step) -> tuple[Chunk, ...]:
        prefills = step.sequences[step.num_decodes :]
        return tuple(
            Chunk(
                self._seats[entry.sequence],
                entry.num_new_tokens,
                0 if entry.samples else entry.sequence.num_uncomputed_tokens,
            )
            for entry in prefills
            if entry.sequence in self._seats
        )

    def _take_seat(self, sequence: Sequence, now: float) -> Rider:
        if not self._free:
            self._free.append(self._num_seats)
            self._num_seats += 1
        seat = self._seats[sequence] = heapq.heappop(self._free)
        return self._rider(sequence, seat, now)

    def _leave(self, sequence: Sequence) -> Departure:
        seat = self._seats.pop(sequence)
        if sequence.status is SequenceStatus.FINISHED and sequence.block_table:
            self._rows[sequence] = seat
        else:
            heapq.heappush(self._free, seat)
        reason = sequence.finish_reason or PREEMPTED
        return Departure(seat, str(reason), sequence.num_output_tokens)

    def _give_up_rows(self, computed: set[Sequence]) -> None:
        """A static batch has ended: its finished rows gave their blocks back, and give their seats, unless
        they are among those that the step computed."""
        for sequence in [row for row in self._rows if not row.block_table and row not in computed]:
            heapq.heappush(self._free, self._rows.pop(sequence))

    def _idle_seats(self, step: Step | None) -> tuple[int, ...]:
        rows = tuple(self._rows.values())
        if step is None or len(step.sequences) - len(rows) >= len(self._seats):
            return rows
        taken = {entry.sequence for entry in step.sequences}
        return rows + tuple(seat for sequence, seat in self._seats.items() if sequence not in taken)

    @staticmethod
    def _rider(sequence: Sequence, seat: int, now: float) -> Rider:
        return Rider(
            seat=seat,
            key=sequence.seq_id,
            tier=sequence.tier,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=sequence.num_output_tokens,
            max_output_tokens=sequence.max_num_tokens - sequence.num_prompt_tokens,
            num_preemptions=sequence.num_preemptions,
            waited_ms=round((now - sequence.arrival_at) * 1e3),
            trace_id=sequence.request.trace_id,
        )


def _left_before_the_step(sequence: Sequence) -> bool:
    """Preempted, or aborted: a step ends nothing in these ways."""
    if sequence.status is SequenceStatus.FINISHED:
        return sequence.finish_reason is FinishReason.ABORT
    return sequence.status is not SequenceStatus.RUNNING
