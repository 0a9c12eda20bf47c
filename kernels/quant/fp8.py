"""The float8 format of this project is e4m3, without infinities."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
