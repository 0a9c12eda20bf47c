from __future__ import annotations

import numpy as np
import pytest
import torch

from lorafleet.workers.device.host_copy import Upload


@pytest.mark.gpu
def test_an_array_may_be_overwritten_once_its_upload_is_asked_for() -> None:
    """Behind work that takes the device longer than the host takes to ask for all of them."""
    upload, array = Upload(torch.device("cuda")), np.zeros((8, 4096), np.int32)
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy
    found = []
    for i, rows in enumerate((3, 8, 1, 8)):
        array[:rows] = i
        found.append(upload(array[:rows]))
    array[:] = -1
    assert [(t.shape, t.unique().tolist()) for t in found] == [((r, 4096), [i]) for i, r in enumerate((3, 8, 1, 8))]
