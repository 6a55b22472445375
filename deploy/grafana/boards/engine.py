"""Engine: steps, chunks, batches, KV."""

from typing import Final

from deploy.grafana.board import Board, Panel, Query, heatmap, quantiles, rate, total

ENGINE: Final = Board(
    uid="headway-engine",
    title="Headway / Engine",
    panels=(
        Panel(title="Step time", queries=quantiles("ray_headway_engine_step_ms", "", 0.5, 0.99), unit="ms"),
        Panel(
            title="Step time p99, by replica",
            queries=quantiles("ray_headway_engine_step_ms", "replica", 0.99),
            unit="ms",
            help="The worst replica decides what clients see; percentiles cannot be averaged.",
        ),
        Panel(
            title="Gaps inside the engine",
            queries=quantiles("ray_headway_engine_itl_ms", "", 0.5, 0.99),
            unit="ms",
        ),
        heatmap("Step time, ms", "ray_headway_engine_step_ms"),
        heatmap("Prefill chunk, tokens", "ray_headway_engine_chunk_tokens", "short"),
        Panel(
            title="Sequences per step",
            queries=quantiles("ray_headway_engine_batch_sequences", "", 0.5, 0.99),
        ),
        Panel(
            title="Running sequences",
            queries=(
                Query(expr=total("ray_headway_running_sequences", "tier"), legend="{{tier}}"),
                Query(expr=total("ray_headway_seats"), legend="seats"),
            ),
        ),
        Panel(
            title="Waiting in replicas",
            queries=(Query(expr=total("ray_headway_waiting_sequences", "tier"), legend="{{tier}}"),),
        ),
        Panel(
            title="KV blocks",
            queries=(
                Query(expr=total("ray_headway_kv_used_blocks"), legend="used"),
                Query(expr=total("ray_headway_kv_blocks"), legend="pool"),
            ),
        ),
        Panel(
            title="Preemptions per second",
            queries=(
                Query(
                    expr=rate("ray_headway_engine_preemptions_total", "replica"),
                    legend="{{replica}}",
                    event_only=True,
                ),
            ),
        ),
        Panel(
            title="Tokens per second",
            queries=(
                Query(expr=rate("ray_headway_engine_computed_tokens_total"), legend="computed"),
                Query(expr=rate("ray_headway_engine_output_tokens_total"), legend="output"),
                Query(expr=rate("ray_headway_engine_cached_tokens_total"), legend="cached", event_only=True),
            ),
        ),
        Panel(
            title="Guessed tokens per second",
            queries=(
                Query(expr=rate("ray_headway_engine_draft_tokens_total"), legend="guessed", event_only=True),
                Query(expr=rate("ray_headway_engine_accepted_tokens_total"), legend="right", event_only=True),
            ),
            help="Speculation by prompt lookup, where it is on.",
        ),
        Panel(
            title="Share of the time in scheduler and model",
            queries=(
                Query(
                    expr=f"{rate('ray_headway_engine_scheduler_seconds_total')} / "
                    f"{rate('ray_headway_replica_seconds_total')}",
                    legend="scheduler",
                ),
                Query(
                    expr=f"{rate('ray_headway_engine_runner_seconds_total')} / "
                    f"{rate('ray_headway_replica_seconds_total')}",
                    legend="model",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Outputs by end",
            queries=(Query(expr=rate("ray_headway_engine_ended_total", "how"), legend="{{how}}"),),
        ),
        Panel(
            title="Chunk at its floor",
            queries=(Query(expr=total("ray_headway_engine_overloaded", "replica"), legend="{{replica}}"),),
            help="1 = the ITL target cannot be kept with this load; prompts move as slowly as they may.",
        ),
    ),
)
