"""What `minicpm quantize` shows: a bar while it works, tables and bars of each layer's error at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli.tables import show_table
from minicpm_cli.errors import UsageError

if TYPE_CHECKING:
    from minicpm_cli.quantize.report import LayerReport, Report

_BAR = 24  # characters of the widest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Bar:
    """Call it with (phase, done, total, detail): a bar with the time left at a terminal; elsewhere a line a phase."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._phase = terminal, ""
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self._terminal.err_tty and not self._terminal.quiet and not self._terminal.plain:
            self._progress = _progress(self._terminal)
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, phase: str, done: int, total: int, detail: str) -> None:
        if self._progress is None:
            if phase != self._phase:
                self._terminal.note(phase)
            self._phase = phase
            return
        if phase != self._phase:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(phase, total=total, detail="")
        self._phase = phase
        self._progress.update(self._task, completed=done, total=total, detail=detail)


def _progress(terminal: Terminal) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
        console=Console(file=terminal.err, no_color=not terminal.color),
        transient=True,
    )


def show_report(terminal: Terminal, report: Report) -> None:
    """The table at the end, on stdout."""
    show_table(terminal, ("quantity", "value"), report.rows())


def show_layers(terminal: Terminal, report: Report) -> None:
    """Each layer's error, on stderr: a line a layer, with a bar as long as its error."""
    most = max((layer.error for layer in report.layers), default=0.0)
    width = max((len(layer.name) for layer in report.layers), default=0)
    for layer in report.layers:
        drawn = bar(layer.error, most)
        terminal.line(f"{layer.name:{width}}  {layer.error:8.4f}  {drawn:{_BAR}}  {_remark(layer)}".rstrip())


def bar(value: float, most: float) -> str:
    """A bar of eighths of a character, the longest for `most`."""
    eighths = round(8 * _BAR * value / most) if most > 0 else 0
    return _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _remark(layer: LayerReport) -> str:
    seen = f"{layer.tokens} tokens" if layer.tokens else ""
    return ", ".join(filter(None, (seen, layer.note)))


def need_matplotlib() -> None:
    """Raises UsageError before hours are spent."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'minicpm-cli[plot]'")


def write_plot(report: Report, path: Path) -> None:
    """A PNG: each kind of layer a line over the blocks."""
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for kind, points in curves(report).items():
        axes.plot(*zip(*points, strict=True), marker=".", label=kind)
    axes.set(xlabel="block", ylabel="relative error", title=f"{report.model}: {report.recipe}", ylim=(0, None))
    axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def curves(report: Report) -> dict[str, list[tuple[int, float]]]:
    """(block, error) by kind of layer; experts of a kind are averaged."""
    found: dict[str, dict[int, list[float]]] = {}
    for layer in report.layers:
        _, _, block, *rest = layer.name.split(".")
        found.setdefault(rest[-1], {}).setdefault(int(block), []).append(layer.error)
    return {kind: [(b, sum(e) / len(e)) for b, e in sorted(blocks.items())] for kind, blocks in found.items()}
