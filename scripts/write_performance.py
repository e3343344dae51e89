"""Writes docs/performance.md, and the table of the README, from the results in benchmarks/.

python scripts/write_performance.py

A file there is what ``diffkern bench step --json`` or ``generate_video.py --compare --json`` wrote, or has one of the
forms below; its ``environment`` names the card.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
BEGIN = "<!-- performance: begin (scripts/write_performance.py) -->\n"
END = "<!-- performance: end -->\n"
HEAD = """# Performance by card

`scripts/write_performance.py` writes this page from the files in [`benchmarks/`](../benchmarks). Weights are random,
in the published configurations; the arms of a table ran in one process. `diffkern bench step --model flux --json FILE`
measures the same on your card. How the kernels were tuned: [H100](gpus/h100.md), [A100](gpus/a100.md),
[T4](gpus/t4.md), [MI300](gpus/mi300.md).
"""

#: The columns of the README, by the names of :data:`diffkern.bench.arms.ARMS`.
ARMS = {
    "stock": "stock",
    "stock + compile": "`torch.compile`",
    "stock + graph + compile": '`mode="reduce-overhead"`',
    "torchao float8 + compile": "torchao float8, `torch.compile`",
    "exact": '`"exact"`',
    "fast": '`"fast"`',
    "fast + graph": "`cuda_graph=True`",
    "fp8": '`"fp8"`',
    "fp8 + graph": '`"fp8"` and graph',
}

#: Differences below this share of the time are called no gain, as in :mod:`diffkern.bench.steps`.
NOISE = 0.01

Result = dict[str, Any]
Table = list[str]


def documents() -> tuple[str, str]:
    """Returns the text of the page, and that of the README's table."""
    files = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("benchmarks/*.json"))}
    found = {path: content for path, content in files.items() if "device" in content.get("environment", {})}
    page = [HEAD]
    for card in sorted({content["environment"]["device"] for content in found.values()}):
        page.append(f"\n## {card}\n")
        for path, content in found.items():
            if content["environment"]["device"] == card:
                page += _section(path, content)
    return "".join(page), _overview(found.values())


def _section(path: Path, content: Result) -> list[str]:
    tables = [table(content) for key, table in KINDS.items() if key(content)]
    if not tables:
        return []
    versions = content["environment"]["versions"]
    title = f"\n### [`{path.name}`](../benchmarks/{path.name})\n\n"
    what = " ".join([content.get("what", ""), f"torch {versions['torch']}, diffusers {versions['diffusers']}."]).strip()
    return [title, what, "\n", *("\n" + "\n".join(lines) + "\n" for lines in tables)]


def _steps(content: Result) -> Table:
    lines = _head("model", "arm", "step, ms", "+-", "against stock", "kernels, ms", "host, ms", "error")
    for model in content["models"].values():
        stock = model["arms"][0]
        for arm in model["arms"]:
            if "wall_ms" not in arm or arm.get("unavailable"):
                continue
            lines.append(
                _row(
                    model["what"],
                    arm["arm"] + " (as a graph)" * (arm.get("as_graph", False) and "graph" not in arm["arm"]),
                    f"{arm['wall_ms']:.1f}",
                    f"{arm.get('spread_ms', 0):.1f}",
                    _gain(arm.get("stock_wall_ms", stock["wall_ms"]), arm["wall_ms"]),
                    f"{sum((arm.get('kernel_ms') or {}).values()):.1f}",
                    f"{arm['host_ms']:.1f}",
                    f"{arm['error']:.1e}" if "error" in arm else f"{arm['error_to_float32']:.1e} to float32",
                )
            )
    return lines


def _breadth(content: Result) -> Table:
    """GPU time of each arm of ``bench step --all``, and where, and by its key ``cause`` why, the compiler is ahead."""
    ours = "fast", "fast + compile"
    columns = "stock", "stock + compile", *ours
    last = "ours against stock", "compile is ahead of fast"
    lines = _head("model", "layers", *(f"{arm}, ms" for arm in columns), *last)
    for model in content["breadth"].values():
        times = {arm["arm"]: sum(arm["kernel_ms"].values()) for arm in model["arms"] if arm.get("kernel_ms")}
        best = min((times[arm] for arm in ours if arm in times), default=None)
        said = [f"{arm['arm']}: {arm['unavailable']}" for arm in model["arms"] if arm.get("unavailable")]
        said = [f"not run: {reason}" for reason in (model.get("failed"), *said) if reason]
        compiled = times.get("stock + compile")
        if compiled and "fast" in times and times["fast"] / compiled > 1 + NOISE:
            said = [_gain(times["fast"], compiled), *([model["cause"]] if model.get("cause") else []), *said]
        lines.append(
            _row(
                model["what"],
                ", ".join(f"{name}={count}" for name, count in model["layers"].items()) or "all",
                *(f"{times[arm]:.2f}" if arm in times else "" for arm in columns),
                _gain(times["stock"], best) if best and "stock" in times else "",
                "; ".join(said).replace("|", "\\|"),
            )
        )
    return lines


def _videos(content: Result) -> Table:
    config = content["config"]
    lines = _head(
        f"{config['width']}x{config['height']}, {config['num_frames']} frames, {config['steps']} steps",
        "seconds a video",
        "slowest - fastest",
        "against stock",
        "peak memory, GiB",
        "error of the frames",
    )
    for title, arms in (("", content["arms"]), (", slower host", content.get("on_a_slower_host", []))):
        for arm in arms:
            difference = arm["difference_from_stock"]
            lines.append(
                _row(
                    arm["name"] + title,
                    f"{arm['median_seconds']:.2f}",
                    f"{max(arm['seconds']) - min(arm['seconds']):.2f}",
                    _gain(arms[0]["median_seconds"], arm["median_seconds"]),
                    f"{arm['peak_memory_bytes'] / 2**30:.2f}",
                    "" if difference is None else f"{difference['frames']:.1e}",
                )
            )
    return lines


def _single_steps(content: Result) -> Table:
    runs = {name: rows for name, rows in content.items() if isinstance(rows, list) and rows and "step_ms" in rows[0]}
    measured: dict[tuple[str, int], dict[str, float]] = {}
    for name, rows in runs.items():
        for row in rows:
            measured.setdefault((row["arm"], row["num_frames"]), {}).setdefault(name, row["step_ms"])
    lines = _head("arm", "frames", *(f"{name}, ms" for name in runs))
    for (arm, frames), times in sorted(measured.items(), key=lambda item: item[0][1]):
        lines.append(_row(arm, frames, *(f"{times[name]:.1f}" if name in times else "" for name in runs)))
    return lines


def _ops(content: Result) -> Table:
    ops: dict[str, list[Result]] = {}
    for case in content["ops"]:
        ops.setdefault(case["op"], []).append(case)
    lines = _head("op", "cases", "time over the byte floor, median", "time over the best rival's, median")
    for op, cases in ops.items():
        numbers = [
            [case[key] for case in cases if case.get(key)] for key in ("ours_over_floor", "ours_over_best_rival")
        ]
        lines.append(_row(f"`{op}`", len(cases), *(f"{median(each):.2f}" if each else "" for each in numbers)))
    return lines


def _installations(content: Result) -> Table:
    """Stock and what one call gives, with each kind of kernels that a machine may have."""
    lines = _head("model", "kernels", "stock, ms", "ours, ms", "kernels: stock, ms", "ours, ms", "first call, s")
    for row in content["installations"]:
        stock, ours = row["stock"], row["fast"]
        times = [f"{arm['wall_ms']:.{1 if stock['wall_ms'] >= 10 else 2}f}" for arm in (stock, ours)]
        kernels = [f"{sum(arm['kernel_ms'].values()):.2f}" for arm in (stock, ours)]
        first = ours["setup_s"] + ours["first_call_s"]
        graph = " (as a graph)" if ours.get("as_graph") else ""
        lines.append(_row(row["what"], row["kernels"], times[0], times[1] + graph, *kernels, f"{first:.1f}"))
    return lines


#: What a file is, by what is in it.
KINDS: dict[Callable[[Result], bool], Callable[[Result], Table]] = {
    lambda content: "models" in content: _steps,
    lambda content: "breadth" in content: _breadth,
    lambda content: "installations" in content: _installations,
    lambda content: "config" in content: _videos,
    lambda content: "step_ms" in str(content.get("arms", ""))[:200]: _single_steps,
    lambda content: "ops" in content: _ops,
}


def _overview(files: Iterable[Result]) -> str:
    """One row for each model, on the newest card: stock's time, and what each arm gains."""
    rows: dict[str, str] = {}
    for content in files:
        card = content["environment"]["device"].removeprefix("NVIDIA ").split()[0]
        if "config" in content:
            times = {arm["name"]: arm["median_seconds"] for arm in content["arms"]}
            config = content["config"]
            what = f"LTX-Video 2B, {config['width']}x{config['height']}, {config['num_frames']} frames, a video"
            rows[what] = _gains(f"{what}, {card}", times, "s")
        for model in content.get("models", {}).values():
            # Of kernels: what a loaded host adds to a step differs from arm to arm.
            times = {arm["arm"]: sum(arm["kernel_ms"].values()) for arm in model["arms"] if arm.get("kernel_ms")}
            for arm in model["arms"]:
                if "stock_gpu_ms" in arm:  # of the other process that it ran in
                    times[arm["arm"]] *= times["stock"] / arm["stock_gpu_ms"]
            name = model["what"].split(",")[0]
            if "encode" in model["what"] or any(what.startswith(name) and what.endswith("a video") for what in rows):
                continue  # the page has them
            what = model["what"] if "decode" in model["what"] else f"{model['what']}, a step"
            rows[what] = _gains(f"{what}, GPU time, {card}", times, "ms")
    return "\n".join([*_head("", *ARMS.values()), *rows.values()]) + "\n"


def _gains(what: str, times: dict[str, float], unit: str) -> str:
    stock = times["stock"]
    others = (_gain(stock, times[arm]) if arm in times else "" for arm in list(ARMS)[1:])
    return _row(what, f"{stock:.{0 if stock >= 100 else 1 if stock >= 10 else 2}f} {unit}", *others)


def _gain(stock: float, time: float) -> str:
    ratio = stock / time
    return "" if stock is time else "no gain" if abs(ratio - 1) < NOISE else f"{ratio:.2f}x"


def _head(*cells: str) -> Table:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def with_table(readme: str, table: str) -> str:
    """Returns the text of the README with another table."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def main(files: Sequence[Path] = (PAGE, README)) -> None:
    """Writes both."""
    page, table = documents()
    files[0].write_text(page, encoding="utf-8")
    files[1].write_text(with_table(files[1].read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
