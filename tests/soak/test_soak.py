"""The soak: what it reads and how it judges. The soak itself runs with ``--long``, small without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import soak


def test_b011_memory_is_flat_in_the_second_half(
    long_run: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """200,000 requests with ``--long``. Fault seen: ``release`` puts the sequence among ``_admitting``."""
    file = tmp_path / "out.json"
    num_requests, num_pages = (200_000, 1000) if long_run else (1_000, 60)
    arguments = ["--requests", str(num_requests), "--pages", str(num_pages), "--json", str(file)]
    status = soak.main(arguments)
    result = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert [r["num_requests"] for r in result["readings"]][-1] == num_requests
    assert len(result["readings"]) == soak.NUM_PARTS and "second half" in printed
    assert result["most_nodes"] <= num_pages
    assert result["growth_objects"] <= num_pages
    if long_run:
        assert status == 0, printed


def test_growth_is_noticed() -> None:
    flat = [
        soak.Reading(num_requests=n, resident_bytes=100 << 20, num_objects=50_000, num_nodes=900)
        for n in range(soak.NUM_PARTS)
    ]
    assert soak.verdict(flat, 1000).is_flat
    grown = [*flat[:-1], replace(flat[-1], resident_bytes=105 << 20)]
    assert not soak.verdict(grown, 1000).is_flat
    leaking = [*flat[:-1], replace(flat[-1], num_objects=51_001)]
    assert not soak.verdict(leaking, 1000).is_flat
    deep = [*flat[:-1], replace(flat[-1], num_nodes=1001)]
    assert not soak.verdict(deep, 1000).is_flat


def test_too_few_requests_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--requests", "3"])
    assert "at least 20" in capsys.readouterr().err
