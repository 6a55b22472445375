"""A runner without a model: its tokens depend on the sequence alone, and it watches the KV cache."""

from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.api import FinishReason, GenerateRequest, SamplingParams
from replicas.config import ResolvedConfig
from replicas.engine import Engine
from replicas.scheduler import Outputs
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence, Step, StepResult, Verified

VOCAB_SIZE = 1000
EOS = 0


def expected_token(token_ids: list[int], index: int) -> int:
    """What the fake model says after these tokens; never EOS."""
    return 1 + (7 * token_ids[-1] + 3 * len(token_ids) + 31 * index + sum(token_ids[-4:])) % (VOCAB_SIZE - 1)


def expected_output(prompt: tuple[int, ...], num_tokens: int, index: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(expected_token(token_ids, index))
    return token_ids[len(prompt) :]


@dataclass
class FakeRunner:
    """Keeps, per KV slot, the token whose K and V would lie there, and refuses to read a wrong one."""

    config: ResolvedConfig
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    fail_on: set[int] = field(default_factory=set)
    """Raise when a sequence of these request ids is in the step."""
    model: Callable[[list[int], int], int] = expected_token
    """Tokens so far and output index -> the next token."""

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        for entry in step.sequences:
            if entry.sequence.request.request_id in self.fail_on:
                raise RuntimeError(f"cannot run request {entry.sequence.request.request_id}")
        for entry in step.sequences:
            token_ids = [*entry.sequence.token_ids, *entry.drafts]
            for position in range(entry.start, entry.start + entry.num_new_tokens):
                self.slots[self._slot(entry.sequence, position)] = token_ids[position]
        result = StepResult(token_ids=[])
        for i, entry in enumerate(step.sequences):
            token_ids = [*entry.sequence.token_ids, *entry.drafts]
            for position in range(entry.start + entry.num_new_tokens):
                found = self.slots.get(self._slot(entry.sequence, position))
                wanted = token_ids[position]
                assert found == wanted, f"position {position}: {found} in the cache, {wanted} in the sequence"
            said = self._say(entry)
            result.token_ids.append(said[0] if entry.samples else None)
            if said[1:]:
                result.verified[i] = Verified(token_ids=said[1:])
        return result

    def _say(self, entry: ScheduledSequence) -> list[int]:
        """What the model says after the sequence, and after each of its drafts that are right."""
        token_ids = list(entry.sequence.token_ids)
        said = [self.model(token_ids, entry.sequence.index)]
        for draft in entry.drafts:
            if said[-1] != draft:
                break
            token_ids.append(draft)
            said.append(self.model(token_ids, entry.sequence.index))
        return said

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        size = self.config.block_size
        return sequence.block_table[position // size], position % size


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def config(**changes: object) -> ResolvedConfig:
    values: dict[str, object] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 128,
        "aging_s": 10.0,
    }
    return ResolvedConfig(**(values | changes))  # type: ignore[arg-type]


def engine(clock: Clock | None = None, **changes: object) -> tuple[Engine, FakeRunner]:
    resolved = config(**changes)
    runner = FakeRunner(resolved)
    built = Engine(
        resolved,
        runner,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        clock=clock or Clock(),
    )
    return built, runner


def request(
    request_id: int, prompt: tuple[int, ...] | int, max_tokens: int = 8, **changes: object
) -> GenerateRequest:
    """A request; an integer prompt stands for so many tokens that no other request id shares."""
    if isinstance(prompt, int):
        prompt = tuple(1 + (request_id * 37 + i) % (VOCAB_SIZE - 1) for i in range(prompt))
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        **changes,  # type: ignore[arg-type]
    )


@dataclass
class Collected:
    """What the owners saw, by (request id, index)."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[int, int], FinishReason] = field(default_factory=dict)
    errors: dict[tuple[int, int], str] = field(default_factory=dict)
    cached: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, outputs: Outputs) -> None:
        for deltas in outputs.values():
            for delta in deltas:
                key = delta.request_id, delta.index
                assert key not in self.finished, f"{key} goes on after its finish"
                self.tokens.setdefault(key, []).extend(delta.token_ids)
                if delta.num_cached_tokens is not None:
                    assert key not in self.cached
                    self.cached[key] = delta.num_cached_tokens
                if delta.finish_reason is not None:
                    self.finished[key] = delta.finish_reason
                if delta.error is not None:
                    self.errors[key] = delta.error


def run_until_idle(engine: Engine, collected: Collected | None = None, max_steps: int = 5000) -> Collected:
    collected = collected or Collected()
    for _ in range(max_steps):
        if not engine.has_work:
            engine.scheduler.check_integrity()
            return collected
        collected.add(engine.step())
        engine.scheduler.check_integrity()
    raise AssertionError(f"still busy after {max_steps} steps")
