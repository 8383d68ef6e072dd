import dataclasses
from typing import Literal

import pytest

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


SPECS = {
    "learning_rate=1e-3": {"learning_rate": 0.001},
    "epochs=5, optimizer = adam ,flip=false": {"epochs": 5, "optimizer": "adam", "flip": False},
    "aspect_ratios=1.0,3.0,optimizer=adam": {"aspect_ratios": (1.0, 3.0), "optimizer": "adam"},
    "masks=0,1,2; 3,4,5,epochs=2": {"masks": ((0, 1, 2), (3, 4, 5)), "epochs": 2},
    "image_size=320x640": {"image_size": (320, 640)},
    "image_size= 96 ": {"image_size": (96, 96)},
    "warmup=0.5": {"warmup": 0.5},
    "": {},
}


@pytest.mark.parametrize(("spec", "expected"), SPECS.items(), ids=SPECS)
def test_hparams_pairs_override_the_config(spec, expected):
    assert override(Config(), spec) == dataclasses.replace(Config(), **expected)


def test_hparams_yaml_values_are_converted_to_the_types_of_the_config(tmp_path):
    rows = ["learning_rate: 1e-3", "image_size: [320, 640]", "aspect_ratios: [1, 2]", "flip: no", "warmup: 0"]
    (tmp_path / "h.yaml").write_text("\n".join(rows))
    config = override(Config(), str(tmp_path / "h.yaml"))
    assert config == Config((320, 640), 0.001, 300, False, (1.0, 2.0), 0.0)


WRONG_PAIRS = [
    ("learning_rat=1", "did you mean 'learning_rate'"),
    ("epochs=many", "epochs='many': expected int"),
    ("epochs=0", "epochs=0: need at least 1"),
    ("flip=maybe", "flip='maybe': expected bool"),
    ("epochs", "'epochs' is not key=value"),
    ("epochs=1,epochs=2", "'epochs' is given twice"),
    ("image_size=12by3", "12by3"),
    ("image_size=0x3", "at least 1 pixel"),
    ("/nowhere/h.yaml", "No such file"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG_PAIRS)
def test_hparams_flag_with_a_wrong_key_value_or_form_is_refused_with_the_reason(spec, message):
    assert message in refusal(override, Config(), spec)


WRONG_YAML = [
    ("epochs: 1\nepochs: 2\n", "'epochs' is given twice"),
    ("epochs: [\n", "not YAML"),
    ("- epochs\n", "is not a YAML mapping"),
    ("epochs: yes\n", "epochs=True: expected int"),
    ("epochs: 12.7\n", "epochs=12.7: expected int"),
    ("epochs: !!python/object/apply:os.system ['true']\n", "not YAML"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_YAML)
def test_hparams_yaml_file_with_a_wrong_value_or_form_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "h.yaml").write_text(text)
    assert message in refusal(override, Config(), str(tmp_path / "h.yaml"))


def test_config_fields_are_listed_by_their_type_annotation_and_their_values_are_validated():
    @dataclasses.dataclass(frozen=True)
    class Marked:
        rate: Share = 0.5
        flips: Loader[Share] = 0.5
        method: Detection[Literal["fast", "slow"]] = "fast"
        sizes: Loader[tuple[int, ...]] = (1,)

    assert marked_fields(Marked, "loader") == ("flips", "sizes")
    assert marked_fields(Marked, "detection") == ("method",)
    assert override(Marked(), "flips=0.25,method=slow,sizes=2,3") == Marked(0.5, 0.25, "slow", (2, 3))
    assert "flips='2': expected float <= 1" in refusal(override, Marked(), "flips=2")
    assert "method='x': expected one of fast, slow" in refusal(override, Marked(), "method=x")
