"""PEFT's `add_weighted_adapter` on a loaded model: sums by concatenation, TIES and DARE of the products by SVD."""

INSTALL: tuple[str, ...] = ()
DISTRIBUTION = "peft"
KINDS = {"average": "cat", "task_arithmetic": "cat", "ties": "ties_svd", "dare": "dare_linear_svd"}
METHODS = tuple(KINDS)


def merge(method: str, base: str, experts: list[str], out: str, dtype: str) -> None:
    """An adapter from adapters."""
    from pathlib import Path

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), experts[0], adapter_name="a0")
    names = [f"a{i}" for i in range(len(experts))]
    for name, place in list(zip(names, experts, strict=True))[1:]:
        model.load_adapter(place, adapter_name=name)
    weight = {"average": 1 / len(names), "ties": 1.0}.get(method, 0.4)
    more = {"density": 0.2 if method == "ties" else 0.5} if method in ("ties", "dare") else {}
    if more:
        more["svd_rank"] = sum(model.peft_config[n].r for n in names)
    model.add_weighted_adapter(names, [weight] * len(names), "merged", combination_type=KINDS[method], **more)
    model.save_pretrained(out, selected_adapters=["merged"], save_embedding_layers=False)
    for file in (Path(out) / "merged").iterdir():
        file.rename(Path(out) / file.name)
