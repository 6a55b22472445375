"""A Ray cluster with Serve but no application: `python -m tests.e2e.cluster CONFIG`, until it is told to end.

Prints two lines, the second with the cluster's address, when others can join.
"""

import os
import random
import signal
import sys
import tempfile
from pathlib import Path

from cluster.config import load_config
from cluster.environment import free_ports, serve_environment
from cluster.haproxy import write_haproxy
from cluster.processes import adopt_orphans, end_descendants

if __name__ == "__main__":
    config = load_config(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="headway-", dir="/tmp") as name:
        folder = Path(name)
        adopt_orphans()
        os.environ.update(serve_environment(config.http, config.metrics, folder, free_ports(random.Random())))
        os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_haproxy(folder))
        import ray

        from cluster.app import local_ray

        with local_ray(config, folder):
            print("a cluster is up\n" + ray.get_runtime_context().gcs_address, flush=True)
            signal.sigwait({signal.SIGTERM})
        end_descendants(3.0)
