"""Runs a chat template from anywhere: jinja2's immutable sandbox with transformers' semantics, on a budget.

A template is a program from the internet. Beyond what the sandbox forbids, every loop turn, call, filter, operator and
literal is metered: steps, size of each value, size of the output, and seconds. No single operation can create more
than the size limit, so a check between operations is enough and works in any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from minicpm_cli.errors import TemplateError
from minicpm_cli.text.meter import LARGEST_NUMBER, Limits, Meter, metered_filter
from minicpm_cli.text.template_functions import Namespace, RaisedByTemplate, raise_exception, strftime_now, tojson

_FILE = "<template>"


class Sandbox:
    """A compiled template. Raises TemplateError, with the line, when it does not compile, fails or exceeds `limits`."""

    def __init__(self, source: str, origin: str, limits: Limits = Limits()) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._meter = Meter(limits)
        self._meter.start()
        try:
            self._template = _Environment(self._meter).from_string(source)
        except Exception as error:  # noqa: BLE001 - a template may make jinja raise anything
            self._fail(error)

    def render(self, variables: Mapping[str, Any]) -> str:
        with self._lock:
            self._meter.start()
            try:
                return "".join(self._template.generate(**variables))
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        line = getattr(error, "lineno", None) or _line(error)
        where = f"{self._origin}, line {line}" if line else self._origin
        reason = "the template nests too deeply" if isinstance(error, RecursionError) else str(error)
        reason = reason or type(error).__name__
        advice = "" if isinstance(error, RaisedByTemplate) else " Choose another one with --chat-template."
        raise TemplateError(f"{where}: {reason.rstrip('.')}.{advice}") from error


def _line(error: Exception) -> int | None:
    """The line of the template that the innermost frame was in; jinja puts template lines into tracebacks."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


class _Environment(ImmutableSandboxedEnvironment):
    """Every operation goes through the meter; jinja calls the methods below from its generated code."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, meter: Meter) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.meter = meter
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=Namespace)
        self.filters["tojson"] = tojson
        self.filters = {name: metered_filter(name, function, meter) for name, function in self.filters.items()}
        self.filters["__value"] = meter.value
        self.filters["__output"] = meter.output

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **options)

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
        self.meter.call(function, args, options)
        return self.meter.value(super().call(context, function, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.binary(operator, left, right)
        return self.meter.value(super().call_binop(context, operator, left, right))


class _Metering(NodeTransformer):
    """Puts the meter where jinja's code would otherwise work without calling the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        size = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        tick = nodes.Call(
            nodes.EnvironmentAttribute("meter.tick"), [nodes.Const(min(size, LARGEST_NUMBER))], [], None, None
        )
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        keep = nodes.TemplateData
        node.nodes = [part if isinstance(part, keep) else _filtered(part, "__output") for part in node.nodes]
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        inner = node.filter or None
        node.filter = nodes.Filter(inner, "__value", [], [], None, None, lineno=node.lineno)
        return node

    def _value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "__value")

    visit_List = visit_Dict = visit_Concat = _value  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        # A tuple may also be the target of an assignment.
        self.generic_visit(node)
        return _filtered(node, "__value") if node.ctx == "load" else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %} marks what a model is trained on; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
