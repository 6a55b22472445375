"""Experiments against a stand-in for the `headway` command."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from load.errors import LoadError
from load.experiments import batching, chunked_prefill, demand, kv, max_num_seqs, overload, tiers
from load.experiments.headway import Lab
from load.experiments.outcome import outcomes_html, outcomes_json, outcomes_markdown
from load.experiments.slots import continuous_steps, static_steps, waste
from tests.load.wellformed import check_page

STAND_IN = """
import json, sys

if sys.argv[1] == "bench":
    name = sys.argv[2] + (" simulated" if "--profile" in sys.argv else "")
    print(json.dumps(json.loads({benches!r})[name]))
elif sys.argv[1] == "simulate":
    print(json.dumps(json.loads({benches!r})["simulate"]))
elif sys.argv[1] == "keys":
    print("hw_key-of-" + sys.argv[3])
else:
    import asyncio
    sys.path.insert(0, {root!r})
    import yaml
    from load.echo import Pace, serve_echo

    config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))

    async def serve():
        server = await serve_echo(Pace(ttft_ms=2, itl_ms=2), "127.0.0.1", config["http"]["port"])
        await server.serve_forever()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        pass
"""
BENCHES: dict[str, dict[str, Any]] = {
    "kv": {
        "kv_utilisation": 0.99, "block_size": 16, "max_concurrent_paged": 90, "max_concurrent_contiguous": 30,
        "max_model_len": 100,
    },
    "batching": {
        "continuous_tokens_per_s": 60.0, "static_tokens_per_s": 10.0, "static_live_rows_tokens_per_s": 30.0,
        "ratio": 6.0, "ratio_live_rows": 2.0, "requests": 128,
    },
    "engine": {"output_tokens_per_s": 5.0, "itl_ms_p50": 1.0, "itl_ms_p99": 2.0},
    "kv simulated": {
        "kv_utilisation": 0.95, "block_size": 256, "max_concurrent_paged": 300,
        "max_concurrent_contiguous": 100, "max_model_len": 100,
    },
    "batching simulated": {
        "continuous_tokens_per_s": 40.0, "static_tokens_per_s": 10.0, "static_live_rows_tokens_per_s": 10.0,
        "ratio": 4.0, "ratio_live_rows": 4.0,
    },
    "engine simulated": {"output_tokens_per_s": 25_600.0, "itl_ms_p50": 3.0, "itl_ms_p99": 4.0},
    "simulate": {
        "requests": 2400, "virtual_s": 30.0, "mean_open": 160.0,
        "tiers": {
            "interactive": {"refused": 240, "ttft_ms_mean": 300.0, "ttft_ms_p50": 200.0,
                "ttft_ms_p99": 3000.0, "itl_ms_p50": 6.0, "itl_ms_p99": 7.0, "itl_ms_max": 60.0,
                "e2e_ms_mean": 2000.0},
            "batch": {"ttft_ms_p50": 900.0},
        },
    },
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    script = tmp_path / "headway.py"
    root = str(Path(__file__).parents[2])
    script.write_text(STAND_IN.format(root=root, benches=json.dumps(BENCHES)))
    return Lab(command=(sys.executable, str(script)), model=None, is_quick=True, seed=0, profile="gpu")


def test_static_steps_are_those_of_the_longest_of_each_batch() -> None:
    assert static_steps([3, 1, 2, 5, 4], 2) == 3 + 5 + 4


def test_continuous_steps_fill_seats_as_they_fall_free() -> None:
    assert continuous_steps([3, 1, 2, 5, 4], 2) == 8
    assert continuous_steps([7, 7], 16) == 7


def test_waste_is_the_share_of_slots_without_a_token() -> None:
    assert waste([1, 3], 2, 3) == pytest.approx(1 / 3)


def test_the_textbooks_examples_are_exact() -> None:
    lengths = batching.textbook_lengths()
    assert (len(lengths), sum(lengths) / 16, max(lengths)) == (16, 64, 512)
    short, batch, steps = batching.slot_findings()
    assert short.measured.startswith("93.75%")
    assert batch.measured.startswith("87.50%")
    assert short.holds
    assert batch.holds
    assert steps.holds


def test_batching(lab: Lab) -> None:
    gain = batching.run(lab).findings[-1]
    assert gain.measured.startswith("6.0x; 2.0x")
    assert gain.holds
    assert gain.simulated.startswith("4.0x; 4.0x")
    assert not gain.simulated_holds


def test_kv(lab: Lab) -> None:
    findings = kv.run(lab).findings
    assert [finding.holds for finding in findings] == [True, True]
    assert [finding.simulated_holds for finding in findings] == [False, True]


def test_max_num_seqs_that_bring_nothing_do_not_hold(lab: Lab) -> None:
    assert [finding.holds for finding in max_num_seqs.run(lab).findings] == [False, False]


def test_a_simulation_is_told_what_a_server_is_told(tmp_path: Path) -> None:
    script = tmp_path / "headway.py"
    script.write_text(
        "import json, sys\n"
        "option = lambda name: sys.argv[sys.argv.index(name) + 1]\n"
        "files = {name: open(option(name)).read() for name in ('--config', '--trace')}\n"
        "print(json.dumps(files | {'shares': option('--tier-shares'), 'profile': option('--profile')}))"
    )
    lab = Lab(command=(sys.executable, str(script)), model="m", is_quick=True, seed=0, profile="gpu")
    plan = chunked_prefill.scripts(9, chunked_prefill.Timing(answer_tokens=8, every_s=0.5), seed=0)
    told = lab.simulate(plan[3:], {"max_num_seqs": 2}, tiers=tiers.TIERS, shares=tiers.SHARES)
    assert yaml.safe_load(told["--config"]) == {"engine": {"max_num_seqs": 2}, "tiers": list(tiers.TIERS)}
    assert told["--trace"] == "arrival_s,input_tokens,output_tokens\n0.0,32,8\n0.5,9,2\n1.0,9,2\n"
    assert (told["shares"], told["profile"]) == ("interactive=0.2,batch=0.8", "gpu")


def test_a_bench_that_fails_is_named() -> None:
    lab = Lab(
        command=(sys.executable, "-c", "raise SystemExit(4)"),
        model=None,
        is_quick=True,
        seed=0,
        profile="gpu",
    )
    with pytest.raises(LoadError, match="ended with 4 and printed no JSON"):
        kv.run(lab)


def test_a_server_that_ends_at_once_is_named() -> None:
    broken = Lab(
        command=(sys.executable, "-c", "print('no such model')"),
        model=None,
        is_quick=True,
        seed=0,
        profile="gpu",
    )
    with pytest.raises(LoadError, match="no such model"), broken.serving({}):
        pass


def test_overload_says_what_a_server_without_limits_cannot_show(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "CAPACITY_S", 1.0)
    outcome = overload.run(lab)
    assert "not available in this server: it refused nothing" in outcome.findings[2].measured
    assert outcome.data["here"]["growth"]["served_rps"] > 0
    check_page(outcomes_html([outcome]))


def test_overload_judges_the_simulated_figures(lab: Lab) -> None:
    gpu = overload.simulate(lab)
    assert gpu.little == overload.Law(counted=160.0, rate_times_time=2400 / 30 * 2.0)
    # 25,600 tokens/s are 100 answers of 256; at twice that 2,400 requests come in 12 s.
    assert (gpu.growth.served_rps, gpu.growth.offered_rps) == (100.0, 200.0)
    assert gpu.growth.predicted_s == overload.mean_wait_s(200.0, 100.0, 64, 12.0)
    assert str(gpu.limits) == "TTFT p99 3.0 s, 3.0 s without; 240 of 2400 were refused"


def test_the_predicted_wait_grows_with_the_surplus() -> None:
    assert overload.mean_wait_s(20.0, 10.0, 0, 30.0) == 15.0
    # 10 seats are full after 1 s; of 30 s, 29 see a wait that grows to 29 s.
    assert overload.mean_wait_s(20.0, 10.0, 10, 30.0) == pytest.approx(29 * 29 / 2 / 30)
    assert overload.mean_wait_s(9.0, 10.0, 4, 30.0) == 0.0


def test_tiers_are_compared_with_one_tenant_for_all(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "CAPACITY_S", 1.0)
    outcome = tiers.run(lab)
    assert set(outcome.data["ttft_ms_p50"]) == {
        "no tiers: interactive", "no tiers: batch", "tiers: interactive", "tiers: batch"
    }  # fmt: skip
    # The stand-in serves everybody at once.
    assert not outcome.findings[0].holds
    assert outcome.findings[0].simulated.startswith("TTFT p50 of interactive 200 ms with tiers, 900 ms with")
    assert outcome.findings[0].simulated_holds


def test_without_tiers_all_requests_come_with_one_key() -> None:
    keys = {"interactive": "i", "batch": "b"}
    assert [tenant.api_key for tenant in tiers.cast(keys, has_tiers=False).tenants] == ["b", "b"]
    assert [tenant.api_key for tenant in tiers.cast(keys, has_tiers=True).tenants] == ["i", "b"]


def test_chunked_prefill_compares_both_settings() -> None:
    whole, chunks = chunked_prefill.settings(2048).values()
    assert (whole["chunked_prefill"], whole["max_num_batched_tokens"]) == (False, 2304)
    assert chunks["max_num_batched_tokens"] == 512
    timing = chunked_prefill.Timing(answer_tokens=100, every_s=5.0)
    plan = chunked_prefill.scripts(2048, timing, seed=0)
    assert [script.at_s for script in plan] == [0, 0, 0, 0, 5.0, 10.0]
    assert [script.turns[0].input_tokens for script in plan[4:]] == [2048, 2048]


def test_pages_show_claim_and_measurement(lab: Lab) -> None:
    outcomes = [kv.run(lab), max_num_seqs.run(lab)]
    check_page(outcomes_html(outcomes))
    assert "| claim | measured here (CPU) | holds | simulated (GPU profile) | holds |" in outcomes_markdown(
        outcomes
    )
    encoded = json.loads(json.dumps(outcomes_json(outcomes)))
    assert [one["name"] for one in encoded["experiments"]] == ["kv", "max-num-seqs"]
