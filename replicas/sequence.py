"""Sequence: one output of one request, as the engine keeps it."""

import enum
from dataclasses import dataclass, field

from replicas.api import FinishReason, GenerateRequest, SamplingParams, TokenDelta, TokenLogprobs


class SequenceStatus(enum.Enum):
    HELD = "held"
    """Not queued yet: its prompt is being computed by the first sequence of the same request."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Mutable state of one output. The scheduler owns it; a runner only reads it.

    There are no phases: `num_computed_tokens` catches up with `num_tokens`. Prefill, a later chunk,
    a prefix hit, decode and recompute after preemption differ only in how far apart the two are.
    """

    seq_id: int
    """Unique within the engine, ascending in order of dispatch."""
    owner: str
    """Who receives the outputs: opaque to the engine."""
    request: GenerateRequest
    index: int
    """Output index within the request."""
    arrival_at: float
    """When the request arrived at its router, on the engine's clock."""
    token_ids: list[int]
    """Prompt, then generated tokens (resumed ones included)."""
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    """Sampling one of these ends the sequence (after min_tokens)."""
    max_num_tokens: int
    """The sequence ends with `length` when it has this many tokens."""

    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache. A running sequence has at least one token to compute."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `token_ids`, as far as computed; see kv_cache."""
    num_registered_blocks: int = 0
    """Leading blocks of `block_table` that the prefix cache knows."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at the first admission."""
    num_preemptions: int = 0
    waiting_since: float = 0.0
    waited_s: float = 0.0
    """Seconds spent waiting before `waiting_since`, router included: what aging counts."""
    finish_reason: FinishReason | None = None
    started: bool = False
    """Its first delta, the one that reports num_cached_tokens, is out."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Those of prompt tokens 1, 2, ... as far as computed, until the first delta takes them. None = not
    asked for, or reported."""

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        position: int,
        *,
        seq_id: int,
        owner: str,
        now: float,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> "Sequence":
        """Begin the output at `position` of the request's indexes, with what was resumed of it."""
        sampling = request.sampling
        resumed = request.resumed_output_ids[position] if request.resumed_output_ids else ()
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= eos_token_ids
        return cls(
            seq_id=seq_id,
            owner=owner,
            request=request,
            index=request.indexes[position],
            arrival_at=now - request.waited_s,
            token_ids=[*request.prompt_ids, *resumed],
            num_prompt_tokens=len(request.prompt_ids),
            stop_ids=stop_ids,
            max_num_tokens=min(len(request.prompt_ids) + sampling.max_tokens, max_model_len),
            waiting_since=now,
            waited_s=request.waited_s,
            prompt_logprobs=None if sampling.prompt_logprobs is None or resumed else [],
        )

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def tier(self) -> int:
        return self.request.tier

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache: their logits are not wanted, or known."""
        return len(self.token_ids) - 1 if self.prompt_logprobs is None else len(self.prompt_logprobs)

    def prompt_rows(self, start: int, num_tokens: int) -> range:
        """Positions of a slice of the sequence at which the next prompt token's logprob is still wanted."""
        if self.prompt_logprobs is None:
            return range(0)
        first = max(start, len(self.prompt_logprobs))
        return range(first, max(first, min(start + num_tokens, self.num_prompt_tokens - 1)))

    def add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Take those of the next of `prompt_rows`."""
        assert self.prompt_logprobs is not None, f"sequence {self.seq_id} did not ask for prompt logprobs"
        self.prompt_logprobs += entries

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token: int, delta: TokenDelta) -> None:
        """Take a sampled token into the sequence and its delta, and see whether it ends with it."""
        self.token_ids.append(token)
        delta.token_ids.append(token)
        if token in self.stop_ids:
            delta.finish_reason, delta.stop_token_id = FinishReason.STOP, token
        elif len(self.token_ids) >= self.max_num_tokens:
            delta.finish_reason = FinishReason.LENGTH
