"""Charts of simulated runs, as one HTML page without anything beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.simulation.measures import WINDOW_S, TierMeasures, Window
from cluster.simulation.world import Outcome
from load.page import card, charts, page
from load.plot import Line, line_chart
from router.tenants import Tier


def write_page(path: Path, outcomes: Sequence[Outcome], tiers: Sequence[Tier]) -> None:
    """Write the charts of the first outcome; the file is replaced."""
    outcome = outcomes[0]
    measures = {tier.name: outcome.measures.tiers[tier.level] for tier in tiers}
    cards = [
        card("Replicas wanted", line_chart([_replicas(outcome)], "minutes", "replicas")),
        card("Requests", line_chart(_by_minute(measures, _requests), "minutes", "requests per minute")),
        card(
            "First tokens too late, or never",
            line_chart(_by_minute(measures, _late), "minutes", "% of the requests"),
        ),
        card("Gaps over the target", line_chart(_by_minute(measures, _over), "minutes", "% of the gaps")),
        card(
            "Time to first token", line_chart(_distribution(measures), "ms", "% of the requests", log_x=True)
        ),
    ]
    path.write_text(page("Headway simulation", ["<h1>Headway simulation</h1>", charts(cards)]), "utf-8")


def _replicas(outcome: Outcome) -> Line:
    end_s = outcome.started_s + outcome.virtual_s
    ends = [at_s for at_s, _ in outcome.targets[1:]] + [end_s]
    points: list[tuple[float, float | None]] = []
    for (at_s, count), until_s in zip(outcome.targets, ends, strict=True):
        points += [(at_s / 60, float(count)), (until_s / 60, float(count))]
    return Line(name="replicas", points=points)


def _by_minute(measures: dict[str, TierMeasures], value: Callable[[Window], float]) -> list[Line]:
    return [
        Line(
            name=name,
            points=[
                (minute * WINDOW_S / 60, value(window)) for minute, window in sorted(tier.windows.items())
            ],
        )
        for name, tier in measures.items()
    ]


def _requests(window: Window) -> float:
    return float(window.requests)


def _late(window: Window) -> float:
    return 100 * window.ttft_missed / window.requests if window.requests else 0.0


def _over(window: Window) -> float:
    return 100 * window.gaps_over / window.gaps if window.gaps else 0.0


def _distribution(measures: dict[str, TierMeasures]) -> list[Line]:
    shares = [share / 100 for share in (*range(1, 100), 99.5, 99.9)]
    return [
        Line(name=name, points=[(tier.ttft.quantile(share) * 1e3, 100 * share) for share in shares])
        for name, tier in measures.items()
        if tier.ttft.count
    ]
