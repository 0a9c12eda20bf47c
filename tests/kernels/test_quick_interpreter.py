from __future__ import annotations

from tests.kernels.harness import needs_triton, run_interpreted

pytestmark = needs_triton


def test_reductions_and_scans_combine_elements_in_their_order() -> None:
    run_interpreted("""
        from tests.kernels.interpreted_folds import fold_kernel

        scale, shift = torch.randn(4, 8), torch.randn(4, 8)
        for axis in (0, 1):
            expected = shift.clone()
            for i in range(1, shift.shape[axis]):
                before = expected.select(axis, i - 1)
                expected.select(axis, i).copy_(before * scale.select(axis, i) + shift.select(axis, i))
            for scans in (False, True):
                out = torch.zeros(4, 8)
                fold_kernel[(1,)](scale, shift, out, axis, scans)
                last = expected.narrow(axis, shift.shape[axis] - 1, 1).expand(4, 8)
                torch.testing.assert_close(out, expected if scans else last)
    """)
