"""Write docs/metrics.md from the metric registry: `python docs/generate.py`. A test checks that it is current."""

from __future__ import annotations

from pathlib import Path

from collapsediag.metrics.registry import MetricInfo, families

TARGET = Path(__file__).parent / "metrics.md"

HEAD = """# Metrics

Generated from the registry (`python docs/generate.py`); the definitions are the code's own.

`bad` says which direction is bad news; `-` where it depends. Units are nats where a logarithm is involved, per token
or per trace as said. A share of groups, and every headline number, comes with `<name>/ci_low` and `<name>/ci_high`, a
95% interval. Numbers from the matrix are logged as `collapse_<draw>_sample/<name>`, where the draw of turns is
`first_turn`, `trajectory` or `turn`. Rollout metrics are repeated as `env/<environment>/<name>` where a step holds
several environments. What cannot be measured is absent, and the record says why.
"""


def bounds(info: MetricInfo) -> str:
    """The possible range in words."""
    low, high = (("" if b is None else f"{b:g}") for b in info.bounds)
    return f"{low} to {high}" if low and high else (f"from {low}" if low else (f"up to {high}" if high else "any"))


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for family, infos in sorted(families().items()):
        parts.append(f"\n## {family[0].upper()}{family[1:]}\n")
        for info in sorted(infos, key=lambda i: i.name):
            needs = f" Needs {info.needs}." if info.needs else ""
            bad = "-" if info.bad == "none" else info.bad
            parts.append(f"\n### `{info.name}`\n\n{info.title}. {info.description}{needs}\n")
            parts.append(f"\nUnit: {info.unit}. Range: {bounds(info)}. Bad: {bad}. Source: {info.source}.\n")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
