"""Deploy a null server's configuration again: `python -m tests.e2e.redeploy ADDRESS FOLDER CONFIG NUMBER`.

Returns when the new replicas serve; old ones may still finish.
"""

import sys
import time
from pathlib import Path

import msgspec
import ray
from ray import serve

from cluster.app import deploy
from cluster.bench.null_serve import open_null_pump
from cluster.config import load_config

if __name__ == "__main__":
    address, folder, config_file, number = sys.argv[1:]
    config = msgspec.structs.replace(load_config(Path(config_file)), replicas=int(number))
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    serve.start()
    deploy(config, open_null_pump, Path(folder) / "progress")
    while serve.status().applications[config.name].status != "RUNNING":
        time.sleep(0.1)
