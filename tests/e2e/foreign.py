"""A deployment that is not ours under SlaPolicy: `python -m tests.e2e.foreign ADDRESS FIGURES`.

Its replicas report, under names of their own, what the JSON file FIGURES says.
"""

import json
import sys
from pathlib import Path

import ray
from ray import serve


@serve.deployment
class Worker:
    """Says that it has the work that the file tells of."""

    def __init__(self, figures: str) -> None:
        self._figures = Path(figures)

    def record_autoscaling_stats(self) -> dict[str, float]:
        figures: dict[str, float] = json.loads(self._figures.read_text())
        return figures


if __name__ == "__main__":
    address, figures = sys.argv[1:]
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    policy = {
        "policy_function": "cluster.serve_policy:SlaPolicy",
        "policy_kwargs": {
            "min_replicas": 1,
            "max_replicas": 3,
            "interval_s": 0.5,
            "demand_span_s": 2,
            "downscale_delay_s": 2,
            "tiers": [{"name": "all", "level": 0, "ttft_target_ms": 2000}],
            "metrics": {"work_s": "my_work_seconds_total", "queued_work_s": "my_backlog_seconds"},
        },
    }
    scaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
        "policy": policy,
    }
    worker = Worker.options(autoscaling_config=scaling, ray_actor_options={"num_cpus": 0})  # type: ignore[attr-defined]
    serve.run(worker.bind(figures), name="foreign", route_prefix="/foreign")
