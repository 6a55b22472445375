"""Overview: is the promise kept, and what stands against it?"""

from typing import Final

from deploy.grafana.board import APP, Board, Panel, Query, heatmap, quantiles, rate, total

BUDGET: Final = 0.01
"""Share of the answers that may break a promise about the 99th percentile."""
_ANSWERS: Final = "ray_headway_answers_total"
_ALL: Final = rate(_ANSWERS, "tier")
_BROKEN: Final = "({} or 0 * {}) / {}".format(rate(_ANSWERS, "tier", 'kept="no"'), _ALL, _ALL)


OVERVIEW: Final = Board(
    uid="headway-overview",
    title="Headway / Overview",
    panels=(
        Panel(
            title="Promise kept, by tier",
            queries=(Query(expr=f"1 - {_BROKEN}", legend="{{tier}}"),),
            unit="percentunit",
            form="stat",
            width=12,
            help="Answers whose first token came in time and at most 1% of whose gaps were too long.",
        ),
        Panel(
            title="Budget burn, by tier",
            queries=(Query(expr=f"{_BROKEN} / {BUDGET}", legend="{{tier}}"),),
            width=12,
            help="1 = exactly as many broken answers as a promise about the 99th percentile allows.",
        ),
        Panel(
            title="Time to first token",
            queries=(
                *quantiles("ray_headway_ttft_ms", "tier", 0.5, 0.99),
                Query(expr=total("ray_headway_ttft_target_ms", "tier", "max"), legend="{{tier}} target"),
            ),
            unit="ms",
            width=12,
        ),
        Panel(
            title="Inter-token latency",
            queries=(
                *quantiles("ray_headway_itl_ms", "tier", 0.5, 0.99),
                Query(
                    expr=total("ray_headway_itl_target_ms", "tier", "max"),
                    legend="{{tier}} target",
                    event_only=True,
                ),
            ),
            unit="ms",
            width=12,
        ),
        heatmap("First tokens, ms", "ray_headway_ttft_ms"),
        heatmap("Gaps between tokens, ms", "ray_headway_itl_ms"),
        Panel(
            title="Requests by outcome",
            queries=(Query(expr=rate("ray_headway_requests_total", "outcome"), legend="{{outcome}}"),),
            unit="reqps",
        ),
        Panel(
            title="Tokens per second",
            queries=(
                Query(expr=rate("ray_headway_prompt_tokens_total"), legend="prompt"),
                Query(expr=rate("ray_headway_cached_tokens_total"), legend="cached", event_only=True),
                Query(expr=rate("ray_headway_output_tokens_total"), legend="output"),
            ),
        ),
        Panel(
            title="Longest silence of a running stream",
            queries=(Query(expr=total("ray_headway_open_gap_ms", "tier", "max"), legend="{{tier}}"),),
            unit="ms",
        ),
        Panel(
            title="Replicas",
            queries=(
                Query(expr=f"min(ray_headway_connected_replicas{{{APP}}})", legend="connected"),
                Query(
                    expr=f'max(ray_serve_autoscaling_target_replicas{{{APP}, deployment="Replica"}})',
                    legend="wanted",
                ),
            ),
        ),
        Panel(
            title="Waiting requests",
            queries=(
                Query(expr=total("ray_headway_queued_requests", "tier"), legend="{{tier}} in routers"),
                Query(expr=total("ray_headway_waiting_sequences", "tier"), legend="{{tier}} in replicas"),
            ),
        ),
        Panel(
            title="KV blocks in use",
            queries=(
                Query(
                    expr=f"{total('ray_headway_kv_used_blocks', 'replica')} / "
                    f"{total('ray_headway_kv_blocks', 'replica')}",
                    legend="{{replica}}",
                ),
            ),
            unit="percentunit",
        ),
    ),
)
