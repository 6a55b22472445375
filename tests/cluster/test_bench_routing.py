import random

from cluster.bench.routing import POLICIES, Arrival, replay


def make_conversations(num_users: int, num_turns: int) -> list[Arrival]:
    """Each turn repeats the one before it and adds two blocks; block 0 is everybody's system prompt."""
    draw = random.Random(0)
    return sorted(
        (
            Arrival(
                60.0 * turn + draw.uniform(0, 50),
                600,
                512 * (3 + 2 * turn),
                (0, *(1 + user * 1000 + block for block in range(2 + 2 * turn))),
            )
            for user in range(num_users)
            for turn in range(num_turns)
        ),
        key=lambda arrival: arrival.at_s,
    )


def test_affinity_finds_conversations_again_and_keeps_the_balance() -> None:
    arrivals = make_conversations(num_users=200, num_turns=5)
    reports = {
        name: replay(arrivals, make(), num_replicas=4, max_blocks=2000, draw=random.Random(0))
        for name, make in POLICIES.items()
    }
    ours, round_robin = reports["headway"], reports["round_robin"]
    assert ours["hit_fraction"] > 1.5 * round_robin["hit_fraction"]
    assert ours["load_max_over_mean_p95"] < 1.5, "longest match alone puts four times the mean on one"
