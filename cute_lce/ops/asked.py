"""Which gradients the running backward asks for."""

from __future__ import annotations

from typing import Any

import torch

_HOOKS = "BackwardHookFunctionBackward"
"""The node of a module's full backward hooks, of which each output is the input in the same place."""
_ONE_NODE = (
    "grad_weight_out: got input and linear_weight that are outputs of one {}, and a backward that asks for "
    "some of its outputs, torch does not say which; want one that asks for what they were made from"
)


def needed_now(ctx) -> tuple[bool, bool]:
    """Whether this backward asks for input's and for linear_weight's gradient, which are the first two of the
    node's. ctx.needs_input_grad says what the forward knew: torch.autograd.grad may ask for one alone.

    torch knows of a node that it will be executed, not for which of its outputs. So linear_weight's is asked
    for if something behind it is. Raises RuntimeError where input and linear_weight are outputs of one node
    at which the backward ends.
    """
    input, weight = ctx.next_functions[:2]
    end = _end(weight)
    if end is not None and end[0].next_functions:
        beside = _end(input)
        if beside is not None and beside[0] is end[0] and beside[1] != end[1]:
            raise RuntimeError(_ONE_NODE.format(type(end[0]).__name__))
    return _executes(input[0]), end is not None


def _end(edge: tuple) -> tuple | None:
    """Where what flows along an edge (a node, and which of its outputs) ends, a leaf or a tensor that was
    asked for; None: nowhere."""
    edges, seen = [edge], set()
    while edges:
        edge = edges.pop()
        node, output = edge
        if edge in seen or not _executes(node):
            continue
        seen.add(edge)
        onward = [each for each in node.next_functions if _executes(each[0])]
        if not onward:
            return edge
        if type(node).__name__ == _HOOKS:
            onward = [node.next_functions[output]]
        edges += onward
    return None


def _executes(node: Any) -> bool:
    """Whether the running backward executes a node; None: of a tensor without gradient."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # A leaf that torch.autograd.grad was asked for; or no backward of torch's runs, and all is needed.
        return True
