"""A rollout backend for veRL 0.9 that samples with transformers: a Ray actor, and the adapter that feeds it weights."""

from __future__ import annotations

import os
import zlib

import ray
import torch
from verl.workers.rollout.base import BaseRollout


class Server:
    """Samples token by token; the draw depends on prompt, sample number and step alone, so runs can be compared."""

    def __init__(self, model_path, response_length):
        torch.set_num_threads(1)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.end = AutoTokenizer.from_pretrained(model_path).eos_token_id
        self.response_length = response_length
        self.global_steps = 0
        self.asked = {}

    def load_weights(self, weights, global_steps=None):
        own = self.model.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                if name in own:
                    own[name].copy_(value)
        self.global_steps = global_steps or 0

    def set_global_steps(self, step):
        self.global_steps = step

    def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, **kwargs):
        from verl.workers.rollout.replica import TokenOutput

        temperature = float(sampling_params.get("temperature", 1.0))
        prompt = tuple(int(t) for t in prompt_ids)
        number = self.asked[prompt] = self.asked.get(prompt, 0) + 1
        seed = zlib.crc32(repr((prompt, number, self.global_steps)).encode())
        draw = torch.Generator().manual_seed(seed)
        past, current, out, logp, reason = None, torch.tensor([prompt]), [], [], "length"
        with torch.no_grad():
            for _ in range(int(sampling_params.get("max_tokens") or self.response_length)):
                found = self.model(current, past_key_values=past, use_cache=True)
                past = found.past_key_values
                scores = (found.logits[0, -1].float() / (temperature or 1.0)).log_softmax(-1)
                token = int(torch.multinomial(scores.exp(), 1, generator=draw)) if temperature else int(scores.argmax())
                out.append(token)
                logp.append(float(scores[token]))
                if token == self.end:
                    reason = "completed"
                    break
                current = torch.tensor([[token]])
        return TokenOutput(
            token_ids=out,
            log_probs=logp if sampling_params.get("logprobs") else None,
            stop_reason=reason,
            extra_fields={"global_steps": self.global_steps},
        )

    def _nothing(self, *args, **kwargs):
        return None

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = _nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class ServerAdapter(BaseRollout):
    """In the actor's process: one server a rank."""

    async def resume(self, tags):
        return None

    async def release(self):
        return None

    @torch.no_grad()
    async def update_weights(self, weights, wire_format="named_tensors", global_steps=None, **kwargs):
        state = {name: value.detach().to("cpu", torch.float32).clone() for name, value in weights}
        server = ray.get_actor(f"hf_cpu_server_{int(os.environ['RANK'])}")
        await server.load_weights.remote(state, global_steps)


def replica_class():
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self):
            name = f"hf_cpu_server_{self.replica_rank}"
            actor = ray.remote(num_cpus=0.1)(Server).options(name=name)
            server = actor.remote(self.model_config["path"], self.config.response_length)
            await server.set_global_steps.remote(0)
            self.servers, self._server_handle, self._server_address = [server], server, f"hf_cpu_{self.replica_rank}"

    return Replica
