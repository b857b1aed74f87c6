"""The same scores on a GPU: `pytest -m gpu`. What does not need one runs here on the CPU as well."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scoring_gpu import Flops, main, make_workload
from benchmarks.scoring_gpu import make_model as make_benchmark_model
from collapsediag.scoring import cache as cache_module
from collapsediag.scoring.hf import HFScorer

from .scoring_tiny import loop, make_model, mixed_pairs

FLEX = pytest.param("flex", marks=pytest.mark.gpu)  # on a CPU: test_scoring_flex


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("way", ["auto", "masked", FLEX, "plain"])
def test_equals_the_loop(kind: str, way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = make_model(kind, **({"sliding_window": 5} if kind == "mistral" else {})), mixed_pairs()
    truth = loop(model, pairs.contexts, pairs.traces)
    scorer = HFScorer(model.float().to(device), attention=way, token_budget=64)
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=1e-3)
    assert scorer.info is not None
    assert scorer.info.path == ("plain" if way == "plain" else "prefix")
    if way == "flex":
        assert scorer.info.attention == "flex"
    monkeypatch.setattr(cache_module, "MIN_SHARED_COPY", 16)  # as long beginnings do: one copy for all rows
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=1e-3)


@pytest.mark.parametrize("way", ["masked", FLEX])
def test_bfloat16_is_as_near_as_the_plain_path(way: str, device: torch.device) -> None:
    """The self-check holds it against that path, and would leave it."""
    model = make_model(dtype=torch.bfloat16).to(device)
    scorer = HFScorer(model, attention=way, check_every=1)
    scorer.score(mixed_pairs())
    assert scorer.info is not None
    assert (scorer.info.path, scorer.info.attention) == ("prefix", way)
    assert scorer.info.check is not None


def test_weights_and_random_states_stay(device: torch.device) -> None:
    model = make_model(dtype=torch.float32).to(device).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device.type == "cuda" else [])]
    HFScorer(model).score(mixed_pairs())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    after = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device.type == "cuda" else [])]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    assert model.training


def test_useful_flops_are_those_of_every_distinct_prompt_and_token() -> None:
    """By a set of all beginnings that must run, and one forward's count of the model's multiplications."""
    model = make_benchmark_model("tiny", torch.device("cpu"), torch.float32)
    work = make_workload("agent", 20, quick=True)
    flops = Flops.of(model)
    body: set[tuple[int, ...]] = set()
    rows: set[tuple[int, ...]] = set()
    for context in map(tuple, work.contexts):
        for trace in map(tuple, work.traces):
            whole = (*context, *trace)
            body |= {whole[: n + 1] for n in range(len(whole) - 1)}  # the last token is only looked up
            rows |= {whole[:n] for n in range(len(context), len(whole))}
    expected = len(body) * flops.body + sum(map(len, body)) * flops.key + len(rows) * flops.row
    assert flops.useful(work) == expected
    model.set_attn_implementation("eager")  # whose products torch counts, those that causality masks included
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(3, 50, dtype=torch.long))
    masked = 3 * 50 * 49 / 2 * flops.key
    counted = flops.dense(3, 50) + masked + 150 * flops.row
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)  # biases and norms are no products


def test_the_benchmark_runs_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--dtype", "float32", "--model", "tiny", "--quick"]
    monkeypatch.setattr("sys.argv", ["x", *options, "--ways", "masked,cascade", "--json", str(out)])
    assert main() == 0
    found = json.loads(out.read_text())
    assert set(found) == {"chat", "long", "agent"}
    assert found["long"]["cascade"]["used"] == "cascade"
    assert found["long"]["masked"]["naive_over_ours"] > 0
    assert "naive/ours" in capsys.readouterr().out
