"""Hypothesis profiles and the ``--long`` flag.

``ci`` (the default): the same examples on every run, no deadline, nothing kept on disk. ``--long``: many
more steps, of the state machine above all.
"""

from __future__ import annotations

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


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "ci")


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether ``--long`` was given."""
    return bool(request.config.getoption("--long"))
