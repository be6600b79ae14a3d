"""bench/overhead.py: what it runs is what it says; its speeds are not tested here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.bench import overhead


def test_every_load_is_in_the_table_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert overhead.main(["--requests", "30", "--repeats", "1", "--profile", "--json", str(file)]) in (0, 1)
    result = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert [run["load"]["max_batch_tokens"] for run in result["runs"]] == [8192, 1024, 8192]
    assert [run["load"]["num_waiting"] for run in result["runs"]] == [128, 128, 1024]
    for run in result["runs"]:
        assert f"{run['requests_per_s']:,.0f}" in printed
        assert run["load"]["num_requests"] == 30 and run["load"]["page_size"] == 16
        assert run["schedule_s"] > 0 and run["update_s"] > 0 and run["add_s"] > 0
    assert result["kept"] == (result["runs"][0]["requests_per_s"] >= result["bound_per_s"])
    assert "schedule" in printed and "tottime" in printed


def test_half_of_each_prompt_is_hit_but_for_the_first_of_a_kind() -> None:
    load = overhead.Load(num_requests=80, num_pages=4096)
    spent = overhead.serve(load)
    assert spent.hit_rate == pytest.approx(0.5 * (80 - load.num_kinds) / 80)
    prompts = [request.prompt_ids for request in overhead.requests_of(load)]
    assert (prompts[0][:500] == prompts[8][:500]).all() and (prompts[0][:500] != prompts[1][:500]).any()
    assert prompts[0][500:].tolist() != prompts[8][500:].tolist()


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--repeats", "0"]])
def test_numbers_that_make_no_sense_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        overhead.main(arguments)
    assert "at least 1" in capsys.readouterr().err


def test_a_page_size_that_is_too_large_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--page-size", "128"]) == 2
    assert "at most 64" in capsys.readouterr().err
