"""A start whose kernels are known loads them and rehearses nothing; whatever is wrong with the list, it rehearses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from test_start_kernels import HERE, OFFLINE, run

from graphrunner.kernels.triton import known_kernels
from graphrunner.kernels.triton.known_kernels import KnownKernels

A, B, C = (json.dumps({"name": f"graphrunner.kernels.triton.norms._{letter}"}) for letter in "abc")


@OFFLINE
def test_what_one_start_met_the_next_one_loads(tmp_path) -> None:
    triton, ours = tmp_path / "triton", tmp_path / "ours"

    def start() -> dict[str, object]:
        return json.loads(run([str(HERE / "remember_kernels.py"), str(ours)], TRITON_CACHE_DIR=str(triton)))

    assert start() == {"known": False, "ordered": 3, "asked": 3, "found": 0}
    assert start() == {"known": True, "ordered": 0, "asked": 0, "found": 3}
    shutil.rmtree(next(triton.rglob("*.cubin")).parent)
    told = start()
    assert (told["known"], told["ordered"]) == (False, 1)
    assert start() == {"known": True, "ordered": 0, "asked": 0, "found": 3}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is loaded in place of Triton, in a process that has loaded nothing."""
    orders: list[str] = []
    monkeypatch.setattr(known_kernels._Process, "is_fresh", True)
    monkeypatch.setattr(known_kernels, "preload", orders.append)
    monkeypatch.setattr(known_kernels, "_are_cached", lambda orders: True)
    yield orders


def next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_kernels._Process, "is_fresh", True)


def test_a_list_is_of_its_settings_sources_and_versions(tmp_path, loaded, monkeypatch) -> None:
    KnownKernels(["8B"], tmp_path).save({A: None, B: None})
    assert KnownKernels(["8B"], tmp_path).load() and loaded == [A, B]
    assert not KnownKernels(["1B"], tmp_path).load()
    for name, value in (("_FORMAT", "2"), ("_sources", lambda: "other"), ("_are_cached", lambda orders: False)):
        with monkeypatch.context() as patch:
            patch.setattr(known_kernels, name, value)
            assert not KnownKernels(["8B"], tmp_path).load()
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "0.0")
        assert not KnownKernels(["8B"], tmp_path).load()
    assert loaded == [A, B]


def test_a_second_engine_of_a_process_keeps_no_list(tmp_path, loaded, monkeypatch) -> None:
    """Triton asks for nothing twice, so what it meets is not all that it launches."""
    KnownKernels(["first"], tmp_path).save([A, B])
    KnownKernels(["second"], tmp_path).save([C])
    assert not KnownKernels(["second"], tmp_path).load() and len(list(tmp_path.iterdir())) == 1
    next_process(monkeypatch)
    assert KnownKernels(["first"], tmp_path).load()
    KnownKernels(["second"], tmp_path).save([C])
    assert len(list(tmp_path.iterdir())) == 1
    next_process(monkeypatch)
    KnownKernels(["second"], tmp_path).save([])
    KnownKernels(["second"], tmp_path).save([C])
    assert len(list(tmp_path.iterdir())) == 1, "no kernels: what was met is not known"


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff", b"0\n[1]"])
def test_a_damaged_list_is_none(tmp_path, loaded, damage: bytes, monkeypatch) -> None:
    known = KnownKernels(["8B"], tmp_path)
    known.save([A])
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert not known.load() and loaded == []
    next_process(monkeypatch)
    known.save([A])
    assert known.load() and loaded == [A]


@pytest.mark.parametrize("name", ["not_ours.kernel", "kernel", "graphrunner.kernels.tritons.kernel", None])
def test_a_list_imports_no_module_but_ours(tmp_path, loaded, monkeypatch, name: str | None) -> None:
    """Also not where only one of many is foreign."""
    known = KnownKernels(["8B"], tmp_path)
    known.save([A, json.dumps({"name": name})])

    asked: list[object] = []
    monkeypatch.setattr(known_kernels, "_are_cached", lambda orders: not asked.append(orders))
    assert not known.load() and loaded == asked == []


def test_no_trouble_is_the_starts(tmp_path, loaded, monkeypatch) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    blocked = KnownKernels(["8B"], tmp_path / "file")
    blocked.save([A])
    assert not blocked.load()
    next_process(monkeypatch)
    known = KnownKernels(["8B"], tmp_path / "ours")
    known.save([A])

    def breaks(order: str) -> None:
        raise RuntimeError("an order of another time")

    monkeypatch.setattr(known_kernels, "preload", breaks)
    assert not known.load()


def test_any_source_of_the_package_counts() -> None:
    root = Path(known_kernels.__file__).parents[2]
    assert root.name == "graphrunner" and (root / "kernels" / "triton" / "tuned_configs.py").is_file()
    assert known_kernels._sources() == known_kernels._sources() and len(known_kernels._sources()) == 64
