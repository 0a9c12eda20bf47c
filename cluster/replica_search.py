"""Asks all replicas for what at most one of them has."""

from __future__ import annotations

from typing import Any, TypeVar

Answer = TypeVar("Answer")


async def find_answer(
    replicas: Any, method: str, question: object, kind: type[Answer], timeout_s: float
) -> tuple[Answer | None, Exception | None]:
    """Returns the first answer of this kind, and the error of a replica that has not answered.

    Args:
        replicas: A handle of the deployment, which has the method. Replicas without an answer of this kind return None.
        timeout_s: If the replicas have not all answered by then, the result is None and a TimeoutError.
    """
    try:
        answers = await replicas.broadcast(method, question).results_async(timeout_s=timeout_s, return_exceptions=True)
    except TimeoutError as error:
        return None, error
    found = next((answer for answer in answers if isinstance(answer, kind)), None)
    return found, next((answer for answer in answers if isinstance(answer, Exception)), None)
