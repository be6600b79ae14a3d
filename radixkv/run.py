"""run_to_end: step an engine until a set of requests has ended, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from radixkv.engine import Engine
from radixkv.errors import InternalError
from radixkv.interrupt import InterruptsHeld
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request


def run_to_end(
    engine: Engine, requests: Sequence[Request], *, keep_going: bool = False, show: bool | None = False
) -> dict[int, tuple[list[int], SequenceOutput]]:
    """Sampled tokens and last output of every request, by its id.

    Raises the first error of a request and aborts the rest, unless ``keep_going``. However it ends, Ctrl-C
    included, nothing of these requests stays in the engine. Outputs of other requests are let go. ``show``:
    a progress bar; ``None`` shows it on a terminal only.
    """
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    finals: dict[int, SequenceOutput] = {}
    with InterruptsHeld() as interrupts:  # but inside a step, which opens
        try:
            for request in requests:
                engine.add(request)
            with tqdm(total=len(tokens), disable=None if show is None else not show, unit="prompt") as bar:
                while len(finals) < len(tokens):
                    interrupts.raise_if_noted()
                    if not engine.has_work:
                        raise InternalError(
                            f"{len(tokens) - len(finals)} requests are gone without an output"
                        )
                    for output in engine.step():
                        if output.request_id not in tokens:
                            continue
                        tokens[output.request_id].extend(output.new_token_ids)
                        if output.finish_reason is not None:
                            finals[output.request_id] = output
                            bar.update()
                            if output.error is not None and not keep_going:
                                raise output.error
        except BaseException:
            if not engine.is_dead:
                for request in requests:
                    engine.abort(request.request_id)
                engine.take_outputs()  # of these requests, or of others, which are let go as above
            raise
    return {request_id: (tokens[request_id], finals[request_id]) for request_id in tokens}
