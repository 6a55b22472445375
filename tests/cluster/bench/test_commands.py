import argparse
from types import ModuleType

import pytest

from cluster.bench import batching, engine, kv, metrics, router, scheduler, watch
from replicas.errors import ConfigError


def run(module: ModuleType, *arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    report: dict[str, object] = module.run(parser.parse_args(arguments))
    return report


@pytest.mark.parametrize("num_seqs", [1, 40])
def test_scheduler_bench_counts_what_it_ran(num_seqs: int) -> None:
    report = run(scheduler, "--seqs", str(num_seqs), "--steps", "20")
    assert report["num_seqs"] == num_seqs
    # 20 measured and 50 warm-up steps, and the steps in which prompts were still computed.
    assert isinstance(report["output_tokens"], int)
    assert report["output_tokens"] >= num_seqs * 70
    assert {"step_us_p50", "step_us_p99"} <= report.keys()


def test_kv_blocks_hold_at_least_96_percent_live_tokens() -> None:
    report = run(kv, "--steps", "600")
    utilisation, paged = report["kv_utilisation"], report["max_concurrent_paged"]
    assert isinstance(utilisation, float)
    assert isinstance(paged, int)
    assert 0.96 <= utilisation <= 1.0
    assert report["max_concurrent_contiguous"] == 34
    assert paged > 2 * 34


def test_a_profile_stands_for_the_pool_and_its_blocks() -> None:
    report = run(kv, "--steps", "3", "--profile", "h200-8b")
    assert (report["block_size"], report["pool_tokens"]) == (256, 801_086)


def test_engine_bench_with_a_profile_takes_virtual_time() -> None:
    report = run(engine, "--profile", "h200-8b", "--concurrency", "1", "--requests", "2", "--sigma", "0")
    # A decode step of one sequence: 5.68 ms, 10 us to sample, some hundred tokens read.
    assert report["itl_ms_p50"] == pytest.approx(5.695, abs=0.005)
    assert report["profile"] == "h200-8b"
    assert not report.keys() & {"scheduler_us_p50", "model"}


def test_batching_bench_with_a_profile_gains_what_the_seats_waste() -> None:
    report = run(batching, "--profile", "h200-8b", "--quick")
    assert isinstance(ratio := report["ratio"], float)
    assert isinstance(static := report["static_steps"], int)
    assert isinstance(continuous := report["continuous_steps"], int)
    assert ratio == pytest.approx(static / continuous, rel=0.1)  # steps hardly differ in length


def test_a_profile_beside_options_of_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave out"):
        run(engine, "--profile", "h200-8b", "--num-threads", "1")


def test_router_bench_reports_cost_per_request_and_token_and_the_longest_hold_up() -> None:
    report = run(router, "--requests", "2", "--streams", "1")
    for key in ("request_cpu_us_1k_prompt", "token_cpu_us", "loop_block_ms_max"):
        value = report[key]
        assert isinstance(value, float)
        assert value > 0
    assert isinstance(held := report["loop_block_ms"], dict)
    assert held.keys() == {"one_text", "token_ids", "messages", "escapes"}


def test_metrics_bench_reports_cost_per_step_and_token() -> None:
    report = run(metrics, "--calls", "50")
    for key in ("step_us", "token_us", "collect_ms_per_s", "export_ms_per_s"):
        value = report[key]
        assert isinstance(value, float)
        assert value > 0
    assert isinstance(report["router_series"], int)
    assert report["router_series"] > 600


def test_watch_bench_records_steps_for_the_pages_alone() -> None:
    report = run(watch, "--seqs", "4", "--steps", "100", "--pages", "2")
    for key in ("cost_fraction", "cost_fraction_unwatched", "record_us_p50"):
        value = report[key]
        assert isinstance(value, float)
        assert value > 0
    assert isinstance(recorded := report["recorded_fraction"], float)
    assert 0 < recorded <= 1
    assert isinstance(size := report["bytes_per_step"], float)
    assert size > 0
