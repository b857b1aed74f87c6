"""What cheaper estimates of the mutual information cost and how wrong they are, on real traces.

    python benchmarks/budget.py                          # prints the tables
    python benchmarks/budget.py --write docs/scoring.md  # puts them between the page's markers
    python benchmarks/budget.py --json FILE

The traces are 64 samples of SmolLM2-135M-Instruct on 16 prompts, every token scored under every prompt
(benchmarks/data/smollm2_p16.npz, made by budget_data.py). Healthy is that matrix as it is. The collapsed states shrink
what is left of the prompt: each row's deviation from its mean is multiplied by lambda. Errors are of the sequence MI in
nats, over seeded draws; costs are tokens run, contexts included, as a share of the whole matrix's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import logsumexp

from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.information import mutual_information
from collapsediag.scoring.budget import choose_columns
from collapsediag.scoring.cost import estimate_cost

DATA = Path(__file__).parent / "data" / "smollm2_p16.npz"
LAMBDAS = (1.0, 0.1, 0.05, 0.02)
PRUNING_BLOCK = 8
BEGIN, END = "<!-- budget tables: made by benchmarks/budget.py -->", "<!-- end of budget tables -->"


@dataclass(frozen=True)
class Traces:
    """logp_PNT: token log-probs, NaN beyond a trace's end. own_N, length_N: per trace."""

    logp_PNT: np.ndarray
    own_N: np.ndarray
    length_N: np.ndarray
    contexts: list[np.ndarray]
    traces: list[np.ndarray]

    @classmethod
    def load(cls, path: Path) -> Traces:
        with np.load(path) as stored:
            contexts = np.split(stored["context_ids"], np.cumsum(stored["context_length_P"])[:-1])
            traces = np.split(stored["trace_ids"], np.cumsum(stored["trace_length_N"])[:-1])
            logp = stored["logp_PNT"].astype(np.float64)
            return cls(logp, stored["own_N"], stored["trace_length_N"], contexts, traces)

    def sums(self, shrink: float) -> np.ndarray:
        """[N, P] sums, each row's deviation from its mean multiplied by `shrink`."""
        logp_NP = np.nansum(self.logp_PNT, axis=2).T
        mean = logp_NP.mean(axis=1, keepdims=True)
        return mean + shrink * (logp_NP - mean)

    def cost(self, scored_NP: np.ndarray) -> float:
        """Tokens run for these cells, as a share of the whole matrix's."""
        return (
            estimate_cost(self.contexts, self.traces, scored_NP=scored_NP).tokens
            / estimate_cost(self.contexts, self.traces).tokens
        )


def mi(logp_NP: np.ndarray, own_N: np.ndarray, scored_NP: np.ndarray | None = None) -> float:
    scored = np.ones(logp_NP.shape, dtype=bool) if scored_NP is None else scored_NP
    matrix = LogLikelihoodMatrix(logp_NP=logp_NP, length_N=np.ones(len(own_N), int), own_N=own_N, scored_NP=scored)
    return mutual_information(matrix, normalization="sequence")


def corrected_mi(logp_NP: np.ndarray, own_N: np.ndarray, scored_NP: np.ndarray) -> float:
    """The budgeted MI less its bias to second order: var / (2 mean^2) of the estimated mixture, row by row."""
    p, rows = logp_NP.shape[1], np.arange(len(own_N))
    ratio_NP = np.exp(np.where(scored_NP, logp_NP - logp_NP[rows, own_N][:, None], -np.inf))
    others_NP = scored_NP.copy()
    others_NP[rows, own_N] = False
    k = int(others_NP.sum(axis=1)[0])
    mean_N = np.where(others_NP, ratio_NP, 0.0).sum(axis=1) / k
    spread_N = np.where(others_NP, (ratio_NP - mean_N[:, None]) ** 2, 0.0).sum(axis=1) / (k - 1)
    variance_N = spread_N / k * (1 - k / (p - 1)) * ((p - 1) / p) ** 2  # drawn without replacement
    mixture_N = (1 + (p - 1) * mean_N) / p
    return mi(logp_NP, own_N, scored_NP) - float((variance_N / (2 * mixture_N**2)).mean())


# --- the ways to save -----------------------------------------------------------------------------------------------

Draw = Callable[[int], tuple[np.ndarray, float]]  # draw number -> cells that are scored, estimated MI


def independent_columns(own_N: np.ndarray, n_contexts: int, k: int, step: int) -> np.ndarray:
    rng = np.random.default_rng([99, step])
    scored = np.zeros((own_N.size, n_contexts), dtype=bool)
    for row, own in enumerate(own_N):
        scored[row, own] = True
        scored[row, rng.choice(np.delete(np.arange(n_contexts), own), k, replace=False)] = True
    return scored


def block_columns(own_N: np.ndarray, n_contexts: int, k: int, step: int) -> np.ndarray:
    """Contexts in random blocks of K+1; every trace under all contexts of its own block."""
    block = np.empty(n_contexts, dtype=int)
    block[np.random.default_rng([98, step]).permutation(n_contexts)] = np.arange(n_contexts) // (k + 1)
    return block[own_N][:, None] == block[None, :]


def ways(logp_NP: np.ndarray, own_N: np.ndarray) -> Iterator[tuple[str, Draw]]:
    n, p = logp_NP.shape
    group = n // p

    def columns(choose: Callable[..., np.ndarray], k: int) -> Draw:
        def draw(step: int) -> tuple[np.ndarray, float]:
            scored = choose(step)
            return scored, mi(logp_NP, own_N, scored)

        return draw

    for k in (1, 2, 4, 8):
        yield f"own + {k} others (budget mode)", columns(lambda step, k=k: choose_columns(own_N, p, k, step=step), k)

    def corrected(step: int) -> tuple[np.ndarray, float]:
        scored = choose_columns(own_N, p, 4, step=step)
        return scored, corrected_mi(logp_NP, own_N, scored)

    yield "own + 4 others, bias removed to second order (not applied)", corrected
    yield "own + 4 others, drawn per trace", columns(lambda step: independent_columns(own_N, p, 4, step), 4)
    yield "own + 3 others, in blocks", columns(lambda step: block_columns(own_N, p, 3, step), 3)
    for kept in (1, 2):

        def rows(step: int, kept: int = kept) -> tuple[np.ndarray, float]:
            rng = np.random.default_rng([97, step])
            chosen = np.concatenate([rng.choice(np.flatnonzero(own_N == j), kept, replace=False) for j in range(p)])
            scored = np.zeros((n, p), dtype=bool)
            scored[chosen] = True
            return scored, mi(logp_NP[chosen], own_N[chosen])

        yield f"{kept} of {group} traces per prompt", rows
    for kept in (4, 8):

        def prompts(step: int, kept: int = kept) -> tuple[np.ndarray, float]:
            chosen = np.sort(np.random.default_rng([96, step]).choice(p, kept, replace=False))
            inside = np.isin(own_N, chosen)
            scored = inside[:, None] & np.isin(np.arange(p), chosen)[None, :]
            return scored, mi(logp_NP[inside][:, chosen], np.searchsorted(chosen, own_N[inside]))

        yield f"{kept} of {p} prompts", prompts


def errors(traces: Traces, draws: int) -> list[dict[str, object]]:
    """One row per way: cost, and bias and sd of the MI in every state."""
    rows: dict[str, dict[str, object]] = {}
    for shrink in LAMBDAS:
        logp_NP = traces.sums(shrink)
        exact = mi(logp_NP, traces.own_N)
        for name, draw in ways(logp_NP, traces.own_N):
            found = np.array([draw(step)[1] for step in range(draws)]) - exact
            row = rows.setdefault(name, {"way": name, "cost": np.mean([traces.cost(draw(s)[0]) for s in range(3)])})
            row[f"bias_{shrink:g}"], row[f"sd_{shrink:g}"] = float(found.mean()), float(found.std())
    return list(rows.values())


def pruning(traces: Traces) -> list[dict[str, float]]:
    """Drop a column once its partial sum is `margin` below the trace's own total: log-probs only fall."""
    rows = []
    for shrink in LAMBDAS:
        # The partial sums shrink with the totals: every token's deviation from its mean over columns is scaled.
        mean = np.mean(traces.logp_PNT, axis=0, keepdims=True)
        partial_PNT = np.cumsum(np.nan_to_num(mean + shrink * (traces.logp_PNT - mean)), axis=2)
        total_NP = partial_PNT[:, :, -1].T
        own_N = total_NP[np.arange(len(traces.own_N)), traces.own_N]
        exact = mi(total_NP, traces.own_N)
        for margin in (0.0, 5.0, 10.0, 20.0):
            used, upper_NP = 0, total_NP.copy()
            dropped_NP = np.zeros(total_NP.shape, dtype=bool)
            for row, length in enumerate(traces.length_N):
                for column in range(total_NP.shape[1]):
                    stops = [*range(PRUNING_BLOCK, length, PRUNING_BLOCK), length]
                    stop = next((t for t in stops if partial_PNT[column, row, t - 1] < own_N[row] - margin), length)
                    used += stop
                    if stop < length:
                        dropped_NP[row, column] = True
                        upper_NP[row, column] = partial_PNT[column, row, stop - 1]
            # What was dropped is somewhere between nothing and its partial sum.
            low = float(np.mean(own_N - logsumexp(upper_NP, axis=1))) + np.log(total_NP.shape[1])
            high = float(np.mean(own_N - logsumexp(np.where(dropped_NP, -np.inf, total_NP), axis=1)))
            high += np.log(total_NP.shape[1])
            rows.append({
                "lambda": shrink, "margin": margin, "tokens": used / (int(traces.length_N.sum()) * total_NP.shape[1]),
                "mi": exact, "mi_low": low, "mi_high": high,
            })  # fmt: skip
    return rows


def first_tokens(traces: Traces) -> list[dict[str, float]]:
    """Only the first t tokens of each trace: MI of the beginning, which is at most the MI of the whole."""
    rows = []
    for t in (8, 16, 24, 32, 48, int(traces.length_N.max())):
        logp_NP = np.nansum(traces.logp_PNT[:, :, :t], axis=2).T
        rows.append({
            "t": t, "tokens": float(np.minimum(traces.length_N, t).sum() / traces.length_N.sum()),
            "mi": mi(logp_NP, traces.own_N), "retrieval": float((logp_NP.argmax(axis=1) == traces.own_N).mean()),
        })  # fmt: skip
    return rows


# --- the page -------------------------------------------------------------------------------------------------------


def markdown(traces: Traces, draws: int, tables: dict[str, list[dict[str, object]]]) -> str:
    exact = {shrink: mi(traces.sums(shrink), traces.own_N) for shrink in LAMBDAS}
    n, p = len(traces.own_N), traces.logp_PNT.shape[0]
    head = [f"{'healthy' if s == 1.0 else f'lambda {s:g}'} (MI {exact[s]:.2f})" for s in LAMBDAS]
    lines = [
        f"{n} traces of {p} prompts ({int(traces.length_N.min())} to {int(traces.length_N.max())} tokens); error of "
        f"the MI in nats, bias ± sd over {draws} draws:",
        "",
        "| scored | cost | " + " | ".join(head) + " |",
        "|---|---|" + "---|" * len(LAMBDAS),
    ]
    for row in tables["errors"]:
        cells = [f"{row[f'bias_{s:g}']:+.4f} ± {row[f'sd_{s:g}']:.4f}" for s in LAMBDAS]
        lines.append(f"| {row['way']} | {row['cost']:.0%} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Exact pruning, partial sums looked at every {PRUNING_BLOCK} tokens:",
        "",
        "| state | margin, nats | trace tokens run | MI | MI lies between |",
        "|---|---|---|---|---|",
    ]
    for row in tables["pruning"]:
        state = "healthy" if row["lambda"] == 1.0 else f"lambda {row['lambda']:g}"
        lines.append(
            f"| {state} | {row['margin']:g} | {row['tokens']:.0%} | {row['mi']:.4f} | {row['mi_low']:.4f} and "
            f"{row['mi_high']:.4f} |"
        )
    lines += [
        "",
        "The first t tokens only (healthy):",
        "",
        "| t | trace tokens run | MI | retrieval |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r['t']} | {r['tokens']:.0%} | {r['mi']:.3f} | {r['retrieval']:.2f} |" for r in tables["first_tokens"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    args = parser.parse_args()
    traces = Traces.load(args.data)
    tables = {"errors": errors(traces, args.draws), "pruning": pruning(traces), "first_tokens": first_tokens(traces)}
    text = markdown(traces, args.draws, tables)  # type: ignore[arg-type]
    print(text)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1, default=float) + "\n")
    if args.write:
        page = args.write.read_text()
        before, rest = page.split(BEGIN)
        args.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
