"""Scheduler: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. Every running sequence has `num_uncomputed_tokens` >= 1,
and a step gives it some of them under one token budget:

1. every decode (one token to go) gets its token; if blocks run out, sequences are preempted, the worst
   (effective tier, arrival) first, just enough;
2. running prefills continue, best first, within the token budget and the ITL budget; waiting sequences
   of better effective tiers start before them;
3. the others that wait start, best first, while a seat, blocks and budget last. One of a better tier may
   take seat and blocks from running ones of a worse tier.

Sources: iteration-level scheduling (Orca, OSDI'22), paged blocks and recompute (vLLM, SOSP'23), chunked
prefill (Sarathi-Serve, OSDI'24); the chunk is bounded by predicted time instead of a token count.
"""

from replicas.api import FinishReason, GenerateRequest, ReplicaLoad, TokenDelta
from replicas.config import ResolvedConfig
from replicas.drafts import Drafter
from replicas.kv_cache import KVCacheManager, PrefixMatch
from replicas.look_ahead import decodes_after
from replicas.prefill_budget import PrefillBudget
from replicas.room import RoomFinder, by_rank
from replicas.sequence import Sequence, SequenceStatus
from replicas.step import ScheduledSequence, Step, StepResult, Verified
from replicas.step_time import StepShape, StepTimeModel
from replicas.tier_loads import tier_loads
from replicas.waiting import WaitingQueue, effective_tier, prefill_tier

Outputs = dict[str, list[TokenDelta]]
"""Deltas by owner."""


class Scheduler:
    """The engine's only decision maker. No clock, no I/O; not thread-safe.

    Calls alternate: `schedule` then `update` with its result; `add` and `abort` come between pairs.
    Cost of a pair is O(sequences in the step), and O(tiers) per waiting sequence that starts.
    """

    def __init__(
        self, config: ResolvedConfig, eos_token_ids: frozenset[int], step_time: StepTimeModel
    ) -> None:
        self.config = config
        self.cache = KVCacheManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.num_preemptions = 0
        self._room = RoomFinder(config, self.cache)
        self._eos_token_ids = eos_token_ids
        self._step_time = step_time
        self._drafter = Drafter(config.num_speculative_tokens)
        self._waiting = WaitingQueue(config.aging_s)
        self._running: list[Sequence] = []
        self._requests: dict[tuple[str, int], list[Sequence]] = {}
        self._siblings: dict[int, list[Sequence]] = {}
        """seq_id of a group's first sequence -> the others, until its prompt is in the prefix cache."""
        self._next_seq_id = 0
        self._step_number = 0
        self._overloaded = False

    # Requests

    def add(self, request: GenerateRequest, owner: str, now: float) -> None:
        """Queue all outputs of a request. The caller has checked that it can fit."""
        group = [
            self._new_sequence(request, owner, position, now) for position in range(len(request.indexes))
        ]
        self._requests[owner, request.request_id] = group
        if self.config.enable_prefix_caching and len(group) > 1:
            # The others find the shared prompt in the prefix cache once the first has computed it.
            self._siblings[group[0].seq_id] = group[1:]
            for sibling in group[1:]:
                sibling.status = SequenceStatus.HELD
            self._waiting.add(group[0], now)
        else:
            for sequence in group:
                self._waiting.add(sequence, now)

    def abort(self, owner: str, request_id: int, now: float, index: int | None = None) -> bool:
        """End a request, or one output, in whatever state; no delta follows. False if nothing was open."""
        group = self._requests.get((owner, request_id), [])
        ended = [s for s in group if s.status is not SequenceStatus.FINISHED and index in (None, s.index)]
        if not ended:
            return False
        leader = group[0].seq_id
        held = [sequence for sequence in self._siblings.pop(leader, ()) if sequence not in ended]
        if held:
            self._siblings[leader] = held
        for sequence in ended:
            self._finish(sequence, FinishReason.ABORT, now)
        self._drop_finished()
        return True

    def withdraw(self, owner: str, request_id: int, now: float) -> bool:
        """End a request of which no sequence has run; no delta follows. False if one has, or none is here."""
        unstarted = (SequenceStatus.WAITING, SequenceStatus.HELD)
        group = self._requests.get((owner, request_id), [])
        if any(s.status not in unstarted or s.num_preemptions for s in group):
            return False
        return self.abort(owner, request_id, now)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._siblings.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting))

    # One step

    def schedule(self, now: float) -> Step:
        """Choose the next step's work; blocks for all of it are allocated. Empty = nothing to do."""
        step = Step(number=self._step_number, sequences=[], num_tokens=0, num_decodes=0)
        self._step_number += 1
        prefills = self._schedule_decodes(step, now)
        budget = PrefillBudget(self.config, self._step_time, step)
        aging_s = self.config.aging_s
        for sequence in by_rank(prefills, now, aging_s):
            self._start_waiting(step, budget, now, above=prefill_tier(sequence, now, aging_s))
            if sequence.status is SequenceStatus.RUNNING:  # else somebody better has just taken its seat
                self._schedule_prefill(sequence, step, budget)
        self._start_waiting(step, budget, now)
        self._overloaded = step.overloaded = budget.at_floor
        if self.config.num_speculative_tokens:
            self._drafter.add_drafts(step, budget, self.cache)
        return step

    def look_ahead(self, step: Step) -> Step | None:
        """Schedule the step after `step`, which is under way; None unless it can only hold decodes.

        The token each of its sequences starts from is what `step` samples. `schedule` must not be called
        before this step was executed.
        """
        if self.config.batching != "continuous" or self.may_start_others():
            return None
        entries = decodes_after(step, self._running)
        if entries is None or (len(self._waiting) and len(entries) < len(self._running)):
            return None  # a seat becomes free for somebody who waits
        if not self.cache.extend_ahead(entries):
            return None
        count = len(entries)
        kv_read = sum(entry.start for entry in entries)
        following = Step(number=self._step_number, sequences=entries, num_tokens=count, num_decodes=count)
        following.shape = StepShape(num_new_tokens=count, kv_read_tokens=kv_read, num_sampling=count)
        self._step_number += 1
        self._overloaded = False
        return following

    def may_start_others(self) -> bool:
        """Whether a waiting sequence may find a free seat, or take one: true when in doubt."""
        if not len(self._waiting):
            return False
        if len(self._running) < self.config.max_num_seqs:
            return True
        best = min(self._waiting.tiers)
        return self.config.takes_seats and max(sequence.tier for sequence in self._running) > best

    def update(self, step: Step, result: StepResult, now: float) -> Outputs:
        """Take over a step's tokens: advance, finish, free. Returns the deltas of each owner."""
        outputs: Outputs = {}
        block_size = self.config.block_size
        any_finished = False
        for position, (entry, token) in enumerate(zip(step.sequences, result.token_ids, strict=True)):
            sequence = entry.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # a finished row that static batching still computes
            error = result.errors.get(position) if result.errors else None
            if error is None:
                # Without the drafts: those that were right are counted as they are appended.
                computed = entry.start + entry.num_new_tokens - len(entry.drafts)
                sequence.num_computed_tokens = computed
                if computed // block_size > sequence.num_registered_blocks:
                    self.cache.register_computed(sequence)
                if self._siblings and computed >= sequence.num_prompt_tokens:
                    self._release_siblings(sequence, now)
                if reported := result.prompt_logprobs.get(position):
                    sequence.add_prompt_logprobs(reported)
                if token is None:
                    continue
                delta = self._append(sequence, token)
                if result.logprobs is not None and (logprobs := result.logprobs[position]) is not None:
                    delta.logprobs = [logprobs]
                if entry.drafts:
                    self._append_verified(sequence, delta, entry, result.verified.get(position))
            else:
                delta = TokenDelta(sequence.request.request_id, sequence.request.attempt, sequence.index, [])
                delta.finish_reason, delta.error = FinishReason.ERROR, error
            if delta.finish_reason is not None:
                self._finish(sequence, delta.finish_reason, now)
                any_finished = True
            outputs.setdefault(sequence.owner, []).append(delta)
        if any_finished:
            self._drop_finished()
        return outputs

    # State for others

    def load(self, step_ms: float, prefill_tokens_per_s: float = 0.0) -> ReplicaLoad:
        """The replica's state, for routers."""
        tiers = tier_loads(self._running, self._waiting, self.config.block_size)
        return ReplicaLoad(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            max_num_seqs=self.config.max_num_seqs,
            free_blocks=self.cache.num_free_blocks,
            num_blocks=self.config.num_blocks,
            queued_tokens=sum(tier.queued_tokens for tier in tiers),
            step_ms=step_ms,
            overloaded=self._overloaded,
            tiers=tiers,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )

    def live_tokens(self) -> int:
        """Tokens that running sequences hold in the cache, shared prefixes counted once per holder."""
        return sum(sequence.num_computed_tokens for sequence in self._running)

    def check_integrity(self) -> None:
        """Compare all books. Raises IntegrityError."""
        self.cache.check_integrity(self._running)

    # Phases of schedule()

    def _schedule_decodes(self, step: Step, now: float) -> list[Sequence]:
        """Give every decode its token; returns the running sequences that are still in prefill."""
        self._make_room_for_decodes(now)
        entries, prefills, kv_read = step.sequences, [], 0
        for sequence in self._running:
            start = sequence.num_computed_tokens
            if len(sequence.token_ids) - start > 1:
                prefills.append(sequence)
                continue
            if sequence.status is SequenceStatus.FINISHED:
                start -= 1  # static batching computes a finished row's last position over and over
            entries.append(ScheduledSequence(sequence, start, 1, True))
            kv_read += start
        count = step.num_decodes = step.num_tokens = len(entries)
        step.shape = StepShape(num_new_tokens=count, kv_read_tokens=kv_read, num_sampling=count)
        return prefills

    def _make_room_for_decodes(self, now: float) -> None:
        """Allocate the blocks into which decodes grow, preempting until they suffice."""
        size = self.config.block_size
        growing = [
            sequence
            for sequence in self._running
            if len(sequence.block_table) * size < len(sequence.token_ids)
            and sequence.status is SequenceStatus.RUNNING
        ]
        while len(growing) > self.cache.num_free_blocks:
            victim = by_rank(self._running, now, self.config.aging_s)[-1]
            self._preempt(victim, now)
            growing = [sequence for sequence in growing if sequence is not victim]
        for sequence in growing:
            self.cache.extend(sequence)

    def _schedule_prefill(self, sequence: Sequence, step: Step, budget: PrefillBudget) -> None:
        """Give a running prefill its next chunk; its blocks were allocated when it started."""
        wanted = sequence.num_uncomputed_tokens
        granted = budget.take(step.within_prompt_rows(sequence), sequence.num_computed_tokens)
        if granted:
            step.add_prefill(sequence, granted, samples=granted == wanted)

    def _start_waiting(self, step: Step, budget: PrefillBudget, now: float, above: int | None = None) -> None:
        """Start waiting sequences; only those of effective tiers better than `above` if that is given."""
        is_static = self.config.batching != "continuous"
        if is_static and self._running:
            return  # a static batch is bound until its longest member ends
        aging_s, blocked_tiers = self.config.aging_s, set[int]()
        while budget.left > 0 or is_static:
            sequence = self._waiting.next(now, blocked_tiers)
            if sequence is None or (above is not None and effective_tier(sequence, now, aging_s) >= above):
                return
            match = self.cache.match_prefix(sequence)
            if not is_static and not budget.could_take(sequence.num_tokens - match.num_tokens):
                return
            room = self._room.find(sequence, match, self._running, now)
            if not room.has_seat:
                # A better tier behind it may still push somebody out.
                blocked_tiers.add(sequence.tier)
                continue
            if not room.has_blocks:
                return  # nobody behind it may pass: small requests would starve a large one
            for victim in room.victims:
                budget.left += step.discard(victim)
                self._preempt(victim, now)
            self._start(sequence, match, now)
            self._schedule_prefill(sequence, step, budget)

    def _start(self, sequence: Sequence, match: PrefixMatch, now: float) -> None:
        self._waiting.remove(sequence, now)
        self.cache.start(sequence, match)
        sequence.status = SequenceStatus.RUNNING
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(match.num_tokens, sequence.num_prompt_tokens)
        self._running.append(sequence)

    # Preemption

    def _preempt(self, victim: Sequence, now: float) -> None:
        """Take seat and blocks; what it computed is recomputed later, mostly from the prefix cache."""
        self._running.remove(victim)
        self.cache.release(victim)
        if victim.status is SequenceStatus.FINISHED:
            return  # a finished row of a static batch: nothing to come back for
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put_back(victim, now)

    # Beginnings and ends

    def _new_sequence(self, request: GenerateRequest, owner: str, position: int, now: float) -> Sequence:
        self._next_seq_id += 1
        return Sequence.of(
            request,
            position,
            seq_id=self._next_seq_id,
            owner=owner,
            now=now,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.config.max_model_len,
        )

    def _append(self, sequence: Sequence, token: int) -> TokenDelta:
        request = sequence.request
        delta = TokenDelta(request.request_id, request.attempt, sequence.index, [])
        sequence.append(token, delta)
        if not sequence.started:
            sequence.started = True
            delta.num_cached_tokens = sequence.num_cached_tokens
            delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        return delta

    def _append_verified(
        self, sequence: Sequence, delta: TokenDelta, entry: ScheduledSequence, verified: Verified | None
    ) -> None:
        """Append the tokens that followed right guesses, up to the sequence's end."""
        token_ids = verified.token_ids if verified is not None else []
        self._drafter.learn(sequence, len(entry.drafts), len(token_ids))
        for i, token in enumerate(token_ids):
            if delta.finish_reason is not None:
                break
            # The guess before it is the sequence's last token now, and was computed in this step.
            sequence.num_computed_tokens += 1
            if sequence.num_computed_tokens // self.config.block_size > sequence.num_registered_blocks:
                self.cache.register_computed(sequence)
            sequence.append(token, delta)
            if verified is not None and verified.logprobs is not None and delta.logprobs is not None:
                delta.logprobs.append(verified.logprobs[i])

    def _release_siblings(self, leader: Sequence, now: float) -> None:
        for sibling in self._siblings.pop(leader.seq_id, ()):
            sibling.status = SequenceStatus.WAITING
            self._waiting.put_back(sibling, now)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence; `_drop_finished` then takes it off the list of running ones."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence, now)
        keeps_row = self.config.batching == "static" and reason is not FinishReason.ABORT
        if not keeps_row:
            self.cache.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._release_siblings(sequence, now)
        key = sequence.owner, sequence.request.request_id
        if all(member.status is SequenceStatus.FINISHED for member in self._requests[key]):
            del self._requests[key]

    def _drop_finished(self) -> None:
        """Give up the seats of finished sequences; in a static batch, when all of it has finished."""
        alive = [sequence for sequence in self._running if sequence.status is SequenceStatus.RUNNING]
        if self.config.batching == "static" and alive:
            self._running = [sequence for sequence in self._running if sequence.block_table]
            return
        for sequence in self._running:
            if sequence.status is SequenceStatus.FINISHED:
                self.cache.release(sequence)
        self._running = alive
