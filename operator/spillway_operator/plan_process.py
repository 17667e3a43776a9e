"""A process that answers PlanQuestions: pickles, each preceded by its length, on stdin and stdout.

    python -m spillway_operator.plan_process MOST_BYTES

Only PlanService starts it, and both ends trust each other. An answer that would need more than MOST_BYTES of memory is
a MemoryError.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import sys

from spillway.errors import UserError
from spillway.planning.known_plans import PlanAnswer, PlanQuestion

LENGTH_BYTES = 8
NICE = 5
"""Lower priority than that of the operator's event loop."""


def answer(question: PlanQuestion) -> PlanAnswer:
    try:
        found = question.answer()
        return UserError(str(found)) if isinstance(found, UserError) else found  # one that can be pickled
    except Exception as error:  # a bug of the planner must not end the process
        return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    most_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the operator, and this with it
    os.nice(NICE)
    gc.freeze()  # imported modules are permanent: the collector can skip them
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while head := questions.read(LENGTH_BYTES):
        question = pickle.loads(questions.read(int.from_bytes(head)))  # noqa: S301
        found = pickle.dumps(answer(question))
        answers.write(len(found).to_bytes(LENGTH_BYTES) + found)
        answers.flush()


if __name__ == "__main__":
    main()
