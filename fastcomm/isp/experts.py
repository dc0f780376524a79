"""Seconds of a layer's routed experts: their products, and the all-to-alls around them."""

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.block import FULL, Block
from fastcomm.isp.communication import by_node, collective
from fastcomm.isp.model import Experts
from fastcomm.isp.question import Question

Array = NDArray[Any]


def copies(block: Block, question: Question, experts: Experts) -> Array:
    """Copies of tokens that the fullest rank sends, and works on, in a micro-batch."""
    tokens = 1.0 * block.bsz * question.seq_len / block.sp
    return np.asarray(tokens * experts.top_k * question.imbalance)


def product(block: Block, question: Question, cluster: Cluster, experts: Experts) -> Array:
    """One of the three products of all experts of a rank, forward, as one grouped kernel.

    Few tokens do not make it faster than reading the weights.
    """
    work = 2.0 * copies(block, question, experts) * question.model.hidden * experts.ffn
    read = question.dtype_size * weights(block, question, experts) / cluster.hbm
    return np.maximum(cluster.gemm.seconds(work), read)


def weights(block: Block, question: Question, experts: Experts) -> float:
    """Elements of one matrix, of all experts of a rank."""
    return experts.number / block.ep * question.model.hidden * experts.ffn


def exchange(block: Block, question: Question, cluster: Cluster, experts: Experts) -> Array:
    """Seconds of a layer's dispatches and combines, forward and backward."""
    volume = question.dtype_size * question.model.hidden * copies(block, question, experts)
    calls = 4 + 2 * (block.ck == FULL).astype(np.float64)
    if question.dispatch == "copies":
        return np.asarray(calls * collective(cluster, "all_to_all", volume, block.ep))
    nodes = -(-block.ep // cluster.gpus_per_node)
    once = by_node(cluster, volume, block.ep, visited(experts, nodes) / experts.top_k)
    return np.asarray(calls * once)


def visited(experts: Experts, nodes: int) -> float:
    """Nodes that a token's experts lie on, on average, if all are as likely."""
    near = min(nodes, experts.node_limit or nodes)
    # Of the experts on so many nodes, none of the token's is on a given one.
    number = experts.number * near // nodes
    missed = comb(number - number // near, experts.top_k) / comb(number, experts.top_k)
    return near * (1 - missed)
