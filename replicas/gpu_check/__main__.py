"""python -m replicas.gpu_check [--device cuda|cpu]: parity, equality, then the table of speeds."""

import argparse
import sys
import time

import torch
import transformers

from replicas.gpu_check.equality import check_equality
from replicas.gpu_check.parity import check_parity
from replicas.gpu_check.speed import LARGE, TINY, measure


def main(argv: list[str] | None = None) -> int:
    """Return 0 when all checks pass, 1 when one fails, 2 when there is no such device."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, no graphs"
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    started_at = time.perf_counter()
    device = torch.device(arguments.device)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {_describe(device)}")
    passed = check_parity(device)
    passed &= check_equality(device)
    measure(device, LARGE if device.type == "cuda" else TINY)
    print(f"{'passed' if passed else 'FAILED'} in {time.perf_counter() - started_at:.0f} s")
    return 0 if passed else 1


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory >> 30} GiB, {properties.multi_processor_count} SMs"


if __name__ == "__main__":
    sys.exit(main())
