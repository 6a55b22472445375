"""Two applications without a model on a running cluster: `python -m tests.e2e.two_models ADDRESS`."""

import sys

import ray
from ray import serve

from cluster.bench.null_serve import build

if __name__ == "__main__":
    ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
    engine = {"device": "cpu", "num_threads": 1, "max_num_seqs": 2}
    serve.run_many(
        [
            serve.RunTarget(build({"name": name, "engine": engine}), name=name, route_prefix=f"/{name}")
            for name in ("small", "large")
        ]
    )
