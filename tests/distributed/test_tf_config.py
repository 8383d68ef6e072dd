"""TF_CONFIG, right and wrong."""

import json

import pytest

from common.distributed import tf_distribute
from common.errors import UserError


def config(cluster=None, kind="worker", index=0):
    cluster = {"worker": ["a:1", "b:2"]} if cluster is None else cluster
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "workers", "rank"),
    [
        (config(), ["a:1", "b:2"], 0),
        (config(index=1), ["a:1", "b:2"], 1),
        (config({"worker": ["localhost:5000"]}), ["localhost:5000"], 0),
        (config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, index=1), ["c:3", "a:1", "b:2"], 2),
        (config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, kind="chief"), ["c:3", "a:1", "b:2"], 0),
        (config({"worker": ["[::1]:5", "[::1]:6"]}, index=1), ["[::1]:5", "[::1]:6"], 1),
    ],
)
def test_the_workers_and_which_one_this_is(text, workers, rank):
    assert tf_distribute.read_tf_config(text) == (workers, rank)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "needs TF_CONFIG"),
        ("", "needs TF_CONFIG"),
        ("{", "is not right"),
        ("[]", "is not right"),
        ("{}", "is not right"),
        ('{"cluster": {"worker": ["a:1"]}}', "is not right"),
        (config({}), "is not right"),
        (config({"worker": 3}), "is not right"),
        (config({"worker": [1, 2]}), "is not right"),
        (config({"worker": ["a", "b"]}), "is not right"),
        (config({"worker": ["a:x", "b:1"]}), "is not right"),
        (config(index=2), "is not right"),
        (config(kind="ps"), "is not right"),
        (config(index=-1), "is not right"),
        (config(index="0"), "is not right"),
        (config(index=True), "is not right"),
        (config({"worker": ["a:0", "b:1"]}), "is not right"),
        (config({"worker": [":1", "b:1"]}), "is not right"),
        (config({"worker": ["a:1"], "ps": ["b:1"]}), "is not right"),
        (config({"worker": ["a:1", "a:1"]}), "is not right"),
    ],
)
def test_a_wrong_one_is_told_in_one_line(text, part):
    with pytest.raises(UserError) as error:
        tf_distribute.read_tf_config(text)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
