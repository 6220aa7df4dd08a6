"""What a causal language model's forward does with its logits, read from its source: all of it, or an error.

A forward is accepted where it has the form

    <anything, in which labels and **kwargs keep their values, and later are not mentioned>
    logits = self.HEAD(<one argument>)                  also as a part of a step
    logits = <step>(logits)                             any number, also under "if PATH is not None:"
    if labels is not None:
        loss = self.loss_function(logits, labels, vocab_size, **kwargs)
    <anything that mentions logits only to return them>

where a step is a product or a quotient with a PATH, torch.tanh between a quotient and a product with one
PATH (a softcap), or a cast, and a PATH is made of attributes of the model. Anything else raises Unproven,
which names it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

DECORATORS = (
    "auto_docstring",
    "can_return_tuple",
    "merge_with_config_defaults",
    "capture_outputs",
    "deprecate_kwarg",
    "filter_output_hidden_states",
    "add_start_docstrings_to_model_forward",
    "replace_return_docstrings",
)
"""Those of transformers that leave labels and logits alone."""
LOSS_ARGUMENTS = ("logits", "labels", "vocab_size")
LOSS_KEYWORDS = ("shift_labels", "num_items_in_batch", "ignore_index")
"""What reaches the loss by **kwargs alone."""

Path = tuple[str, ...]
"""Attributes from the model on: "name", "name()" a method without arguments, "name?" None where missing."""


class Unproven(ValueError):
    """A forward of another form than is understood."""


class Factor(NamedTuple):
    """What multiplies the logits, or where `inverse` divides them; only if `guard` is not None."""

    path: Path
    inverse: bool
    guard: Path | None


class Softcap(NamedTuple):
    """c of c tanh(logits / c), applied last; only if `guard` is not None."""

    path: Path
    guard: Path | None


class Tail(NamedTuple):
    """head: the attribute of the model that is its last layer. labels: the place of labels among forward's
    arguments behind self. factors, softcap: what is done to the logits."""

    head: str
    labels: int
    factors: tuple[Factor, ...]
    softcap: Softcap | None


def value_of(model: Any, path: Path) -> Any:
    """What a path leads to."""
    value = model
    for name in path:
        if name.endswith("()"):
            value = getattr(value, name[:-2])()
        elif name.endswith("?"):
            value = getattr(value, name[:-1], None)
        else:
            value = getattr(value, name)
    return value


def written(path: Path) -> str:
    return ".".join(name.removesuffix("?") for name in path)


def read(forward: Callable) -> Tail:
    """The Tail of a class's forward. Raises Unproven."""
    return _Reader(*_source(forward)).tail()


def _source(forward: Callable) -> tuple[str, ast.FunctionDef]:
    """Its qualified name and its definition."""
    function = forward
    while hasattr(function, "__wrapped__"):
        # functools.wraps copies __module__, not the globals.
        owner = getattr(function, "__globals__", {}).get("__name__", "")
        if not owner.startswith("transformers."):
            raise Unproven(
                f"forward: got a wrapper of {owner or type(function).__name__} around it, want none"
            )
        function = function.__wrapped__
    name = getattr(function, "__qualname__", repr(function))
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        raise Unproven(f"{name}: its source cannot be read, want a def in a file") from None
    if not isinstance(node, ast.FunctionDef):
        raise Unproven(f"{name}: got no def, want one")
    return name, node


class _Step(NamedTuple):
    """kind: "multiply", "divide" or "tanh"."""

    kind: str
    path: Path
    guard: Path | None


class _Reader:
    """Reads one definition."""

    def __init__(self, name: str, node: ast.FunctionDef):
        self.name, self.node = name, node
        every = [*node.args.posonlyargs, *node.args.args]
        self.parameters = [argument.arg for argument in every]
        self.own = self.parameters[0] if every else ""
        self.others = node.args.kwarg.arg if node.args.kwarg else ""
        self.aliases: dict[str, Path] = {}
        # Mentions of the logits that are accounted for.
        self.understood: set[int] = set()

    def tail(self) -> Tail:
        self._check_signature()
        statement, call = self._loss()
        logits = self._check_loss(call)
        head, steps = self._steps(logits, statement, call)
        self._check_mentions(logits, head)
        factors, softcap = self._fold(steps)
        return Tail(head, self.parameters.index("labels") - 1, factors, softcap)

    def _refuse(self, node: ast.AST, why: str) -> Unproven:
        return Unproven(f"{self.name}: {why}: `{' '.join(ast.unparse(node).split())[:160]}`")

    def _check_signature(self) -> None:
        if "labels" not in self.parameters or not self.others:
            raise Unproven(f"{self.name}: got no labels and **kwargs among its parameters, want both")
        named = {*self.parameters, *(argument.arg for argument in self.node.args.kwonlyargs)}
        for name in sorted(named & set(LOSS_KEYWORDS)):
            raise Unproven(f"{self.name}: got a parameter {name}, which does not reach the loss by **kwargs")
        for decorator in self.node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if not (isinstance(called, ast.Name) and called.id in DECORATORS):
                raise self._refuse(decorator, "got a decorator that is not known")
        given = {
            id(node.value) for node in ast.walk(self.node) if isinstance(node, ast.keyword) and not node.arg
        }
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and node.attr == "get" and isinstance(node.ctx, ast.Load):
                given.add(id(node.value))
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                if node.id in ("labels", self.others, self.own):
                    raise Unproven(f"{self.name}: {node.id} gets another value, want the caller's")
            elif _is_name(node, self.others) and id(node) not in given:
                raise Unproven(f"{self.name}: {self.others} may change before the loss, want **{self.others}")

    def _calls(self, name: str) -> list[ast.Call]:
        """The calls of self.name."""
        return [
            node for node in ast.walk(self.node) if isinstance(node, ast.Call) and self._method(node) == name
        ]

    def _method(self, call: ast.Call) -> str | None:
        """The name of what is called, where that is an attribute of self."""
        own = isinstance(call.func, ast.Attribute) and _is_name(call.func.value, self.own)
        return call.func.attr if own and isinstance(call.func, ast.Attribute) else None

    def _loss(self) -> tuple[ast.If, ast.Call]:
        """`if labels is not None:`, and right in it the only call of self.loss_function."""
        calls = self._calls("loss_function")
        if len(calls) != 1:
            raise Unproven(f"{self.name}: got {len(calls)} calls of self.loss_function, want 1")
        for statement in self.node.body:
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == "labels is not None":
                for each in statement.body:
                    if isinstance(each, ast.Assign) and each.value is calls[0]:
                        return statement, calls[0]
        raise self._refuse(
            calls[0], "want `if labels is not None: loss = self.loss_function(...)` at its top"
        )

    def _check_loss(self, call: ast.Call) -> str:
        """The name of the logits that the loss gets."""
        given = dict(zip(LOSS_ARGUMENTS, call.args, strict=False))
        starred = False
        for keyword in call.keywords:
            if keyword.arg is None and _is_name(keyword.value, self.others):
                starred = True
            elif keyword.arg in LOSS_ARGUMENTS and keyword.arg not in given:
                given[keyword.arg] = keyword.value
            else:
                raise self._refuse(
                    call, f"got {ast.unparse(keyword)}, want logits, labels, vocab_size, **kwargs"
                )
        logits = given.get("logits")
        right = len(call.args) <= 3 and len(given) == 3 and starred and _is_name(given["labels"], "labels")
        if not right or not isinstance(logits, ast.Name):
            raise self._refuse(call, f"want (logits, labels, vocab_size, **{self.others}), all of them names")
        self.understood.add(id(logits))
        return logits.id

    def _steps(self, logits: str, loss: ast.If, call: ast.Call) -> tuple[str, list[_Step]]:
        """The head, and what is done to its output, in order."""
        head, steps = "", []
        for statement in self.node.body:
            if statement is loss:
                break
            if not _mentions(statement, logits):
                self._remember_alias(statement)
                self._check_inputs(statement, head)
                continue
            guard, body = self._guarded(statement)
            if guard is not None and not head:
                raise self._refuse(statement, f"{logits} are made under a condition")
            for each in body:
                found, own = self._step(each, logits, head)
                head = head or found
                steps += [step._replace(guard=guard) for step in own]
        for statement in itertools.takewhile(lambda each: call not in ast.walk(each), loss.body):
            self._check_inputs(statement, head)
        if not head:
            raise Unproven(
                f"{self.name}: got no `{logits} = self.<head>(hidden_states)` before the loss, want one"
            )
        return head, steps

    def _check_inputs(self, statement: ast.stmt, head: str) -> None:
        """What the head's loss is computed from stays as it is until the loss function is called."""
        if head and (_mentions(statement, "labels") or _mentions(statement, self.others)):
            raise self._refuse(statement, "labels may change between head and loss")

    def _guarded(self, statement: ast.stmt) -> tuple[Path | None, list[ast.stmt]]:
        """The path of `if PATH is not None:` and its body, or the statement itself."""
        if not isinstance(statement, ast.If):
            return None, [statement]
        test = statement.test
        compared = test.left if isinstance(test, ast.Compare) and len(test.ops) == 1 else None
        if compared is None or statement.orelse or not ast.unparse(test).endswith(" is not None"):
            raise self._refuse(test, "got a condition on what is done to the logits, want `... is not None`")
        tested = compared
        if isinstance(tested, ast.NamedExpr):
            name, tested = tested.target.id, tested.value
            self._alias(name, tested)
        path = self._path(tested)
        if path is None:
            raise self._refuse(test, "the logits depend on what is no attribute of the model")
        return path, statement.body

    def _step(self, statement: ast.stmt, logits: str, head: str) -> tuple[str, list[_Step]]:
        """What one statement does: the head if it calls it, and its steps."""
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and _is_name(statement.targets[0], logits)
        ):
            value = statement.value
        elif isinstance(statement, ast.AugAssign) and _is_name(statement.target, logits) and head:
            value = ast.BinOp(ast.Name(logits, ast.Load()), statement.op, statement.value)
        else:
            raise self._refuse(
                statement, f"got something between head and loss that is not known to leave {logits} alone"
            )
        found, steps = self._chain(value, logits, head)
        return found, steps

    def _chain(self, node: ast.expr, logits: str, head: str) -> tuple[str, list[_Step]]:
        """The head and the steps of an expression of the logits."""
        if head and _is_name(node, logits):
            self.understood.add(id(node))
            return head, []
        called = self._method(node) if isinstance(node, ast.Call) and not head else None
        if called and isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            if isinstance(node.args[0], ast.Starred):
                raise self._refuse(node, "got several arguments, want one")
            return called, []
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
            product = isinstance(node.op, ast.Mult)
            ways = (
                [(node.left, node.right), (node.right, node.left)] if product else [(node.left, node.right)]
            )
            for inner, factor in ways:
                path = self._path(factor)
                if path is not None:
                    found, steps = self._chain(inner, logits, head)
                    return found, [*steps, _Step("multiply" if product else "divide", path, None)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
            called, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
            if (
                called in ("torch.tanh", "nn.functional.tanh", "torch.nn.functional.tanh", "F.tanh")
                and len(arguments) == 1
            ):
                found, steps = self._chain(node.args[0], logits, head)
                return found, [*steps, _Step("tanh", (), None)]
            casts = (node.func.attr, arguments) in (
                ("float", []),
                ("contiguous", []),
                ("to", ["torch.float32"]),
            )
            if casts:
                return self._chain(node.func.value, logits, head)
        raise self._refuse(
            node, "got something between head and loss that is not known, want a scale or a softcap"
        )

    def _path(self, node: ast.expr) -> Path | None:
        """The path that an expression is, or None."""
        if _is_name(node, self.own):
            return ()
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        name, inner = "", node
        if isinstance(node, ast.Attribute):
            name, inner = node.attr, node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and not (node.args or node.keywords)
        ):
            if not node.func.attr.startswith("get_"):
                return None
            name, inner = f"{node.func.attr}()", node.func.value
        elif isinstance(node, ast.Call) and _is_name(node.func, "getattr") and not node.keywords:
            constants = [each.value for each in node.args[1:] if isinstance(each, ast.Constant)]
            if len(node.args) != 3 or len(constants) != 2 or constants[1] is not None:
                return None
            name, inner = f"{constants[0]}?", node.args[0]
        if not name:
            return None
        path = self._path(inner)
        return None if path is None else (*path, name)

    def _remember_alias(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name):
                self._alias(target.id, statement.value)

    def _alias(self, name: str, value: ast.expr) -> None:
        """Remember a name of a path that is bound once."""
        stores = [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        ]
        path = self._path(value)
        if path is not None and len(stores) == 1 and name not in self.parameters:
            self.aliases[name] = path

    def _check_mentions(self, logits: str, head: str) -> None:
        """No other use of the logits than to return them, and no second call of the head."""
        if len(self._calls(head)) != 1:
            raise Unproven(f"{self.name}: got {len(self._calls(head))} calls of self.{head}, want 1")
        returned = set()
        for node in ast.walk(self.node):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                returned |= {id(each.value) for each in node.value.keywords if each.arg == "logits"}
            elif (
                isinstance(node, ast.BinOp) and isinstance(node.left, ast.Tuple) and len(node.left.elts) == 1
            ):
                returned.add(id(node.left.elts[0]))
        for statement in self.node.body:
            for node in ast.walk(statement):
                mentioned = (
                    isinstance(node, ast.Name) and node.id == logits and isinstance(node.ctx, ast.Load)
                )
                if mentioned and id(node) not in self.understood | returned:
                    raise self._refuse(
                        _smallest(statement, node), f"{logits} are used for more than the loss"
                    )

    def _fold(self, steps: list[_Step]) -> tuple[tuple[Factor, ...], Softcap | None]:
        """Factors, then a softcap, which is the last."""
        softcap = None
        kinds = [step.kind for step in steps]
        if "tanh" in kinds:
            *steps, before, tanh, after = steps if len(steps) > 2 else [*steps, *[_Step("", (), None)] * 3]
            one = (before.kind, tanh.kind, after.kind) == ("divide", "tanh", "multiply")
            same = before.path == after.path and before.guard == tanh.guard == after.guard
            if not one or not same or "tanh" in kinds[:-2]:
                raise Unproven(
                    f"{self.name}: got {', '.join(kinds)} of the logits, want a softcap's last and alone"
                )
            softcap = Softcap(before.path, before.guard)
        return tuple(Factor(step.path, step.kind == "divide", step.guard) for step in steps), softcap


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _mentions(statement: ast.AST, name: str) -> bool:
    return any(_is_name(node, name) for node in ast.walk(statement))


def _smallest(statement: ast.stmt, node: ast.AST) -> ast.stmt:
    """The innermost statement that has the node."""

    def inside(outer: ast.AST) -> Iterator[ast.stmt]:
        for each in ast.walk(outer):
            if isinstance(each, ast.stmt) and any(found is node for found in ast.walk(each)):
                yield each

    return min(inside(statement), key=lambda each: sum(1 for _ in ast.walk(each)))
