"""Def-use over one function: which definition each loaded name reads, and in which order everything is evaluated.

The form is static single assignment without renaming: every load of a local name knows the definitions that reach it.
One definition means that the name is that value; several mean a phi, where branches or loops join.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from diffkern.rewrite.syntax import arguments_of, nodes_in

#: Calls that look at local variables by means no analysis follows.
_REFLECTION = {"locals", "vars", "eval", "exec", "globals", "dir"}

Env = dict[str, frozenset["Definition"]]
_Expr = ast.expr | None


@dataclass(eq=False)
class Definition:
    """One place where a local name is bound.

    Attributes:
        name: The name.
        statement: The statement that binds it; None for a parameter.
        value: The expression it is bound to, for ``name = expression``; None for parts of a tuple, loops and the rest.
        source: The expression that an element of a tuple, or the value after ``x += y``, is made from.
        uses: The loads that it reaches.
        deleted: The targets of ``del`` behind it, in the list of statements that it stands in.
        is_captured: Whether it has to stay: a nested function reads the name at a time that is not known, or ``del``.
    """

    name: str
    statement: ast.stmt | None
    value: ast.expr | None = None
    source: ast.expr | None = None
    uses: list[ast.Name] = field(default_factory=list)
    deleted: list[ast.Name] = field(default_factory=list)
    is_captured: bool = False


@dataclass(frozen=True, eq=False)
class Place:
    """Where a statement stands: the list it is in, its index there, and the places of the statements around it."""

    block: list[ast.stmt]
    index: int
    parents: tuple[ast.stmt, ...]


class Flow:
    """Definitions, uses and order of evaluation of one function.

    Attributes:
        tree: The function.
        definitions: The definitions that reach each load of a local name.
        order: Position of each node in the order of evaluation; a node comes after its operands.
        first: Position of the first node that is evaluated in a statement.
        places: Where each statement stands.
        statement: The innermost statement around each expression.
        guarded: Expressions that may not run though their statement does, or that run in a scope of their own.
        augmented: The load of ``x`` in each ``x += y``.
        nodes: All nodes in the order of evaluation.
        roots: The expressions that a rule may be about, the last one first.
        decline: Why nothing can be said about the function, or None.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.tree = tree
        self.definitions: dict[ast.Name, frozenset[Definition]] = {}
        self.order: dict[ast.AST, int] = {}
        self.first: dict[ast.stmt, int] = {}
        self.places: dict[ast.stmt, Place] = {}
        self.statement: dict[ast.expr, ast.stmt] = {}
        self.guarded: set[ast.expr] = set()
        self.augmented: dict[ast.AugAssign, ast.Name] = {}
        self.nodes: list[ast.AST] = []
        self.decline: str | None = None
        self._env_at: dict[ast.stmt, Env] = {}
        self._bound: dict[tuple[ast.AST, str], Definition] = {}
        self._captured: set[str] = set()
        self._wanted: set[Definition] = set()  # by a `del` that does not go with them
        self._stack: list[ast.stmt] = []
        self._guard = 0
        names = arguments_of(tree, with_any_number=True)
        env: Env = {name: frozenset([Definition(name, None)]) for name in names}
        self.parameters = {name: next(iter(reaching)) for name, reaching in env.items()}
        self._block(tree.body, env)
        for name, reaching in self.definitions.items():
            for definition in reaching:
                definition.uses.append(name)
        for definition in {*self.parameters.values(), *self._bound.values()}:
            definition.is_captured = definition.name in self._captured or definition in self._wanted
        operations = [node for node in self.nodes if isinstance(node, (ast.BinOp, ast.Call, ast.Tuple))]
        numbers = self._numbers()
        self.roots = [node for node in reversed(operations) if node in self.statement and node not in numbers]

    def _numbers(self) -> set[ast.AST]:
        """Arithmetic whose result bounds a slice or a range, as in ``x[:, j * n:(j + 1) * n]``: none of tensors."""
        left = [bound for node in self.nodes if isinstance(node, ast.Slice) for bound in ast.iter_child_nodes(node)]
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
                left += node.args
        found: set[ast.AST] = set()
        while left:
            node = left.pop()
            definition = self.single(node) if isinstance(node, ast.Name) else None
            if definition is not None and definition.value is not None:
                left.append(definition.value)
            elif isinstance(node, (ast.BinOp, ast.UnaryOp)):
                found.add(node)
                left += ast.iter_child_nodes(node)
        return found

    def reaching(self, statement: ast.stmt, name: str) -> frozenset[Definition]:
        """The definitions of ``name`` that reach a statement; none for names that are not local there."""
        return self._env_at[statement].get(name, frozenset())

    def only(self, name: ast.expr) -> Definition | None:
        """The one definition that a load reads; None for a phi, and for what is no variable."""
        reaching = self.definitions.get(name, frozenset()) if isinstance(name, ast.Name) else frozenset()
        return next(iter(reaching)) if len(reaching) == 1 else None

    def single(self, name: ast.expr) -> Definition | None:
        """The same, if it is a plain assignment; None for a parameter, or a part of a tuple, too."""
        definition = self.only(name)
        if definition is None:
            return None
        return definition if definition.value is not None and not definition.is_captured else None

    def bound(self, target: ast.Name) -> Definition:
        """The definition that a target of an assignment makes."""
        return self._bound[target, target.id]

    def is_local(self, name: ast.Name) -> bool:
        """Whether a load reads a local variable or a parameter, not a global or a free variable."""
        return bool(self.definitions.get(name))

    # --- statements ------------------------------------------------------------------------------------

    def _block(self, block: list[ast.stmt], env: Env) -> Env:
        for index, statement in enumerate(block):
            self.places[statement] = Place(block, index, tuple(self._stack))
            known = self._env_at.get(statement)
            self._env_at[statement] = dict(env) if known is None else _joined(known, env)
            self.first.setdefault(statement, len(self.nodes))
            self._stack.append(statement)
            env = self._statement(statement, dict(env))
            self._stack.pop()
            self._number(statement)
        return env

    def _statement(self, node: ast.stmt, env: Env) -> Env:
        if isinstance(node, ast.Assign):
            self._load(node.value, env)
            for target in node.targets:
                value = node.value if isinstance(target, ast.Name) and len(node.targets) == 1 else None
                self._bind(target, env, node, value, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._load(node.value, env)
                self._bind(node.target, env, node, node.value, node.value)
        elif isinstance(node, ast.AugAssign):
            self._augmented(node, env)
        elif isinstance(node, ast.If):
            self._load(node.test, env)
            branches = [(block, self._block(block, dict(env))) for block in (node.body, node.orelse)]
            ends = [end for block, end in branches if not (block and isinstance(block[-1], (ast.Return, ast.Raise)))]
            return _joined(*ends) if ends else env
        elif isinstance(node, (ast.For, ast.While)):
            return self._loop(node, env)
        elif isinstance(node, ast.With):
            for item in node.items:
                self._load(item.context_expr, env)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, env, node)
            return self._block(node.body, env)
        elif isinstance(node, ast.Try):
            return self._try(node, env)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self._nested(node)
            env[node.name] = frozenset([self._definition(node, node.name, node)])
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._delete(target, env.pop(target.id, frozenset()), self.places[node].block)
                else:
                    self._load(target, env)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                env[name] = frozenset([self._definition(node, name, node)])
        elif isinstance(node, (ast.Return, ast.Expr, ast.Raise, ast.Assert)):
            for child in ast.iter_child_nodes(node):
                self._load(child, env)
        elif not isinstance(node, (ast.Pass, ast.Break, ast.Continue)):
            self.decline = f"it holds a {type(node).__name__.lower()} statement"
        return env

    def _delete(self, target: ast.Name, reaching: frozenset[Definition], block: list[ast.stmt]) -> None:
        """``del x`` wants x to be there: it goes with the definition, or the definition has to stay."""
        (only,) = reaching if len(reaching) == 1 else (None,)
        if only is None or only.statement is None or self.places[only.statement].block is not block:
            self._wanted.update(reaching)
        elif target not in only.deleted:
            only.deleted.append(target)

    def _augmented(self, node: ast.AugAssign, env: Env) -> None:
        if isinstance(node.target, ast.Name):
            # `x += y` reads x, too, by a load that the tree does not hold.
            name = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
            load = self.augmented.setdefault(node, name)
            self._load(load, env)
            self._load(node.value, env)
            self._bind(node.target, env, node, None, load)
        else:
            self._load(node.target, env)
            self._load(node.value, env)

    def _loop(self, node: ast.For | ast.While, env: Env) -> Env:
        head = node.iter if isinstance(node, ast.For) else node.test
        before = env
        for _ in range(3):  # until what the end of the body defines has come round
            env = dict(before)
            self._load(head, env)
            if isinstance(node, ast.For):
                self._bind(node.target, env, node)
            joined = _joined(before, self._block(node.body, env))
            if joined == before:
                break
            before = joined
        return _joined(before, self._block(node.orelse, dict(before)))

    def _try(self, node: ast.Try, env: Env) -> Env:
        inside = self._block(node.body, dict(env))
        # Anything may have happened before an exception: all that the body binds may reach the handlers.
        for child in nodes_in(node.body):
            for name in [key for key in self._bound if key[0] is child]:
                definition = self._bound[name]
                env[definition.name] = env.get(definition.name, frozenset()) | {definition}
        ends = [self._block(node.orelse, dict(inside))]
        for handler in node.handlers:
            if handler.type is not None:
                self._load(handler.type, env)
            if handler.name is not None:
                self._captured.add(handler.name)
            ends.append(self._block(handler.body, dict(env)))
        return self._block(node.finalbody, _joined(*ends))

    # --- expressions -----------------------------------------------------------------------------------

    def _load(self, node: ast.AST, env: Env) -> None:
        """Records the loads of an expression, and numbers its nodes in the order of evaluation."""
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            self._nested(node, env if not isinstance(node, (ast.Lambda, ast.GeneratorExp)) else None)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                known = self.definitions.get(node, frozenset())
                self.definitions[node] = known | env.get(node.id, frozenset())
                if node.id in _REFLECTION and not env.get(node.id):
                    self.decline = f"it calls {node.id}()"
        elif isinstance(node, ast.NamedExpr):
            self._load(node.value, env)
            self._bind(node.target, env, self._stack[-1], None, node.value)
            self._captured.add(node.target.id)
        elif isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom)):
            self.decline = "it is a generator or a coroutine"
        elif isinstance(node, (ast.IfExp, ast.BoolOp)):
            test, *rest = [node.test, node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            self._load(test, env)
            self._guard += 1
            for part in rest:
                self._load(part, env)
            self._guard -= 1
        else:
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop)):
                    self._load(child, env)
        if isinstance(node, (ast.expr, ast.keyword)):
            self._number(node)
        if isinstance(node, ast.expr):
            self.statement[node] = self._stack[-1]
            if self._guard:
                self.guarded.add(node)

    def _nested(self, node: ast.AST, env: Env | None = None) -> None:
        """A scope of its own: what it reads of the locals is read now if ``env`` is given, else some time later."""
        own: set[ast.AST] = set()  # loads of its own parameters
        if isinstance(node, ast.FunctionDef):
            parameters = {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
            inside = [child for statement in node.body for child in ast.walk(statement)]
            own = {child for child in inside if isinstance(child, ast.Name) and child.id in parameters}
        for child in ast.walk(node):
            if isinstance(child, ast.expr):
                self.guarded.add(child)
                self.statement[child] = self._stack[-1]
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
                if env is None:
                    self._captured.update(() if child in own else [child.id])
                elif env.get(child.id):
                    self.definitions[child] = self.definitions.get(child, frozenset()) | env[child.id]
            elif isinstance(child, ast.Nonlocal):
                self._captured.update(child.names)
            if child is not node:
                self._number(child)

    def _bind(self, target: ast.AST, env: Env, statement: ast.stmt, value: _Expr = None, source: _Expr = None) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = frozenset([self._definition(target, target.id, statement, value, source)])
        elif isinstance(target, (ast.Tuple, ast.List)):
            sources: Iterable[_Expr] = [source] * len(target.elts)
            if isinstance(source, (ast.Tuple, ast.List)) and len(source.elts) == len(target.elts):
                sources = source.elts
            for element, part in zip(target.elts, sources, strict=True):
                self._bind(element, env, statement, None, part)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, env, statement, None, source)
        else:
            self._load(target, env)  # x[i] = ..., x.y = ...: x is read

    def _definition(
        self, key: ast.AST, name: str, statement: ast.stmt, value: _Expr = None, source: _Expr = None
    ) -> Definition:
        if (key, name) not in self._bound:
            self._bound[key, name] = Definition(name, statement, value, source)
        return self._bound[key, name]

    def _number(self, node: ast.AST) -> None:
        if node not in self.order:
            self.order[node] = len(self.nodes)
            self.nodes.append(node)


def _joined(*envs: Env) -> Env:
    first, *rest = envs
    joined = dict(first)
    for env in rest:
        for name, reaching in env.items():
            known = joined.get(name)
            joined[name] = reaching if known is None or known == reaching else known | reaching
    return joined
