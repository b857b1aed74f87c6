"""Loading a policy: what a path may be, what is refused and in which words, and that nothing else is touched."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import transformers

from collapsediag.errors import MissingExtraError, ScoringError, SettingsError
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.load import load_policy, load_tokenizer

from .conftest import import_or_skip
from .scoring_tiny import make_model, mixed_pairs
from .tiny_policy import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_model(dtype=torch.float32).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the network fails at once: nothing here may."""
    import socket

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("a test asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_folder(folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    with caplog.at_level(logging.INFO):
        model, tokenizer = load_policy(folder)
    assert capfd.readouterr() == ("", "")
    assert [r.getMessage() for r in caplog.records if r.name.startswith(("collapsediag", "transformers"))] == []
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.utils.logging.is_progress_bar_enabled() == bars
    assert not any(module.training for module in model.modules())
    assert model.dtype == torch.float32
    assert tokenizer("hi").input_ids == byte_tokenizer()("hi").input_ids
    wanted = make_model(dtype=torch.float32).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=0)
    pairs = mixed_pairs()
    direct = HFScorer(make_model(dtype=torch.float32)).score(pairs).logp_NP
    assert HFScorer(model).score(pairs).logp_NP.tolist() == direct.tolist()


def test_a_string_and_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder), f"~/{folder.name}", f"{folder}/"):
        assert load_policy(name)[0].num_parameters() == make_model().num_parameters()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
    ],
)
def test_dtypes(folder: Path, dtype: str, expected: torch.dtype) -> None:
    model, _ = load_policy(folder, dtype=dtype, device="cpu")
    assert {p.dtype for p in model.parameters()} == {expected}


def test_on_the_cpu_auto_is_float32_whatever_was_saved(tmp_path: Path) -> None:
    make_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_policy(tmp_path, device="cpu")[0].dtype == torch.float32


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    make_model(dtype=torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    model, _ = load_policy(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_no_tokenizer_is_none_and_another_one_may_be_given(folder: Path, tmp_path: Path) -> None:
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    assert load_policy(tmp_path)[1] is None
    assert load_tokenizer(tmp_path) is None
    assert load_policy(tmp_path, tokenizer=folder)[1]("a").input_ids == byte_tokenizer()("a").input_ids
    assert load_tokenizer(folder)("a").input_ids == byte_tokenizer()("a").input_ids


def test_a_damaged_tokenizer_is_told_and_done_without(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{torn")
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        assert load_policy(tmp_path / "model")[1] is None
    assert ["its tokenizer cannot be read" in r.getMessage() for r in caplog.records] == [True]
    with pytest.raises(ScoringError, match=r"tokenizer .*model: cannot be read"):
        load_policy(folder, tokenizer=tmp_path / "model")


def test_an_adapter_folder_is_the_base_with_its_adapter(folder: Path, tmp_path: Path) -> None:
    peft = import_or_skip("peft")
    tuned = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    tuned.save_pretrained(tmp_path / "adapter")
    pairs = mixed_pairs()
    model, _ = load_policy(tmp_path / "adapter")
    found = HFScorer(model).score(pairs).logp_NP
    wanted = HFScorer(tuned).score(pairs).logp_NP
    base = HFScorer(load_policy(folder)[0]).score(pairs).logp_NP
    assert abs(found - wanted).max() < 1e-4
    assert abs(found - base).max() > 1e-2, "the adapter changes nothing here"


def gguf_names(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 50)
    return path


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda p: p / "nowhere", {}, r"nowhere: no such folder or file\. Give a model folder"),
        # Names that could be of the hub, but for their end: nobody asks the hub for a file.
        (lambda p: "nope.gguf", {}, r"^nope\.gguf: no such file\. Give the path of a \.gguf file"),
        (lambda p: "models/nope.gguf", {}, r"^models/nope\.gguf: no such file\."),
        (lambda p: "", {}, "the model's name is empty"),
        (lambda p: "  ", {}, "the model's name is empty"),
        (lambda p: p, {}, r"holds no config\.json and no \.gguf file \(found: nothing\)"),
        (lambda p: gguf_names(p, "a.gguf", "b.gguf"), {}, r"several GGUF files: a\.gguf, b\.gguf\. Name one"),
        (lambda p: gguf_names(p, "a.gguf"), {"gguf_file": "c.gguf"}, r"holds no c\.gguf \(GGUF files there: a\.gguf\)"),
        (lambda p: p, {"gguf_file": "c.gguf"}, r"holds no c\.gguf \(GGUF files there: none\)"),
        (lambda p: _file(p / "model.safetensors"), {}, "is a file, but a model is a folder"),
    ],
)
def test_paths_that_are_no_model(tmp_path: Path, make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_policy(make(tmp_path), **arguments)


def _file(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


def test_what_a_folder_without_config_holds_is_listed(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / name).mkdir()
    with pytest.raises(SettingsError, match=r"found: a, b, c, d, e, f, \.\.\.\)\. .*subfolder such as checkpoint-100"):
        load_policy(tmp_path)


def test_a_folder_with_config_and_gguf_is_taken_by_its_config(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    gguf_names(tmp_path / "model", "a.gguf", "b.gguf")
    assert load_policy(tmp_path / "model")[0].num_parameters() == make_model().num_parameters()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cuda:99"}, r"device 'cuda:99' cannot be used here \(.+\)\. Try cpu or auto"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
        ({"device": "toaster"}, "device 'toaster' cannot be used here"),
        ({"dtype": "int8"}, "dtype 'int8' is not known; choose auto or one of float32, bfloat16, float16, float64"),
    ],
)
def test_settings_that_do_not_exist(folder: Path, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_policy(folder, **arguments)


def test_weights_that_the_checkpoint_lacks_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "model")
    weights = make_model(dtype=torch.float32).state_dict()
    del weights["model.layers.1.mlp.down_proj.weight"]
    save = import_or_skip("safetensors.torch").save_file
    save(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ScoringError, match=r"1 weights of the LlamaForCausalLM .*layers\.1\.mlp\.down_proj"):
        load_policy(broken)


def test_weights_without_use_are_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = shutil.copytree(folder, tmp_path / "model")
    weights = {**make_model(dtype=torch.float32).state_dict(), "value_head.weight": torch.zeros(2, 2)}
    import_or_skip("safetensors.torch").save_file(weights, odd / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        load_policy(odd)
    lines = [r.getMessage() for r in caplog.records if r.name == "collapsediag"]
    assert len(lines) == 1
    assert "1 weights are of no use to LlamaForCausalLM: value_head.weight" in lines[0]


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "d_model": 8}')
    with pytest.raises(ScoringError, match="not a causal language model that transformers can read"):
        load_policy(tmp_path)


def test_a_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ScoringError, match="no such folder, and it could not be loaded from the hub"):
        load_policy("no-such-org-here/no-such-model")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_without_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'collapsediag\[gguf\]'"):
        load_policy(gguf_names(tmp_path, "a.gguf") / "a.gguf")


@pytest.mark.pretrained
@pytest.mark.slow
def test_a_folder_that_holds_one_gguf(smollm2_gguf: Path, smollm2_model: Any, tmp_path: Path) -> None:
    (tmp_path / "only.gguf").symlink_to(smollm2_gguf)
    model, tokenizer = load_policy(tmp_path)
    torch.testing.assert_close(model.lm_head.weight, smollm2_model.lm_head.weight, rtol=0, atol=0)
    assert tokenizer.decode(tokenizer("two words").input_ids) == "two words"


@pytest.mark.pretrained
@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file_and_of_its_folder(smollm2_gguf: Path, smollm2_tokenizer: Any) -> None:
    wanted = smollm2_tokenizer("two words").input_ids
    assert load_tokenizer(smollm2_gguf)("two words").input_ids == wanted
    assert load_tokenizer(smollm2_gguf.parent)("two words").input_ids == wanted
