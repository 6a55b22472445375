"""Runs what others would use instead on the same requests: vLLM on CPU, or transformers' own batching.

Stands alone: it runs under the peer's own Python, where none of our packages need be installed.

    headway bench engine --write-requests requests.jsonl ...
    PEER_VENV/bin/python -P cluster/bench/peers.py vllm --model FOLDER --requests requests.jsonl

Each line of the requests is {"prompt_ids": [...], "output_tokens": N}; every answer is greedy and has
exactly so many tokens. Prints one JSON object. Loading and a warm-up stay outside the time.
"""

import argparse
import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description="measure another engine on our requests")
    parser.add_argument("peer", choices=["vllm", "transformers", "transformers-single"])
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.requests.read_text().splitlines()]
    run = {"vllm": run_vllm, "transformers": run_transformers, "transformers-single": run_generate}[args.peer]
    wall_s = run(args, requests)
    output_tokens = sum(request["output_tokens"] for request in requests)
    report = {
        "peer": args.peer,
        "requests": len(requests),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "output_tokens_per_s": output_tokens / wall_s,
    }
    print(json.dumps(report))


def run_vllm(args: argparse.Namespace, requests: list[dict[str, Any]]) -> float:
    """vLLM without compilation, as its CPU wheel starts on a small machine; no prefix to reuse."""
    vllm: Any = import_module("vllm")
    engine = vllm.LLM(
        model=args.model,
        dtype="float32",
        max_num_seqs=args.max_num_seqs,
        max_model_len=2048,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    params = [
        vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request["output_tokens"])
        for request in requests
    ]
    short = vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
    engine.generate(prompts[: args.max_num_seqs], short, use_tqdm=False)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - started
    _check([len(output.outputs[0].token_ids) for output in outputs], requests)
    return wall_s


def run_transformers(args: argparse.Namespace, requests: list[dict[str, Any]]) -> float:
    """transformers' continuous batching with paged attention."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    model = _load(args, attention="sdpa")
    manager = model.init_continuous_batching(
        transformers.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=256)
    )
    manager.start()
    try:
        with torch.inference_mode():
            _drain(manager, [(request["prompt_ids"], 4) for request in requests[: args.max_num_seqs]])
            started = time.perf_counter()
            lengths = _drain(manager, [(r["prompt_ids"], r["output_tokens"]) for r in requests])
            wall_s = time.perf_counter() - started
    finally:
        manager.stop(block=True)
    _check(lengths, requests)
    return wall_s


def run_generate(args: argparse.Namespace, requests: list[dict[str, Any]]) -> float:
    """transformers' `generate`, one request after the other."""
    torch: Any = import_module("torch")
    model = _load(args, attention="sdpa")

    def generate(request: dict[str, Any], num_tokens: int) -> int:
        ids = torch.tensor([request["prompt_ids"]])
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )
        return int(answer.shape[1] - ids.shape[1])

    generate(requests[0], 4)
    started = time.perf_counter()
    lengths = [generate(request, request["output_tokens"]) for request in requests]
    wall_s = time.perf_counter() - started
    _check(lengths, requests)
    return wall_s


def _load(args: argparse.Namespace, attention: str) -> Any:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.set_num_threads(args.num_threads)
    return transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation=attention
    )


def _drain(manager: Any, requests: list[tuple[list[int], int]]) -> list[int]:
    """Add (prompt ids, output tokens) and wait for all; return the lengths of the answers, in order."""
    names = [
        manager.add_request(input_ids=list(ids), max_new_tokens=num_tokens) for ids, num_tokens in requests
    ]
    lengths: dict[str, int] = {}
    while len(lengths) < len(names):
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            lengths[result.request_id] = len(result.generated_tokens)
    return [lengths[name] for name in names]


def _check(lengths: list[int], requests: list[dict[str, Any]]) -> None:
    expected = [request["output_tokens"] for request in requests]
    if lengths != expected:
        raise SystemExit(f"the peer generated {sum(lengths)} tokens instead of {sum(expected)}")


if __name__ == "__main__":
    main()
