import pytest
import torch

from surefoot.build import IMAGENET_MEAN, IMAGENET_STD, normalize_images


def test_bytes_and_unit_floats_normalise_alike():
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    result = normalize_images(images)
    torch.testing.assert_close(result, normalize_images(images.float() / 255))
    expected = (images[0, 1, 2, 3].item() / 255 - IMAGENET_MEAN[1]) / IMAGENET_STD[1]
    assert float(result[0, 1, 2, 3]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("images", "error", "says"),
    [
        (torch.full((2, 3, 4, 4), 200.0), ValueError, "Divide bytes by 255"),
        (torch.full((2, 3, 4, 4), -1.0), ValueError, "normalised already"),
        (torch.full((2, 3, 4, 4), float("nan")), ValueError, "nan"),
        (torch.zeros(2, 4, 4, 3), ValueError, "channels-last"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.int64), TypeError, "int64"),
    ],
)
def test_images_of_the_wrong_scale_or_layout_are_refused_with_the_way_out(images, error, says):
    with pytest.raises(error, match=says):
        normalize_images(images)
