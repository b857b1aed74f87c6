"""The fast path: each context runs once, then the packed traces of all contexts continue it.

Everything goes through the model's outer forward, so that the hooks of FSDP, ZeRO and PEFT fire.

Legend: B contexts of a batch; T tokens of a step; R rows read; M pairs; K prefix keys; G traces of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.attention import Attention, Own
from collapsediag.scoring.cache import KeysValues, Prefix, new_keys_values, stack
from collapsediag.scoring.contexts import ContextBatch
from collapsediag.scoring.head import HeadJob, HeadResult, HeadTap, UnsupportedModelError
from collapsediag.scoring.masks import KNOWN_KINDS
from collapsediag.scoring.packing import Step, last_uses
from collapsediag.scoring.plan import Group, Plan

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NO_PAIRS = HeadJob(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def unsupported_reason(access: ModelAccess) -> str | None:
    """Why this model cannot take the fast path, as far as can be told without running it; None if it may."""
    if access.config is None:
        return "it is not a transformers model"
    if "position_ids" not in access.parameters:
        return "its forward takes no position_ids"
    if access.cache_name is None:
        return "its forward takes no key-value cache"
    kinds = set(access.setting("layer_types", ()))
    if not kinds <= KNOWN_KINDS:
        return f"it has layers of type {', '.join(sorted(kinds - KNOWN_KINDS))}"
    if len(set(access.layer_settings("sliding_window"))) > 1:
        return "its layers have windows of different sizes"
    if access.setting("alibi", False) or access.setting("model_type") in ("bloom", "mpt"):
        return "its attention biases (ALiBi) take no tree mask"
    if "local" in access.setting("attention_layers", ()):
        return "its local attention counts places of a forward pass, not positions"
    if getattr(access.inner, "_is_stateful", False):
        return "it keeps a recurrent state"
    return None


def length_reason(access: ModelAccess, longest: int) -> str | None:
    """Why pairs of up to `longest` tokens cannot take the fast path on this model; None if they may."""
    limit = access.length_dependent_rope
    if limit is not None and longest > limit:
        return f"its rotary frequencies change beyond {limit} tokens and the longest pair has {longest}"
    return None


@dataclass(frozen=True, eq=False)
class BatchScores:
    """Results of one batch.

    context_B: numbers of the contexts within the group.
    logp_BG: summed log-probs. tokens: per-token values by context row, where asked for.
    context_nan_B: contexts that give NaN by themselves, whatever the trace.
    """

    context_B: tuple[int, ...]
    logp_BG: FloatArray
    context_nan_B: BoolArray
    tokens: list[tuple[FloatArray, FloatArray | None]] | None = None


class PrefixEngine:
    """Runs a plan on a model whose head is tapped.

    on_tokens: called with the number of tokens after each forward pass.
    max_tokens: tokens of one forward pass.
    """

    def __init__(
        self,
        access: ModelAccess,
        tap: HeadTap,
        attention: Attention,
        *,
        max_tokens: int,
        on_tokens: Callable[[int], None],
    ):
        self.access, self.tap, self.attention = access, tap, attention
        self.max_tokens, self.on_tokens = max_tokens, on_tokens
        self.cache_name = str(access.cache_name)
        self.device = access.device
        self.checked = False

    def run(
        self, contexts: Sequence[IntArray], plan: Plan, entropy_UC: BoolArray | None = None, *, tokens: bool = False
    ) -> Iterator[tuple[Group, BatchScores]]:
        """Score all traces of each group under all its contexts, a batch of contexts at a time.

        contexts: the distinct ones. entropy_UC: cells whose entropies are wanted. tokens: give per-token values too.
        """
        kept: dict[int, Prefix] = {-1: Prefix.empty(self.device)}
        batches = [batch for group in plan.groups for batch in group.batches]
        last_use = {base: n for n, batch in enumerate(batches) for end in batch.bases for base in _line(plan, end)}
        number = 0
        for group in plan.groups:
            traces, chosen = _Entries(group), [contexts[c] for c in group.context_G]
            entropy_GC = None if entropy_UC is None else entropy_UC[np.ix_(group.trace_G, group.context_G)]
            for batch in group.batches:
                for base in sorted(set(batch.bases)):
                    self._ensure_base(plan, base, kept)
                prefix, first = self._prefill(chosen, group, batch, kept, entropy_GC)
                for base in [b for b in kept if b >= 0 and last_use[b] <= number]:
                    del kept[base]
                results = [first, *self._steps(group, batch, prefix, entropy_GC)]
                del prefix
                yield group, traces.collect(batch, results, tokens=tokens)
                number += 1

    def _ensure_base(self, plan: Plan, number: int, kept: dict[int, Prefix]) -> None:
        if number in kept:
            return
        base = plan.bases[number]
        self._ensure_base(plan, base.parent, kept)
        kept[number] = self._chain(kept[base.parent], base.tokens[None, :], NO_PAIRS)[0]

    def _prefill(
        self,
        contexts: Sequence[IntArray],
        group: Group,
        batch: ContextBatch,
        bases: dict[int, Prefix],
        entropy_GC: BoolArray | None,
    ) -> tuple[Prefix, HeadResult]:
        """Keys and values of the batch's contexts, and the log-probs of the traces' first tokens."""
        parts: list[tuple[Prefix, KeysValues, torch.Tensor]] = []
        results: list[HeadResult] = []
        for rows in batch.prefills:
            base = bases[batch.bases[rows[0]]]
            chosen = [batch.contexts[row] for row in rows]
            start = int(base.length_B[0])
            size_B = np.array([contexts[c].size - start for c in chosen])
            ids = np.zeros((len(rows), int(size_B.max())), dtype=np.int64)
            for row, c in enumerate(chosen):
                ids[row, : size_B[row]] = contexts[c][start:]
                # Padded with its own token: an embedding that is NaN must not come in from elsewhere.
                ids[row, size_B[row] :] = contexts[c][-1]
            wanted = None if entropy_GC is None else np.asarray(entropy_GC[:, chosen].any(axis=0))[:, None]
            job = HeadJob(size_B[:, None] - 1, np.zeros(group.first_F.size, dtype=np.int64), group.first_F, wanted)
            whole, result = self._chain(base, ids, job)
            parts.append((base, _after(base, whole), torch.from_numpy(size_B).to(self.device)))
            results.append(result)
        entropy = None if entropy_GC is None else torch.cat([r.entropy_BR for r in results if r.entropy_BR is not None])
        return stack(parts), HeadResult(torch.cat([r.logp_BM for r in results]), entropy)

    def _chain(self, prefix: Prefix, ids_BT: IntArray, job: HeadJob) -> tuple[Prefix, HeadResult]:
        """Run tokens that follow each other, in equal pieces where they are too many; the job is for the last piece."""
        tokens = ids_BT.shape[1]
        pieces = max(1, -(-ids_BT.size // self.max_tokens)) if ids_BT.shape[0] == 1 else 1
        cuts = np.linspace(0, tokens, pieces + 1).round().astype(int).tolist()
        result: HeadResult | None = None
        for start, stop in pairwise(cuts):
            piece = torch.from_numpy(np.ascontiguousarray(ids_BT[:, start:stop])).to(self.device)
            position = prefix.length_B[:, None] + torch.arange(stop - start, device=self.device)
            position = position.expand(ids_BT.shape[0], -1)
            piece_job = NO_PAIRS
            if stop == tokens:
                piece_job = HeadJob(job.row_BR - start, job.pair_row_M, job.pair_target_M, job.entropy_BR)
            own = Own.chain(stop - start, self.device)
            result, new = self._forward(piece, position, own, prefix, piece_job, keep=True)
            assert new is not None
            prefix = prefix.continued(new, position)
        assert result is not None
        return prefix, result

    def _steps(
        self, group: Group, batch: ContextBatch, prefix: Prefix, entropy_GC: BoolArray | None
    ) -> Iterator[HeadResult]:
        kept = {-1: prefix}
        uses = last_uses([step.parent for step in group.steps])
        for number, step in enumerate(group.steps):
            position = prefix.length_B[:, None] + torch.from_numpy(step.depth_T).to(self.device)
            ids = torch.from_numpy(step.token_T).to(self.device)[None, :].expand(len(batch.contexts), -1)
            own = Own(step.end_T, self.device)
            wanted = None if entropy_GC is None else _entropy_rows(step, entropy_GC[:, list(batch.contexts)])
            job = HeadJob(step.row_R, step.pair_row_M, step.pair_target_M, wanted)
            parent = kept[step.parent]
            result, new = self._forward(ids, position, own, parent, job, keep=step.keep)
            if new is not None:
                kept[number] = parent.continued(new, position)
            if uses[step.parent] == number and step.parent >= 0:
                del kept[step.parent]
            yield result

    def _forward(
        self,
        ids_BT: torch.Tensor,
        position_BT: torch.Tensor,
        own: Own,
        prefix: Prefix,
        job: HeadJob,
        *,
        keep: bool,
    ) -> tuple[HeadResult, KeysValues | None]:
        """One forward pass, and the keys and values that it added where they are to be kept."""
        cache = prefix.cache(keep=keep, join=self.attention.join)
        self.tap.job = job
        with self.attention.applied(prefix, own, position_BT) as mask:
            output = self.access.call(
                input_ids=ids_BT,
                position_ids=position_BT,
                attention_mask=mask,
                use_cache=True,
                **{self.cache_name: cache},
            )
        result = self.tap.take(getattr(output, "logits", None), check=not self.checked)
        self.checked = True
        self.on_tokens(ids_BT.numel())
        new = new_keys_values(cache, ids_BT.shape[1]) if keep else None
        if keep and new is None:
            raise UnsupportedModelError("its cache does not hold keys and values of all tokens")
        return result, new


def _after(base: Prefix, whole: Prefix) -> KeysValues:
    """Keys and values that `whole` has beyond `base`, in one piece."""
    pieces = [segment.keys_values for segment in whole.segments[len(base.segments) :]]
    if len(pieces) == 1:
        return pieces[0]
    return [
        (torch.cat([k for k, _ in layer], dim=-2), torch.cat([v for _, v in layer], dim=-2))
        for layer in zip(*pieces, strict=True)
    ]


def _line(plan: Plan, base: int) -> Iterator[int]:
    """A base and all that it continues."""
    while base >= 0:
        yield base
        base = plan.bases[base].parent


def _entropy_rows(step: Step, wanted_GB: BoolArray) -> BoolArray:
    """[B, R] rows that a trace passes whose entropy under that context is wanted."""
    row_K = step.pair_row_M[step.entry_pair_K]
    rows = np.zeros((wanted_GB.shape[1], step.row_R.size), dtype=np.bool_)
    for b in range(wanted_GB.shape[1]):
        rows[b, row_K[wanted_GB[step.entry_trace_K, b]]] = True
    return rows


class _Entries:
    """Where each token of each trace of a group reads its log-prob: from which pair of which step."""

    def __init__(self, group: Group):
        self.n_traces = group.trace_G.size
        nothing = np.zeros(self.n_traces, dtype=np.int64)
        trace, time, pair, row = [np.arange(self.n_traces)], [nothing], [group.first_of_G], [nothing]
        pairs, rows = group.first_F.size, 1
        for step in group.steps:
            trace.append(step.entry_trace_K)
            time.append(step.entry_time_K)
            pair.append(pairs + step.entry_pair_K)
            row.append(rows + step.pair_row_M[step.entry_pair_K])
            pairs, rows = pairs + step.pair_row_M.size, rows + step.row_R.size
        self.trace, self.pair, self.row = np.concatenate(trace), np.concatenate(pair), np.concatenate(row)
        # Tokens of all traces, one trace after the other.
        self.order = np.lexsort((np.concatenate(time), self.trace))

    def collect(self, batch: ContextBatch, results: list[HeadResult], *, tokens: bool) -> BatchScores:
        """Sums over each trace's tokens, in float64, and the tokens themselves where asked for."""
        logp_BM: FloatArray = torch.cat([r.logp_BM for r in results], dim=1).double().cpu().numpy()
        sums: FloatArray = np.zeros((len(logp_BM), self.n_traces))
        for b, logp_M in enumerate(logp_BM):
            sums[b] = np.bincount(self.trace, logp_M[self.pair], minlength=self.n_traces)
        context_nan = np.isnan(logp_BM[:, 0])  # the first token's log-prob, of whichever trace: nothing ran beside it
        if not tokens:
            return BatchScores(batch.contexts, sums, context_nan)
        found = [r.entropy_BR for r in results if r.entropy_BR is not None]
        entropy_BR: FloatArray | None = torch.cat(found, dim=1).double().cpu().numpy() if found else None
        values = []
        for b, logp_M in enumerate(logp_BM):
            entropy = None if entropy_BR is None else entropy_BR[b][self.row][self.order]
            values.append((logp_M[self.pair][self.order], entropy))
        return BatchScores(batch.contexts, sums, context_nan, values)
