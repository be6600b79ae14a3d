"""Progress: a bar of finished requests, on a terminal only."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm


class Progress:
    """Counts to ``total`` requests; elsewhere than on a terminal it writes nothing."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, unit=" requests", disable=None, leave=False)

    def tick(self) -> None:
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
