"""Defines how kinds of adapters get the base's weights that they compute with, such as for DoRA's row norms.

slots/base_weights.py has the implementations.
"""

# D in features or hidden size · O out features · V vocabulary

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class BaseWeights(Protocol):
    """A source of the base's whole tensors, with the values that are served.

    Tensors have the base's dtype, lie on any device, and must never be changed. Modules are named as in BaseLayout.
    Any thread may call the methods.
    """

    def weight(self, module: str) -> Tensor:
        """Returns [O, D] for a linear, [V, D] for the embedding or the head, and [D] for a norm as stored."""

    def bias(self, module: str) -> Tensor:
        """Returns [O], for a linear that has a bias."""

    def beside_the_steps(self) -> AbstractContextManager[None]:
        """Returns a context in which computation disturbs no running step, and at whose end the computation is done.

        Only one load at a time can hold it, so do not hold it for long.
        """
