"""What a class folder must hold, and which image files count as whole."""

import io

import pytest
from PIL import Image

from flash_vision.data.class_folder import CorruptImageError, check_class_folder, decode, has_image, is_image_name


def encoded(kind="PNG", mode="RGB"):
    buffer = io.BytesIO()
    Image.effect_noise((64, 48), 50).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def test_a_folder_with_images_below_each_class_is_accepted(tmp_path):
    for name in ("a/1.PNG", "b/deep/2.jpeg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(encoded())
    (tmp_path / ".hidden").mkdir()
    check_class_folder(tmp_path)
    assert has_image(tmp_path / "b")


@pytest.mark.parametrize(
    ("folders", "named"),
    [([], "holds no class folder"), (["a", "b"], r"a: class folder without an image \(2 of 2 are empty\)")],
)
def test_a_folder_that_is_not_one_is_named(tmp_path, folders, named):
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=named):
        check_class_folder(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        check_class_folder(tmp_path / "missing")


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("stored", ["RGB", "L", "P", "1"])
def test_every_stored_mode_is_decoded_to_the_one_asked_for(stored, mode):
    image = decode(encoded(mode=stored), mode=mode)
    assert image.mode == mode
    assert image.size == (64, 48)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.9])
def test_a_cut_file_is_corrupt(kind, share):
    content = encoded(kind)
    with pytest.raises(CorruptImageError):
        decode(content[: int(share * len(content))])


def test_bytes_that_are_no_image_are_corrupt():
    with pytest.raises(CorruptImageError, match="not an image"):
        decode(b"text")


def test_only_the_extensions_of_timm_count_as_images():
    assert [is_image_name(name) for name in ("a.jpg", "a.JPEG", "a.b.png", "a.txt", "png", ".png")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
