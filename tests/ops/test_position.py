"""Position tables: relative offsets, rotations that see only distance, sinusoids."""

import torch

from flash_vision.ops.position import relative_position_index, rotary_table, rotate, sincos_position_embedding
from flash_vision.ops.windows import WindowLayout, merge_windows, window_layout


def test_relative_index_names_every_offset_of_the_window_once():
    index = relative_position_index(WindowLayout(6, 6, 2, 3), (2, 3))
    assert index.shape == (6, 6)
    assert set(index.flatten().tolist()) == set(range(3 * 5))
    assert index[0, 0] == index[4, 4] == 7  # the same token: the middle row of the table
    assert index[0, 1] == index[1, 2] == index[3, 4]  # the same step to the right


def test_offsets_beyond_the_table_take_its_outermost_row():
    small = relative_position_index(WindowLayout(1, 3, 1, 3), (1, 3))
    large = relative_position_index(WindowLayout(1, 5, 1, 5), (1, 3))
    assert large.min() == small.min() == 0
    assert large.max() == small.max() == 4
    torch.testing.assert_close(large[1:4, 1:4], small)
    assert large[0].tolist() == [2, 1, 0, 0, 0]


def test_rotary_scores_depend_on_the_offset_alone_across_windows():
    layout = window_layout(6, 6, (3, 3))
    cosine, sine = rotary_table(layout, 16, 100.0)
    q = rotate(torch.randn(16, dtype=torch.float64).expand(1, *cosine.shape[:2], 16), cosine, sine)
    k = rotate(torch.randn(16, dtype=torch.float64).expand(1, *cosine.shape[:2], 16), cosine, sine)
    q, k = merge_windows(q, layout)[0], merge_windows(k, layout)[0]
    scores = torch.einsum("yxs,vus->yxvu", q, k)
    torch.testing.assert_close(scores[0, 0, 2, 1], scores[3, 4, 5, 5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[2, 2, 0, 3], scores[4, 1, 2, 2], rtol=1e-5, atol=1e-5)
    assert (scores[0, 0, 2, 1] - scores[0, 0, 1, 2]).abs() > 1e-4  # rows and columns are told apart


def test_rotary_keeps_lengths_and_its_first_frequency_is_one_radian_a_token():
    layout = WindowLayout(1, 4, 1, 4)
    cosine, sine = rotary_table(layout, 8, 10000.0)
    x = torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(rotate(x, cosine, sine).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(cosine[0, 1, 2], torch.tensor(1.0).cos())
    assert (sine[0, :, 3] < 0.04).all()  # 10000^(-1/2) a token: frequencies fall, they do not rise


def test_sincos_embedding_tells_rows_from_columns():
    table = sincos_position_embedding(3, 5, 8)
    assert table.shape == (1, 3, 5, 8)
    assert (table[0, :, 0, :4] == table[0, :, 4, :4]).all()
    assert (table[0, 0, :, 4:] == table[0, 2, :, 4:]).all()
    assert len({tuple(v.tolist()) for v in table[0].flatten(0, 1)}) == 15
