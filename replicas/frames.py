"""FrameWindow: the frames of one router epoch, from a step's deltas to their acknowledgement."""

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from replicas.api import (
    MAX_FRAME_BYTES,
    MAX_UNACKED_FRAMES,
    Credits,
    ReplicaLoad,
    StepOutputs,
    TokenDelta,
)

NO_CREDITS: Final = Credits()


class FrameWindow:
    """Numbers, encodes, splits, keeps and coalesces. Pure; not thread-safe.

    Frames are kept encoded until they are acknowledged, so that a new subscription gets the same bytes
    under the same numbers. While no subscription is connected, or too many frames are unacknowledged,
    deltas wait in `_pending`, merged per output: its size is bounded by the tokens of open outputs.
    """

    def __init__(self, replica_epoch: int) -> None:
        self.connected = False
        """A subscription is open: new frames go out at once."""
        self._encoder = msgspec.msgpack.Encoder()
        self._replica_epoch = replica_epoch
        self.acked = 0
        """Number of the last acknowledged frame; 0 before the first."""
        self._unacked: deque[bytes] = deque()  # frames acked + 1, acked + 2, ...
        self._pending: dict[tuple[int, int, int], TokenDelta] = {}
        self._stalled_since: float | None = None

    @property
    def number(self) -> int:
        """Number of the last frame made; 0 before the first."""
        return self.acked + len(self._unacked)

    @property
    def num_pending(self) -> int:
        """Outputs whose deltas wait for room in the window."""
        return len(self._pending)

    def stalled_s(self, now: float) -> float:
        """Seconds since the last sign of progress while something is outstanding; 0 if nothing is."""
        return 0.0 if self._stalled_since is None else now - self._stalled_since

    def push(
        self,
        deltas: list[TokenDelta],
        load: ReplicaLoad,
        sent_at: float,
        now: float,
        credits: Credits = NO_CREDITS,
    ) -> list[bytes]:
        """Take over a step's deltas; return the frames that are to be sent now.

        Without deltas a frame is made of the rest alone, if there is room.
        """
        is_open = not self._pending and self._has_room()
        if self._stalled_since is None and (deltas or is_open):
            self._stalled_since = now
        if is_open:
            return self._make(deltas, load, sent_at, credits)
        self._coalesce(deltas)
        return self.flush(load, sent_at, credits)

    def flush(self, load: ReplicaLoad, sent_at: float, credits: Credits = NO_CREDITS) -> list[bytes]:
        """Return frames for all that is pending, if the window has room for any."""
        if not self._pending or not self._has_room():
            return []
        deltas = list(self._pending.values())
        self._pending.clear()
        return self._make(deltas, load, sent_at, credits)

    def acknowledge(self, number: int, now: float) -> None:
        """Forget the frames up to `number`. Numbers below the last one, or never sent, change nothing."""
        if not self.acked < number <= self.number:
            return
        while self.acked < number:
            self._unacked.popleft()
            self.acked += 1
        self._restart_stall(now)

    def connect(self, received: int, now: float) -> list[bytes] | None:
        """Open or reopen the flow after frame `received`; return the frames to send again.

        None when frame `received` was never made: the caller speaks of another life. Acknowledgements
        that overtook the caller count too.
        """
        if received > self.number:
            return None
        self.acknowledge(received, now)
        self._restart_stall(now)
        self.connected = True
        return list(self._unacked)

    def _has_room(self) -> bool:
        return self.connected and len(self._unacked) < MAX_UNACKED_FRAMES

    def _restart_stall(self, now: float) -> None:
        self._stalled_since = now if self._unacked or self._pending else None

    def _coalesce(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.attempt, delta.index)
            waiting = self._pending.get(key)
            if waiting is None:
                self._pending[key] = delta
            else:
                waiting.append(delta)

    def _make(
        self, deltas: list[TokenDelta], load: ReplicaLoad, sent_at: float, credits: Credits
    ) -> list[bytes]:
        """Encode `deltas` into as many frames as they need, halving what is too large. In order."""
        frames: list[bytes] = []
        todo = [deltas]
        while todo:
            part = todo.pop()
            outputs = StepOutputs(self._replica_epoch, self.number + 1, sent_at, load, part, credits)
            frame = self._encoder.encode(outputs)
            halves = _halve(part) if len(frame) >= MAX_FRAME_BYTES else None
            if halves is None:
                self._unacked.append(frame)
                frames.append(frame)
            else:
                todo += reversed(halves)
        return frames


def _halve(deltas: list[TokenDelta]) -> list[list[TokenDelta]] | None:
    """Split into two parts that are sent one after the other; None when there is only one token."""
    if len(deltas) > 1:
        middle = len(deltas) // 2
        return [deltas[:middle], deltas[middle:]]
    (delta,) = deltas
    if delta.prompt_logprobs and (delta.token_ids or len(delta.prompt_logprobs) > 1):
        return _halve_prompt(delta)
    middle = len(delta.token_ids) // 2
    if not middle:
        return None
    logprobs = delta.logprobs
    first = TokenDelta(
        request_id=delta.request_id,
        attempt=delta.attempt,
        index=delta.index,
        token_ids=delta.token_ids[:middle],
        logprobs=logprobs and logprobs[:middle],
        num_cached_tokens=delta.num_cached_tokens,
    )
    second = TokenDelta(
        request_id=delta.request_id,
        attempt=delta.attempt,
        index=delta.index,
        token_ids=delta.token_ids[middle:],
        finish_reason=delta.finish_reason,
        logprobs=logprobs and logprobs[middle:],
        stop_token_id=delta.stop_token_id,
        error=delta.error,
    )
    return [[first], [second]]


def _halve_prompt(delta: TokenDelta) -> list[list[TokenDelta]]:
    """Split off the first half of the prompt's logprobs; all the rest stays together."""
    entries = delta.prompt_logprobs or []
    first = TokenDelta(request_id=delta.request_id, attempt=delta.attempt, index=delta.index, token_ids=[])
    middle = (len(entries) + 1) // 2
    first.prompt_logprobs = entries[:middle]
    rest = TokenDelta(*(getattr(delta, field) for field in delta.__struct_fields__))
    rest.prompt_logprobs = entries[middle:] or None
    return [[first], [rest]]
