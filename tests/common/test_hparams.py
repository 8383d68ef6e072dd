import dataclasses
import re
from typing import Literal

import pytest

from common.errors import UserError
from common.hparams import Detection, Loader, Share, marked_fields, override
from tests.refusal import refusal


@dataclasses.dataclass(frozen=True)
class Config:
    image_size: tuple[int, int] = (512, 512)
    learning_rate: float = 0.08
    epochs: int = 300
    flip: bool = True
    aspect_ratios: tuple[float, ...] = (1.0, 2.0, 0.5)
    warmup: float = 1.0
    masks: tuple[tuple[int, ...], ...] = ()
    optimizer: str = "sgd"

    def __post_init__(self):
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}: need at least 1")


PAIRS = [
    ("learning_rate=1e-3", {"learning_rate": 0.001}),
    ("epochs=5, optimizer = adam ,flip=false", {"epochs": 5, "optimizer": "adam", "flip": False}),
    ("aspect_ratios=1.0,3.0,optimizer=adam", {"aspect_ratios": (1.0, 3.0), "optimizer": "adam"}),
    ("masks=0,1,2; 3,4,5,epochs=2", {"masks": ((0, 1, 2), (3, 4, 5)), "epochs": 2}),
    ("image_size=320x640", {"image_size": (320, 640)}),
    ("image_size= 96 ", {"image_size": (96, 96)}),
    ("warmup=0.5", {"warmup": 0.5}),
    ("", {}),
]


@pytest.mark.parametrize(("spec", "expected"), PAIRS)
def test_pairs(spec, expected):
    assert override(Config(), spec) == dataclasses.replace(Config(), **expected)


def test_yaml_numbers_that_pyyaml_reads_as_text(tmp_path):
    file = tmp_path / "h.yaml"
    rows = ["learning_rate: 1e-3", "image_size: [320, 640]", "aspect_ratios: [1, 2]", "flip: no", "warmup: 0"]
    file.write_text("\n".join(rows))
    config = override(Config(), str(file))
    assert config == Config((320, 640), 0.001, 300, False, (1.0, 2.0), 0.0)


BAD = [
    ("learning_rat=1", "did you mean 'learning_rate'"),
    ("epochs=many", "epochs='many': expected int"),
    ("epochs=0", "epochs=0: need at least 1"),
    ("flip=maybe", "flip='maybe': expected bool"),
    ("epochs", "'epochs' is not key=value"),
    ("epochs=1,epochs=2", "'epochs' is given twice"),
    ("image_size=12by3", "12by3"),
    ("image_size=0x3", "at least 1 pixel"),
    ("/nowhere/h.yaml", "No such file"),
    ("YAML: epochs: 1\nepochs: 2\n", "'epochs' is given twice"),
    ("YAML: epochs: [\n", "not YAML"),
    ("YAML: - epochs\n", "is not a YAML mapping"),
    ("YAML: epochs: yes\n", "epochs=True: expected int"),
    ("YAML: epochs: 12.7\n", "epochs=12.7: expected int"),
    ("YAML: epochs: !!python/object/apply:os.system ['true']\n", "not YAML"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_pairs_and_bad_yaml(tmp_path, given, message):
    if given.startswith("YAML: "):
        (tmp_path / "h.yaml").write_text(given.removeprefix("YAML: "))
        given = str(tmp_path / "h.yaml")
    assert re.search(message, refusal(override, Config(), given))


def test_marked_fields_are_found_by_their_mark_and_checked_as_without_it():
    @dataclasses.dataclass(frozen=True)
    class Marked:
        rate: Share = 0.5
        flips: Loader[Share] = 0.5
        method: Detection[Literal["fast", "slow"]] = "fast"
        sizes: Loader[tuple[int, ...]] = (1,)

    assert marked_fields(Marked, "loader") == ("flips", "sizes")
    assert marked_fields(Marked, "detection") == ("method",)
    assert override(Marked(), "flips=0.25,method=slow,sizes=2,3") == Marked(0.5, 0.25, "slow", (2, 3))
    for spec, message in (
        ("flips=2", "flips='2': expected .* <= 1"),
        ("method=x", "expected one of fast, slow"),
    ):
        with pytest.raises(UserError, match=message):
            override(Marked(), spec)
