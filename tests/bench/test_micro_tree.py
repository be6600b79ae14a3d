"""bench/micro_tree.py: what it runs is what it says; its speeds are not tested here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.bench import micro_tree


def test_every_case_is_in_the_table_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert micro_tree.main(["--scale", "100", "--json", str(file)]) in (0, 1)
    result = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert len(result["rates"]) == 30
    assert {rate["num_tokens"] for rate in result["rates"]} == {10, 64, 100, 1000}
    assert all(rate["us"] > 0 for rate in result["rates"])
    for bound in result["bounds"]:
        assert bound["kept"] == (bound["us"] < bound["limit_us"])
        assert bound["what"] in printed
    assert [bound["what"] for bound in result["bounds"]] == [
        "evict one page among 400 leaves",
        "evict one page among 400 leaves beside 100 held older ones",
        "match 1,296 tokens over one node",
        "match 1,296 tokens over 80 nodes",
    ]


def test_a_scale_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        micro_tree.main(["--scale", "0"])
    assert "1..100" in capsys.readouterr().err


def test_a_request_leaves_its_prompt_behind() -> None:
    forest = micro_tree.Forest(5, 2, 16, 8)
    prompt = forest.prompt(40)
    forest.request(0, prompt)
    assert forest.match(prompt) == 40
    forest.kv.check([])
