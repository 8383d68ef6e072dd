import dataclasses
import json

import pytest

from common.training.checkpoints import RunState
from tests.refusal import refusal

STATE = RunState(
    epoch=3,
    step=31,
    step_in_epoch=1,
    totals={"loss": 2.5},
    loader_options={"seed": 3, "mosaic": False},
    batches_read=1,
    evaluated=2.75,
    best_ap=0.25,
    best_eval_data="f00",
    evaluations_since_best=2,
)


@pytest.mark.parametrize("state", [STATE, RunState()])
def test_state_survives_json(state):
    values = json.loads(json.dumps(dataclasses.asdict(state)))
    assert RunState.from_json(values, "checkpoint 1") == state


def test_state_with_other_fields_is_refused_with_their_names():
    values = dataclasses.asdict(STATE) | {"warmth": 1}
    del values["best_ap"]
    message = refusal(RunState.from_json, values, "checkpoint 00000031")
    assert message.startswith(
        "checkpoint 00000031 is of another version of this project, whose state differs in "
    )
    assert "differs in best_ap, warmth. Continue with that version, or give --overwrite" in message


def test_states_share_no_values():
    RunState().totals["loss"] = 1.0
    assert RunState().totals == {}
