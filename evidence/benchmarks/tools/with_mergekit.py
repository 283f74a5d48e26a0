"""mergekit; computes in float32, as the others do. Adapters are merged into the model."""

INSTALL = ("mergekit==0.1.5", "immutables")
DISTRIBUTION = "mergekit"
EACH = {
    "average": {"weight": 1.0},
    "task_arithmetic": {"weight": 0.4},
    "ties": {"weight": 1.0, "density": 0.2},
    "dare": {"weight": 0.4, "density": 0.5},
    "slerp": {},
}
ALL = {"average": {"normalize": True}, "ties": {"normalize": True}, "slerp": {"t": 0.5}}
NAMES = {"average": "linear", "dare": "dare_linear"}
METHODS = tuple(EACH)


def merge(method: str, base: str, experts: list[str], out: str, dtype: str) -> None:
    """A model."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    models = [f"{base}+{e}" if "lora" in e else e for e in experts]
    recipe = {
        "merge_method": NAMES.get(method, method),
        "models": [{"model": m, "parameters": EACH[method]} for m in models],
        "parameters": ALL.get(method, {}),
        "dtype": "float32",
        "out_dtype": dtype,
    }
    if method != "average":
        recipe["base_model"] = models[0] if method == "slerp" else base
    options = MergeOptions(lora_merge_cache=f"{out}-cache", write_model_card=False, device="cpu")
    run_merge(MergeConfiguration.model_validate(recipe), out, options)
