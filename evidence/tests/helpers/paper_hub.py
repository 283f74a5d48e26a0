"""The repositories of the paper's suites on the stand-in of the hub: real names, commits, lists of files, configs and
columns (`evidence/tests/rehearsal/hub.json`); tiny weights of the real architectures, and a few rows.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from evidence.tests.helpers.hub import HubStandIn
from evidence.tests.helpers.language import HUB_ROWS
from evidence.tests.helpers.pretrained import made

from actmat_experiments.vision.clip import clip_tasks

HERE = Path(__file__).parents[1]
RECORD: dict[str, Any] = json.loads((HERE / "rehearsal" / "hub.json").read_text(encoding="utf-8"))
PROBLEMS = HERE / "reasoning" / "data"
TEMPLATE = (
    "Solve the following problem step by step. The last line of your response should be the answer to the problem in "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{% for message in messages %}{{ '\n\n' if not loop.first else '' }}{{ message['content'] + '\n' }}"
    "{% if loop.last and add_generation_prompt %}"
    "{{ '\nRemember to put your answer on its own line after \"Answer:\"' }}{% endif %}{% endfor %}"
)

IFEVAL = (
    *("num_highlights", "relation", "num_words", "num_placeholders", "prompt_to_repeat", "num_bullets"),
    *("section_spliter", "num_sections", "capital_relation", "capital_frequency", "keywords", "num_paragraphs"),
    *("language", "let_relation", "letter", "let_frequency", "end_phrase", "forbidden_words", "keyword", "frequency"),
    *("num_sentences", "postscript_marker", "first_word", "nth_paragraph"),
)
"""Arguments of the instructions of IFEval."""


class PaperHub:
    """Publishes repositories when they are asked for.

    Args:
        root: folder of their files.
    """

    def __init__(self, hub: HubStandIn, root: Path) -> None:
        self.hub, self.root = hub, root

    def model(self, repo: str, make: Callable[[Path], None]) -> None:
        """Publish a model: `make` writes it, and exactly the files of the record are kept."""
        record = RECORD["models"].get(repo) or RECORD["models"][repo.rpartition("_")[0] + "_*"]
        files = list(record.get("files") or [*RECORD["models"][record["like"]]["files"], *record["also"]])
        folder = self.root / repo
        folder.mkdir(parents=True)
        make(folder)
        for path in folder.iterdir():
            if path.name not in files:
                path.unlink()
        for name in files:
            if not (folder / name).exists():
                (folder / name).write_text("{}" if name.endswith(".json") else "not to be read\n")
        self.hub.add(repo, folder, commit=record.get("commit"))

    def dataset(self, repo: str, splits: Mapping[str, Sequence[Mapping[str, Any]]], features: Any = None) -> None:
        """Publish a data set as Parquet files, with the card that names its configuration and splits."""
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        record = RECORD["datasets"][repo]
        assert set(splits) <= set(record["splits"]), repo
        folder, config = self.root / "datasets" / repo, record.get("config", "default")
        below = record.get("config", "data")
        (folder / below).mkdir(parents=True)
        for split in record["splits"]:
            rows = splits.get(split, splits[next(iter(splits))])
            made = Dataset.from_list([dict(row) for row in rows], features=features)
            made.to_parquet(folder / below / f"{split}-00000-of-00001.parquet")
        entries = "".join(f"  - split: {s}\n    path: {below}/{s}-*\n" for s in record["splits"])
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{entries}---\n")
        commit = record.get("commit") or hashlib.sha1(repo.encode()).hexdigest()
        self.hub.add(f"datasets/{repo}", folder, commit=commit)


# Vision


def _merges() -> list[tuple[str, str]]:
    """Merges of letters to the words of the tasks' prompts, which would have more than 77 tokens otherwise."""
    found: dict[tuple[str, str], None] = {}
    texts = [t for task in clip_tasks() for t in (*task.templates, *(task.classes or ()))]
    for word in sorted({w for text in texts for w in re.findall("[a-z]{3,}", text.lower())}):
        letters = [*word[:-1], word[-1] + "</w>"]
        found |= {("".join(letters[:n]), letters[n]): None for n in range(1, len(letters))}
    return list(found)


def clip(folder: Path, patch: int, *, size: int = 224) -> Any:
    """CLIP with the odd config of OpenAI's repositories (every key of 2021, the end token 2), and its tokenizer."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    letters = [chr(c) for c in range(33, 127)]
    merges = _merges()
    tokens = [*letters, *(c + "</w>" for c in letters), *dict.fromkeys(a + b for a, b in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(f"{a} {b}" for a, b in merges)]) + "\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77).save_pretrained(folder)
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    special = {n: {"content": f"<|{t}oftext|>", **added} for n, t in (("bos_token", "start"), ("eos_token", "end"))}
    special |= {"unk_token": special["eos_token"], "pad_token": "<|endoftext|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "preprocessor_config.json").write_text(json.dumps({"crop_size": 224, "size": 224, "do_resize": True}))
    old = {"attention_dropout": 0.0, "hidden_act": "quick_gelu", "top_k": 50, "num_beams": 1, "torch_dtype": None}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "clip_text_model", "vocab_size": len(tokens), "max_position_embeddings": 77}
    text |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    vision = {"model_type": "clip_vision_model", "image_size": size, "patch_size": patch}
    config = {
        "architectures": ["CLIPModel"],
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "model_type": "clip",
        "projection_dim": 12,
        "text_config": {**old, **sizes, **text},
        "text_config_dict": None,
        "torch_dtype": "float32",
        "transformers_version": None,
        "vision_config": {**old, **sizes, **vision},
        "vision_config_dict": None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig.from_pretrained(folder))


def write_clip(folder: Path, patch: int, *, safetensors: bool) -> None:
    """A CLIP in both formats; the record decides which one stays."""
    model = clip(folder, patch)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    if safetensors:
        own = (folder / "config.json").read_text()
        model.save_pretrained(folder)
        (folder / "config.json").write_text(own)


def write_vision_expert(folder: Path, patch: int, number: int) -> None:
    """The image encoder of `write_clip` with some noise, as `CLIPVisionModel`."""
    from transformers import CLIPVisionModel

    scratch = folder.parent / f"{folder.name}.clip"
    scratch.mkdir()
    clip(scratch, patch).save_pretrained(scratch)
    model = CLIPVisionModel.from_pretrained(scratch)
    noise = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.01)
    model.save_pretrained(folder)
    shutil.rmtree(scratch)


def publish_vision(paper: PaperHub, models: Sequence[str], *, experts: str | None = None, n: int = 40) -> None:
    """CLIP models, the eight data sets, and public experts of one model."""
    from datasets import ClassLabel, Features, Image
    from PIL import Image as Picture

    from actmat_experiments.vision.clip import clip_tasks
    from actmat_experiments.vision.suite import MODELS

    for name in models:
        repo = MODELS[name].partition("@")[0]
        patch = int(name.rpartition("/")[2])
        paper.model(repo, lambda folder, patch=patch: write_clip(folder, patch, safetensors="large" in folder.name))
    for number, task in enumerate(clip_tasks()):
        classes = RECORD["datasets"][task.hub.repo]["classes"]
        names = task.classes or [f"/c/kind_{i}" for i in range(classes)]
        features = Features({"image": Image(), "label": ClassLabel(names=list(names))})
        if task.classes:
            features["label"] = ClassLabel(names=[str(i) for i in range(classes)])
        shape = (28, 28) if task.name == "mnist" else (60, 40)
        mode = "L" if task.name == "mnist" else "RGB"
        rows = [
            {"image": Picture.new(mode, shape, i * 6 if mode == "L" else (i * 6, number * 20, 9)), "label": i % classes}
            for i in range(n)
        ]
        paper.dataset(task.hub.repo, {"train": rows, "test": rows[: n // 2]}, features)
        if experts:
            repo = f"tanganke/{MODELS[experts].partition('/')[2].partition('@')[0]}_{task.expert}"
            patch = int(experts.rpartition("/")[2])
            paper.model(repo, lambda folder, k=number, patch=patch: write_vision_expert(folder, patch, k))


# Language


def write_t5(folder: Path) -> None:
    """T5 v1.0 with the keys of its config, and a unigram tokenizer in `tokenizer.json` and no other file."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import T5Config, T5ForConditionalGeneration

    signs = [chr(c) for c in range(33, 127)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((s, -3.0) for s in signs)]
    vocabulary += [(f"<extra_id_{n}>", 0.0) for n in reversed(range(100))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.normalizer = normalizers.Replace("\n", " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["T5ForConditionalGeneration"],
        "d_ff": 24,
        "d_kv": 8,
        "d_model": 16,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "n_positions": 512,
        "num_heads": 2,
        "num_layers": 2,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"max_length": 200, "prefix": "summarize: "}},
        "vocab_size": len(vocabulary),
    }
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(**config)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def publish_language(paper: PaperHub, data: Path, n: int = 40) -> None:
    """T5-base, the six data sets of the hub; Story Cloze goes to a local folder."""
    paper.model("google-t5/t5-base", write_t5)
    from actmat_experiments.language.sources import SOURCES

    unlabeled = {"qasc": {"answerKey": ""}, "winogrande": {"answer": ""}, "wsc": {"label": -1}}
    texts = {"wikiqa": "question", "paws": "sentence1", "winogrande": "sentence", "wsc": "text"}
    for task, source in SOURCES.items():
        column = texts.get(task, "question")
        rows = [dict(HUB_ROWS[task]) for _ in range(n)]
        for k, row in enumerate(rows):
            row |= {column: f"{row[column]} {k}"} if column in row else {}
        if task == "story_cloze":
            data.mkdir(parents=True, exist_ok=True)
            for split in source.splits:
                (data / f"story_cloze.{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            continue
        test = [row | unlabeled.get(task, {}) for row in rows]
        paper.dataset(source.hub[0], {"train": rows, "validation": rows, "test": test})


# Reasoning


def write_olmo(folder: Path, number: int, template: str | None) -> None:
    """OLMo 3 in bfloat16 and in two shards, with a byte-level tokenizer; experts differ by some noise."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {t: i for i, t in enumerate([*letters, "<|endoftext|>", "<|pad|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", **words)
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    ids = {"eos_token_id": vocabulary["<|endoftext|>"], "pad_token_id": vocabulary["<|pad|>"]}
    sizes = {"vocab_size": len(vocabulary), "intermediate_size": 24, "num_hidden_layers": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 65536, "sliding_window": 64}
    model = made("olmo3", rope_scaling=yarn, rope_theta=500000, **ids, **sizes)
    noise = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for weight in model.parameters() if number else ():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.02)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) * 2 // 3)


def publish_reasoning(paper: PaperHub) -> None:
    """Base, three experts, the benchmarks and the prompts of the experts' training."""
    paper.model("allenai/Olmo-3-1025-7B", lambda folder: write_olmo(folder, 0, None))
    for number, name in enumerate(("Math", "Code", "IF"), start=1):
        paper.model(f"allenai/Olmo-3-7B-RL-Zero-{name}", lambda folder, k=number: write_olmo(folder, k, TEMPLATE))
        rows = [{"prompt": f"{name}: what is {k} + {k}?", "ground_truth": str(2 * k)} for k in range(8)]
        paper.dataset(f"allenai/Dolci-RL-Zero-{name}-7B", {"train": rows})
    code = lines("HumanEval.jsonl")
    paper.dataset("openai/openai_humaneval", {"test": code})
    paper.dataset("evalplus/humanevalplus", {"test": code})
    page = "https://artofproblemsolving.com/wiki/index.php/{}_AIME_I_Problems/Problem_{}"
    aime = [
        {"id": k, "problem": f"What is {k} + 1?", "solution": "", "answer": f"{k + 1:03}", "url": page.format(year, k)}
        for year in range(2021, 2026)
        for k in range(1, 3)
    ]
    paper.dataset("allenai/aime-2021-2025", {"train": aime})
    rows = lines("IFEval_input_data.jsonl")
    for row in rows:  # a column of structs: every row has the arguments of all instructions
        row["kwargs"] = [{name: given.get(name) for name in IFEVAL} for given in row["kwargs"]]
    paper.dataset("HuggingFaceH4/ifeval", {"train": rows})


def lines(name: str) -> list[dict[str, Any]]:
    """Problems of the tests, in the columns that the published sets have."""
    return [json.loads(line) for line in (PROBLEMS / name).read_text(encoding="utf-8").splitlines()]
