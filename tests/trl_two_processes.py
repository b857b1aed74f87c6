"""Run under torchrun by test_integrations_trl_distributed.py: trains with two gloo ranks, writes what each rank saw.

torchrun --nproc_per_node 2 trl_two_processes.py OUT SCENARIO...
"""

from __future__ import annotations

import importlib.util
import json
import logging
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
OUT = Path(sys.argv[1])
FSDP, ZERO = "fsdp2" in sys.argv[2:], "zero3" in sys.argv[2:]
SHARDED = FSDP or ZERO

if FSDP:
    # accelerate refuses FSDP on CPU; this is for tests only.
    import os

    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="GPT2Block",
        FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        ACCELERATE_USE_CPU="true",
    )
    import accelerate.state as states
    from accelerate.utils import DistributedType

    original = states.AcceleratorState.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type != DistributedType.FSDP:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            states.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    states.AcceleratorState.__init__ = patched

if ZERO:
    # Nor does it start DeepSpeed with gloo, and DeepSpeed would compile an operator that nothing here uses.
    import os

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    import accelerate.state as states
    import deepspeed  # noqa: F401
    from accelerate.utils import DistributedType

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    states.PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own takes minutes to compile
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}

spec = importlib.util.spec_from_file_location("trl_tiny", Path(__file__).parent / "trl_tiny.py")
assert spec is not None
assert spec.loader is not None
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from collapsediag.integrations import trl_session  # noqa: E402
from collapsediag.integrations.trl_callback import CollapseCallback  # noqa: E402
from collapsediag.monitor import Monitor  # noqa: E402
from collapsediag.scoring.hf import HFScorer  # noqa: E402

torch.set_num_threads(1)
logging.disable(logging.CRITICAL)


class Keep:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def rank() -> int:
    return int(dist.get_rank()) if dist.is_initialized() else 0


def fail_on(step: int, on_rank: int, owner: Any, name: str) -> Any:
    """Make `owner.name` raise on one rank from the given call on (0 is the first)."""
    method, calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 == step and rank() == on_rank:
            raise RuntimeError(f"rank {on_rank} on purpose")
        return method(*args, **kwargs)

    setattr(owner, name, failing)
    return lambda: setattr(owner, name, method)


def run(scenario: str) -> dict[str, Any]:
    keep, eval_keep, batches, undo = Keep(), Keep(), [], None
    observed = scenario != "without"
    callback = CollapseCallback(
        every=1,
        reasoning="completion",
        sinks=[keep],
        eval_sinks=[eval_keep],
        budget=2 if scenario == "budget" else None,
    )
    if scenario == "scoring fails on rank 1":
        undo = fail_on(1, 1, HFScorer, "score_cells")
    elif scenario == "scoring fails on rank 0":
        undo = fail_on(1, 0, HFScorer, "score_cells")
    elif scenario == "rollouts fail on rank 1":
        undo = fail_on(1, 1, trl_session, "add_generation")
    elif scenario == "measuring fails on rank 0":
        undo = fail_on(1, 0, Monitor, "_pairs")
    trainer = tiny.trainer(
        "grpo",
        OUT / scenario,
        [callback] if observed else [],
        model=tiny.gpt2(tiny.tokenizer(), dropout=0.1),
        per_device_train_batch_size=6,  # 12 rows: the second of three groups spans both ranks
        gradient_accumulation_steps=2 if not SHARDED else 1,
        max_steps=3,
        eval_steps=2,
        **({"deepspeed": ZERO3, "use_cpu": False} if ZERO else {"ddp_backend": "gloo"}),
    )
    watched = tiny.Fingerprint(trainer)
    monitor = callback.session.monitor()
    observe = monitor.observe
    monitor.observe = lambda step, batch, **kw: (batches.append(batch), observe(step, batch, **kw))[1]  # type: ignore
    trainer.train()
    if undo is not None:
        undo()
    if rank() == 0 and batches:
        with open(OUT / f"{scenario}.pickle", "wb") as stream:
            pickle.dump((batches[0], keep.records[0]), stream)
    print_ = watched.read() if not SHARDED else {"random": tiny.random_states(), "weights": full_weights(trainer)}
    return {
        "fingerprint": print_,
        "statuses": [(r.step, r.status, r.reason) for r in keep.records],
        "evaluations": [(r.step, r.status, r.values.get("n_rollouts")) for r in eval_keep.records],
        "values": [{k: v for k, v in r.values.items() if "timing" not in k} for r in keep.records],
        "state": callback.session.state_dict(),
        "logged": [
            {k: v for k, v in row.items() if "collapse" in k and "timing" not in k} for row in trainer.state.log_history
        ],
        "model": type(trainer.model).__name__,
        "group_sizes": {str(g): len(rows) for g, rows in batches[0].groups().items()} if batches else None,
    }


def full_weights(trainer: Any) -> str:
    if ZERO:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
            return str(tiny.digest(*(p for _, p in sorted(trainer.model.named_parameters()))))
    named = sorted(trainer.model.named_parameters())
    return tiny.digest(*(p.full_tensor() if hasattr(p, "full_tensor") else p for _, p in named))


if __name__ == "__main__":
    results = {}
    for scenario in sys.argv[2:]:
        results[scenario] = run("observed" if scenario in ("fsdp2", "zero3") else scenario)
    (OUT / f"rank{rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
