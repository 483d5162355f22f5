"""Files with compiled programs: read again for equal programs, targets and options only."""

from __future__ import annotations

import gzip

import pytest

from meshpar.inspect.pod import PodProcess
from meshpar.inspect.program_cache import ProgramCache


@pytest.mark.pod
def test_programs_for_clusters_are_compiled_once(pod, planted, tmp_path, monkeypatch):
    plant = planted.nothing()
    traced = plant.step.trace(plant.state, plant.batch)
    cache = ProgramCache(tmp_path / "cache")
    calls = []
    original = PodProcess.call
    monkeypatch.setattr(
        PodProcess, "call", lambda self, *args, **kwargs: calls.append(1) or original(self, *args, **kwargs)
    )
    with PodProcess(cache=cache) as process:
        first = process.compile(traced, "h100:1x8")
        assert process.compile(traced, "h100:1x8") == first
    assert len(calls) == 1
    with PodProcess(cache=cache) as process:
        assert process.compile(traced, "h100:1x8") == first
        assert process._running is None
        process.compile(traced, "h100:1x8", options={"xla_gpu_enable_pipelined_all_gather": True})
        process.compile(traced, "h200:1x8")
    assert len(calls) == 3
    (file, *_) = sorted((tmp_path / "cache").iterdir(), key=lambda path: path.stat().st_mtime)
    file.write_bytes(gzip.compress(b"{}"))
    with PodProcess(cache=cache) as process:
        assert process.compile(traced, "h100:1x8").text == first.text
    assert len(calls) == 4
