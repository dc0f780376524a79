"""A strategy that is given, not searched: its record, priced as the search would."""

from typing import Any

import numpy as np

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.block import Block
from fastcomm.isp.memory import memory
from fastcomm.isp.price import price
from fastcomm.isp.question import Question


def evaluate(block: Block, question: Question, cluster: Cluster) -> dict[str, Any]:
    """Every number of a single strategy, by the names of a record."""
    found = price(block, question, cluster) | memory(block, question)
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in found.items()}
