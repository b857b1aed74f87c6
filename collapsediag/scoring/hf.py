"""Score with any transformers causal language model, and leave the model as it was."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.access import ModelAccess, check_ids
from collapsediag.scoring.attention import Attention, CascadeAttention, MaskedAttention, without_flex_attention
from collapsediag.scoring.checks import self_check
from collapsediag.scoring.cost import CostEstimate, estimate, plan_tokens
from collapsediag.scoring.flex import FlexAttention
from collapsediag.scoring.guard import one_at_a_time, undisturbed
from collapsediag.scoring.head import HeadTap, UnsupportedModelError
from collapsediag.scoring.memory import MIN_TOKENS, BackOff, is_out_of_memory, release_memory, work_model
from collapsediag.scoring.plain import PlainSettings, plain_tokens
from collapsediag.scoring.plan import Unique, make_plan
from collapsediag.scoring.prefix import PrefixEngine, length_reason, unsupported_reason
from collapsediag.scoring.results import Progress, Results, TokenScores
from collapsediag.scoring.state import continues, fill_pair_by_pair, state_tokens

logger = logging.getLogger("collapsediag")

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
ProgressCallback = Callable[[int, int], None]

ATTENTION = ("auto", "cascade", "flex", "masked", "plain")


@dataclass(frozen=True)
class ScoreInfo:
    """How the last matrix was computed.

    path: "prefix", "state" (traces continue copies of each context's state, unpacked) or "plain".
    reason: why not the first, None for it.
    attention: "cascade", "flex" or "masked", how the fast path attends; None on the plain path.
    check: largest difference between both paths in the self-check, nats per token; None where none was due. In low
        precision this is the noise that retrieval and MI carry.
    dtype: of the model's parameters. token_budget: tokens of one forward pass at the end.
    """

    path: str
    reason: str | None
    attention: str | None
    check: float | None
    dtype: str
    token_budget: int


class HFScorer:
    """Scores traces under contexts with a transformers causal language model.

    Each context's keys and values run once; all distinct traces continue them, packed into few forward passes. Where
    layers cannot share them that way (hybrids with linear attention, ALiBi, chunked attention) each trace continues a
    copy of the context's state; where not even that is exact (Mamba), and for any model whose fast scores do not agree
    with the plain path, `[context | trace]` is forwarded in full, and one log line says so. Weights, modes, random
    states, caches and gradients of the model are as before when a call returns.

    model: on any device, in any floating-point type, in train or eval mode, wrapped by PEFT, DDP, FSDP or DeepSpeed.
    temperature: score softmax(logits / temperature).
    token_budget: tokens of one forward pass; from free memory where None. Halved when memory runs out,
        doubled again after some calls that fitted.
    check_every: compare a few pairs with the plain path at the first call, every so many calls, and once pairs are over
        twice as long as any compared before; 0: never.
    max_tokens: longest context and trace together; the model's own limit where None.
    attention: how the fast path attends ("cascade"; "masked"; "flex": torch's compiled FlexAttention, masked where that
        fails), or "plain" for no fast path; "auto" chooses cascade or masked.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        token_budget: int | None = None,
        check_every: int = 50,
        max_tokens: int | None = None,
        attention: str = "auto",
    ) -> None:
        if attention not in ATTENTION:
            raise SettingsError(f"attention {attention!r} is not known; choose one of {', '.join(ATTENTION)}.")
        if not 0 < temperature < math.inf:
            raise SettingsError(f"temperature is {temperature}; it must be above 0 (1 scores the model as it is).")
        if token_budget is not None and token_budget < MIN_TOKENS:
            raise SettingsError(f"token_budget is {token_budget}; at least {MIN_TOKENS} tokens are needed.")
        if check_every < 0:
            raise SettingsError(f"check_every is {check_every}; 0 switches the self-check off.")
        self.temperature = float(temperature)
        self.token_budget = token_budget
        self.check_every = check_every
        self.attention = attention
        self.info: ScoreInfo | None = None
        self._max_tokens = max_tokens
        self._calls = 0
        self._budget = BackOff()
        self._known: weakref.ref[Any] | None = None
        self.model = model

    @property
    def model(self) -> Any:
        """The model that is scored; another one may be put in its place, and None lets go of it."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model
        if self._known is not None and (model is None or model is self._known()):
            return
        self.max_tokens = self._max_tokens if self._max_tokens is not None else ModelAccess.of(model).max_tokens
        # Weak: whoever lends a model for one step at a time finds what was learnt of it, and may free it.
        self._known = weakref.ref(model)
        # Ways that this model turned out not to allow, with the reason, and the longest pair of ways that passed.
        self._failed: dict[str, str] = {}
        self._passed: dict[str, int] = {}
        self._continues: bool | None = None
        self._told = False

    def __repr__(self) -> str:
        return f"HFScorer({type(self.model).__name__}, temperature={self.temperature:g})"

    def score(self, pairs: ScoringPairs, progress: ProgressCallback | None = None) -> LogLikelihoodMatrix:
        """Score every trace of `pairs` under every context.

        progress: called with (tokens done, tokens in all) after each forward pass.

        Raises ScoringError for an empty context, a token id that the model does not know, or a pair longer than the
        model's limit (before any forward pass), and where memory does not suffice even for the smallest pass.
        """
        return self._results(pairs, None, progress).matrix()

    def score_cells(
        self, pairs: ScoringPairs, scored_NP: BoolArray, progress: ProgressCallback | None = None
    ) -> FloatArray:
        """Log-likelihoods [N, P] of the cells marked in `scored_NP`, NaN elsewhere. Raises as `score` does."""
        wanted = np.asarray(scored_NP)
        if wanted.shape != (pairs.n_traces, pairs.n_contexts) or wanted.dtype != np.bool_:
            raise ScoringError(
                f"scored_NP must be booleans of shape ({pairs.n_traces}, {pairs.n_contexts}), one per trace and "
                f"context, found shape {wanted.shape} of {wanted.dtype}."
            )
        return np.where(wanted, self._results(pairs, wanted, progress).logp_NP(), np.nan)

    def score_tokens(
        self,
        pairs: ScoringPairs,
        *,
        entropies: bool = False,
        every_context: bool = False,
        progress: ProgressCallback | None = None,
    ) -> TokenScores:
        """The matrix and, from the same pass, the log-prob of every token of each trace under its own context.

        entropies: also the exact entropy of the policy before each token, under the trace's own context.
        every_context: also the log-prob of every token under every context (N x P x tokens numbers).
        """
        return self._results(
            pairs, None, progress, own_tokens=True, entropies=entropies, every_context=every_context
        ).token_scores()

    def score_with_tokens(
        self,
        pairs: ScoringPairs,
        rows: Sequence[int],
        scored_NP: BoolArray | None = None,
        progress: ProgressCallback | None = None,
    ) -> tuple[LogLikelihoodMatrix, list[FloatArray]]:
        """`score`, and from the same pass for each of `rows` the log-prob [P, T] of its tokens; see TokenScorer."""
        results = self._results(pairs, scored_NP, progress, every_context=rows)
        return results.matrix(scored_NP), results.tokens_of(rows, scored_NP)

    def estimate(self, pairs: ScoringPairs, scored_NP: BoolArray | None = None) -> CostEstimate:
        """What `score` would cost, without running the model. Raises as `score` does for what cannot be scored."""
        access = ModelAccess.of(self.model)
        check_ids(access, pairs.contexts, pairs.traces, self.max_tokens)
        unique = Unique.of(pairs.contexts, pairs.traces, scored_NP)
        work = self._work(access, unique)
        cost = estimate(unique, make_plan(unique, work), scored_NP)
        if self._reason(access, unique) is None:
            return cost
        cells = [(int(u), int(c)) for u, c in np.argwhere(unique.wanted_UC)]
        tokens_of = state_tokens if self._continues and self._may_continue(access, unique) else plain_tokens
        rows = sum(unique.traces[u].size for u, _ in cells)
        return replace(cost, tokens=tokens_of(unique.contexts, unique.traces, cells), logit_rows=int(rows))

    def _reason(self, access: ModelAccess, unique: Unique) -> str | None:
        """Why these pairs take the plain path, as far as is known before anything runs."""
        if self.attention == "plain":
            return "that was asked for"
        reason = unsupported_reason(access) or length_reason(access, unique.longest_pair)
        return reason or (None if self._ways(access) else list(self._failed.values())[-1])

    def _may_continue(self, access: ModelAccess, unique: Unique) -> bool:
        """Whether each context's state may serve its traces, where no tree of traces can share it."""
        return (
            self.attention != "plain"
            and self._continues is not False
            and unsupported_reason(access) is not None
            and length_reason(access, unique.longest_pair) is None
        )

    def _check_due(self, call: int, way: str, longest: int) -> bool:
        # A window, or a choice of the best keys, shows only in pairs that are longer than it.
        due = bool(self.check_every) and (call % self.check_every == 0 or longest > 2 * self._passed.get(way, 0))
        if due:
            self._passed[way] = max(longest, self._passed.get(way, 0))  # what does not pass is not tried again
        return due

    def _ways(self, access: ModelAccess) -> list[Attention]:
        """Ways to attend that are left to try, the fastest first."""
        wanted = {"auto": {"cascade", "masked"}, "flex": {"flex", "masked"}}.get(self.attention, {self.attention})
        if self.attention == "auto" and not CascadeAttention.suits(access):
            wanted = {"masked"}
        ways: list[Attention] = [CascadeAttention(access), FlexAttention(access), MaskedAttention(access)]
        return [way for way in ways if way.name in wanted and way.name not in self._failed]

    def _work(self, access: ModelAccess, unique: Unique) -> Any:
        longest = max((c.size for c in unique.contexts), default=1)
        names = [way.name for way in self._ways(access)] or ["masked"]
        return work_model(access, longest, self.token_budget, shrink=self._budget.shrink, attention=names[0])

    def _results(
        self,
        pairs: ScoringPairs,
        scored_NP: BoolArray | None,
        callback: ProgressCallback | None,
        **wanted: Any,
    ) -> Results:
        access = ModelAccess.of(self.model)
        check_ids(access, pairs.contexts, pairs.traces, self.max_tokens)
        unique = Unique.of(pairs.contexts, pairs.traces, scored_NP)
        results = Results(pairs, unique, **wanted)
        if not unique.wanted_UC.any():
            return results
        call, self._calls = self._calls, self._calls + 1
        check: float | None = None
        way: Attention | None = None
        with one_at_a_time(), undisturbed(access.outer), without_flex_attention(access):
            reason = self._reason(access, unique)
            for way in self._ways(access) if reason is None else ():
                results = Results(pairs, unique, **wanted)
                check, reason = self._fast_and_checked(access, way, results, call, Progress(callback))
                if reason is None:
                    break
                self._failed[way.name] = reason
                logger.info("%s attention does not suit %s: %s.", way.name, type(access.inner).__name__, reason)
            path = "prefix" if reason is None else "plain"
            if self._may_continue(access, unique):
                results = Results(pairs, unique, **wanted)
                check, worked = self._try_continued(access, results, call, Progress(callback))
                path = "state" if worked else "plain"
            if path == "plain":
                results = Results(pairs, unique, **wanted)
                self._tell(access, str(reason))
                self._plain(access, results, Progress(callback))
        self.info = ScoreInfo(
            path=path,
            reason=reason,
            attention=None if reason is not None or way is None else way.name,
            check=check,
            dtype=str(access.dtype).removeprefix("torch."),
            token_budget=self._work(access, unique).max_tokens,
        )
        self._budget.fitted()
        return results

    def _fast_and_checked(
        self, access: ModelAccess, way: Attention, results: Results, call: int, progress: Progress
    ) -> tuple[float | None, str | None]:
        """Fill `results` by the fast path: (largest difference where a self-check was due, reason where it failed)."""
        with way.installed():
            reason = self._try_fast(access, way, results, progress)
        if reason is not None or not self._check_due(call, way.name, results.unique.longest_pair):
            return None, reason
        return self_check(access, results, self._plain_settings(access, results.unique), call)

    def _try_fast(self, access: ModelAccess, way: Attention, results: Results, progress: Progress) -> str | None:
        """Fill `results` by the fast path; the reason where that failed, None where it did not."""
        while True:
            try:
                self._fast(access, way, results, progress)
            except (ScoringError, KeyboardInterrupt):
                raise
            except UnsupportedModelError as error:
                return str(error)
            except Exception as error:
                if not is_out_of_memory(error):
                    # Whatever a model does not take (a tree mask, explicit positions), it says in its own words.
                    return f"its forward failed on the fast path ({type(error).__name__}: {_first_line(error)})"
                message = _first_line(error)
            else:
                return None
            # Out here the traceback is gone, and with it the tensors that its frames held.
            self._halve(access, results, message)

    def _fast(self, access: ModelAccess, way: Attention, results: Results, progress: Progress) -> None:
        work = self._work(access, results.unique)
        with HeadTap(access, self.temperature) as tap:
            engine = PrefixEngine(access, tap, way, max_tokens=work.max_tokens, on_tokens=progress.add)
            for apart in (False, True):  # the second time only what is NaN, perhaps by its neighbours in a forward
                plan = make_plan(results.unique, work, results.open_UC, apart=apart)
                progress.plan(plan_tokens(results.unique, plan)[0])
                contexts, entropy_UC = results.unique.contexts, results.entropy_UC
                for group, scores in engine.run(contexts, plan, entropy_UC, tokens=results.wants_tokens):
                    results.add_batch(group, scores, apart=apart)

    def _halve(self, access: ModelAccess, results: Results, message: str) -> None:
        before = self._work(access, results.unique).max_tokens
        if before <= MIN_TOKENS:
            raise ScoringError(
                f"out of memory on {access.device} even at {before} tokens a forward pass ({message}). Free memory on "
                "the device, score shorter contexts, or score on another device."
            )
        self._budget.halve()
        release_memory(access.device)
        after = self._work(access, results.unique).max_tokens
        logger.info("out of memory at %d tokens a forward pass; going on with %d.", before, after)

    def _pair_by_pair(
        self, access: ModelAccess, results: Results, progress: Progress, *, continued: bool
    ) -> Exception | None:
        """Fill `results` cell by cell, on copies of each context's state or in full; the error where that failed."""
        while True:
            settings = replace(self._plain_settings(access, results.unique), entropies=results.entropies)
            try:
                fill_pair_by_pair(access, results, settings, progress, continued=continued)
                return None
            except ScoringError:
                raise
            except Exception as error:
                if not is_out_of_memory(error):
                    return error
                message = _first_line(error)
            self._halve(access, results, message)

    def _plain_settings(self, access: ModelAccess, unique: Unique) -> PlainSettings:
        return PlainSettings(temperature=self.temperature, max_tokens=2 * self._work(access, unique).max_tokens)

    def _try_continued(
        self, access: ModelAccess, results: Results, call: int, progress: Progress
    ) -> tuple[float | None, bool]:
        """Fill `results` on copies of each context's state: (difference in the self-check, whether it worked)."""
        unique = results.unique
        if self._continues is None:
            self._continues = continues(access, unique.contexts, unique.traces, self._plain_settings(access, unique))
        if not self._continues:
            return None, False
        check: float | None = None
        error = self._pair_by_pair(access, results, progress, continued=True)
        reason = None if error is None else _first_line(error)
        if reason is None and self._check_due(call, "state", unique.longest_pair):
            check, reason = self_check(access, results, self._plain_settings(access, unique), call)
        if reason is not None:
            self._continues = False
            logger.info("a copied state does not suit %s: %s.", type(access.inner).__name__, reason)
        return check, reason is None

    def _plain(self, access: ModelAccess, results: Results, progress: Progress) -> None:
        error = self._pair_by_pair(access, results, progress, continued=False)
        if error is not None:
            raise ScoringError(
                f"{type(access.inner).__name__} cannot be run ({type(error).__name__}: {_first_line(error)}). Scoring "
                "needs a causal language model whose forward takes input_ids."
            ) from error

    def _tell(self, access: ModelAccess, reason: str) -> None:
        """Say once that this scorer is slower than it could be."""
        if not self._told and self.attention != "plain":
            logger.warning(
                "%s is scored by the plain path, because %s. The numbers are exact; every pair is forwarded in full, "
                "which is slower.",
                type(access.inner).__name__,
                reason,
            )
            self._told = True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
