"""Logprobs of prompt tokens: transformers' own, whatever the chunks, the cache and preemption do."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from replicas import scheduler
from replicas.api import MAX_FRAME_BYTES, ReplicaLoad, StepOutputs, TokenDelta, TokenLogprobs
from replicas.engine import Engine
from replicas.frames import FrameWindow
from replicas.runner import TorchRunner
from replicas.startup import OpenedRunner
from replicas.step import Step, StepResult
from tests.replicas.test_model_engine import engine, open_tiny, prompts, request
from tests.replicas.tiny_models import llama, save

TIGHT = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def opened(folder: Path) -> OpenedRunner:
    return open_tiny(folder, TIGHT)


def reference(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """Logprobs of every possible token after each prompt token but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), dim=-1)


def run(built: Engine) -> dict[int, TokenDelta]:
    """Run until idle; all that came, by request id."""
    merged: dict[int, TokenDelta] = {}
    while built.has_work:
        for deltas in built.step().values():
            for delta in deltas:
                if delta.request_id in merged:
                    assert delta.prompt_logprobs is None
                    merged[delta.request_id].append(delta)
                else:
                    merged[delta.request_id] = delta
    return merged


def check(folder: Path, prompt: tuple[int, ...], found: list[TokenLogprobs] | None, top: int) -> None:
    expected = reference(folder, prompt)
    assert found is not None
    assert len(found) == len(prompt) - 1
    for entry, row, token in zip(found, expected, prompt[1:], strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        values, ids = row.topk(top)
        assert [one.token_id for one in entry.top] == ids.tolist()
        assert [one.logprob for one in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_a_cached_prefix_loses_no_position(folder: Path, opened: OpenedRunner) -> None:
    built, watched = engine(opened)
    (prompt,) = prompts(60)
    built.add(request(1, prompt, max_tokens=2), "")
    run(built)
    built.add(request(2, prompt, max_tokens=2, prompt_logprobs=3), "")
    delta = run(built)[2]
    assert watched.chunks
    assert delta.num_cached_tokens == 0
    check(folder, prompt, delta.prompt_logprobs, top=3)


def test_preemption_neither_loses_nor_doubles_a_position(folder: Path, opened: OpenedRunner) -> None:
    built, watched = engine(opened)
    each = prompts(60, 70, 50)
    for i, prompt in enumerate(each):
        built.add(request(i, prompt, max_tokens=20, prompt_logprobs=0), "")
    deltas = run(built)
    assert watched.preempted
    for i, prompt in enumerate(each):
        check(folder, prompt, deltas[i].prompt_logprobs, top=0)


def test_a_step_reports_no_more_positions_than_fit(
    folder: Path, opened: OpenedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    execute = TorchRunner.execute

    def counted(runner: TorchRunner, planned: Step) -> StepResult:
        result = execute(runner, planned)
        most.append(sum(map(len, result.prompt_logprobs.values())))
        return result

    monkeypatch.setattr(TorchRunner, "execute", counted)
    monkeypatch.setattr(scheduler, "Step", lambda **fields: Step(prompt_rows_left=7, **fields))
    built, _ = engine(opened)
    each = prompts(60, 20)
    for i, prompt in enumerate(each):
        built.add(request(i, prompt, max_tokens=1, prompt_logprobs=1), "")
    deltas = run(built)
    assert max(most) == 7
    for i, prompt in enumerate(each):
        check(folder, prompt, deltas[i].prompt_logprobs, top=1)


def test_a_resumed_request_does_not_report_its_prompt_again(opened: OpenedRunner) -> None:
    built, _ = engine(opened)
    resumed = request(1, prompts(20)[0], max_tokens=5, prompt_logprobs=1)
    built.add(msgspec.structs.replace(resumed, resumed_output_ids=((7, 8),)), "")
    assert run(built)[1].prompt_logprobs is None


def test_frames_split_the_logprobs_of_a_long_prompt() -> None:
    window = FrameWindow(1)
    window.connect(0, 0.0)
    entries = [TokenLogprobs(-float(i)) for i in range(20_000)]
    delta = TokenDelta(1, 0, 0, [5], prompt_logprobs=list(entries), num_cached_tokens=0)
    frames = window.push([delta], ReplicaLoad(), 0.0, 0.0)
    assert max(map(len, frames)) < MAX_FRAME_BYTES
    decoded = [msgspec.msgpack.decode(frame, type=StepOutputs).deltas[0] for frame in frames]
    assert len(decoded) > 1
    for later in decoded[1:]:
        decoded[0].append(later)
    assert decoded[0].prompt_logprobs == entries
    assert decoded[0].token_ids == [5]
