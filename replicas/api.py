"""The contract between a router and a replica: everything that crosses the wire, and nothing else.

Routers know text, replicas know tokens; both know this file. All structs are msgpack, positional
(`array_like`) where they travel once per token. Times are seconds of the sender's clock and are only
ever compared with times of the same sender, except `sent_at`, which is wall-clock time.

The rules that keep two parties in step over an unreliable carrier (ARCHITECTURE.md, "wire contract"):

* A router draws an ascending epoch for each replica it talks to. Everything below is numbered within
  that epoch. Whoever finds that the other's state is lost or in doubt ends the epoch: the replica aborts
  its work, the router ends (or resumes elsewhere) its streams and begins again with the next epoch, at
  number 1. A higher epoch of a router ends the lower one. This is the only way in which a stream fails.
* A router numbers its commands 1, 2, 3, ...; a replica applies them in order, each once. An abort for an
  unknown request leaves a tombstone, so a late submit stays dead.
* A replica numbers its frames 1, 2, 3, ... and keeps each one until it is acknowledged. A subscription
  that ends, or shows a gap, is opened again with the number of the last frame that arrived with all
  before it; the frames after that are sent again as they were, and the router drops those it has.
  Nothing is lost or doubled by a broken subscription. A lost last frame shows no gap: the replica sees that
  it is not acknowledged, and ends the subscription once so that it is opened again.
* A delta names the attempt and output index it belongs to; those of ended requests and stale attempts
  are dropped at both ends.
* A router may ask for a request back (Withdraw). The replica alone decides, in the order of its frames:
  either nothing of the attempt has run, and its outputs finish with `abort` and no token, or all of it runs
  on. So what was taken back never comes twice.
* A subscription is a lease: every command batch renews it. The router acknowledges frame numbers; a
  replica that runs ahead by too many frames coalesces, and by too many seconds ends the epoch.
"""

import enum
from typing import Any, Final

import msgspec

LEASE_S: Final = 3.0
"""A router that has said nothing for this long has lost its subscription."""
LEASE_GRACE_S: Final = 2.0
"""After a lost lease, wait this long for a sign of the same router epoch, then end it."""
PING_INTERVAL_S: Final = 1.0
"""A router with nothing to submit pings this often: renews the lease, acknowledges frames."""
MAX_UNACKED_FRAMES: Final = 256
"""Beyond this many unacknowledged frames a replica coalesces deltas instead of sending more frames."""
MAX_UNACKED_S: Final = 10.0
"""The epoch of a router that acknowledges nothing for this long, with deltas outstanding, is ended."""
REOPEN_S: Final = MAX_UNACKED_S / 2
"""A subscription whose frames are not acknowledged for this long is ended once, to be opened again."""
CREDIT_TTL_S: Final = 3.0
"""Credits are void after so long: they come with every frame and every reply."""
MAX_FRAME_BYTES: Final = 90_000
"""Frames stay below Ray's limit for inline results (100 KB); larger steps are split over frames."""


GRAMMAR_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 500_000,  # 10 ms
    "step_lexer_fuel": 100_000,  # 7 ms
    "step_max_items": 50_000,  # 2.5 ms
    "max_lexer_states": 10_000,  # about 2 kB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Of llguidance's parser, the same where a grammar is checked and where it is followed."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `stop` and `length` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """On the wire: taken back by Withdraw before anything of it ran."""
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw tokens. Validated by the router; a replica trusts the ranges given here."""

    max_tokens: int
    """Most tokens to generate, resumed ones included; >= 1."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens (resumed ones included) were generated."""
    temperature: float = 1.0
    """0 = greedy, whatever top_k, top_p, min_p and seed say."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches top_p; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token generated so far; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the generated tokens; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of prompt and generated tokens; > 0."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids; -100 bans, in [-100, 100]."""
    seed: int = 0
    """The draw at a position depends on (seed, output index, position) only. Routers always set it."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence with `stop` when one of these is sampled."""
    ignore_eos: bool = False
    """Treat the model's end-of-sequence tokens as ordinary ones."""
    grammar: str = ""
    """The output must match this (replicas/constraints.py says in what form); "" = anything."""
    logprobs: int | None = None
    """Report the sampled token's logprob and this many most probable alternatives; None = nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first. Such a prompt is computed anew, cached or not."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt and the outputs wanted for it, as a router asks for them. Frozen."""

    request_id: int
    """Unique within a router epoch; chosen by the router, never by a client."""
    attempt: int = 0
    """0 at first; raised by one for each resume on another replica."""
    prompt_ids: tuple[int, ...]
    """At least one token."""
    sampling: SamplingParams
    indexes: tuple[int, ...] = (0,)
    """The output indexes to generate: (0, ..., n-1), or what is left of them after a resume."""
    resumed_output_ids: tuple[tuple[int, ...], ...] = ()
    """Per entry of `indexes` the tokens generated by earlier attempts; empty = none at all."""
    tier: int = 0
    """Priority tier; smaller = sooner."""
    waited_s: float = 0.0
    """Seconds the request has waited so far, for aging."""
    cache_salt: str = ""
    """Prefix blocks are shared only between requests of equal salt."""
    trace_id: str = ""
    """The id the client sees; for logs only."""
    traceparent: str = ""
    """W3C trace context of the router's span; empty = nobody traces this request."""

    @property
    def num_outputs(self) -> int:
        """Outputs that this attempt is to generate."""
        return len(self.indexes)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that this attempt needs to start; its outputs share the prompt's."""
        resumed = sum(len(ids) // block_size + 1 for ids in self.resumed_output_ids[1:])
        first = len(self.resumed_output_ids[0]) if self.resumed_output_ids else 0
        alone = -(-(len(self.prompt_ids) + first + 1) // block_size)
        return alone + (resumed or self.num_outputs - 1)


class TopLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One alternative at a position."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The logprobs of one token, natural logarithm, before temperature and truncation."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()
    """Most probable first."""


class TokenDelta(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step (or several coalesced ones) brought for one output of one request."""

    request_id: int
    attempt: int
    index: int
    token_ids: list[int]
    """New tokens in order. A stop token that ended the sequence is included."""
    finish_reason: FinishReason | None = None
    """Set on the last delta of an output, exactly once."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token when asked for."""
    stop_token_id: int | None = None
    """The token that ended the output when finish_reason is `stop`."""
    num_cached_tokens: int | None = None
    """On the first delta: prompt tokens that came from the prefix cache."""
    error: str | None = None
    """With finish_reason `error`: one line for the client."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """On the first delta when asked for: one per prompt token but the first. Never after a resume."""

    def append(self, later: "TokenDelta") -> None:
        """Coalesce: take over what a later delta of the same output brings. The later one is used up."""
        self.token_ids.extend(later.token_ids)
        self.logprobs = _joined(self.logprobs, later.logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, later.prompt_logprobs)
        self.finish_reason = later.finish_reason
        self.stop_token_id = later.stop_token_id
        self.error = later.error


def _joined(
    first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    if first is None or second is None:
        return second if first is None else first
    first.extend(second)
    return first


class TierLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tier's share of a replica."""

    tier: int
    num_running: int
    num_waiting: int
    queued_tokens: int
    """Tokens still to be computed before these sequences decode."""
    held_blocks: int = 0
    """Blocks of its running sequences, shared ones counted once per holder."""
    waiting_blocks: int = 0
    """Blocks that its waiting sequences need to start."""


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """A replica's state after a step, small enough to travel with every frame."""

    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    free_blocks: int = 0
    """Blocks that hold nothing or only cached prefixes nobody uses now."""
    num_blocks: int = 0
    queued_tokens: int = 0
    step_ms: float = 0.0
    """Median duration of the latest engine steps: what held one of them up says nothing of the next."""
    overloaded: bool = False
    """The prefill chunk is at its floor: the ITL budget cannot be kept with this load."""
    tiers: tuple[TierLoad, ...] = ()
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed beside the present decodes; 0 = not known yet."""


class TierDemand(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a router would send of one tier if it could."""

    tier: int
    num_outputs: int


class TierCredit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much a router may have submitted in its epoch, in all, of one tier and the better ones."""

    tier: int
    num_outputs: int
    num_blocks: int


class Credits(msgspec.Struct, frozen=True, array_like=True):
    """What a replica lets a router submit; every message with a higher number replaces it.

    Totals instead of increments: what is under way counts as used, and a lost message costs nothing.
    They are no promise: another router may be granted the same seat later. For a tier that is not
    listed the largest listed one below it counts. Void after CREDIT_TTL_S without a newer one.
    """

    number: int = 0
    tiers: tuple[TierCredit, ...] = ()
    """Ascending by tier, from 0."""


class StepOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """A frame: what one engine step brought for all sequences of one router."""

    replica_epoch: int
    """Drawn when the engine starts; another value means that all state is gone."""
    number: int
    """1, 2, 3, ... within one router epoch. A step too large for one frame takes several numbers."""
    sent_at: float
    """Wall-clock seconds when the step ended; differences across hosts include their clock skew."""
    load: ReplicaLoad
    deltas: list[TokenDelta] = []
    credits: Credits = Credits()
    """What the router may submit as of this step."""


class FrameBatch(msgspec.Struct, frozen=True, array_like=True):
    """Frames as a carrier takes them over: all that have come since it last took some."""

    frames: list[bytes]
    """Encoded StepOutputs, in order."""
    delay_s: float
    """Seconds from the end of the oldest frame's step until here."""
    handed_at: float
    """Wall-clock seconds."""


class Submit(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """Start a request. Idempotent on (router epoch, request id, attempt)."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag="a", array_like=True, omit_defaults=True):
    """End a request, whatever its state. Unknown ids leave a tombstone."""

    request_id: int
    attempt: int
    index: int | None = None
    """End this output only, if it is open; None = all of them."""


class Withdraw(msgspec.Struct, frozen=True, tag="w", array_like=True):
    """Give a request back if no output of it has started: then each ends with `abort`. Else ignored."""

    request_id: int
    attempt: int


Command = Submit | Abort | Withdraw


class CommandBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All commands of one router loop tick for one replica. Empty = a ping."""

    router_id: str
    router_epoch: int
    """Ascending per router and replica, across restarts of the router too; a higher one ends the lower."""
    first_number: int
    """Number of the first command; for a ping, of the command that would come next."""
    commands: tuple[Command, ...] = ()
    acked_frame: int = 0
    """The highest frame number that arrived with all before it."""
    demand: tuple[TierDemand, ...] = ()
    """What the router has queued: credits are split by it."""
    counters: bytes = b""
    """For whoever asks the replica what its routers see (EnginePump.counters); it does not look inside."""


class BatchReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the replica made of a command batch."""

    replica_epoch: int
    applied_through: int
    """The highest command number applied so far; a smaller one than sent means earlier ones are missing."""
    ended: bool = False
    """The batch's router epoch is over here: nothing of it runs, and nothing more of it is applied."""
    load: ReplicaLoad | None = None
    """The replica's state after its last step, for routers that receive no frames just now."""
    credits: Credits = Credits()
    """What the router may submit, this batch counted."""
    failure: str | None = None
    """Why this replica must be replaced, a step that never ends for one: expect nothing more of it."""


class Subscribe(msgspec.Struct, frozen=True, kw_only=True):
    """Open (or reopen) the step stream of one router epoch; ends the subscription before it."""

    router_id: str
    router_epoch: int
    number: int = 1
    """1, 2, 3, ... within the router epoch: one that arrives late does not end its successor."""
    received_frame: int = 0
    """As CommandBatch.acked_frame: sending starts with the frame after this one."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a router must know about the model a replica serves."""

    name: str
    fingerprint: str
    """Equal fingerprints generate equal tokens: weights, dtype, quantisation, numerics."""
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    replica_epoch: int
    takes_seats: bool = True
    """A better tier takes seats from running sequences of a worse one."""
