"""run_to_end: step an engine until a set of requests has ended, whatever happens on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tqdm import tqdm

from radixkv.answer import Answer, take_output
from radixkv.engine import Engine
from radixkv.errors import InternalError
from radixkv.interrupt import InterruptsHeld
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request
from radixkv.text import Tokenizer


def run_to_end(
    engine: Engine,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    keep_going: bool = False,
    show: bool | None = False,
) -> dict[int, Answer]:
    """The answer of every request, by its id; text only with a ``tokenizer``.

    They enter the queue as far as it has room: its limit is against others who arrive, not against one call.
    Raises the first error of a request and aborts the rest, unless ``keep_going``: then the error stands in
    its answer. However it ends, Ctrl-C included, nothing of these requests stays in the engine. Outputs of
    other requests are let go. ``show``: a progress bar; ``None`` shows it on a terminal only.
    """
    answers = {request.request_id: Answer(request, tokenizer) for request in requests}
    num_done = 0
    with InterruptsHeld() as interrupts:  # but inside a step, which opens
        try:
            to_add = deque(requests)
            with tqdm(total=len(answers), disable=None if show is None else not show, unit="prompt") as bar:
                while num_done < len(answers):
                    interrupts.raise_if_noted()
                    while to_add and not engine.is_full:
                        engine.add(to_add.popleft())
                    if not engine.has_work:
                        raise InternalError(f"{len(answers) - num_done} requests are gone without an output")
                    for output in engine.step():
                        answer = answers.get(output.request_id)
                        if answer is None or answer.is_done:
                            continue
                        _take(engine, answer, output)
                        if answer.is_done:
                            num_done += 1
                            bar.update()
                            if answer.error is not None and not keep_going:
                                raise answer.error
        except BaseException:
            if not engine.is_dead:
                for request in requests:
                    engine.abort(request.request_id)
                engine.take_outputs()  # of these requests, or of others, which are let go as above
            raise
    return answers


def _take(engine: Engine, answer: Answer, output: SequenceOutput) -> None:
    """An error in making text fails this request alone."""
    try:
        take_output(engine, answer, output)
    except Exception as error:
        engine.abort(output.request_id)
        answer.fail(error)
