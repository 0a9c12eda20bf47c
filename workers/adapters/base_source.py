"""Where kinds of adapters get the base's weights from that they are computed with, as DoRA's row norms are.

slots/base_weights.py has the sources.
"""

# D in features or hidden size · O out features · V vocabulary

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class BaseWeights(Protocol):
    """Whole tensors with the values that are served, in the base's dtype, wherever they lie; never to be changed.

    Modules are called as in BaseLayout. Any thread may ask.
    """

    def weight(self, module: str) -> Tensor:
        """[O, D] of a linear, [V, D] of embedding or head, [D] of a norm as stored."""

    def bias(self, module: str) -> Tensor:
        """[O], of a linear that has one."""

    def beside_the_steps(self) -> AbstractContextManager[None]:
        """What is computed within disturbs no running step, and is done at its end. Not to be held for long: one load
        at a time has it."""
