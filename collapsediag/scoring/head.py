"""From hidden states to the log-probs that are asked for, a few rows at a time.

Legend: B contexts of a batch; T tokens of a forward; R rows read in each context; M (row, token) pairs; V vocabulary;
D hidden width.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.access import ModelAccess

IntArray = NDArray[np.int64]

# What a logits chunk may take. Larger chunks multiply no faster; smaller ones do.
MAX_ROWS = 512
CPU_LOGITS_BYTES = 32 << 20
CUDA_LOGITS_BYTES = 512 << 20


class UnsupportedModelError(Exception):
    """The fast path cannot run this model; the message is the reason that the log line gives."""


@dataclass(frozen=True, eq=False)
class HeadJob:
    """What to read from one forward.

    row_BR: positions to read, [R] for all contexts alike or [B, R].
    pair_row_M: index into R, ascending. pair_target_M: token looked up there.
    entropy_BR: rows whose entropy is wanted, None for none.
    flat: positions count through all B x T tokens, B being 1 in the result.
    """

    row_BR: IntArray
    pair_row_M: IntArray
    pair_target_M: IntArray
    entropy_BR: NDArray[np.bool_] | None = None
    flat: bool = False


@dataclass(frozen=True, eq=False)
class HeadResult:
    """logp_BM: log-prob of each pair. entropy_BR: nats, NaN where not asked for; None where none was."""

    logp_BM: torch.Tensor
    entropy_BR: torch.Tensor | None


@dataclass(frozen=True)
class LogitTransform:
    """What the model does to its head's output, and the temperature: `cap * tanh(scale * z / cap) / temperature`."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, access: ModelAccess, temperature: float) -> LogitTransform:
        """Read from the config: Cohere and Falcon-H1 multiply, Granite divides, Gemma caps."""
        scale = float(access.setting("logit_scale", 1.0)) * float(access.setting("lm_head_multiplier", 1.0))
        scale /= float(access.setting("logits_scaling", 1.0))
        cap = access.setting("final_logit_softcapping")
        return cls(scale=scale, cap=float(cap) if cap else None, temperature=temperature)

    def model_(self, z: torch.Tensor) -> torch.Tensor:
        """In place: the model's own part, without the temperature."""
        if self.cap is not None:
            return z.mul_(self.scale / self.cap).tanh_().mul_(self.cap)
        return z if self.scale == 1.0 else z.mul_(self.scale)

    def full_(self, z: torch.Tensor) -> torch.Tensor:
        """In place: the model's part, then the temperature."""
        z = self.model_(z)
        return z if self.temperature == 1.0 else z.div_(self.temperature)


class HeadTap:
    """While entered, the head module computes a `HeadJob` instead of all logits.

    The module's `__call__` still runs, so that the hooks of FSDP, ZeRO-3 and PEFT gather its weights; only its
    `forward` is replaced, for this instance. What it returns in place of the logits is a column of probe numbers,
    `[B, T, 1]`: the model then does to them what it does to logits, and comparing tells whether `LogitTransform`
    knows everything that it does.
    """

    def __init__(self, access: ModelAccess, temperature: float = 1.0, max_rows: int | None = None):
        head = access.head
        if head is None:
            raise UnsupportedModelError("the model does not say which module is its head")
        self.head = head
        self.transform = LogitTransform.of(access, temperature)
        self.max_rows = max_rows
        self.job: HeadJob | None = None
        self._result: HeadResult | None = None

    def __enter__(self) -> HeadTap:
        if "forward" in self.head.__dict__:
            # Somebody else (accelerate's offloading) patched this instance already; keep theirs and put it back.
            self._patched = self.head.__dict__["forward"]
        else:
            self._patched = None
        self._original = self.head.forward
        tap = weakref.proxy(self)
        self.head.forward = lambda hidden, *args, **kwargs: tap._forward(hidden)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._patched is None:
            del self.head.forward
        else:
            self.head.forward = self._patched
        del self._original

    def take(self, logits: Any, *, check: bool) -> HeadResult:
        """The result of the forward that just ran; `logits` is what the model made of the probe."""
        result, self._result, self.job = self._result, None, None
        if result is None:
            raise UnsupportedModelError("the model does not compute its logits by calling its output embeddings")
        if check:
            self._compare(logits)
        return result

    def _compare(self, logits: Any) -> None:
        if not isinstance(logits, torch.Tensor) or logits.shape != self._probe.shape:
            shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise UnsupportedModelError(f"the model reshapes its logits (found {shape})")
        expected = self.transform.model_(self._probe.double().clone())
        tolerance = 4 * torch.finfo(self._probe.dtype).eps
        if not torch.allclose(logits.double(), expected, rtol=tolerance, atol=tolerance):
            raise UnsupportedModelError("the model transforms its logits in a way that is not known here")

    def _forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        assert self.job is not None
        rows = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1]) if self.job.flat else hidden_BTD
        self._result = self._read(rows, self.job)
        tokens = hidden_BTD.shape[1]
        ramp = torch.linspace(-50.0, 50.0, tokens, device=hidden_BTD.device).to(hidden_BTD.dtype)
        self._probe = ramp[None, :, None].expand(hidden_BTD.shape[0], tokens, 1)
        return self._probe.clone()

    def _rows_per_chunk(self, hidden: torch.Tensor) -> int:
        if self.max_rows is not None:
            return self.max_rows
        vocabulary = getattr(self.head, "out_features", None) or getattr(self.head, "weight", hidden).shape[0]
        limit = CUDA_LOGITS_BYTES if hidden.is_cuda else CPU_LOGITS_BYTES
        return max(16, min(MAX_ROWS if not hidden.is_cuda else 4096, limit // (4 * max(1, int(vocabulary)))))

    def _read(self, hidden_BTD: torch.Tensor, job: HeadJob) -> HeadResult:
        batch, device = hidden_BTD.shape[0], hidden_BTD.device
        dtype = torch.float64 if hidden_BTD.dtype == torch.float64 else torch.float32
        n_rows = job.row_BR.shape[-1]
        logp = torch.empty(batch, job.pair_row_M.size, dtype=dtype, device=device)
        entropy = None
        if job.entropy_BR is not None:
            entropy = torch.full((batch, n_rows), torch.nan, dtype=dtype, device=device)
        row_index = torch.from_numpy(np.broadcast_to(job.row_BR, (batch, n_rows)).copy()).to(device)
        target, pair_row = (torch.from_numpy(a).to(device) for a in (job.pair_target_M, job.pair_row_M))
        width = min(self._rows_per_chunk(hidden_BTD), max(1, n_rows))
        height = max(1, self._rows_per_chunk(hidden_BTD) // width)
        for start in range(0, n_rows, width):
            stop = min(start + width, n_rows)
            a, b = np.searchsorted(job.pair_row_M, [start, stop]).tolist()
            for top in range(0, batch, height):
                few = slice(top, min(top + height, batch))
                index = row_index[few, start:stop, None].expand(-1, -1, hidden_BTD.shape[-1])
                z = self._logits(hidden_BTD[few].gather(1, index), dtype)
                logp[few, a:b], total = _log_probs_(z, pair_row[a:b] - start, target[a:b])
                if entropy is not None and job.entropy_BR is not None:
                    wanted = torch.from_numpy(job.entropy_BR[few, start:stop]).to(device)
                    entropy[few, start:stop][wanted] = torch.special.entr(z[wanted] / total[wanted][:, None]).sum(-1)
        return HeadResult(logp, entropy)

    def _logits(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Logits [b, r, V] of these hidden states, as the model would give them, in a tensor that is ours."""
        flat = self._original(hidden.reshape(1, -1, hidden.shape[-1]))
        z = flat.to(dtype).reshape(*hidden.shape[:-1], flat.shape[-1])
        return self.transform.full_(z)


def _log_probs_(z: torch.Tensor, pair_row: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [b, m] of the pairs, and sum_v exp(z - max) [b, r]; leaves exp(z - max) in `z`."""
    top = z.amax(-1, keepdim=True)
    chosen = z[:, pair_row, target] - top[:, pair_row, 0]
    total = z.sub_(top).exp_().sum(-1)
    return chosen - total.log()[:, pair_row], total
