"""torch's clipping, bit for bit, but for norms that are not finite."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from surefoot.act.torch_clip import any_nonfinite, clip_grad_norm


def parameters(
    scale: float = 1.0, broken: float | None = None, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((5, 3), (7,), (2,))]
    for each in made[:2]:
        each.grad = (scale * torch.randn(each.shape, generator=generator)).to(dtype)
    if broken is not None:
        made[1].grad[3] = broken  # type: ignore[index]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_finite_gradients_are_clipped_with_torchs_bits(max_norm, norm_type, dtype):
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    norm, factor = clip_grad_norm(ours, max_norm, norm_type)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:2], theirs[:2], strict=True))
    assert ours[2].grad is None
    assert factor is not None
    assert float(factor) == pytest.approx(min(1.0, max_norm / float(norm)), rel=1e-2)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_multiplied_into_nothing(broken):
    clipped = parameters(broken=broken)
    before = copy.deepcopy([each.grad for each in clipped])
    norm, factor = clip_grad_norm(clipped, 0.1)
    assert not torch.isfinite(norm)
    assert factor == 1.0
    assert all(torch.equal(a.grad.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(clipped[:2], before, strict=False))
    assert any_nonfinite([each.grad for each in clipped[:2]])
    assert not any_nonfinite([clipped[0].grad])


def test_an_infinite_limit_asks_for_the_norm_alone():
    given = parameters()
    norm, factor = clip_grad_norm(given, math.inf)
    assert factor is None
    assert torch.equal(norm, torch.nn.utils.get_total_norm([each.grad for each in given[:2]]))


def test_nothing_to_clip_is_no_error():
    assert clip_grad_norm([torch.zeros(2, requires_grad=True)], 1.0)[1] is None
