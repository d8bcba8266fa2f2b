"""Whether a model can fit into this machine's memory at all, from its settings alone."""

from __future__ import annotations

import os

from thinwire.train.config import Config, ConfigError

_VOCABULARY = 256  # as in ``data``, which needs torch
_TRAINED_BYTES = 16  # a parameter in fp32, its gradient and AdamW's two moments
_FROZEN_BYTES = 4
# fp32 values a block keeps for its backward, in units of dim: two norms, q k v, attention, its
# projection, and the MLP's two hidden layers of four
_KEPT_A_BLOCK = 14


def check_size(config: Config, local_processes: int) -> None:
    """Refuse what this machine's physical memory cannot hold; raises ConfigError.

    The estimate is a lower bound: parameters with their optimizer state, the batch, and the
    activations of one micro-batch, for the share of ``local_processes`` of all the processes.
    """
    memory = physical_memory()
    if memory is None:
        return
    on_cpu, parameters = config.device == "cpu", _parameters(config)
    trained = parameters - _frozen_parameters(config)
    weights = _FROZEN_BYTES * parameters
    weights += (_TRAINED_BYTES - _FROZEN_BYTES) * trained if on_cpu else 0
    activations = _activation_bytes(config) if on_cpu else 0
    needed = (
        (weights + activations) * min(local_processes, config.nproc or 1) // (config.nproc or 1)
    )
    if needed <= memory:
        return
    model = config.model
    raise ConfigError(
        f"model.layers {model.layers}, model.dim {model.dim}, model.context {model.context} and "
        f"train.batch {config.train.batch} need {_gigabytes(weights)} for {_count(parameters)} "
        f"parameters and {_gigabytes(activations)} for activations, but this machine has "
        f"{_gigabytes(memory)}; lower the largest of them"
    )


def physical_memory() -> int | None:
    """Bytes of RAM; None where the system doesn't tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_memory() -> int | None:
    """Bytes of RAM that processes can still take; all of it where the system doesn't tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123  no file of ours
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    return physical_memory()


def _parameters(config: Config) -> int:
    model = config.model
    embeddings = (_VOCABULARY * (1 if model.tied else 2) + model.context) * model.dim
    return embeddings + model.layers * _block_parameters(config) + 2 * model.dim


def _block_parameters(config: Config) -> int:
    return 12 * config.model.dim**2 + 13 * config.model.dim


def _frozen_parameters(config: Config) -> int:
    frozen, model = config.train.frozen, config.model
    if not frozen:
        return 0
    return (_VOCABULARY + model.context) * model.dim + frozen * _block_parameters(config)


def _activation_bytes(config: Config) -> int:
    model, batch = config.model, config.train.batch
    tokens = batch * model.context
    of_a_microbatch = config.microbatch_rows * model.context
    kept = model.layers * _KEPT_A_BLOCK * model.dim + _VOCABULARY
    return 16 * tokens + 4 * of_a_microbatch * kept  # int64 tokens and targets


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count < 10**15 else f"{count / 1e9:.1e} GB"


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**15 else f"{number:.1e}"
