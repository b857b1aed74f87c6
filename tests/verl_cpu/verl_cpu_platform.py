"""Lets the real veRL 0.9 train on a CPU, through its own registries and variables.

Load with VERL_USE_EXTERNAL_MODULES=verl_cpu_platform VERL_PLATFORM=cpu in every process.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils as fsdp_init
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

from collapsediag.integrations.verl.plugin import TrainerImports


def _nothing(*args, **kwargs):
    return None


def _zero(*args, **kwargs):
    return 0


def _device_module():
    module = types.ModuleType("verl_cpu_device")
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _zero)
    module.set_per_process_memory_fraction = _nothing
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: torch.device("cpu")
    module.mem_get_info = lambda *a, **k: (0, 0)
    module.get_device_name = lambda *a, **k: "cpu"
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *a, **k: torch.get_rng_state()
    module.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    module.current_stream, module.Stream, module.stream = torch.cpu.current_stream, torch.cpu.Stream, torch.cpu.stream
    module.Event = torch.Event
    return module


_DEVICE = _device_module()


@platform_manager.PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "generic"

    @property
    def device_module(self):
        return _DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        return None

    def synchronize(self, device_index=None):
        return None

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        return None

    def empty_cache(self):
        return None

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        return None

    def profiler_stop(self):
        return None

    def ray_resource_name(self):
        return "GPU"  # a logical resource: ray.init(num_gpus=N)

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


platform_manager._current_platform = CpuPlatform()
# Engines are registered for cuda and npu; veRL has this variable for other devices.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
# FSDP1 will not broadcast parameters on a CPU; gloo can.
fsdp_init._check_module_states_for_sync_module_states = _nothing

_init_process_group = dist.init_process_group


def _gloo(backend=None, *args, **kwargs):
    # veRL asks for "cpu:gloo,<device>:<backend>", which is "cpu:gloo" twice here.
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


dist.init_process_group = _gloo


NAME = "hf_cpu"


def _replica_class():
    import verl_cpu_rollout

    return verl_cpu_rollout.replica_class()


def _register(module):
    if module.__name__ == "verl.workers.rollout.replica":
        module.RolloutReplicaRegistry.register(NAME, _replica_class)
    else:
        module._ROLLOUT_REGISTRY[(NAME, "async")] = "verl_cpu_rollout.ServerAdapter"


sys.meta_path.insert(0, TrainerImports({"verl.workers.rollout.replica", "verl.workers.rollout.base"}, _register))
