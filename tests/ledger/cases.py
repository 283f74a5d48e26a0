"""The ledger's merges as data: recipes, command lines, and calls of documented functions."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.ledger import calls

Recipe = Mapping[str, Any]
Call = Callable[[Path], calls.Values]


@dataclass(frozen=True)
class Case:
    """One run; locations are below the folder of the inputs.

    Args:
        name: from the general to the special, joined by slashes.
        run: a recipe, a command without `--out`, or a function of the folder of the output.
        flags: further arguments of a merge by a recipe.
        code: expected exit code.
        needs: groups of inputs that a function reads.
        out: name of the output.
    """

    name: str
    run: Recipe | str | Call
    flags: Sequence[str] = ("--threads", "1")
    code: int = 0
    needs: Sequence[str] = ()
    out: str = "out"

    @property
    def slug(self) -> str:
        """The name as that of a file."""
        return re.sub(r"[^\w.-]+", "+", self.name)

    @property
    def groups(self) -> set[str]:
        """Groups of inputs that the case reads: first folders of its locations."""
        return {*self.needs, *re.findall(r"(?<![\w/])(\w+)/\w", "" if callable(self.run) else json.dumps(self.run))}

    def arguments(self, out: Path) -> list[str]:
        """Arguments of the command line."""
        assert not callable(self.run)
        if isinstance(self.run, str):
            return [*shlex.split(self.run), "--out", str(out)]
        return ["merge", f"{self.slug}.json", *self.flags, "--out", str(out)]


def model(family: str, method: str = "actmat", count: int = 2, **fields: Any) -> Recipe:
    """A merge of experts into the base of their folder."""
    experts = [f"{family}/expert{n}" for n in range(1, count + 1)]
    return {"base": f"{family}/base", "experts": experts, "method": method, **fields}


def adapters(*names: str, method: str = "actmat", base: str = "", **fields: Any) -> Recipe:
    """A merge of adapters, into a base if there is one."""
    place = {"base": f"peft/base_{base}"} if base else {}
    return {**place, "experts": [f"peft/{n}" for n in names], "method": method, **fields}


def measured(family: str, method: str, kind: str = "gram", **fields: Any) -> Recipe:
    """A merge by statistics."""
    places = [{"path": f"{family}/expert{n}", "statistics": f"statistics/{family}/{kind}{n}"} for n in (1, 2)]
    return {"base": f"{family}/base", "experts": places, "method": method, **fields}


METHODS = (
    "average", "task_arithmetic", "linear", "ties", "actmat", "actmat_ridge", "dc_merge", "ct_merging", "adamerging",
    "aswudi", "breadcrumbs", "cart", "dare", "della", "iso_c", "iso_cts", "karcher", "knots", "model_stock", "ram",
    "sce", "swudi", "tsv", "wudi", "nuslerp", "slerp", "nearswap", "arcee_fusion",
)  # fmt: skip
"""Methods without statistics."""
COUNTS: Mapping[str, int] = {"nuslerp": 2, "slerp": 1, "nearswap": 1, "arcee_fusion": 1}
"""Numbers of experts of methods that do not take three."""
READS_BASE = {"karcher", "nuslerp", "slerp", "arcee_fusion"}
"""Methods that make no adapter of adapters."""
LAYOUTS = (
    "llama_tied", "gpt2", "phi3", "mixtral", "qwen2_moe", "gpt_oss", "granitemoe", "gpt_neox", "falcon_new", "bloom",
    "mpt", "bert", "deberta", "t5", "clip", "vit", "resnet", "mamba", "qwen3_next", "whisper",
)  # fmt: skip
RANK_3, EXTRACTED = {"kind": "adapter", "rank": 3}, {"kind": "extracted", "rank": 4}


def methods() -> Iterator[Case]:
    """Every method: models, adapters into a model, into an adapter, and models into an extracted adapter."""
    for name in METHODS:
        count = COUNTS.get(name, 3)
        loras = ["lora1", "lora2", "lora3"][:count]
        yield Case(f"method/{name}/model", model("llama", name, count))
        yield Case(f"method/{name}/adapters-model", adapters(*loras, method=name, base="llama"))
        yield Case(f"method/{name}/adapter", adapters(*loras, method=name, output=RANK_3), code=int(name in READS_BASE))
        yield Case(f"method/{name}/extracted", model("llama", name, count, output=EXTRACTED))
    for name in ("regmean", "lot", "ssr", "cat"):
        yield Case(f"method/{name}/model", measured("llama", name))
    yield Case("method/fisher/model", measured("llama", "fisher", "fisher"))
    yield Case("method/regmean/gpt2", measured("gpt2", "regmean"))
    yield Case("method/regmean/mixtral", measured("mixtral", "regmean", options={"off_diagonal": 0.9}))
    yield Case("method/slerp/no-base", {"experts": ["llama/expert1", "llama/expert2"], "method": "slerp"})
    yield Case("method/user/model", model("llama", "user/rule.py:FIRST"))


def layouts() -> Iterator[Case]:
    """Every layout of tensors, and the meaning of tensors in a recipe."""
    for family in LAYOUTS:
        yield Case(f"layout/{family}/actmat", model(family, "actmat", 3))
    for family in ("gpt2", "phi3", "mixtral", "gpt_oss", "resnet", "bloom"):
        yield Case(f"layout/{family}/ties-all", model(family, "ties", scope="all", dtype="bfloat16"))
        yield Case(f"layout/{family}/tsv-post", model(family, "tsv", post=["isotropize"]))
    yield Case("layout/gpt2/extracted", model("gpt2", output=EXTRACTED))
    yield Case("layout/phi3/extracted", model("phi3", output={"kind": "extracted", "ranks": "pattern", "rank": 4}))
    yield Case("layout/llama_tied/untied", model("llama_tied", ties=False))
    yield Case("layout/resnet/paper", model("resnet", scope="paper"))
    roles = [{"match": "lm_head.weight", "role": "embedding"}, {"match": "*o_proj.weight", "orientation": "IO"}]
    yield Case("layout/llama/roles", model("llama", roles=roles))


FORMS: Mapping[str, tuple[str, str, str]] = {
    "saved": ("llama", "saved1", "saved2"), "pattern": ("llama", "pattern", "lora1"),
    "dora": ("llama", "dora1", "dora2"), "pissa": ("llama", "pissa", "lora2"), "rows": ("llama", "rows", "lora1"),
    "gpt2": ("gpt2", "gpt2_1", "gpt2_2"), "mixtral": ("mixtral", "mixtral1", "mixtral2"),
    "vision": ("vision", "vision1", "vision2"), "kernels": ("vision", "loha2", "vision1"),
    "loha": ("llama", "loha1", "lora1"), "lokr": ("llama", "lokr1", "lora1"),
    "ia3": ("llama", "ia3", "lora1"), "vera": ("llama", "vera", "lora1"), "adalora": ("llama", "adalora", "lora1"),
    "oft": ("llama", "oft", "lora1"),
}  # fmt: skip
"""Forms of adapters: base and two adapters."""
FACTORED = {"saved", "pattern", "gpt2", "mixtral", "vision"}
"""Forms that need no base."""
REFUSED: Mapping[str, Sequence[str]] = {"factors": ("actmat", "dc_merge"), "pico": ("ties", "dare")}
"""Spaces, and methods that have none there."""


def adapter_forms() -> Iterator[Case]:
    """Forms of adapters, spaces, ranks and weights."""
    for space in ("core", "factors", "pico"):
        for name in ("actmat", "ties", "dare", "task_arithmetic", "dc_merge"):
            pair, code = adapters("lora1", "lora4", method=name, space=space), int(name in REFUSED.get(space, ()))
            yield Case(f"space/{space}/{name}/adapter", pair, code=code)
            yield Case(f"space/{space}/{name}/model", {**pair, "base": "peft/base_llama"}, code=code)
    yield Case("space/core/post", adapters("lora1", "lora2", space="core", post=["isotropize"]))
    for name, (base, *pair) in FORMS.items():
        yield Case(f"form/{name}/model", adapters(*pair, base=base, method="task_arithmetic"))
        yield Case(f"form/{name}/rank-3", adapters(*pair, base=base, output=RANK_3))
        if name in ("vera", "pissa", "adalora"):
            yield Case(f"form/{name}/exact", adapters(*pair, base=base, method="linear", output={"kind": "adapter"}))
        yield Case(f"form/{name}/adapter", adapters(*pair), code=int(name not in FACTORED))
    yield Case("adapter/with-a-model", {**adapters("lora1", "base_llama", base="llama"), "output": {"kind": "model"}})
    yield Case("adapter/post", adapters("lora1", "lora2", post=["kappa"]))
    yield Case("adapter/post-model", adapters("lora1", "lora2", base="llama", post=["mean_norm"]))
    yield Case("adapter/ranks", adapters("lora1", "lora2", "lora3", output={"kind": "adapter", "ranks": "pattern"}))
    yield Case("adapter/half", adapters("lora1", "lora2", dtype="bfloat16", compute_dtype="float64"))
    weights = [{"path": "peft/lora1", "weight": -0.5}, {"path": "peft/lora2", "weight": 0.0}, "peft/lora3"]
    yield Case("adapter/weights", {"experts": weights, "method": "task_arithmetic"})
    yield Case("adapter/auto", adapters("lora1", "lora2", method="auto"))
    yield Case("adapter/device", adapters("lora1", "lora2"), ("--device", "cpu:0"))
    yield Case("adapter/device-model", adapters("lora1", "lora2", base="llama"), ("--device", "cpu:0"))


def numbers() -> Iterator[Case]:
    """Steps, weights, scales, rules, seeds, dtypes."""
    for step in ("isotropize", "isotropize:mean=rank", "kappa", "mean_norm", "subspace_boosting:beta=0.5"):
        yield Case(f"post/{step}", model("llama", "task_arithmetic", post=[step]))
    entries: list[dict[str, Any]] = [{"match": "*mlp*", "value": 2.0}, {"value": [0.1, 1.0]}]
    weights = {"plain": [-1.0, 0.0], "gradient": [[0.0, 1.0], [1.0, 0.5, 0.0]], "entries": [entries, 1.0]}
    for name, values in weights.items():
        experts = [{"path": f"llama/expert{n}", "weight": value} for n, value in enumerate(values, 1)]
        for method in ("task_arithmetic", "actmat", "linear"):
            fields = {"experts": experts, "normalize": name == "gradient"}
            code = int((name, method) == ("plain", "actmat"))
            yield Case(f"weight/{name}/{method}", {**model("llama", method), **fields}, code=code)
    own = [{"path": f"llama/expert{n}", "options": {"density": d}} for n, d in ((1, 0.3), (2, [0.1, 0.9]))]
    yield Case("weight/options", {**model("llama", "ties"), "experts": own})
    yield Case("scale/gradient", model("llama", scale=[0.0, 2.0]))
    scale = [{"layers": [0, 1], "value": 0.5}, {"layers": "before", "value": 3.0}, {"value": 1.5}]
    yield Case("scale/entries", model("llama", "ties", scale=scale, scope="all"))
    rules: list[dict[str, Any]] = [
        {"match": "*q_proj*", "method": "ties", "options": {"density": 0.5}, "scale": 0.5},
        {"match": "*v_proj*", "method": "dare"}, {"match": "re:.*norm.*", "keep": "base", "optional": True},
        {"match": "*down_proj*", "options": {"rtol": 1e-3}},
    ]  # fmt: skip
    yield Case("rules/model", model("llama", rules=rules, keep="*embed*"))
    yield Case("rules/adapter", adapters("lora1", "lora2", rules=rules, output=RANK_3))
    for seed in (1, 2):
        yield Case(f"seed/dare-{seed}", model("llama", "dare", seed=seed, options={"rule": "ties"}))
        yield Case(f"seed/della-{seed}", model("llama", "della", seed=seed))
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        for compute in ("float32", "float64"):
            yield Case(f"dtype/{dtype}-{compute}", model("llama", count=3, dtype=dtype, compute_dtype=compute))


def storage() -> Iterator[Case]:
    """Forms of storage, large tensors, devices, threads, memory."""
    for name in ("actmat", "ties", "average", "dare", "tsv"):
        for flags in ("--threads 1", "--threads 4", "--device cpu:0", "--device cpu:0,1 --threads 2"):
            if flags == "--threads 1" or name != "tsv":
                yield Case(f"large/{name}/{flags.replace('--', '')}", model("large", name, scope="all"), flags.split())
    yield Case("large/extracted", model("large", output=EXTRACTED), ("--threads", "2"))
    yield Case("large/little-memory", model("large", "ties"), ("--threads", "4", "--max-memory", "400MB"))
    for form in ("torch", "halves", "sharded", "dcp"):
        yield Case(f"stored/{form}", model(f"stored/{form}"))
    yield Case("stored/shards", model("stored/sharded", max_shard_size="20KB"))
    base, *single = (f"stored/{name}.safetensors" for name in ("base", "expert1", "expert2"))
    yield Case("stored/single", {"base": base, "experts": single, "method": "actmat"})
    yield Case("stored/file", {"base": base, "experts": single, "method": "ties"}, out="out.safetensors")
    yield Case("stored/nan-refused", model("stored/broken"), code=1)
    for form in ("fp8", "int8", "int4"):
        yield Case(f"coded/{form}", model(f"coded/{form}", "ties"))
    base, *coded = (f"coded/{name}.gguf" for name in ("base", "expert1", "expert2"))
    yield Case("coded/gguf", {"base": base, "experts": coded, "method": "actmat"})
    yield Case("coded/export", f"export {base} --to gguf --type q8_0 --like {base}", out="out.gguf")


def images() -> Iterator[Case]:
    """Pipelines, single files and LoRA files of image models."""
    pipelines = [f"images/pipelines/{name}" for name in ("base", "expert1", "expert2")]
    single = [f"images/{name}.safetensors" for name in ("base", "expert1", "expert2")]
    for name, (base, *experts) in {"pipelines": pipelines, "single": single}.items():
        recipe = {"base": base, "experts": experts, "method": "actmat"}
        yield Case(f"image/{name}", recipe)
        yield Case(f"image/{name}-all", {**recipe, "method": "task_arithmetic", "scope": "all", "dtype": "float16"})
    yield Case("image/file", {"base": single[0], "experts": single[1:], "method": "ties"}, out="out.safetensors")
    loras = {"experts": ["images/unet1.safetensors", "images/unet2.safetensors"], "method": "task_arithmetic"}
    for layout in ("same", "kohya", "diffusers", "comfy", "peft"):
        yield Case(f"image/lora-{layout}", {**loras, "output": {"kind": "adapter", "layout": layout}})
    yield Case("image/lora-model", {**loras, "base": "images/unet", "scope": "all"})
    for kind, end in {"kohya": ".safetensors", "diffusers": ""}.items():
        experts = [f"images/{kind}{n}{end}" for n in (1, 2)]
        yield Case(f"image/text-encoder-{kind}", {"experts": experts, "method": "actmat"}, out="out.safetensors")


def tools() -> Iterator[Case]:
    """Several outputs, vocabularies, stacks of layers, other tools, data, Python, killed runs, refusals."""
    pair = "merge -b llama/base -e llama/expert1 -e llama/expert2"
    yield Case("several/methods", f"{pair} -m ties -m actmat -m dare -m tsv")
    yield Case("several/options", f"{pair} -m ties -o density=0.1,0.5,0.9 --dtype bfloat16")
    loras = "merge -e peft/lora1 -e peft/lora2 -m actmat -m task_arithmetic -m tsv"
    yield Case("several/adapters", loras)
    yield Case("several/adapters-model", f"{loras} -b peft/base_llama")
    tokens: Recipe = {"base": "vocabulary/base", "experts": ["vocabulary/chat", "vocabulary/tool"], "scope": "all"}
    for source in ("union", "base", "chat"):
        output = {"kind": "model", "vocabulary": {"source": source, "pad_to_multiple_of": 8}}
        yield Case(f"vocabulary/{source}", {**tokens, "method": "task_arithmetic", "output": output})
    yield Case("vocabulary/none", {**tokens, "method": "task_arithmetic"}, code=1)
    yield Case("stack/copy", {"base": "llama/base[0:2] + llama/expert1[1:2]", "experts": []})
    stacks = [f"llama/{name}[0:2] + llama/{name}[0:1]" for name in ("base", "expert1", "expert2")]
    experts = [{"path": stack, "name": f"e{n}"} for n, stack in enumerate(stacks[1:])]
    yield Case("stack/merge", {"base": stacks[0], "experts": experts, "method": "task_arithmetic"})
    baked = {"base": "peft/base_llama", "experts": ["peft/base_llama+peft/lora1", "peft/lora3"]}
    yield Case("stack/with-adapter", {**baked, "method": "actmat"})
    for name in ("linear_gradient", "linear_precedence"):
        yield Case(f"mergekit/{name}", f"merge mergekit/{name}.yml")
    for name in ("uniform", "ema:0.9", "wsd"):
        yield Case(f"average/{name}", partial(calls.average, weights=name), needs=("llama",))
    yield Case("extract", "extract --base llama/base --model llama/expert1 --rank 4")
    yield Case("extract/family", "extract --base peft/base_llama --model peft/loha1 --rank 3")
    yield Case("statistics", "statistics collect texts/experts/math --data texts/math.jsonl")
    texts = "merge -b texts/base -e math=texts/experts/math -e code=texts/experts/code"
    yield Case("data/merge", f"{texts} --data math=texts/math.jsonl --data code=texts/code.jsonl")
    yield Case("data/none", f"{texts} --diagnose --set files_from=math")
    yield Case("python/modules", calls.merge_modules, needs=("gpt2",))
    yield Case("python/peft", calls.merge_peft, needs=("peft",))
    yield Case("python/function", calls.merge_by_function, needs=("llama",))
    yield Case("python/layers", calls.merge_layers)
    killed = {
        "model": model("llama", "actmat", 3, max_shard_size="20KB"),
        "adapter": adapters("lora1", "lora2", "lora3"),
        "extracted": model("llama", output=EXTRACTED),
    }
    for name, recipe in killed.items():
        yield Case(f"killed/{name}", partial(calls.kill_and_resume, recipe=recipe), needs=("llama", "peft"))
    yield Case("refused/method", model("llama", "no_such_method"), code=1)
    yield Case("refused/shapes", {**model("llama"), "experts": ["gpt2/expert1"]}, code=1)
    yield Case("refused/flag", f"{pair} --no-such-flag", code=2)


CASES: tuple[Case, ...] = (*methods(), *layouts(), *adapter_forms(), *numbers(), *storage(), *images(), *tools())
