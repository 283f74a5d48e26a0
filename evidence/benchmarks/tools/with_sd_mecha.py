"""sd-mecha: single files of any tensors."""

INSTALL = ("sd-mecha==1.1.8", "fuzzywuzzy", "python-Levenshtein", "Levenshtein", "rapidfuzz")
DISTRIBUTION = "sd-mecha"
METHODS = ("average", "task_arithmetic", "ties", "slerp")


def merge(method: str, base: str, experts: list[str], out: str, dtype: str) -> None:
    """A file, `OUT/model.safetensors`."""
    from pathlib import Path

    import sd_mecha
    import torch
    from sd_mecha.extensions import merge_methods

    added = merge_methods.resolve("add_difference")  # the function of that name wants models of known kinds
    start, *models = (sd_mecha.model(only_file(f)) for f in (base, *experts))
    deltas = [sd_mecha.subtract(m, start) for m in models]
    recipe = {
        "average": lambda: sd_mecha.n_average(*models),
        "task_arithmetic": lambda: added(start, sum(deltas[1:], deltas[0]), alpha=0.4),
        "ties": lambda: added(start, sd_mecha.ties_sum(*deltas, k=0.2, vote_sgn=True), alpha=1.0),
        "slerp": lambda: sd_mecha.slerp(models[0], models[1], alpha=0.5),
    }[method]()
    Path(out).mkdir()
    written = getattr(torch, dtype)
    more = {
        "merge_device": "cpu",
        "merge_dtype": torch.float32,
        "output_dtype": written,
        "strict_merge_space": "weight",
    }
    sd_mecha.merge(recipe, output=Path(out, "model.safetensors"), **more)


def only_file(folder: str):
    """The only weight file of a folder.

    Raises:
        SystemExit: there are several.
    """
    from pathlib import Path

    file, *others = sorted(Path(folder).glob("*.safetensors"))
    if others:
        raise SystemExit("sd-mecha reads one file per model")
    return file
