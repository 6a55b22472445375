"""What is asked: draws scripts (requests and sessions) from a seed. Pure.

Every script is a function of (workload, seed, index, tenant) alone, so the number of worker processes, and
which of them runs a script, change nothing about it.
"""

import random
from collections.abc import Sequence
from typing import Final

import msgspec

from load.arrivals import GapLaw, RateProfile, draw_arrivals, unit_gaps
from load.lengths import Lengths
from load.plan import Script, Segment, Turn
from load.tenants import Source
from load.trace import Trace, TraceRow

SEED_BITS: Final = 62


class UserPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a prompts file."""

    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    output_tokens: int | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What requests look like, without when and from whom."""

    seed: int = 0
    input_tokens: Lengths
    output_tokens: Lengths
    length_pairs: tuple[TraceRow, ...] = ()
    """Draw input and output lengths together from these rows instead."""
    prompts: tuple[UserPrompt, ...] = ()
    """Take these in turn instead of synthetic text."""
    prefix_tokens: int = 0
    """Length of a system message that requests share."""
    prefix_groups: int = 1
    """Number of different system messages."""
    turns: Lengths = Lengths(law="fixed", a=1)
    think_s: float = 0.0
    """Mean pause before each further turn of a session, exponential."""
    cancel_fraction: float = 0.0
    """Share of turns that are hung up on, at a point uniform over the answer."""
    slow_fraction: float = 0.0
    """Share of scripts whose answers are read slowly."""
    slow_bytes_per_s: float = 1000.0

    def script(self, index: int, tenant: int, at_s: float, row: TraceRow | None = None) -> Script:
        """Draw script number `index`; `row` gives its lengths and prefix blocks."""
        rng = random.Random(f"{self.seed}/script/{index}")
        system: tuple[Segment, ...] = ()
        if self.prefix_tokens:
            group = rng.randrange(self.prefix_groups)
            system = (Segment(self._seed_of(f"prefix/{group}"), self.prefix_tokens),)
        num_turns = self.turns.draw(rng)
        turns = tuple(self._turn(index, number, row, rng) for number in range(num_turns))
        is_slow = rng.random() < self.slow_fraction
        speed = self.slow_bytes_per_s if is_slow else 0.0
        return Script(index, tenant, turns, at_s, system, speed)

    def _turn(self, index: int, number: int, row: TraceRow | None, rng: random.Random) -> Turn:
        think_s = rng.expovariate(1 / self.think_s) if number and self.think_s else 0.0
        input_tokens, output_tokens = self._lengths(row, rng)
        messages: tuple[dict[str, str], ...] = ()
        segments: tuple[Segment, ...] = ()
        if self.prompts:
            prompt = self.prompts[(index + number) % len(self.prompts)]
            messages = prompt.messages or ({"role": "user", "content": prompt.prompt or ""},)
            output_tokens = prompt.output_tokens or output_tokens
        else:
            segments = (Segment(rng.getrandbits(SEED_BITS), input_tokens),)
        is_cancelled = rng.random() < self.cancel_fraction
        stop_after = rng.randint(1, output_tokens) if is_cancelled else 0
        return Turn(output_tokens, segments, messages, think_s, stop_after)

    def _lengths(self, row: TraceRow | None, rng: random.Random) -> tuple[int, int]:
        if row is None and self.length_pairs:
            row = rng.choice(self.length_pairs)
        if row is not None:
            return row.input_tokens, row.output_tokens
        return self.input_tokens.draw(rng), self.output_tokens.draw(rng)

    def _seed_of(self, name: str) -> int:
        return random.Random(f"{self.seed}/{name}").getrandbits(SEED_BITS)

    def replay(self, index: int, tenant: int, row: TraceRow, block_tokens: int) -> Script:
        """Draw the script of a trace row: its lengths, and its prefix blocks as text that repeats."""
        script = self.script(index, tenant, row.at_s, row)
        if not row.blocks or self.prompts:
            return script
        segments = []
        left = row.input_tokens
        for block in row.blocks:
            size = min(block_tokens, left)
            if size > 0:
                segments.append(Segment(self._seed_of(f"block/{block}"), size))
            left -= size
        if left > 0:
            segments.append(Segment(script.turns[0].segments[0].seed, left))
        first = msgspec.structs.replace(script.turns[0], segments=tuple(segments))
        return msgspec.structs.replace(script, turns=(first, *script.turns[1:]))


class OpenLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals that do not wait for answers."""

    profile: RateProfile
    law: GapLaw = "poisson"
    cv: float = 1.0


def open_schedule(loop: OpenLoop, workload: Workload, sources: Sequence[Source]) -> list[Script]:
    """Draw every script of an open loop, in order of arrival. Tenants with a rate of their own are separate
    processes; the others share one, each arrival drawn by share."""
    mean_rate = loop.profile.expected_arrivals / loop.profile.duration_s
    shares = [source.share for source in sources]
    arrivals: list[tuple[float, int]] = []
    for tenant, source in enumerate(sources):
        if source.rate is not None:
            rng = random.Random(f"{workload.seed}/tenant/{source.tenant.name}")
            own = loop.profile.scaled(source.rate / mean_rate)
            times = draw_arrivals(own, unit_gaps(loop.law, loop.cv, rng))
            arrivals.extend((at_s, tenant) for at_s in times)
    if sum(shares) > 0:
        rng = random.Random(f"{workload.seed}/arrivals")
        times = draw_arrivals(loop.profile, unit_gaps(loop.law, loop.cv, rng))
        arrivals.extend(zip(times, rng.choices(range(len(sources)), shares, k=len(times)), strict=True))
    arrivals.sort()
    return [workload.script(index, tenant, at_s) for index, (at_s, tenant) in enumerate(arrivals)]


def trace_schedule(trace: Trace, workload: Workload, sources: Sequence[Source]) -> list[Script]:
    """Turn a trace into scripts. A client of the trace is always the same tenant, drawn by share."""
    shares = [source.share if source.rate is None else source.rate for source in sources]
    scripts = []
    for index, row in enumerate(trace.rows):
        rng = random.Random(f"{workload.seed}/client/{row.client or index}")
        tenant = rng.choices(range(len(sources)), shares)[0]
        scripts.append(workload.replay(index, tenant, row, trace.block_tokens))
    return scripts
