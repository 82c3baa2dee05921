"""Building: once per machine, named by its inputs, and a clear line where it cannot be done."""

import logging

import pytest
import torch

from graphrunner.kernels.cpu import build, ops


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    return tmp_path / "cpu_kernels"


def test_no_compiler_is_one_warning_and_no_kernels(empty_cache, monkeypatch, caplog):
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert not build.load_library.__wrapped__()
    assert len(caplog.records) == 1
    assert "no C++ compiler found (looked for no-such-compiler)" in caplog.text


def test_a_failing_compiler_is_named_and_leaves_nothing_behind(empty_cache, monkeypatch, tmp_path, caplog):
    source = tmp_path / "sources"
    source.mkdir()
    (source / "broken.cpp").write_text("int broken( {\n")
    monkeypatch.setattr(build, "_SOURCE_DIR", source)
    with caplog.at_level(logging.WARNING):
        assert not build.load_library.__wrapped__()
    assert "compiler failed: " in caplog.text and "broken.cpp:1" in caplog.text
    assert [path.suffix for path in empty_cache.iterdir()] == [".lock"]


def test_the_second_call_builds_nothing(empty_cache, monkeypatch):
    calls = []

    def compile_once(_compiler, library):
        calls.append(library)
        library.write_bytes(b"")

    monkeypatch.setattr(build, "_compile", compile_once)
    assert build._built_library() == build._built_library()
    assert len(calls) == 1


def test_the_name_follows_sources_and_torch(monkeypatch, tmp_path):
    compiler = build._find_compiler()
    before = build._build_key(compiler)
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert build._build_key(compiler) != before
    monkeypatch.undo()
    assert build._build_key(compiler) == before
    (tmp_path / "other.cpp").write_text("")
    monkeypatch.setattr(build, "_SOURCE_DIR", tmp_path)
    assert build._build_key(compiler) != before


def test_without_kernels_the_twins_answer(monkeypatch):
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    want = ops.norm_linear(x, None, 0.0, weight)
    monkeypatch.setattr(ops, "_is_served", lambda _: False)
    torch.testing.assert_close(ops.norm_linear(x, None, 0.0, weight), want)
