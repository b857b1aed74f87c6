"""Server scorers against a real HTTP server on this machine: a tiny transformers model behind both contracts.

The server below is written from the documentation of vLLM's completions endpoint and SGLang's /generate, not from the
client; faults are injected between the model and the socket.
"""

from __future__ import annotations

import functools
import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring._http import JsonClient
from collapsediag.scoring.protocol import CellScorer, Scorer
from collapsediag.scoring.server import OpenAICompatibleScorer, SGLangScorer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 97
KEY = "sk-secret-0123456789"
FLOAT32_TOLERANCE = 1e-5  # nats per token
SETTINGS = {"api_key": KEY, "concurrency": 4, "timeout_s": 60.0, "retries": 2, "backoff_s": 0.01}


@functools.cache
def tiny_model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model.to(dtype)


@functools.cache
def random_pairs() -> ScoringPairs:
    rng = np.random.default_rng(0)
    zero = np.zeros(6, dtype=np.int64)
    contexts = tuple(rng.integers(0, VOCABULARY, size) for size in (1, 9, 5))
    traces = [rng.integers(0, VOCABULARY, size) for size in (4, 1, 13, 7)]
    own = np.array([0, 1, 2, 0, 1, 2])
    return ScoringPairs(
        contexts=contexts, traces=(*traces, traces[2], traces[2][:6]), own_N=own, group_N=own,
        multiplicity_P=np.ones(3, dtype=np.int64), rollout_N=zero, turn_N=zero,
    )  # fmt: skip


@functools.cache
def oracle() -> np.ndarray:
    """One float64 forward per cell."""
    pairs = random_pairs()
    expected = np.zeros((pairs.n_traces, pairs.n_contexts))
    for i, trace in enumerate(pairs.traces):
        for j, context in enumerate(pairs.contexts):
            logp = token_logp(tiny_model(torch.float64), [*context.tolist(), *trace.tolist()])
            expected[i, j] = sum(logp[len(context) - 1 :])
    return expected


def token_logp(model: Any, ids: list[int]) -> list[float]:
    """log p(ids[t] | ids[:t]) for t = 1, 2, ..."""
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logp[t - 1, ids[t]]) for t in range(1, len(ids))]


# --- the server -----------------------------------------------------------------------------------------------------


def vllm_reply(body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/completions as vLLM documents it, for one prompt of token ids."""
    ids = body["prompt"]
    assert isinstance(ids, list)
    assert all(isinstance(token, int) for token in ids)
    assert body["model"] == "policy"
    assert body["temperature"] == 1.0
    logp = [None, *token_logp(tiny_model(), ids)]
    choice: dict[str, Any] = {"index": 0, "text": " x", "logprobs": None, "finish_reason": "length"}
    if body.get("prompt_logprobs") is not None:
        assert body["max_tokens"] >= 1, "vLLM: max_tokens must be at least 1"
        choice["prompt_logprobs"] = [
            None if value is None else {str(token): {"logprob": value, "rank": 3, "decoded_token": "?"}}
            for token, value in zip(ids, logp, strict=True)
        ]
    if body.get("return_token_ids"):
        choice |= {"prompt_token_ids": ids, "token_ids": [1]}
    if body.get("echo"):
        generated = body["max_tokens"]
        tokens, values = [*ids, *[1] * generated], [*logp, *[-0.5] * generated]
        as_ids = body.get("return_tokens_as_token_ids")
        choice["logprobs"] = {
            "tokens": [f"token_id:{t}" if as_ids else f"w{t}" for t in tokens], "token_logprobs": values,
            "text_offset": list(range(len(tokens))), "top_logprobs": [None] * len(tokens),
        }  # fmt: skip
    usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
    return {"id": "cmpl-1", "object": "text_completion", "model": "policy", "choices": [choice], "usage": usage}


def sglang_reply(body: dict[str, Any]) -> dict[str, Any]:
    """POST /generate as SGLang documents it: entries from logprob_start_len on, the first without a value."""
    ids, start = body["input_ids"], body["logprob_start_len"]
    assert body["return_logprob"] is True
    assert "text" not in body
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 1.0}
    logp = [None, *token_logp(tiny_model(), ids)]
    entries = [[value, token, None] for token, value in zip(ids, logp, strict=True)][start:]
    entries[0] = [None, ids[start], None]
    for entry in entries:
        entry[1] = entry[1] if entry[1] < VOCABULARY - 1 else 0  # what SGLang does to the last id
    meta = {"id": "1", "prompt_tokens": len(ids), "completion_tokens": 1, "cached_tokens": 0}
    return {
        "text": "",
        "meta_info": {**meta, "input_token_logprobs": entries, "output_token_logprobs": [[-0.5, 1, None]]},
    }


Fault = Callable[["Handler", dict[str, Any]], "dict[str, Any] | bytes | None"]


class Server(ThreadingHTTPServer):
    """Remembers the requests; `faults` are used up one per request, `fault` stays."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault] = []
        self.fault: Fault | None = None
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hung up is part of the tests


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers.items()))
            fault = server.faults.pop(0) if server.faults else server.fault
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            with server.lock:  # one thread in the model at a time
                reply: Any = vllm_reply(body) if self.path == "/v1/completions" else sglang_reply(body)
            if fault is not None:
                reply = fault(self, reply)
        finally:
            with server.lock:
                server.at_once -= 1
        if reply is not None:
            self.send(200, reply if isinstance(reply, bytes) else json.dumps(reply).encode())

    do_GET = do_POST

    def send(self, status: int, raw: bytes, *, promised: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw) if promised is None else promised))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def status(code: int, text: str = "", **headers: str) -> Fault:
    return lambda handler, reply: handler.send(code, text.encode(), **headers)


def hang_up(handler: Handler, reply: dict[str, Any]) -> None:
    handler.connection.close()


def cut(handler: Handler, reply: dict[str, Any]) -> None:
    raw = json.dumps(reply).encode()
    handler.send(200, raw[: len(raw) // 2], promised=len(raw))
    handler.close_connection = True


def half_json(handler: Handler, reply: dict[str, Any]) -> bytes:
    raw = json.dumps(reply).encode()
    return raw[: len(raw) // 2]


def slow(seconds: float) -> Fault:
    def fault(handler: Handler, reply: dict[str, Any]) -> dict[str, Any]:
        time.sleep(seconds)
        return reply

    return fault


def dripping(handler: Handler, reply: dict[str, Any]) -> None:
    """Every byte comes before the socket's own time-out, the reply never ends."""
    handler.send(200, b"", promised=1000)
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.fixture
def server() -> Iterator[Server]:
    tiny_model()  # made once, and not while a client waits for its first reply
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join(5)


def vllm(server: Server, **settings: Any) -> OpenAICompatibleScorer:
    return OpenAICompatibleScorer(server.url + "/v1", model="policy", **{**SETTINGS, **settings})


def echo(server: Server, **settings: Any) -> OpenAICompatibleScorer:
    return vllm(server, style="echo", **settings)


def sglang(server: Server, **settings: Any) -> SGLangScorer:
    return SGLangScorer(server.url + "/", **{**SETTINGS, **settings})


EVERY_SCORER = pytest.mark.parametrize("make", [vllm, echo, sglang])


def assert_is_oracle(logp_NP: np.ndarray) -> None:
    lengths = np.array([[len(trace)] for trace in random_pairs().traces])
    error = np.abs(logp_NP - oracle()) / lengths
    assert error.max() < FLOAT32_TOLERANCE, f"off by {error.max():.2e} nats per token"


# --- what it computes -----------------------------------------------------------------------------------------------


@EVERY_SCORER
def test_the_matrix_is_the_models_own(server: Server, make: Any) -> None:
    scorer, pairs = make(server), random_pairs()
    matrix = scorer.score(pairs)
    assert_is_oracle(matrix.logp_NP)
    np.testing.assert_array_equal(matrix.own_N, pairs.own_N)
    assert len(server.bodies) == 3 * 5, "equal traces are asked for once"
    assert isinstance(scorer, Scorer)
    assert isinstance(scorer, CellScorer)
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {KEY}"}


@EVERY_SCORER
def test_cells_cost_one_request_each(server: Server, make: Any) -> None:
    scored = np.zeros((6, 3), dtype=bool)
    scored[0, 1] = scored[4, 2] = scored[2, 2] = True
    logp = make(server).score_cells(random_pairs(), scored)
    assert len(server.bodies) == 2
    np.testing.assert_allclose(logp[scored], oracle()[scored], atol=1e-4)
    assert np.isnan(logp[~scored]).all()


def test_requests_run_at_once_but_no_more_than_asked(server: Server) -> None:
    server.fault = slow(0.05)
    start = time.monotonic()
    assert_is_oracle(vllm(server, concurrency=3).score(random_pairs()).logp_NP)
    assert server.most_at_once <= 3
    assert server.most_at_once > 1
    assert time.monotonic() - start < 15 * 0.05 + 1.0


def test_sglang_asks_from_the_contexts_last_token(server: Server) -> None:
    sglang(server, concurrency=1).score(random_pairs())
    starts = [body["logprob_start_len"] for body in server.bodies]
    assert starts == [0] * 5 + [8] * 5 + [4] * 5, "by context, for the server's prefix cache"


def test_sglang_names_the_last_id_zero(server: Server) -> None:
    ids, zero = (np.array([3, 5]), np.array([VOCABULARY - 1, 7])), np.zeros(2, dtype=np.int64)
    pairs = ScoringPairs(
        contexts=ids, traces=ids, own_N=np.array([0, 1]), group_N=np.array([0, 1]), multiplicity_P=np.array([1, 1]),
        rollout_N=zero, turn_N=zero,
    )  # fmt: skip
    expected = sum(token_logp(tiny_model(), [3, 5, VOCABULARY - 1, 7])[1:])
    np.testing.assert_allclose(sglang(server).score(pairs).logp_NP[1, 0], expected, atol=1e-4)
    server.fault = change(values=lambda entries: [*entries[:-1], [-1.0, 0, None]])
    with pytest.raises(ScoringError, match=r"was sent at position 1 of the trace, 0 came back"):
        sglang(server).score(pairs)  # 7 is not the last id


def test_extra_body_adds_and_takes_out(server: Server) -> None:
    echo(server, extra_body={"return_tokens_as_token_ids": None, "priority": 3}).score(random_pairs())
    assert all("return_tokens_as_token_ids" not in b and b["priority"] == 3 for b in server.bodies)


def test_an_echo_server_that_generates_all_the_same(server: Server) -> None:
    assert_is_oracle(echo(server, extra_body={"max_tokens": 1}).score(random_pairs()).logp_NP)


# --- what may go wrong for a while ----------------------------------------------------------------------------------


@pytest.mark.fault(
    "a scoring server answers 500, 429 or 503, hangs up, or cuts its answer",
    "retried; the scores are the same",
)
@EVERY_SCORER
@pytest.mark.parametrize(
    "fault",
    [status(500, "boom"), status(429, "busy"), status(503, "loading"), hang_up, cut, half_json],
    ids=["500", "429", "503", "hang_up", "cut", "half_json"],
)
@pytest.mark.faults
def test_passing_faults_are_retried(server: Server, make: Any, fault: Fault) -> None:
    server.faults = [fault] * 2
    assert_is_oracle(make(server).score(random_pairs()).logp_NP)
    assert len(server.bodies) == 15 + 2


@pytest.mark.fault("a scoring server hangs", "given up after the time limit, retried, then an error that names it")
@pytest.mark.faults
@pytest.mark.parametrize("fault", [slow(1.0), dripping], ids=["slow", "dripping"])
def test_a_time_out_is_retried_and_named(server: Server, fault: Fault) -> None:
    server.faults = [fault]
    assert_is_oracle(vllm(server, timeout_s=0.3).score(random_pairs()).logp_NP)
    server.fault = fault
    with pytest.raises(ScoringError, match=r"/v1/completions: no full reply within 0.3 s .2 attempts."):
        vllm(server, timeout_s=0.3, retries=1).score(random_pairs())


@pytest.mark.faults
def test_retry_after_is_kept(server: Server) -> None:
    server.faults = [status(429, "busy", Retry_After="0.4")]
    start = time.monotonic()
    vllm(server, concurrency=1).score(random_pairs())
    assert time.monotonic() - start > 0.4


def test_waits_double_up_to_a_minute_and_yield_to_retry_after() -> None:
    client = JsonClient(url="http://h", backoff_s=0.5)
    assert [client._wait_s(retry, 0.0) for retry in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert client._wait_s(1, 7.0) == 7.0
    assert client._wait_s(20, 0.0) == client._wait_s(0, 1e9) == 60.0


@pytest.mark.faults
def test_it_does_wait(server: Server) -> None:
    server.faults = [status(503)] * 2
    start = time.monotonic()
    vllm(server, concurrency=1, backoff_s=0.15).score(random_pairs())
    assert time.monotonic() - start > 0.15 + 0.30


# --- what does not pass ---------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_lasting_500_names_address_status_and_body(server: Server) -> None:
    server.fault = status(500, '{"message": "CUDA error"}')
    with pytest.raises(ScoringError, match=r"POST http://127.*/generate: status 500 .*CUDA error.*\(3 attempts\)"):
        sglang(server).score(random_pairs())


@pytest.mark.faults
@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_refusal_is_not_retried_and_ends_the_rest(server: Server, code: int) -> None:
    server.fault = status(code, "max_model_len is 8")
    with pytest.raises(ScoringError, match=rf"status {code} [^:]*: 'max_model_len is 8'$"):
        vllm(server, concurrency=1).score(random_pairs())
    assert len(server.bodies) <= 3, "requests after the refused one were cancelled"


@pytest.mark.faults
def test_a_failure_does_not_wait_for_the_others_back_off(server: Server) -> None:
    server.fault = status(503)
    server.faults = [status(503), status(400)]
    start = time.monotonic()
    with pytest.raises(ScoringError, match="status 400"):
        vllm(server, concurrency=2, backoff_s=40.0).score(random_pairs())
    while any(thread.name.startswith("collapsediag-server") for thread in threading.enumerate()):
        assert time.monotonic() - start < 20.0, "a thread still waits for its next attempt"
        time.sleep(0.01)


def test_nobody_there() -> None:
    with pytest.raises(ScoringError, match="ConnectionRefusedError"):
        SGLangScorer("http://127.0.0.1:9", retries=0).score(random_pairs())


@pytest.mark.faults
def test_redirects_are_not_followed(server: Server) -> None:
    server.fault = status(302, "", Location="http://127.0.0.1:9/elsewhere")
    with pytest.raises(ScoringError, match=r"status 302 .*redirects are not followed"):
        vllm(server).score(random_pairs())


def change(**paths: Any) -> Fault:
    """A fault that rewrites the reply: `change(prompt=f)` applies f to the list of log-probability entries."""

    def fault(handler: Handler, reply: dict[str, Any]) -> dict[str, Any]:
        if "choices" in reply and reply["choices"][0]["logprobs"] is not None:
            logprobs = reply["choices"][0]["logprobs"]
            logprobs["token_logprobs"] = paths["values"](logprobs["token_logprobs"])
        elif "choices" in reply:
            choice = reply["choices"][0]
            choice["prompt_logprobs"] = paths["values"](choice["prompt_logprobs"])
        else:
            meta = reply["meta_info"]
            meta["input_token_logprobs"] = paths["values"](meta["input_token_logprobs"])
        return reply

    return fault


def last(value: Any) -> Callable[[list[Any]], list[Any]]:
    """The list of entries with the last entry's log-probability replaced."""

    def apply(entries: list[Any]) -> list[Any]:
        old = entries[-1]
        if isinstance(old, dict):
            (token,) = old
            return [*entries[:-1], {token: {**old[token], "logprob": value}}]
        return [*entries[:-1], [value, *old[1:]] if isinstance(old, list) else value]

    return apply


@EVERY_SCORER
@pytest.mark.faults
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda entries: entries[:-1], r"has \d+ entries|sent at position"),
        (lambda entries: [*entries, *entries, *entries], r"has \d+ entries"),
        (last(None), "is None, not a number"),
        (last("x"), "is 'x', not a number"),
        (last(0.7), "cannot be positive"),
        (lambda entries: None, "has no '.*' of type list"),
    ],
    ids=["short", "long", "null", "text", "positive", "missing"],
)
def test_wrong_replies_are_refused(server: Server, make: Any, values: Any, message: str) -> None:
    server.fault = change(values=values)
    with pytest.raises(ScoringError, match=message):
        make(server).score(random_pairs())


@EVERY_SCORER
@pytest.mark.faults
@pytest.mark.parametrize(("sent", "kept"), [(float("nan"), np.nan), (-9999.0, -np.inf), (-float("inf"), -np.inf)])
def test_nan_and_impossible_tokens_stay_visible(server: Server, make: Any, sent: float, kept: float) -> None:
    server.faults = [change(values=last(sent))]
    matrix = make(server, concurrency=1).score(random_pairs())
    np.testing.assert_equal(matrix.logp_NP[0, 0], kept)
    np.testing.assert_array_equal(matrix.nonfinite_N, [True] + [False] * 5)


@pytest.mark.faults
def test_other_tokens_than_sent_are_noticed(server: Server) -> None:
    def rename(handler: Handler, reply: dict[str, Any]) -> dict[str, Any]:
        if "meta_info" in reply:
            reply["meta_info"]["input_token_logprobs"][-1][1] += 1
        elif reply["choices"][0]["logprobs"]:
            reply["choices"][0]["logprobs"]["tokens"][0] = "token_id:999"
        else:
            entries = reply["choices"][0]["prompt_logprobs"]
            entries[-1] = {str(int(key) + 1): value for key, value in entries[-1].items()}
        return reply

    def renumber(handler: Handler, reply: dict[str, Any]) -> dict[str, Any]:
        reply["choices"][0]["prompt_token_ids"][0] += 1
        return reply

    def bos(handler: Handler, reply: dict[str, Any]) -> dict[str, Any]:
        (reply.get("usage") or reply["meta_info"])["prompt_tokens"] += 1
        return reply

    for make in (vllm, echo, sglang):
        server.fault = rename
        with pytest.raises(ScoringError, match=r"trace \d .*under context \d .*came back|was sent at position"):
            make(server).score(random_pairs())
        server.fault = bos
        with pytest.raises(ScoringError, match="added a special token or cut the prompt"):
            make(server).score(random_pairs())
    server.fault = renumber
    with pytest.raises(ScoringError, match="prompt_token_ids"):
        vllm(server).score(random_pairs())


@pytest.mark.parametrize("reply", [b"[]", b"{}", b'{"choices": []}', b'{"choices": [3]}', b'"text"', b"null"])
@pytest.mark.faults
def test_replies_of_another_shape(server: Server, reply: bytes) -> None:
    server.fault = lambda handler, _: reply
    for make in (vllm, sglang):
        with pytest.raises(ScoringError, match="the reply"):
            make(server).score(random_pairs())


# --- the key, and the settings --------------------------------------------------------------------------------------


@pytest.mark.faults
def test_the_key_is_shown_nowhere(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("COLLAPSEDIAG_API_KEY", KEY)
    scorer = vllm(server, api_key=None, retries=0)
    server.fault = status(401, f"Incorrect API key provided: {KEY}. " + "x" * 2000)
    with pytest.raises(ScoringError) as caught:
        scorer.score(random_pairs())
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    chain, error = "", caught.value
    while error is not None:
        chain += repr(error) + str(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    out, err = capfd.readouterr()
    for text in (chain, repr(scorer), repr(scorer._client), caplog.text, out, err):
        assert KEY not in text
    assert "Incorrect API key provided: ***" in chain
    assert len(chain) < 2 * 2000


def test_without_a_key_none_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLLAPSEDIAG_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # somebody else's key is not for this server
    vllm(server, api_key=None).score(random_pairs())
    assert all("Authorization" not in headers for headers in server.headers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "temperature is 0.7"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"retries": -1}, "retries=-1"),
        ({"api_key": "a\nb"}, "api_key holds a line break"),
        ({"style": "chat"}, "style is 'chat'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        OpenAICompatibleScorer("http://localhost:8000/v1", **{"model": "m", **settings})


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://user:secret@host/v1"])
def test_addresses_that_cannot_be(url: str) -> None:
    with pytest.raises(SettingsError, match="address") as caught:
        SGLangScorer(url)
    assert "secret" not in str(caught.value)


def test_scorers_travel_to_other_processes() -> None:
    assert repr(pickle.loads(pickle.dumps(SGLangScorer("http://h:1")))) == "SGLangScorer('http://h:1/generate')"
