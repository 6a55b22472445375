"""`headway bench routing`: prefix hits and balance of routing policies over a trace.

Every replica has a prefix cache of its own (LRU, by the trace's block hashes) and works off prefill and
decode at given rates; policies see the load and, ours, only what they sent themselves.
"""

import argparse
import csv
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.bench.report import commit, percentile
from router.prefix_index import PrefixIndex
from router.routing import Candidate, choose

NAME = "routing"
HELP = "prefix hits and load balance of routing policies over a trace with block hashes"

PREFILL_TOKENS_PER_S: Final = 20_000.0
ITL_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row of the trace."""

    at_s: float
    num_output_tokens: int
    num_input_tokens: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class SimulatedReplica:
    """A prefix cache and the requests in progress."""

    name: str
    max_blocks: int
    view: PrefixIndex
    """What our policy knows of this replica."""
    busy: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at_s: float = 0.0
    """When the prefills given so far are done."""

    def take(self, blocks: Sequence[int]) -> int:
        """Compute a prompt; returns how many of its blocks were cached."""
        hits = 0
        for block in blocks:
            if block not in self.cache:
                break
            hits += 1
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.max_blocks:
            self.cache.popitem(last=False)
        return hits


Policy = Callable[[Arrival, Sequence[SimulatedReplica], random.Random], SimulatedReplica]


def round_robin() -> Policy:
    turn = iter(range(1 << 62))

    def pick(_: Arrival, replicas: Sequence[SimulatedReplica], __: random.Random) -> SimulatedReplica:
        return replicas[next(turn) % len(replicas)]

    return pick


def least_load() -> Policy:
    def pick(_: Arrival, replicas: Sequence[SimulatedReplica], draw: random.Random) -> SimulatedReplica:
        least = min(replica.busy for replica in replicas)
        return draw.choice([replica for replica in replicas if replica.busy == least])

    return pick


def pow_2() -> Policy:
    def pick(_: Arrival, replicas: Sequence[SimulatedReplica], draw: random.Random) -> SimulatedReplica:
        return min(draw.sample(replicas, 2), key=lambda replica: replica.busy)

    return pick


def prefix_affinity() -> Policy:
    """The production code."""

    def pick(arrival: Arrival, replicas: Sequence[SimulatedReplica], draw: random.Random) -> SimulatedReplica:
        candidates = [
            Candidate(
                replica=replica.name,
                num_busy=replica.busy,
                matched=replica.view.match(arrival.blocks) / len(arrival.blocks),
            )
            for replica in replicas
        ]
        chosen = choose(candidates, draw).replica
        replica = next(replica for replica in replicas if replica.name == chosen)
        replica.view.note(arrival.blocks)
        return replica

    return pick


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "round_robin": round_robin,
    "least_load": least_load,
    "pow_2": pow_2,
    "headway": prefix_affinity,
}


def read_trace(path: Path, jitter_s: float, draw: random.Random) -> list[Arrival]:
    """Read a trace with hash_ids; arrivals are moved by up to `jitter_s`, see the traces' README."""
    with path.open(newline="") as file:
        rows = [
            Arrival(
                float(row["arrival_s"]) + draw.uniform(0, jitter_s),
                int(row["output_tokens"]),
                int(row["input_tokens"]),
                tuple(_blocks(row["hash_ids"])),
            )
            for row in csv.DictReader(file)
        ]
    return sorted(rows, key=lambda arrival: arrival.at_s)


def _blocks(text: str) -> Iterator[int]:
    for part in text.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def replay(
    arrivals: Sequence[Arrival], policy: Policy, num_replicas: int, max_blocks: int, draw: random.Random
) -> dict[str, float]:
    """Send every arrival where `policy` says; return the keys of the report."""
    replicas = [SimulatedReplica(f"r{i}", max_blocks, PrefixIndex(max_blocks)) for i in range(num_replicas)]
    ends: list[tuple[float, int]] = []
    num_blocks = num_hits = 0
    imbalance = []
    for arrival in arrivals:
        while ends and ends[0][0] <= arrival.at_s:
            replicas[heapq.heappop(ends)[1]].busy -= 1
        replica = policy(arrival, replicas, draw)
        hits = replica.take(arrival.blocks)
        num_blocks += len(arrival.blocks)
        num_hits += hits
        tokens_per_block = arrival.num_input_tokens / len(arrival.blocks)
        prefill_s = (len(arrival.blocks) - hits) * tokens_per_block / PREFILL_TOKENS_PER_S
        replica.free_at_s = max(replica.free_at_s, arrival.at_s) + prefill_s
        replica.busy += 1
        end_s = replica.free_at_s + arrival.num_output_tokens * ITL_S
        heapq.heappush(ends, (end_s, replicas.index(replica)))
        mean = sum(other.busy for other in replicas) / num_replicas
        imbalance.append(max(other.busy for other in replicas) / mean)
    return {
        "hit_fraction": num_hits / num_blocks,
        "load_max_over_mean_p50": percentile(imbalance, 50),
        "load_max_over_mean_p95": percentile(imbalance, 95),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="CSV with hash_ids")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument(
        "--blocks",
        type=int,
        default=4000,
        help="prefix cache of a replica in the trace's blocks (default 4000)",
    )
    parser.add_argument(
        "--jitter-s",
        type=float,
        default=3.0,
        help="random delay of each arrival (default 3: stamps are 3 s apart)",
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    arrivals = read_trace(args.trace, args.jitter_s, random.Random(args.seed))
    report: dict[str, object] = {
        name: replay(arrivals, make(), args.replicas, args.blocks, random.Random(args.seed))
        for name, make in POLICIES.items()
    }
    return report | {
        "requests": len(arrivals),
        "replicas": args.replicas,
        "cache_blocks": args.blocks,
        "commit": commit(),
    }
