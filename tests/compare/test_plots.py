import numpy as np
import pytest
from matplotlib.image import imread
from numpy.testing import assert_allclose

from hybrid.compare.plots import learning_curves_png, mean_band
from hybrid.errors import HybridError


def test_a_picture_with_a_line_for_every_method(runs, tmp_path):
    picture = imread(learning_curves_png(runs, tmp_path / "new" / "curves.png", baseline="grpo"))
    seen = {tuple(pixel) for pixel in (255 * picture[:, :, :3]).round().astype(int).reshape(-1, 3)}
    assert {(0x4D, 0x58, 0x66), (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= seen


def test_the_band_by_hand():
    # at step 1 the values 1 and 3: mean 2, sd sqrt(2), half width 12.706 * sqrt(2) / sqrt(2); at step 0 one value
    steps, mean, half = mean_band(
        [(np.array([0.0, 1.0]), np.array([5.0, 1.0])), (np.array([1.0, 2.0]), np.array([3.0, np.nan]))]
    )
    assert_allclose(steps, [0, 1])
    assert_allclose(mean, [5, 2])
    assert_allclose(half, [0, 12.7062], atol=1e-4)


def test_without_evaluations_there_is_no_picture(runs, tmp_path):
    with pytest.raises(HybridError, match="eval/avg_at_8"):
        learning_curves_png(runs, tmp_path / "c.png", metric="eval/avg_at_8")
