"""`LLM` called in orders that people try: streams side by side, after `close`, after Ctrl-C, with wrong settings."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_driver import generate, greedy, pool_check, prompts_of

from graphrunner import LLM
from graphrunner.config.options import engine_config_from_options
from graphrunner.core.errors import ConfigError, EngineStateError, InvalidRequestError

Make = Callable[..., LLM]
PROMPTS = prompts_of([5, 9])


def test_streams_side_by_side_and_a_call_between(make_llm: Make) -> None:
    llm = make_llm()
    alone = [generate(llm, [prompt], greedy(8))[0] for prompt in PROMPTS]
    streams = [llm.stream({"prompt_token_ids": prompt}, greedy(8)) for prompt in PROMPTS]
    got = [list(next(stream).outputs[0].token_ids) for stream in streams]
    assert generate(llm, PROMPTS, greedy(8)) == alone
    for ids, stream in zip(got, streams, strict=True):
        ids += [token for output in stream for token in output.outputs[0].token_ids]
    assert got == alone
    pool_check(llm)


def test_a_stream_whose_request_is_aborted_ends(make_llm: Make) -> None:
    llm = make_llm()
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, greedy(8))
    assert llm.abort(next(stream).request_id)
    assert list(stream) == []
    pool_check(llm)


@pytest.mark.parametrize("method", [None, "ngram"])
def test_an_interrupted_step_ends_its_requests_and_nothing_else(
    make_llm: Make, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    llm = make_llm(speculative=method)
    before = generate(llm, PROMPTS, greedy(8))
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, greedy(8))
    next(stream)

    def interrupted(pending: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "resolve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS, greedy(8))
    assert [output.outputs[0].finish_reason for output in stream] == ["error"]
    pool_check(llm)
    assert generate(llm, PROMPTS, greedy(8)) == before


@pytest.mark.parametrize("call", ["generate", "stream", "sleep", "wake", "reload_weights"])
def test_nothing_runs_after_close(make_llm: Make, call: str) -> None:
    llm = make_llm()
    begun = llm.stream({"prompt_token_ids": PROMPTS[0]}, greedy(8))
    next(begun)
    llm.close()
    llm.close()
    arguments = [PROMPTS[0], greedy(4)] if call in ("generate", "stream") else []
    with pytest.raises(EngineStateError, match="closed"):
        list(getattr(llm, call)(*arguments) or ())
    with pytest.raises(EngineStateError, match="closed"):
        next(begun)


@pytest.mark.parametrize("params", [{}, "greedy", [{}]])
def test_what_is_no_sampling_params_is_refused(make_llm: Make, params: object) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        make_llm().generate(PROMPTS[:1], params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode_sizes", "1,2"), ("decode_sizes", 4), ("decode_sizes", (1.5,)), ("prefill_sizes", ["a"]),
        ("decode_sizes", [True]), ("num_threads", 0), ("num_threads", "x"), ("num_threads", 1.5),
        ("kv_cache_dtype", 3), ("decode_graph", 3), ("capture", []), ("load_format", "x"), ("max_queue_len", -1),
        ("enforce_eager", "yes"),
    ],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        engine_config_from_options({name: value})


def test_a_trace_that_is_a_folder_is_refused_at_the_start(make_llm: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace="):
        make_llm(trace=str(tmp_path))


def test_a_method_that_starts_with_a_dot_is_no_module(make_llm: Make) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.method"):
        make_llm(speculative_config={"method": "..x"})
