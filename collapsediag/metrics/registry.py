"""What every metric is, as data: docs, report, sinks and verdicts read it from here.

A metric's module registers its own names next to the function that computes them, so that neither exists without the
other. `find` also resolves the parametrised names (`pass@8`, `retrieval_accuracy@4`) and the prefixed ones
(`collapse_first_turn_sample/mi_estimate`, `env/maze/reward/mean`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from collapsediag.errors import MetricError

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """One metric.

    name: canonical name; `@k` stands for any `@<number>`.
    title: what a chart calls it.
    unit: "nats/token", "nats/trace", "fraction", "tokens", "count", ...
    bad: the direction that is bad news: "up", "down", or "none" where it depends.
    bounds: smallest and largest possible value, None where open.
    description: one sentence: the definition.
    source: paper, equation or code the definition is from.
    family: heading it is listed under.
    needs: what must be known for it, in words a user understands.
    """

    name: str
    title: str
    unit: str
    bad: Direction
    description: str
    source: str
    family: str
    bounds: tuple[float | None, float | None] = (None, None)
    needs: str = ""


_REGISTRY: dict[str, MetricInfo] = {}
_AT_NUMBER = re.compile(r"@\d+")
_CI = re.compile(r"/ci_(?:low|high)$")
# Names that hold a user's own word: a reward component, a way of failing of a format callable.
_OWN_WORD = (
    (re.compile(r"^reward/.+/(mean|std|n_unscored)$"), r"reward/<component>/\1"),
    (re.compile(r"^format/custom/.+_fraction$"), "format/custom/<failure>_fraction"),
)
_PREFIX = re.compile(r"^(?:collapse_(?:first_turn|trajectory|turn)_sample/|(?:collapse/)?env/[^/]+/|collapse/)")


def register(*infos: MetricInfo) -> None:
    """Add metrics; a name registered twice with another meaning is an error."""
    for info in infos:
        if _REGISTRY.setdefault(info.name, info) != info:
            raise MetricError(f"metric {info.name!r} is registered twice with different definitions.")


def registered() -> dict[str, MetricInfo]:
    """All metrics by canonical name, in the order of registration."""
    import collapsediag.metrics  # noqa: F401  every family registers itself on import

    return dict(_REGISTRY)


def canonical_name(name: str) -> str:
    """The registry's name of a logged key: without prefix, without `/ci_low`, `@8` as `@k`.

    >>> canonical_name("collapse_turn_sample/retrieval_accuracy@4/ci_low")
    'retrieval_accuracy@k'
    >>> canonical_name("env/maze/reward/mean")
    'reward/mean'
    """
    plain = _CI.sub("", _PREFIX.sub("", name))
    for pattern, canonical in _OWN_WORD:
        if pattern.search(plain):
            return pattern.sub(canonical, plain)
    return _AT_NUMBER.sub("@k", plain)


def find(name: str) -> MetricInfo | None:
    """The MetricInfo of a logged key, or None for a key that is not ours."""
    return registered().get(canonical_name(name))


def families() -> dict[str, list[MetricInfo]]:
    """Metrics by family, in the order of registration."""
    grouped: dict[str, list[MetricInfo]] = {}
    for info in registered().values():
        grouped.setdefault(info.family, []).append(info)
    return grouped


def unknown_names(names: Iterable[str]) -> list[str]:
    """Those keys that no registered metric explains."""
    return [name for name in names if find(name) is None]
