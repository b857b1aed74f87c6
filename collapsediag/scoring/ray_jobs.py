"""Large offline jobs over many GPUs or machines, on Ray: whole steps are the tasks, each worker loads the model once.

The driver stays the only writer. It takes the matrices in the order of the steps, so that everything that runs along
the steps (moving averages, records) is as in a run without Ray, and a job that was killed goes on where its run folder
ends.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from collapsediag._optional import require
from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.cells import tokens_digest
from collapsediag.scoring.protocol import Scorer

Item = TypeVar("Item")
Result = TypeVar("Result")

DEFAULT_AHEAD = 2
TASK_RETRIES = 2


def ordered_map(
    make_worker: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    *,
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    cpus_per_worker: float = 1,
    ahead: int = DEFAULT_AHEAD,
    address: str | None = None,
) -> Iterator[Result]:
    """`work(item)` for every item, computed by Ray workers, yielded in the order of the items.

    make_worker: called once on each worker; loads the model and returns the function of one item. It travels to the
        workers by cloudpickle: what it closes over must exist or be importable there.
    workers: how many; one per GPU of the cluster where not given, one where it has none.
    gpus_per_worker: GPUs that Ray reserves for each; 1 where the cluster has any, else 0.
    ahead: items taken from `items` per worker before their results are needed; bounds the memory.
    address: of a running cluster; Ray's own default (the environment, else a local one) where not given.

    A worker that dies is started again and its item redone, TASK_RETRIES times. Raises ScoringError where an item
    fails, with the worker's own message.
    """
    ray = require("ray", extra="ray", feature="scoring on Ray")
    started = not ray.is_initialized()
    if started:
        # Ray reports usage to its makers unless told otherwise; a diagnostic has no business to decide that.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=False)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = (gpus or 1) if workers is None else workers
        if count < 1 or ahead < 1:
            raise SettingsError(f"workers={count}, ahead={ahead}: at least 1 of each is needed.")
        pool = _actors(
            ray, make_worker, count, float(bool(gpus)) if gpus_per_worker is None else gpus_per_worker, cpus_per_worker
        )
        yield from _in_order(ray, pool, iter(items), count * ahead)
    finally:
        if started:
            ray.shutdown()


def _actors(ray: Any, make_worker: Callable[[], Any], count: int, gpus: float, cpus: float) -> list[Any]:
    class Worker:
        def __init__(self) -> None:
            self.work = make_worker()

        def run(self, item: Any) -> Any:
            return self.work(item)

    remote = ray.remote(num_gpus=gpus, num_cpus=cpus, max_restarts=TASK_RETRIES, max_task_retries=TASK_RETRIES)(Worker)
    return [remote.remote() for _ in range(count)]


def _in_order(ray: Any, actors: list[Any], items: Iterator[Any], window: int) -> Iterator[Any]:
    """At most one task per actor runs and at most `window` results wait; the next in order is yielded when it is in."""
    idle = deque(actors)
    running: dict[Any, tuple[int, Any]] = {}
    results: dict[int, Any] = {}
    taken = given = 0
    exhausted = False
    while True:
        while idle and not exhausted and taken - given < window:
            try:
                item = next(items)
            except StopIteration:
                exhausted = True
                break
            actor = idle.popleft()
            running[actor.run.remote(item)] = (taken, actor)
            taken += 1
        if given == taken and exhausted:
            return
        if given in results:
            yield results.pop(given)
            given += 1
            continue
        done, _ = ray.wait(list(running), num_returns=1)
        number, actor = running.pop(done[0])
        results[number] = _result(ray, done[0])
        idle.append(actor)


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise ScoringError(f"a Ray worker failed: {type(cause).__name__}: {cause}") from None
    except ray.exceptions.RayError as error:
        raise ScoringError(
            f"a Ray worker died {TASK_RETRIES + 1} times on the same step or could not start ({type(error).__name__}: "
            f"{str(error).strip()}). Out of memory is the usual reason."
        ) from None


class KeepingScorer:
    """Scores, and keeps the matrices by the tokens they are of; runs on the workers."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._kept: dict[str, LogLikelihoodMatrix] = {}

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """Score with the inner scorer and keep the result."""
        matrix = self._kept[tokens_digest(pairs)] = self.scorer.score(pairs)
        return matrix

    def take(self) -> dict[str, LogLikelihoodMatrix]:
        """What was kept since the last time, which is then forgotten."""
        kept, self._kept = self._kept, {}
        return kept


class KeptScorer:
    """Answers with matrices that workers computed; runs in the driver."""

    def __init__(self) -> None:
        self.matrices: Mapping[str, LogLikelihoodMatrix] = {}

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """The matrix of these very pairs. Raises ScoringError where the workers computed others."""
        try:
            return self.matrices[tokens_digest(pairs)]
        except KeyError:
            raise ScoringError(
                "the driver cut this step into other pairs than the worker did; both need the same tokenizer, "
                "settings and release of collapsediag."
            ) from None
