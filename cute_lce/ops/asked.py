"""Which gradients the running backward asks for."""

from __future__ import annotations

from typing import Any

import torch

_IDENTITIES = ("BackwardHookFunction", "RegisterPostBackwardFunction")
"""torch's functions of which each output is the tensor in the same place: of a module's full backward hooks,
and of fully_shard."""
_ONE_NODE = (
    "grad_weight_out: got input and linear_weight that are outputs of one {}, and a backward that asks for "
    "one of these itself, torch does not say which; want one that asks for what they were made from"
)


def needed_now(ctx) -> tuple[bool, bool]:
    """Whether this backward asks for input's and for linear_weight's gradient, which are the first two of the
    node's. ctx.needs_input_grad says what the forward knew: torch.autograd.grad may ask for one alone.

    torch knows of a node that it will be executed, not for which of its outputs. So linear_weight's is asked
    for if something behind it is, which a walk over its graph finds: of a leaf one step, at most all of it.
    Behind an operation that makes both operands, unless it is one of _IDENTITIES, that may be input's alone;
    and a tensor between such an identity and the call is not seen to be asked for beside input. Raises
    RuntimeError where input and linear_weight are outputs of one node at which the backward ends.
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
    edges, seen = [edge] if _executes(edge[0]) else [], set()
    while edges:
        edge = edges.pop()
        if edge in seen:
            continue
        seen.add(edge)
        node, output = edge
        onward = [each for each in node.next_functions if _executes(each[0])]
        if not onward:
            return edge
        if _is_identity(node):
            own = node.next_functions[output]
            onward = [own] if own in onward else []
        edges += onward
    return None


def _is_identity(node: Any) -> bool:
    function = getattr(type(node), "_forward_cls", None)
    return getattr(function, "__name__", "") in _IDENTITIES and function.__module__.startswith("torch.")


def _executes(node: Any) -> bool:
    """Whether the running backward executes a node; None: of a tensor without gradient."""
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # A leaf that torch.autograd.grad was asked for; or no backward of torch's runs, and all is needed.
        return True
