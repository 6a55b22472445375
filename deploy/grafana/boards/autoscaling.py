"""Autoscaling: what was wanted, what there is, and why."""

from typing import Final

from deploy.grafana.board import APP, Annotation, Board, Panel, Query, rate, total

AUTOSCALING: Final = Board(
    uid="headway-autoscaling",
    title="Headway / Autoscaling",
    annotations=(
        Annotation(
            name="Decisions",
            expr="sum by (application, reason) "
            f"(increase(ray_headway_autoscaling_reasons_total{{{APP}}}[1m])) > 0",
            text="{{reason}}",
        ),
    ),
    panels=(
        Panel(
            title="Replicas",
            queries=(
                Query(
                    expr=f'max(ray_serve_autoscaling_target_replicas{{{APP}, deployment="Replica"}})',
                    legend="Serve's target",
                ),
                Query(
                    expr=f"max(ray_headway_autoscaling_target_replicas{{{APP}}})",
                    legend="decided",
                    event_only=True,
                ),
                Query(expr=f"count(ray_headway_seats{{{APP}}})", legend="ready"),
                Query(
                    expr=f"max(ray_headway_autoscaling_running_replicas{{{APP}}})",
                    legend="running, as the autoscaler sees it",
                    event_only=True,
                ),
                Query(expr=f"min(ray_headway_connected_replicas{{{APP}}})", legend="connected"),
            ),
            width=12,
        ),
        Panel(
            title="Replicas that each signal asks for",
            queries=(
                Query(
                    expr=total("ray_headway_autoscaling_load_replicas", "signal", "max"),
                    legend="{{signal}}",
                    event_only=True,
                ),
            ),
            width=12,
        ),
        Panel(
            title="Reasons of decisions, per minute",
            queries=(
                Query(
                    expr=f"60 * {rate('ray_headway_autoscaling_reasons_total', 'reason')}",
                    legend="{{reason}}",
                    event_only=True,
                ),
            ),
        ),
        Panel(
            title="Seats in use",
            queries=(
                Query(
                    expr=f"sum(ray_headway_running_sequences{{{APP}}}) / sum(ray_headway_seats{{{APP}}})",
                    legend="share",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Demand: arrivals, refused ones included",
            queries=(Query(expr=rate("ray_headway_requests_total", "tier"), legend="{{tier}}"),),
            unit="reqps",
        ),
    ),
)
