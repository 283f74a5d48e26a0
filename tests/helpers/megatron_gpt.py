"""Checkpoints of a tiny GPT by megatron-core's own code, and its reading of an average; runs where it is installed.

python -P tests/helpers/megatron_gpt.py save FOLDER [RANKS]    # step-1, step-2 and step-3; RANKS share the tensors
python -P tests/helpers/megatron_gpt.py load FOLDER OUT.pt     # what megatron's `load` gives the model, in one process

On a CPU, with gloo. `tests/data/dcp/megatron` has two such checkpoints.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

STEPS = (1, 2, 3)


def _rank(rank: int, ranks: int, rendezvous: str, job: list[str]) -> None:
    """One of the processes, which share every layer (tensor parallelism)."""
    from megatron.core import parallel_state

    warnings.simplefilter("ignore")
    torch.cuda.synchronize = lambda *_: None  # its writer asks for these, also where there is no GPU
    torch.cuda.current_device = lambda: "cpu"
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    if job[0] == "save":
        for step in STEPS:
            _save(Path(job[1]) / f"step-{step}", step)
    else:
        _load(job[1], job[2])
    torch.distributed.destroy_process_group()


def _model(step: int) -> Any:
    """Two layers in bfloat16, with grouped queries and a gated MLP; every step has other weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(step)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=16,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="LayerNorm",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:  # the same on every rank; all steps begin with ones
                tensor += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step)).to(tensor.dtype)
    return model


def _save(folder: Path, step: int) -> None:
    """A model with state of an optimiser beside it, and objects of the training program."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    model = _model(step).sharded_state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    rank = torch.distributed.get_rank()
    moment = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", torch.zeros(4), replica_id=rank)
    random = ShardedObject("rng_state", torch.get_rng_state()[:4], (1,), (0,), replica_id=rank)
    state = {"model": model, "optimizer": {"exp_avg": moment}, "rng_state": random, "iteration": step}
    torch.distributed.barrier()
    os.chdir(folder.parent)
    dist_checkpointing.save(state, folder.name)


def _load(folder: str, out: str) -> None:
    """Store what a new model has after loading, by the names of its parameters, and the iteration.

    `log_all` is Megatron-LM's `--dist-ckpt-strictness`: a merged checkpoint has no `_extra_state` objects.
    """
    from megatron.core import dist_checkpointing

    model = _model(0)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder, strict="log_all")
    missing, unexpected = model.load_state_dict(loaded["model"], strict=False)
    assert not unexpected
    assert not [name for name in missing if not name.endswith("_extra_state")], missing
    torch.save({"model": dict(model.named_parameters()), "iteration": loaded["iteration"]}, out)


def main(job: list[str]) -> None:
    """Run a job of the command line in processes of its own."""
    import torch.multiprocessing as processes

    ranks = int(job[2]) if job[0] == "save" and len(job) > 2 else 1
    job = [job[0], *(str(Path(place).resolve()) for place in job[1:])]
    with tempfile.TemporaryDirectory() as place:
        processes.spawn(_rank, args=(ranks, f"{place}/rendezvous", job), nprocs=ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
