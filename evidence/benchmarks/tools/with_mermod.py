"""mermod: task arithmetic is its `dare` that drops nothing; its TIES sums where others average."""

INSTALL = ("mermod==0.1.0",)
DISTRIBUTION = "mermod"
METHODS = ("average", "task_arithmetic")


def merge(method: str, base: str, experts: list[str], out: str, dtype: str) -> None:
    """A file, `OUT/model.safetensors`, in the dtype of the inputs."""
    import os
    from pathlib import Path

    import mermod
    import torch

    def file(folder: str) -> str:
        return str(next(Path(folder).glob("*.safetensors")))

    Path(out).mkdir()
    os.chdir(out)  # where it makes the folders of its parts
    mermod.merge(
        sd_base_path=file(base),
        sd_merged_paths={str(i): file(e) for i, e in enumerate(experts)},
        method="dare",
        sparsity=0.0,
        use_ties=False,
        lambda_param=0.4 if method == "task_arithmetic" else 1 / len(experts),
        weight_batch_size=8,
        weight_batches_custom=[],
        sd_output_path=str(Path(out, "model.safetensors")),
        seed_dict=None,
        merge_device=torch.device("cpu"),
        use_progress_bar=False,
    )
