"""DALI's Pipeline API as the stages of dali_ops.py see it, so that a stage can also run in the Dynamic API.

Operators have the same names and arguments in both APIs. What differs are the methods of `Api`;
tools/preprocessing/apis.py has the Dynamic API and the methods that only `--ops` needs.
"""

from typing import Any

from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

Data = Any  # nvidia.dali.data_node.DataNode in a graph, nvidia.dali.experimental.dynamic.Batch otherwise


class Api:
    """The Pipeline API: nodes of a graph that runs later.

    Attributes:
        ops: the module of the operators; `ops.decoders`, `ops.transforms` and so on below it.
    """

    ops: Any = fn

    def part(self, data: DataNode, index: int | slice) -> DataNode:
        """`data[index]` along the first axis of each sample."""
        return data[index]


GRAPH = Api()
