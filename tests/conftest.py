"""Hypothesis profiles and the ``--long`` and ``--data FOLDER`` flags.

``ci`` (the default): the same examples on every run, no deadline, nothing kept on disk. ``--long``: many
more steps, of the state machine above all. ``--data`` (or ``RADIXKV_DATA``) names a folder of real data sets;
without it the tests that read them are deselected, not skipped.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms of the random tests")
    parser.addoption("--data", metavar="FOLDER", help="real data sets; enables the tests marked needs_data")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_data: reads the folder that --data names")
    config.addinivalue_line("markers", "needs_peft: makes or reads LoRA adapters with peft")
    settings.load_profile("long" if config.getoption("--long") else "ci")


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether ``--long`` was given."""
    return bool(request.config.getoption("--long"))


def _data_folder(config: pytest.Config) -> Path | None:
    name = config.getoption("--data") or os.environ.get("RADIXKV_DATA")
    if not name:
        return None
    if not Path(name).is_dir():
        raise pytest.UsageError(f"--data (or RADIXKV_DATA): {name!r} is not a folder")
    return Path(name)


def _missing(config: pytest.Config) -> dict[str, str]:
    """Marker to what a test so marked needs and does not find."""
    missing = {}
    if _data_folder(config) is None:
        missing["needs_data"] = "--data FOLDER"
    if importlib.util.find_spec("peft") is None:
        missing["needs_peft"] = "peft, which pip install -e '.[lora]' brings"
    return missing


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, what in _missing(config).items():
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if not left_out:
            continue
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        if marker != "needs_data":
            config.issue_config_time_warning(
                pytest.PytestWarning(f"{len(left_out)} tests are left out: they need {what}"), 2
            )


@pytest.fixture
def data_folder(request: pytest.FixtureRequest) -> Path:
    """The folder that ``--data`` or ``RADIXKV_DATA`` names. Mark the test ``needs_data``."""
    folder = _data_folder(request.config)
    assert folder is not None, "mark tests that take data_folder with pytest.mark.needs_data"
    return folder
