"""A stand-in for a handle of a deployment whose replicas are asked all at once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any


@dataclass
class AnsweringReplicas:
    """Its replicas give these answers to one question; without answers, none comes in time."""

    method: str
    question: object
    answers: list[Any]

    def broadcast(self, method: str, question: object) -> AnsweringReplicas:
        assert (method, pickle.loads(pickle.dumps(question))) == (self.method, self.question)
        return self

    async def results_async(self, timeout_s: float, *, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0 and return_exceptions
        if not self.answers:
            raise TimeoutError
        return [pickle.loads(pickle.dumps(answer)) for answer in self.answers]
