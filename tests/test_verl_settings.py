"""The veRL adapter before it meets a trainer: settings, what a config rules out, and the dormant plug-in."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import SettingsError
from collapsediag.integrations.verl.__main__ import checked, with_our_overrides
from collapsediag.integrations.verl.facts import ModelFacts as Facts
from collapsediag.integrations.verl.facts import check_config, lasting_notes, lasting_refusal, limits_of, staleness_note
from collapsediag.integrations.verl.plugin import TrainerImports
from collapsediag.integrations.verl.rows import Row
from collapsediag.integrations.verl.settings import VerlSettings, settings_of

# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"evry": 5}, "collapsediag.evry is no setting; did you mean every?"),
        ({"every": "five"}, "collapsediag.every='five': a whole number is needed"),
        ({"every": True}, "collapsediag.every=True: a whole number is needed"),
        ({"every": 0}, "every=0"),
        ({"logged": "some"}, "collapsediag.logged='some': choose one of charts, all, none"),
        ({"definition": "mine"}, "collapsediag.definition='mine'"),
        ({"reasoning": "thought"}, "reasoning must be"),
        ({"max_traces": 0}, "max_traces must be a whole number from 1 on"),
        ({"token_budget": 0}, "collapsediag.token_budget=0"),
        ({"context_bank": -1}, "collapsediag.context_bank=-1"),
        ({"time_budget": 2.0}, "time_budget=2.0"),
        ({"dump": True}, "collapsediag.dump=true needs collapsediag.out=FOLDER"),
        (5, "collapsediag=5: a section is needed"),
    ],
)
def test_a_wrong_setting_is_named(section: Any, said: str) -> None:
    with pytest.raises(SettingsError) as found:
        settings_of({"collapsediag": section})
    assert said in str(found.value)


def test_settings_come_from_the_config_and_changes_win() -> None:
    settings = settings_of({"collapsediag": {"every": 5, "success_threshold": 1}}, every=2, max_contexts=8)
    assert (settings.every, settings.success_threshold, settings.max_contexts) == (2, 1, 8)
    assert settings_of({}) == VerlSettings()
    assert [VerlSettings(sinks=given).sink_list for given in ("wandb", ["wandb", print], print, ())] == [
        *(["wandb"], ["wandb", print], [print], [])
    ]


def test_the_front_door_ends_with_one_line_before_anything_runs() -> None:
    ran: list[Any] = []
    run = checked(lambda config, **kwargs: ran.append((config, kwargs)))
    with pytest.raises(SystemExit, match=r"error: collapsediag\.evry is no setting"):
        run({"collapsediag": {"evry": 5}})
    assert ran == []
    good = config()
    run(good, task_runner_class="T")
    assert ran == [(good, {"task_runner_class": "T"})]


def test_the_front_door_switches_diagnostics_on() -> None:
    assert with_our_overrides(["a=1"])[-1] == "+collapsediag.every=10"
    assert not any("every=10" in argument for argument in with_our_overrides(["a=1", "+collapsediag.seed=1"]))


# -- what the config says --------------------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    rollout = {"temperature": 1.0, "log_prob_micro_batch_size_per_gpu": 4, "response_length": 24, "prompt_length": 64}
    made = {
        "algorithm": changes.pop("algorithm", {}),
        "data": {"max_prompt_length": 1, "max_response_length": 1},
        "trainer": changes.pop("trainer", {}),
        "actor_rollout_ref": {
            "actor": {"strategy": "fsdp2"} | changes.pop("actor", {}),
            "rollout": rollout | changes,
            "model": {},
        },
    }
    return Section(made)


class Section(dict):  # type: ignore[type-arg]
    """As OmegaConf: attributes and keys."""

    def __getattr__(self, name: str) -> Any:
        value = self[name]
        return Section(value) if isinstance(value, dict) else value


def written(weights_from: int) -> Row:
    ids = np.array([1])
    return Row(group="u", prompt=ids, response=ids, mask_R=ids, weights_from=weights_from)


def test_limits_are_those_of_the_trainers_own_pass() -> None:
    fixed = limits_of(config(), Facts(vocabulary=9))
    assert (fixed.row_tokens, fixed.micro_batch_tokens, fixed.vocabulary) == (352, 352, 9)
    dynamic = {"log_prob_use_dynamic_bsz": True, "log_prob_max_token_len_per_gpu": 200}
    assert limits_of(config(**dynamic), Facts()).row_tokens == 200
    assert limits_of(config(**dynamic), Facts(positions=100)).row_tokens == 100
    # A limit of the model that training itself oversteps is none.
    assert limits_of(config(**dynamic), Facts(positions=10)).row_tokens == 88


def test_settings_that_do_not_go_with_the_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    check_config(VerlSettings(share_prefixes=True), config())
    check_config(VerlSettings(out=str(tmp_path)), config())
    with pytest.raises(SettingsError, match="holds a run already"):
        check_config(VerlSettings(out=str(tmp_path)), config(trainer={"resume_mode": "disable"}))
    for actor in ({"strategy": "megatron"}, {"strategy": "fsdp", "ulysses_sequence_parallel_size": 2}):
        with pytest.raises(SettingsError, match="share_prefixes=true is not possible here"):
            check_config(VerlSettings(share_prefixes=True), config(actor=actor))
        check_config(VerlSettings(), config(actor=actor))


def test_refusals_and_notes() -> None:
    assert lasting_refusal(config()) is None
    assert lasting_refusal(config(actor={"megatron": {"router_replay": {"mode": "R3"}}})) == "router_replay"
    assert lasting_refusal(config(actor={"veomni": {"router_replay": {"mode": "disabled"}}})) is None
    assert lasting_notes(config()) == []
    told = lasting_notes(
        config(
            temperature=0.7,
            algorithm={"rollout_correction": {"bypass_mode": True}, "filter_groups": {"enable": True}},
        )
    )
    assert [note.split(" ")[0] for note in told] == ["log-likelihoods", "old_log_probs", "groups"]
    assert staleness_note([written(weights_from=4)], step=5) is None
    note = staleness_note([written(weights_from=4), written(weights_from=2)], step=5)
    assert note is not None
    assert note.startswith("1 of 2 rollouts were written by weights up to 2 steps older")


# -- the plug-in -----------------------------------------------------------------------------------------------------


def test_the_plug_in_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import collapsediag.integrations.verl.plugin\n"
        "print(sorted(n for n in set(sys.modules) - before if n.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = ["", ".integrations", ".integrations.verl", ".integrations.verl.plugin"]
    assert done.stdout.strip() == str([f"collapsediag{name}" for name in names])


def test_a_module_is_seen_once_after_it_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("answer = 42")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    names = {"watched_package.inner", "watched_package.missing"}
    monkeypatch.setattr(sys, "meta_path", [TrainerImports(names, lambda m: seen.append(m.answer)), *sys.meta_path])
    import watched_package.other  # type: ignore[import-not-found]

    assert importlib.util.find_spec("watched_package.inner") is not None  # asked for, not imported
    assert seen == []
    import watched_package.inner  # type: ignore[import-not-found]

    assert seen == [42]
    with pytest.raises(ModuleNotFoundError):
        import watched_package.missing  # type: ignore[import-not-found]  # noqa: F401
    assert seen == [42]


def test_a_trainer_that_cannot_be_observed_is_refused() -> None:
    from collapsediag.integrations.verl import attach

    with pytest.raises(SettingsError, match="SimpleNamespace has no actor_rollout_wg"):
        attach(SimpleNamespace(config={}, tokenizer=1, _update_actor=print))
