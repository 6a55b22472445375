"""Router: queues, refusals, tenants, routing, where the time goes."""

from typing import Final

from deploy.grafana.board import APP, WINDOW, Board, Panel, Query, quantiles, rate, total

ROUTER: Final = Board(
    uid="headway-router",
    title="Headway / Router",
    panels=(
        Panel(
            title="Waiting requests",
            queries=(Query(expr=total("ray_headway_queued_requests", "tier"), legend="{{tier}}"),),
        ),
        Panel(
            title="Age of the queue",
            queries=(Query(expr=total("ray_headway_queue_age_s", "tier", "max"), legend="{{tier}}"),),
            unit="s",
        ),
        Panel(
            title="Wait in the queue",
            queries=quantiles("ray_headway_queue_wait_ms", "tier", 0.5, 0.99),
            unit="ms",
        ),
        Panel(
            title="Refusals by code",
            queries=(
                Query(
                    expr=rate("ray_headway_requests_total", "code", 'outcome="refused"'),
                    legend="{{code}}",
                    event_only=True,
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Failures and hang-ups",
            queries=(
                Query(
                    expr=rate("ray_headway_requests_total", "outcome, code", 'outcome=~"failed|client_gone"'),
                    legend="{{outcome}} {{code}}",
                    event_only=True,
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Where the time goes, p99",
            queries=tuple(
                Query(expr=query.expr, legend=part)
                for part, metric in (
                    ("router", "ray_headway_prepare_ms"),
                    ("queue", "ray_headway_queue_wait_ms"),
                    ("engine to frame", "ray_headway_engine_to_frame_ms"),
                    ("frame to router", "ray_headway_frame_to_router_ms"),
                    ("replica, first token", "ray_headway_replica_ttft_ms"),
                )
                for query in quantiles(metric, "", 0.99)
            ),
            unit="ms",
        ),
        Panel(
            title="Service by tenant",
            queries=(
                Query(
                    expr=f'sum by (tenant) (rate(ray_headway_tenant_tokens_total{{{APP}, kind="prompt"}}'
                    f"{WINDOW})) + 2 * sum by (tenant) (rate(ray_headway_tenant_tokens_total"
                    f'{{{APP}, kind="output"}}{WINDOW}))',
                    legend="{{tenant}}",
                ),
            ),
            help="What fairness counts per second: input 1, output 2; cached input is not taken off here.",
        ),
        Panel(
            title="Tokens left by tenant",
            queries=(
                Query(
                    expr=f'max by (tenant) (ray_headway_quota_left{{{APP}, limit="tokens"}})',
                    legend="{{tenant}}",
                    event_only=True,
                ),
            ),
            help="Of the tokens per minute, not leased by any router.",
        ),
        Panel(
            title="Expected prefix hits",
            queries=(
                Query(
                    expr=f"({rate('ray_headway_matched_tokens_total')} or vector(0)) / "
                    f"{rate('ray_headway_routed_tokens_total')}",
                    legend="share of prompt tokens",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Resumed and asked back",
            queries=(
                Query(expr=rate("ray_headway_resumed_total"), legend="resumed", event_only=True),
                Query(expr=rate("ray_headway_withdrawn_total"), legend="asked back", event_only=True),
            ),
        ),
        Panel(
            title="Open completions",
            queries=(Query(expr=total("ray_headway_open_requests", "replica"), legend="{{replica}}"),),
        ),
        Panel(
            title="Ledger of quotas",
            queries=(
                Query(expr=f"min(ray_headway_ledger_up{{{APP}}})", legend="answers"),
                Query(expr=f"max(ray_headway_ledger_routers{{{APP}}})", legend="routers"),
                Query(
                    expr=rate("ray_headway_access_lines_dropped_total"),
                    legend="lost lines of the access log",
                    event_only=True,
                ),
            ),
        ),
    ),
)
