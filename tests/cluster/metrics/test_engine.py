from cluster.metrics import catalogue as c
from cluster.metrics.catalogue import Buckets, Metric
from cluster.metrics.engine import EngineFigures, StepMeasures
from replicas.engine import StepReport
from replicas.pump import EnginePump
from tests.replicas.fake_runner import engine, request, run_until_idle
from tests.replicas.test_pump import CARD


def report(**changes: object) -> StepReport:
    given = {"step_s": 0.004, "gap_s": 0.006, "num_sequences": 3, "num_decodes": 2, "num_prompt_tokens": 16}
    return StepReport(**given | changes)  # type: ignore[arg-type]


def test_a_gap_counts_once_per_decode() -> None:
    measures = StepMeasures()
    measures.note(report())
    assert (measures.itl_ms.num_observed, measures.itl_ms.sum) == (2, 12.0)
    assert (measures.step_ms.num_observed, measures.step_ms.sum) == (1, 4.0)
    assert (measures.chunk_tokens.sum, measures.batch_sequences.sum) == (16.0, 3.0)


def test_steps_without_decodes_or_prompts_leave_those_out() -> None:
    measures = StepMeasures()
    measures.note(report(num_decodes=0, gap_s=0.1))
    measures.note(report(gap_s=None))
    measures.note(report(num_prompt_tokens=0))
    assert (measures.itl_ms.num_observed, measures.chunk_tokens.num_observed) == (2, 2)


def test_a_replica_reports_all_tiers_those_at_rest_too() -> None:
    built, _ = engine()
    now = [5.0]
    figures = EngineFigures(EnginePump(built, CARD), {0: "gold", 7: "free"}, "cpu", lambda: now[0])
    built.add(request(1, 6, max_tokens=3), "a")
    run_until_idle(built)
    now[0] = 8.0
    values: dict[tuple[Metric, tuple[str, ...]], float | Buckets] = {
        (sample.metric, sample.labels): sample.value for sample in figures.samples()
    }
    assert values[c.RUNNING, ("gold",)] == values[c.WAITING, ("free",)] == 0
    assert values[c.ENGINE_OUTPUT, ()] == 3
    assert values[c.ENGINE_ENDED, ("finished",)] == 1
    assert values[c.REPLICA_S, ("cpu",)] == 3.0
    steps = values[c.STEP, ()]
    assert isinstance(steps, Buckets)
    assert sum(steps.counts) == 3


def test_guesses_are_reported_beside_those_that_were_right() -> None:
    built, runner = engine(num_speculative_tokens=4)
    runner.model = lambda token_ids, _: (
        1 + len(token_ids) % 4 if len(token_ids) < 20 else 500 + len(token_ids)
    )
    built.add(request(1, 6, max_tokens=40), "a")
    run_until_idle(built)
    figures = EngineFigures(EnginePump(built, CARD), {}, "cpu", lambda: 0.0)
    values = {sample.metric: sample.value for sample in figures.samples()}
    drafted, accepted = values[c.ENGINE_DRAFTED], values[c.ENGINE_ACCEPTED]
    assert isinstance(drafted, float | int)
    assert isinstance(accepted, float | int)
    assert 0 < accepted < drafted
