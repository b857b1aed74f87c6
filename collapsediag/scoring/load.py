"""Load the policy that wrote the rollouts: a folder, a GGUF file, or a name on the hub."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from collapsediag._optional import require
from collapsediag.errors import CollapsediagError, ScoringError, SettingsError

logger = logging.getLogger("collapsediag")

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_policy(
    path_or_name: str | Path,
    *,
    tokenizer: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, quietly.

    path_or_name: a model folder, a folder that holds one GGUF file, a GGUF file, or a name on the Hugging Face hub. A
        path that exists is never looked up on the network.
    tokenizer: where the tokenizer is, if not with the model. Returned as None where there is none.
    device: "auto" takes the GPU if there is one.
    dtype: "auto" is float32 on the CPU and the checkpoint's own elsewhere.
    gguf_file: which GGUF file of the folder.

    Raises SettingsError for a path, device or dtype that does not exist, ScoringError for a model that cannot be read.
    """
    where, name = _locate(path_or_name, gguf_file)  # first: transformers takes seconds to import
    transformers = require("transformers", extra="hf", feature="loading a policy")
    if name is not None:
        for package in ("gguf", "accelerate"):
            require(package, extra="gguf", feature=f"reading {name}")
    local = Path(where).exists()
    target = _device(device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if name is not None:
        options["gguf_file"] = name
    if local and not (Path(where) / "adapter_config.json").exists():  # an adapter's base model may be elsewhere
        options["local_files_only"] = True
    try:
        with _quiet(transformers):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                where,
                dtype=_dtype(dtype, target),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, in words
                **options,
            )
            _refuse_made_up_weights(path_or_name, model, found)
            model = model.to(target).eval()
            loaded = _tokenizer(transformers, tokenizer, where, options)
    except CollapsediagError:
        raise
    except Exception as error:
        raise ScoringError(_unreadable(path_or_name, local, error)) from error
    return model, loaded


def load_tokenizer(
    path_or_name: str | Path, *, tokenizer: str | Path | None = None, gguf_file: str | None = None
) -> Any:
    """The tokenizer that `load_policy` would give, without the model; None where there is none."""
    where, name = _locate(path_or_name, gguf_file)
    transformers = require("transformers", extra="hf", feature="loading a tokenizer")
    options: dict[str, Any] = {} if name is None else {"gguf_file": name}
    if Path(where).exists():
        options["local_files_only"] = True
    with _quiet(transformers):
        return _tokenizer(transformers, tokenizer, where, options)


def _locate(path_or_name: str | Path, gguf_file: str | None) -> tuple[str, str | None]:
    """Folder or hub name, and the GGUF file in it."""
    if not str(path_or_name).strip():
        raise SettingsError("the model's name is empty. Give a model folder, a .gguf file, or a hub name.")
    path = Path(path_or_name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise SettingsError(f"{path} is a file, but a model is a folder (or a .gguf file). Give its folder.")
        return str(path.parent), path.name
    if path.is_dir():
        found = sorted(file.name for file in path.glob("*.gguf"))
        if gguf_file is not None:
            if gguf_file not in found:
                raise SettingsError(f"{path} holds no {gguf_file} (GGUF files there: {', '.join(found) or 'none'}).")
            return str(path), gguf_file
        if (path / "config.json").exists() or (path / "adapter_config.json").exists():
            return str(path), None
        if len(found) == 1:
            return str(path), found[0]
        if found:
            raise SettingsError(f"{path} holds several GGUF files: {', '.join(found)}. Name one (--gguf-file).")
        raise SettingsError(
            f"{path} holds no config.json and no .gguf file (found: {_listing(path)}). A checkpoint folder written by "
            "save_pretrained is expected; trainers often keep it in a subfolder such as checkpoint-100 or actor."
        )
    if path.suffix == ".gguf":
        raise SettingsError(f"{path}: no such file. Give the path of a .gguf file, a model folder, or a hub name.")
    if not _HUB_NAME.match(str(path_or_name)):
        raise SettingsError(f"{path}: no such folder or file. Give a model folder, a .gguf file, or a hub name.")
    return str(path_or_name), gguf_file


def _listing(path: Path, limit: int = 6) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "") or "nothing"


def best_device() -> torch.device:
    """The device that "auto" stands for."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _device(device: str) -> torch.device:
    if device == "auto":
        return best_device()
    try:
        target = torch.device(device)
        if target.type == "meta":
            raise SettingsError("nothing can be computed on it")
        torch.empty(0, device=target)
    except Exception as error:
        raise SettingsError(
            f"device {device!r} cannot be used here ({_first_line(error)}). Try cpu or auto."
        ) from error
    return target


def _dtype(dtype: str, device: torch.device) -> Any:
    if dtype == "auto":
        # bfloat16 on a CPU without matrix units is several times slower than float32, and rounds.
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise SettingsError(f"dtype {dtype!r} is not known; choose auto or one of {', '.join(DTYPES)}.")
    return getattr(torch, dtype)


def _tokenizer(transformers: Any, wanted: str | Path | None, where: str, options: dict[str, Any]) -> Any:
    if wanted is None:
        try:
            return transformers.AutoTokenizer.from_pretrained(where, **options)
        except Exception as error:  # rollouts with token ids need none; who needs one says so then
            if any(Path(where).glob("tokenizer*")):
                logger.warning("%s: its tokenizer cannot be read (%s); going on without.", where, _first_line(error))
            return None
    folder, name = _locate(wanted, None)
    own = {key: value for key, value in options.items() if key == "trust_remote_code"}
    if name is not None:
        own["gguf_file"] = name
    if Path(folder).exists():
        own["local_files_only"] = True
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **own)
    except Exception as error:
        raise ScoringError(f"tokenizer {wanted}: cannot be read ({_first_line(error)}).") from error


def _refuse_made_up_weights(path_or_name: str | Path, model: Any, found: Mapping[str, Any]) -> None:
    """transformers fills what the checkpoint lacks with random numbers, and only logs it."""
    names_of: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), set()).add(name)
    # A tied weight is there under its other name.
    missing = set(found["missing_keys"])
    missing -= {name for names in names_of.values() if names - missing for name in names}
    kind = type(model).__name__
    if missing:
        raise ScoringError(
            f"{path_or_name}: {len(missing)} weights of the {kind} that its config.json describes are not in the "
            f"checkpoint ({_some(missing)}), and random ones would be scored. Is this another model's config.json, or "
            "is a weight file missing?"
        )
    odd = [f"{name} is {list(there)}, not {list(wanted)}" for name, there, wanted in found["mismatched_keys"]]
    if odd:
        raise ScoringError(
            f"{path_or_name}: {len(odd)} weights have another shape than the {kind} that its config.json describes "
            f"({_some(odd)}). Is this another model's config.json?"
        )
    unused = found["unexpected_keys"]
    if unused:
        logger.warning("%s: %d weights are of no use to %s: %s", path_or_name, len(unused), kind, _some(unused))


def _some(names: Iterable[str], limit: int = 3) -> str:
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "")


def _unreadable(path_or_name: str | Path, local: bool, error: Exception) -> str:
    reason = f"{type(error).__name__}: {_first_line(error)}"
    if local:
        return (
            f"{path_or_name}: not a causal language model that transformers can read ({reason}). Is the copy complete, "
            "and is this version of transformers new enough for the model?"
        )
    return (
        f"{path_or_name}: no such folder, and it could not be loaded from the hub ({reason}). Check the spelling, or "
        "give the path of a model folder."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No bars, no advice: whoever loads a model wants to see the model's numbers."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.CRITICAL)  # its retries are told by the error that ends them
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
