"""The result of a run as data: written as JSON, drawn as Markdown and HTML. Schema: docs/load.md."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from load import measures
from load.errors import LoadError
from load.files import read_file
from load.measures import is_answered, is_judged, keeps, num_tokens
from load.plan import Tenant
from load.record import RequestRecord
from load.run import Outcome
from load.series import Series, build_series
from load.statistics import Summary, curve, jain_index, max_min_shares, summarise
from load.tenants import Cast, Slo

SCHEMA_VERSION: Final = 1
KIND: Final = "headway-load-report"
MAX_EXAMPLES: Final = 3


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The measures of some requests: of all, of a tier, of a tenant."""

    requests: int
    answered: int
    cancelled: int
    """Hung up on by us, as planned."""
    slow: int
    """Read slowly by us, as planned: in no latency and no goodput."""
    failed: int
    errors: dict[str, int]
    ttft_ms: Summary | None
    itl_ms: Summary | None
    event_gap_ms: Summary | None
    max_gap_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None
    queue_wait_ms: Summary | None
    """Where the server reports it in a header."""
    retry_wait_ms: Summary | None
    """Of the requests that were refused and tried again."""
    requests_per_s: float
    """Answered ones."""
    output_tokens_per_s: float
    """That arrived within the window."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    goodput_rps: float
    """Requests per second that kept their promise; without a promise, that were answered."""
    goodput_fraction: float
    """Of those that we neither hung up on nor read slowly."""
    slo: Slo | None = None
    tier: str | None = None


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """How well the tool itself did: a late or busy driver measures itself."""

    workers: int
    lateness_ms_p50: float
    lateness_ms_p99: float
    """Sent minus due."""
    lateness_ms_max: float
    loop_lag_ms_p99: float
    """How late timers fired; received bytes wait as long."""
    cpu_us_per_token: float | None
    cpu_share: float
    """CPU seconds of all workers per second of the run."""


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles 0, 0.01, ..., 1."""

    ttft_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `total` is flattened into the top level of the JSON."""

    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    name: str
    started_at: str
    configuration: dict[str, Any]
    is_valid: bool
    invalid_because: list[str]
    is_interrupted: bool
    wall_s: float
    window_s: tuple[float, float]
    """Requests due in here count; warm-up and cool-down are outside."""
    total: Group
    tiers: dict[str, Group]
    tenants: dict[str, Group]
    jain_index: float
    """Over tenants, of output tokens against the max-min fair part of what all tenants got together."""
    usage_missing: int
    usage_mismatches: int
    """Answers whose usage cannot be true: fewer tokens than events, or `length` at another length."""
    bundled_tokens: int
    """Tokens that came in an event with others (or brought no text)."""
    prompt_token_error: float | None
    """Mean of |prompt tokens - planned| / planned, where both are known."""
    error_examples: dict[str, list[str]]
    driver: Driver
    series: Series
    curves: Curves


def build_report(
    outcome: Outcome, cast: Cast, configuration: dict[str, Any], *,
    name: str, duration_s: float, warmup_s: float, cooldown_s: float, max_lateness_ms: float,
) -> Report:  # fmt: skip
    """Measure a run. Raises LoadError when nothing is left in the window."""
    window = (warmup_s, duration_s - cooldown_s)
    records = _due_within(outcome.records, window)
    tenants = cast.tenants
    slos = [cast.slo(tenant.tier) for tenant in tenants]
    by_tenant = [[record for record in records if record.tenant == i] for i in range(len(tenants))]
    tiers = sorted({tenant.tier for tenant in tenants})
    by_tier = {tier: [r for r in records if tenants[r.tenant].tier == tier] for tier in tiers}
    driver = _driver(outcome, records)
    problems = _problems(driver, max_lateness_ms, outcome)
    answered = [record for record in records if is_answered(record)]
    return Report(
        name=name,
        started_at=datetime.fromtimestamp(outcome.started_at, UTC).isoformat(timespec="milliseconds"),
        configuration=configuration,
        is_valid=not problems,
        invalid_because=problems,
        is_interrupted=outcome.is_interrupted,
        wall_s=outcome.wall_s,
        window_s=window,
        total=_group(records, slos, window, cast.slos.get("") if len(tiers) > 1 else cast.slo(tiers[0])),
        tiers={tier: _group(by_tier[tier], slos, window, cast.slo(tier), tier) for tier in tiers},
        tenants={
            tenant.name: _group(own, slos, window, slo, tenant.tier)
            for tenant, own, slo in zip(tenants, by_tenant, slos, strict=True)
        },
        jain_index=_fairness(tenants, by_tenant),
        usage_missing=sum(record.output_tokens is None for record in answered),
        usage_mismatches=sum(map(_is_mismatch, answered)),
        bundled_tokens=sum(max(0, num_tokens(record) - len(record.output_at)) for record in answered),
        prompt_token_error=_prompt_token_error(answered),
        error_examples=_examples(records),
        driver=driver,
        series=build_series(outcome.records),
        curves=_curves(records),
    )


def _due_within(records: list[RequestRecord], window: tuple[float, float]) -> list[RequestRecord]:
    due = [record for record in records if window[0] <= record.due_s <= window[1]]
    if not due:
        raise LoadError(f"no request was due between {window[0]:g} and {window[1]:g} s: nothing to report")
    return due


def _fairness(tenants: Sequence[Tenant], by_tenant: Sequence[list[RequestRecord]]) -> float:
    """Jain's index of what tenants got, each relative to what a fair server would have given it."""
    got = [float(sum(map(num_tokens, own))) for own in by_tenant]
    asked = [float(sum(map(_num_asked, own))) for own in by_tenant]
    fair = max_min_shares(sum(got), asked, [tenant.weight for tenant in tenants])
    return jain_index([g / f for g, f in zip(got, fair, strict=True) if f > 0])


def _num_asked(record: RequestRecord) -> int:
    # Nobody was denied what a hang-up of ours cut off.
    return num_tokens(record) if record.is_cancelled else max(num_tokens(record), record.asked_output_tokens)


def _values(records: Iterable[RequestRecord], measure: Callable[[RequestRecord], float | None]) -> Any:
    values = (measure(record) for record in records)
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _pooled(records: list[RequestRecord], measure: Callable[[RequestRecord], Any]) -> tuple[Any, Any]:
    arrays = [measure(record) for record in records]
    owners = np.repeat(np.arange(len(arrays)), [len(gaps) for gaps in arrays])
    return np.concatenate(arrays or [np.empty(0)]), owners


def _group(
    records: list[RequestRecord], slos: list[Slo | None], window: tuple[float, float],
    slo: Slo | None, tier: str | None = None,
) -> Group:  # fmt: skip
    """`slos`: the promise to each tenant; `slo`: the one to print."""
    length_s = max(window[1] - window[0], 1e-9)
    answered = [record for record in records if is_answered(record)]
    failures = Counter(error_name(record) for record in records if record.failure is not None)
    judged = [record for record in records if is_judged(record)]
    kept = sum(keeps(record, slos[record.tenant]) for record in judged)
    read = [record for record in records if not record.is_slow]
    whole = [record for record in answered if not record.is_slow]
    retried = [record for record in records if record.attempts > 1]
    return Group(
        requests=len(records),
        answered=len(answered),
        cancelled=sum(record.is_cancelled for record in records),
        slow=sum(record.is_slow for record in records),
        failed=failures.total(),
        errors=dict(failures.most_common()),
        ttft_ms=summarise(_values(read, measures.ttft_ms)),
        itl_ms=summarise(*_pooled(read, measures.itl_ms)),
        event_gap_ms=summarise(*_pooled(read, measures.event_gaps_ms)),
        max_gap_ms=summarise(_values(read, measures.max_gap_ms)),
        tpot_ms=summarise(_values(whole, measures.tpot_ms)),
        e2e_ms=summarise(_values(whole, measures.e2e_ms)),
        queue_wait_ms=summarise(_values(records, lambda record: record.queue_wait_ms)),
        retry_wait_ms=summarise(_values(retried, measures.retry_wait_ms)),
        requests_per_s=len(answered) / length_s,
        output_tokens_per_s=sum(_tokens_until(window[1], record) for record in records) / length_s,
        prompt_tokens=sum(record.prompt_tokens or record.asked_input_tokens for record in answered),
        output_tokens=sum(map(num_tokens, records)),
        cached_tokens=sum(record.cached_tokens or 0 for record in answered),
        goodput_rps=kept / length_s,
        goodput_fraction=kept / max(1, len(judged)),
        slo=slo,
        tier=tier,
    )


def _tokens_until(end_s: float, record: RequestRecord) -> int:
    arrived = int(np.count_nonzero(np.frombuffer(record.output_s) <= end_s))
    bundled = max(0, num_tokens(record) - len(record.output_at)) if record.done_s <= end_s else 0
    return arrived + bundled


def error_name(record: RequestRecord) -> str:
    """Return the kind of a failure; an HTTP status is a kind of its own."""
    assert record.failure is not None
    return f"http_{record.status}" if record.failure == "http_status" else str(record.failure)


def _is_mismatch(record: RequestRecord) -> bool:
    tokens = record.output_tokens
    if tokens is None:
        return False
    is_cut_elsewhere = record.finish_reason == "length" and tokens != record.asked_output_tokens
    return len(record.output_at) > tokens or is_cut_elsewhere


def _prompt_token_error(records: list[RequestRecord]) -> float | None:
    errors = [
        abs(record.prompt_tokens - record.asked_input_tokens) / record.asked_input_tokens
        for record in records
        # Later turns carry the conversation so far: only the first is as long as planned.
        if record.prompt_tokens is not None and record.asked_input_tokens and record.turn == 0
    ]
    return float(np.mean(errors)) if errors else None


def _examples(records: list[RequestRecord]) -> dict[str, list[str]]:
    examples: dict[str, list[str]] = {}
    for record in records:
        if record.failure is not None:
            shown = examples.setdefault(error_name(record), [])
            if len(shown) < MAX_EXAMPLES and record.detail not in shown:
                shown.append(record.detail)
    return examples


def _curves(records: list[RequestRecord]) -> Curves:
    records = [record for record in records if not record.is_slow]
    return Curves(
        ttft_ms=curve(_values(records, measures.ttft_ms)),
        itl_ms=curve(_pooled(records, measures.itl_ms)[0]),
        e2e_ms=curve(_values(filter(is_answered, records), measures.e2e_ms)),
    )


def _driver(outcome: Outcome, records: list[RequestRecord]) -> Driver:
    lateness = np.array([max(0.0, record.first_sent_s - record.due_s) for record in records]) * 1e3
    lags = np.concatenate([end.loop_lag_ms for end in outcome.ends] or [[]])
    cpu_s = sum(end.cpu_s for end in outcome.ends)
    num_events = sum(len(record.output_s) // 8 for record in outcome.records)
    return Driver(
        workers=len(outcome.ends),
        lateness_ms_p50=float(np.quantile(lateness, 0.5)),
        lateness_ms_p99=float(np.quantile(lateness, 0.99)),
        lateness_ms_max=float(lateness.max()),
        loop_lag_ms_p99=float(np.quantile(lags, 0.99)) if len(lags) else 0.0,
        cpu_us_per_token=cpu_s / num_events * 1e6 if num_events else None,
        cpu_share=cpu_s / outcome.wall_s if outcome.wall_s else 0.0,
    )


def _problems(driver: Driver, max_lateness_ms: float, outcome: Outcome) -> list[str]:
    problems = []
    for what, p99 in (("requests left", driver.lateness_ms_p99), ("timers fired", driver.loop_lag_ms_p99)):
        if p99 > max_lateness_ms:
            problems.append(
                f"{what} {p99:.1f} ms late (P99), more than {max_lateness_ms:g} ms: the driver was short of "
                "CPU and measured itself; add --workers, lower the rate, or use another machine"
            )
    if outcome.is_interrupted:
        problems.append("the run was interrupted")
    return problems


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON types, with `total` flattened into the top level, as docs/load.md has it."""
    fields: dict[str, Any] = msgspec.to_builtins(report)
    total = fields.pop("total")
    head = {key: fields.pop(key) for key in ("schema_version", "kind", "name", "started_at")}
    lateness = {"driver_lateness_ms_p99": report.driver.lateness_ms_p99}
    return {**head, **total, **lateness, **fields}


def read_report(path: Path) -> Report:
    """Read a file that holds `to_json` of a report. Raises LoadError for anything else."""
    data = read_file(path, "the report")
    try:
        fields = msgspec.json.decode(data)
        if not isinstance(fields, dict) or fields.get("kind") != KIND:
            raise LoadError(f"{path} is not a load report")
        if fields.get("schema_version") != SCHEMA_VERSION:
            version = fields.get("schema_version")
            raise LoadError(f"{path} has schema version {version!r}; this tool reads {SCHEMA_VERSION}")
        total = {name: fields.get(name) for name in Group.__struct_fields__}
        return msgspec.convert(fields | {"total": total}, Report)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LoadError(f"{path}: {error}") from error
