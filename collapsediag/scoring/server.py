"""Score through an inference server that returns the log-probabilities of its prompt: vLLM, SGLang and their kin.

Written against the documented requests and replies of vLLM's completions endpoint and SGLang's /generate, and tested
against a local server that speaks both; not run on vLLM or SGLang themselves.

The server must hold the weights to be diagnosed: after a weight update that did not reach it, the matrix is that of
the old policy.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Literal

import numpy as np

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring._http import JsonClient
from collapsediag.scoring.cells import BoolArray, FloatArray, check_logp, distinct_cells, matrix_of

API_KEY_VARIABLE = "COLLAPSEDIAG_API_KEY"
# vLLM cannot write -inf as JSON and clamps to this.
CLAMPED_LOGP = -9999.0


class ServerScorer(ABC):
    """What both servers share: one request per distinct (context, trace) pair, many at a time.

    url: the server's address.
    api_key: sent as a bearer token; without it the environment variable COLLAPSEDIAG_API_KEY is read. Never logged.
    concurrency: requests under way at once.
    timeout_s: limit of one attempt of one request.
    retries, backoff_s: further attempts after time-outs, cut connections, 429 and 5xx, and the first wait, doubled
        each time.
    temperature: must be 1: servers return prompt log-probabilities of the raw distribution.
    extra_body: merged into each request (a LoRA's name, a priority); a value of None takes a field out.

    Token ids are sent, never text, and compared with the ids that come back. NaN and -inf are kept: the metrics leave
    such rows out and count them. Anything else that is not a log-probability raises ScoringError.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        concurrency: int = 16,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 0.5,
        temperature: float = 1.0,
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if temperature != 1.0:
            raise SettingsError(
                f"temperature is {temperature}: a server's prompt log-probabilities are those of the raw distribution, "
                "whatever it samples at. Score at another temperature with HFScorer, or at 1 here."
            )
        if concurrency < 1:
            raise SettingsError(f"concurrency is {concurrency}; at least 1 is needed.")
        self.concurrency = concurrency
        self.extra_body = dict(extra_body or {})
        self._client = JsonClient(
            url=url.rstrip("/") + self._path,
            api_key=api_key if api_key is not None else (os.environ.get(API_KEY_VARIABLE) or None),
            headers=dict(headers or {}),
            timeout_s=timeout_s,
            retries=retries,
            backoff_s=backoff_s,
        )

    _path: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client.url!r})"

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """Score every trace of `pairs` under every context. Raises ScoringError where the server does not answer."""
        return matrix_of(pairs, self._logp_NP(pairs, None))

    def score_cells(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """Log-likelihoods [N, P] of the cells marked in `scored_NP`, NaN elsewhere."""
        return self._logp_NP(pairs, scored_NP)

    @abstractmethod
    def _request(self, context: list[int], trace: list[int]) -> dict[str, Any]:
        """The request body for one pair."""

    @abstractmethod
    def _logp_T(self, reply: Any, context: list[int], trace: list[int]) -> list[float]:
        """The log-probability of each trace token, out of the reply. Raises _BadReplyError where it is not there."""

    def _logp_NP(self, pairs: ScoringPairs, scored_NP: BoolArray | None) -> FloatArray:
        cells = distinct_cells(pairs, scored_NP)
        logp_C = np.full(len(cells), np.nan)
        stop = threading.Event()

        def work(cell: int) -> None:
            logp_C[cell] = self._cell(pairs, int(cells.row_C[cell]), int(cells.context_C[cell]), stop)

        with _Pool(min(self.concurrency, max(1, len(cells))), stop) as pool:
            # In the order of the cells, which is by context: a server that caches prefixes has the context at hand.
            futures = [pool.submit(work, cell) for cell in range(len(cells))]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        return cells.matrix(logp_C)

    def _cell(self, pairs: ScoringPairs, row: int, column: int, stop: threading.Event) -> float:
        context, trace = pairs.contexts[column].tolist(), pairs.traces[row].tolist()
        body = {**self._request(context, trace), **self.extra_body}
        reply = self._client.post({name: value for name, value in body.items() if value is not None}, stop)
        try:
            logp_T = self._logp_T(reply, context, trace)
        except _BadReplyError as error:
            raise ScoringError(
                f"{self._client.url}: trace {row} ({len(trace)} tokens) under context {column} ({len(context)} "
                f"tokens): {error}"
            ) from error
        for value in logp_T:
            check_logp(value, pairs, row, column, f"{self._client.url}, at one token,")
        return float(np.sum(logp_T))


class OpenAICompatibleScorer(ServerScorer):
    """An OpenAI-compatible completions endpoint that gives log-probabilities of its prompt: vLLM, and servers like it.

    url: address up to and including the version ("http://localhost:8000/v1").
    model: the served model's name.
    style: "prompt_logprobs" asks in vLLM's own way and can check every token id; "echo" asks in OpenAI's older way
        (`echo` with `logprobs`), which more servers know, where ids are checked only if the server names them.

    Further arguments: see ServerScorer.

    >>> OpenAICompatibleScorer("http://localhost:8000/v1", model="policy")
    OpenAICompatibleScorer('http://localhost:8000/v1/completions')
    """

    _path = "/completions"

    def __init__(
        self, url: str, *, model: str, style: Literal["prompt_logprobs", "echo"] = "prompt_logprobs", **settings: Any
    ) -> None:
        if style not in ("prompt_logprobs", "echo"):
            raise SettingsError(f"style is {style!r}; known are 'prompt_logprobs' and 'echo'.")
        super().__init__(url, **settings)
        self.model = model
        self.style = style

    def _request(self, context: list[int], trace: list[int]) -> dict[str, Any]:
        shared = {"model": self.model, "prompt": context + trace, "temperature": 1.0, "n": 1, "stream": False}
        if self.style == "echo":
            return {**shared, "echo": True, "logprobs": 0, "max_tokens": 0, "return_tokens_as_token_ids": True}
        # vLLM refuses max_tokens=0 without echo; the one generated token is not read.
        return {**shared, "prompt_logprobs": 0, "max_tokens": 1, "return_token_ids": True}

    def _logp_T(self, reply: Any, context: list[int], trace: list[int]) -> list[float]:
        ids = context + trace
        choice = _entry(_field(reply, "choices", list), 0)
        usage = reply.get("usage")
        _check_count(usage if isinstance(usage, dict) else {}, len(ids))
        if choice.get("prompt_token_ids") is not None and choice["prompt_token_ids"] != ids:
            raise _BadReplyError("the token ids the server scored (prompt_token_ids) are not those that were sent")
        return self._echoed(choice, ids, len(trace)) if self.style == "echo" else _vllm(choice, ids, len(trace))

    def _echoed(self, choice: dict[str, Any], ids: list[int], length: int) -> list[float]:
        logprobs = _field(choice, "logprobs", dict)
        values = _field(logprobs, "token_logprobs", list)
        # max_tokens=0 gives the prompt alone; a server that generates one token all the same appends it.
        if len(values) not in (len(ids), len(ids) + 1):
            raise _BadReplyError(f"token_logprobs has {len(values)} entries for {len(ids)} prompt tokens")
        for position, name in enumerate((logprobs.get("tokens") or [])[: len(ids)]):
            if str(name).startswith("token_id:") and str(name) != f"token_id:{ids[position]}":
                raise _BadReplyError(f"token {ids[position]} was sent at position {position}, {name} came back")
        return [_number(value) for value in values[len(ids) - length : len(ids)]]


class SGLangScorer(ServerScorer):
    """SGLang's own /generate endpoint.

    url: the server's address ("http://localhost:30000").

    The log-probabilities are asked for from the context's last token on (`logprob_start_len`), so that the server can
    take the rest of the context from its prefix cache. Further arguments: see ServerScorer.

    >>> SGLangScorer("http://localhost:30000")
    SGLangScorer('http://localhost:30000/generate')
    """

    _path = "/generate"

    def _request(self, context: list[int], trace: list[int]) -> dict[str, Any]:
        return {
            "input_ids": context + trace,
            # The prefill samples one token anyway; asking for none takes another path through the server.
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(context) - 1,
            "return_text_in_logprobs": False,
            "stream": False,
        }

    def _logp_T(self, reply: Any, context: list[int], trace: list[int]) -> list[float]:
        # One prompt gives one object; a list of one is what a batch of one gives.
        only = reply[0] if isinstance(reply, list) and len(reply) == 1 else reply
        meta = _field(only, "meta_info", dict)
        _check_count(meta, len(context) + len(trace))
        entries = _field(meta, "input_token_logprobs", list)
        # The context's last token comes first and without a value; some versions leave it out.
        if len(entries) not in (len(trace), len(trace) + 1):
            raise _BadReplyError(
                f"input_token_logprobs has {len(entries)} entries; {len(trace)} for the trace and at most one more "
                "were asked for by logprob_start_len"
            )
        values = []
        for position, (sent, entry) in enumerate(zip(trace, entries[-len(trace) :], strict=True)):
            if not isinstance(entry, list) or len(entry) < 2:
                raise _BadReplyError(
                    f"entry {position} of input_token_logprobs is {entry!r}, not [logprob, token id, text]"
                )
            # SGLang writes 0 for the vocabulary's last ids; only the largest id that was sent can be one of them.
            if entry[1] != sent and not (entry[1] == 0 and sent == max(trace)):
                raise _BadReplyError(f"token {sent} was sent at position {position} of the trace, {entry[1]} came back")
            values.append(_number(entry[0]))
        return values


class _BadReplyError(Exception):
    """A reply that does not say what was asked."""


class _Pool(ThreadPoolExecutor):
    """Threads that are not waited for once one request has failed for good: each ends with its own request."""

    def __init__(self, threads: int, stop: threading.Event) -> None:
        super().__init__(threads, thread_name_prefix="collapsediag-server")
        self._stop_waiting = stop

    def __exit__(self, *failure: object) -> None:
        self._stop_waiting.set()
        self.shutdown(wait=failure[0] is None, cancel_futures=True)


def _vllm(choice: dict[str, Any], ids: list[int], length: int) -> list[float]:
    """vLLM's prompt_logprobs: one {token id: {logprob, ...}} per prompt token, null for the first."""
    entries = _field(choice, "prompt_logprobs", list)
    if len(entries) != len(ids):
        raise _BadReplyError(f"prompt_logprobs has {len(entries)} entries for {len(ids)} prompt tokens")
    values = []
    for position in range(len(ids) - length, len(ids)):
        entry = entries[position]
        if not isinstance(entry, dict) or str(ids[position]) not in entry:
            found = sorted(entry)[:4] if isinstance(entry, dict) else entry
            raise _BadReplyError(
                f"token {ids[position]} was sent at position {position}, but prompt_logprobs has {found!r} there"
            )
        value = entry[str(ids[position])]
        values.append(_number(value.get("logprob") if isinstance(value, dict) else value))
    return values


def _check_count(counts: dict[str, Any], sent: int) -> None:
    counted = counts.get("prompt_tokens", sent)
    if counted != sent:
        raise _BadReplyError(
            f"{sent} token ids were sent but the server counted {counted} prompt tokens; it added a special token or "
            "cut the prompt"
        )


def _field(value: Any, name: str, kind: type) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        keys = sorted(value)[:12] if isinstance(value, dict) else type(value).__name__
        raise _BadReplyError(
            f"the reply has no {name!r} of type {kind.__name__} (found: {keys}); does this server return prompt "
            "log-probabilities?"
        )
    return found


def _entry(values: list[Any], index: int) -> dict[str, Any]:
    if len(values) <= index or not isinstance(values[index], dict):
        raise _BadReplyError(f"the reply's choices are {str(values)[:80]!r}")
    entry: dict[str, Any] = values[index]
    return entry


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _BadReplyError(f"a log-probability is {value!r}, not a number")
    return float("-inf") if value <= CLAMPED_LOGP else float(value)
