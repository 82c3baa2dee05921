"""Share of a decode step spent outside the forward, and peak memory over the weights, on the embedded model.

python benchmarks/host_share.py
"""

import json
import resource
import time


def main() -> None:
    from graphrunner import LLM, SamplingParams

    llm = LLM()
    runner = llm.engine.core.model_runner.decode_cuda_graph_runner
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    llm.generate("Once upon a time", params, use_tqdm=False)
    execute, spent_s = runner.execute, [0.0]

    def timed(loaded):
        start_s = time.perf_counter()
        output = execute(loaded)
        spent_s[0] += time.perf_counter() - start_s
        return output

    runner.execute = timed  # type: ignore[method-assign]
    start_s = time.perf_counter()
    llm.generate("Once upon a time", params, use_tqdm=False)
    host_share = 1 - spent_s[0] / (time.perf_counter() - start_s)
    llm.generate({"prompt_token_ids": list(range(10, 1500))}, params.clone(max_tokens=16), use_tqdm=False)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    weights_mib = 134_515_008 * 4 / 2**20
    row = {"host_share": host_share, "peak_mib": peak_mib, "peak_over_weights_mib": peak_mib - weights_mib}
    print(f"outside the forward: {row['host_share']:.1%}; peak {peak_mib:.0f} MiB, weights {weights_mib:.0f} MiB")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
