import pytest

from tools.conversion.labels import image_ids

IDS = {
    "digits with underscore": (["2007_000027.jpg", "2007_000032.jpg"], [2007000027, 2007000032]),
    "digits after letters": (["BloodImage_00000.jpg", "BloodImage_00007.jpg"], [0, 7]),
    "directory": (["sub2/000000000139.jpg"], [139]),
    "digits in the suffix": (["7.mp4"], [7]),
    "equal digits": (["b1.jpg", "a1.jpg"], [1, 2]),
    "name without digits": (["x7.jpg", "y.jpg"], [1, 2]),
    "largest id of DALI": (["2147483647.jpg"], [2147483647]),
    "id too large for DALI": (["2147483648.jpg"], [1]),
    "thirty digits": (["5.jpg", "9" * 30 + ".jpg"], [1, 2]),
    "no image": ([], []),
}


@pytest.mark.parametrize(("names", "ids"), IDS.values(), ids=IDS)
def test_converted_image_ids_are_the_digits_in_file_names_if_unique_and_else_count_from_1(names, ids):
    assert image_ids(names) == ids
