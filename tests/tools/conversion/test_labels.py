import pytest

from tools.conversion.labels import image_ids

IDS = [
    (["2007_000027.jpg", "2007_000032.jpg"], [2007000027, 2007000032]),
    (["BloodImage_00000.jpg", "BloodImage_00007.jpg"], [0, 7]),
    (["sub/000000000139.jpg"], [139]),
    (["b1.jpg", "a1.jpg"], [1, 2]),
    (["x7.jpg", "y.jpg"], [1, 2]),
    (["2147483647.jpg"], [2147483647]),
    (["2147483648.jpg"], [1]),  # DALI's largest id is 2147483647
    (["5.jpg", "9" * 30 + ".jpg"], [1, 2]),
    (["7.mp4"], [7]),
    ([], []),
]


@pytest.mark.parametrize(("names", "ids"), IDS)
def test_ids_are_the_digits_of_the_names_where_these_differ(names, ids):
    assert image_ids(names) == ids
