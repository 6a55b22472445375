"""Cost: tokens per second of a replica or GPU."""

from typing import Final

from deploy.grafana.board import APP, WINDOW, Board, Panel, Query, rate

COST: Final = Board(
    uid="headway-cost",
    title="Headway / Cost",
    panels=(
        Panel(
            title="Output tokens per replica-second",
            queries=(
                Query(
                    expr=f"{rate('ray_headway_engine_output_tokens_total')} / "
                    f"{rate('ray_headway_replica_seconds_total')}",
                    legend="all devices",
                ),
                Query(
                    expr=f"{rate('ray_headway_engine_output_tokens_total')} / "
                    + rate("ray_headway_replica_seconds_total", more='device="cuda"'),
                    legend="per GPU-second",
                    event_only=True,
                ),
            ),
            width=12,
            help="A replica has one GPU; times its price per second, this is what a token costs.",
        ),
        Panel(
            title="Replicas paid for",
            queries=(Query(expr=rate("ray_headway_replica_seconds_total", "device"), legend="{{device}}"),),
            width=12,
        ),
        Panel(
            title="Output tokens by tier",
            queries=(Query(expr=rate("ray_headway_output_tokens_total", "tier"), legend="{{tier}}"),),
        ),
        Panel(
            title="Output tokens by tenant",
            queries=(
                Query(
                    expr=f'sum by (tenant) (rate(ray_headway_tenant_tokens_total{{{APP}, kind="output"}}'
                    f"{WINDOW}))",
                    legend="{{tenant}}",
                ),
            ),
        ),
        Panel(
            title="Time in the model",
            queries=(
                Query(
                    expr=f"{rate('ray_headway_engine_runner_seconds_total', 'replica')} / "
                    f"{rate('ray_headway_replica_seconds_total', 'replica')}",
                    legend="{{replica}}",
                ),
            ),
            unit="percentunit",
            help="What is left is paid for and idle.",
        ),
    ),
)
