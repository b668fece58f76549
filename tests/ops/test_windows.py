"""The window layout: least padding, exact round trips, masks and counts of real tokens."""

import pytest
import torch

from flash_vision.ops.windows import (
    WindowLayout,
    key_mask,
    merge_windows,
    partition_windows,
    window_layout,
    window_side,
    windows_per_axis,
)


@pytest.mark.parametrize(
    ("length", "nominal", "side"),
    [
        (14, 7, 7),
        (16, 7, 8),
        (28, 7, 7),
        (32, 7, 8),
        (15, 7, 5),
        (21, 7, 7),
        (50, 7, 5),
        (3, 7, 3),
        (1, 7, 1),
        (24, 7, 8),
    ],
)
def test_window_side_leaves_no_padding_where_a_near_divisor_exists(length, nominal, side):
    assert window_side(length, nominal) == side
    assert length % side == 0


def test_window_side_pads_least_among_all_candidates():
    for nominal in range(1, 12):
        for length in range(1, 200):
            side = window_side(length, nominal)
            candidates = range(-(-2 * nominal // 3), nominal + nominal // 2 + 1)
            least = 0 if length <= nominal else min(-length % s for s in candidates)
            assert -length % side == least, (length, nominal, side)
            assert side == length or side in candidates


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 9), (14, 14), (15, 21), (13, 17), (2, 31)])
def test_partition_and_merge_are_inverse_on_any_grid(height, width):
    layout = window_layout(height, width, (7, 5))
    x = torch.randn(2, height, width, 3)
    tokens = partition_windows(x, layout)
    rows, columns = windows_per_axis(layout)
    assert tokens.shape == (2, rows * columns, layout.window_height * layout.window_width, 3)
    assert tokens.is_contiguous()
    torch.testing.assert_close(merge_windows(tokens, layout), x, rtol=0, atol=0)


def test_a_window_holds_neighbours_in_two_dimensions():
    layout = WindowLayout(4, 6, 2, 3)
    index = torch.arange(24).view(1, 4, 6, 1)
    windows = partition_windows(index, layout)[0, :, :, 0]
    assert windows[0].tolist() == [0, 1, 2, 6, 7, 8]
    assert windows[3].tolist() == [15, 16, 17, 21, 22, 23]


@pytest.mark.parametrize(("height", "width"), [(13, 14), (11, 17), (23, 22)])
def test_key_mask_counts_exactly_the_real_tokens(height, width):
    layout = window_layout(height, width, (7, 7))
    mask = key_mask(layout)
    padded = height % layout.window_height or width % layout.window_width
    if not padded:
        assert mask is None
        return
    assert mask is not None
    assert int(mask.sum()) == height * width
    assert (mask.sum(-1) > 0).all()


@pytest.mark.parametrize(("length", "nominal", "word"), [(0, 7, "length"), (14, 0, "window_size")])
def test_sizes_below_one_are_refused_by_name(length, nominal, word):
    with pytest.raises(ValueError, match=word):
        window_side(length, nominal)
