"""Transcript: what a request has generated so far, so that another replica can go on with it. Pure."""

import msgspec

from replicas.api import GenerateRequest, TokenDelta


class Transcript:
    """The token ids of a request's unfinished outputs, over all its attempts.

    A draw depends on (seed, output index, position) only, so a replica of equal fingerprint that is given
    prompt and transcript continues as the lost one would have. Everything that looks at output (penalties,
    min_tokens, max_tokens) counts the resumed ids too.
    """

    __slots__ = ("_ids",)

    def __init__(self, indexes: tuple[int, ...]) -> None:
        self._ids: dict[int, list[int]] = {index: [] for index in indexes}

    @property
    def running(self) -> tuple[int, ...]:
        """The outputs that have not finished."""
        return tuple(self._ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the unfinished outputs."""
        return sum(map(len, self._ids.values()))

    def take(self, delta: TokenDelta) -> None:
        """Note what a delta of the current attempt brought. O(its tokens).

        A later attempt finds the earlier one's prompt, and its tokens, in a prefix cache: only the first
        delta of an output says what was cached for the client's request.
        """
        ids = self._ids[delta.index]
        if ids:
            delta.num_cached_tokens = None
        if delta.finish_reason is None:
            ids += delta.token_ids
        else:
            del self._ids[delta.index]

    def drop(self, index: int) -> None:
        """Forget an output that has not finished and is not wanted any more."""
        del self._ids[index]

    def next_attempt(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request that goes on after the last delta taken. Some output must be unfinished."""
        resumed = tuple(tuple(ids) for ids in self._ids.values())
        return msgspec.structs.replace(
            request,
            attempt=request.attempt + 1,
            indexes=self.running,
            resumed_output_ids=resumed if any(resumed) else (),
        )


def without_output(request: GenerateRequest, index: int) -> GenerateRequest:
    """Return the request less one of its outputs, which is not its only one."""
    kept = [place for place, other in enumerate(request.indexes) if other != index]
    resumed = request.resumed_output_ids
    return msgspec.structs.replace(
        request,
        indexes=tuple(request.indexes[place] for place in kept),
        resumed_output_ids=tuple(resumed[place] for place in kept) if resumed else (),
    )
