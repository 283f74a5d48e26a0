"""Names of inputs: each is looked at once, by `locate`, where a command or a public function begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.helpers.repository import PACKAGE, modules, tree

LOOKS = frozenset({"locate", "located", "locate_recipes"})
OPENS = frozenset({"open_checkpoint", "open_source", "find_source", "open_repository", "open_remote"})

ENTRIES: dict[str, str] = {
    "run.locate._Looks._look": "every input of a recipe",
    "run.locate.located": "decisions that come before a run",
    "run.open.open_inputs": "the start of every run",
    "report.verify.verify": "an output, and the adapters that it is compared with",
    "report.verify.ManifestInputs.located": "the inputs that a manifest names",
    "api.exporting.export": "the start of an export",
    "api.extracting.extract_recipe": "a model that is LoRA already has nothing to extract",
    "cli.inspect._print_content": "the start of `actmat inspect`",
    "extras.collect.collect.bound": "the checkpoint and the adapter of a model in memory",
    "extras.collect.on_data.measure_residuals": "an output",
    "extras.collect.staged.measure_blocks": "the start of a measurement",
    "extras.collect.staged._Job.put_merged": "an output of its own",
    "extras.conformance.experts.ExpertConformance.opened": "inputs of a test",
    "extras.conformance.experts.ExpertConformance.test_attributes_describe_the_expert": "inputs of a test",
    "extras.conformance.experts.ExpertConformance.test_content_tells_data_apart": "inputs of a test",
    "extras.diffusion.files._is_ours": "an output",
    "extras.diffusion.files._metadata_of_files": "adapters that may be merged into one file",
    "extras.gguf.writing._pattern": "the file that --like names",
    "extras.models.loading.can_switch": "the experts of a measurement",
    "extras.models.loading.load_model": "a model to run, and the base that an adapter names",
    "extras.models.loading.switched": "an adapter that is switched on",
    "extras.pages.comparison.merges._opened_base": "the base that two manifests name",
    "extras.pages.comparison.merges.open_output": "an output",
    "extras.stack.adapted.merged": "the adapter of model+adapter",
    "extras.tune.kept._looked_at": "a base that is given for full models, and its config",
    "extras.tune.merges.search_inputs": "the start of a search",
    "extras.tune.with_inputs.merge_with_inputs": "the start of a merge with inputs",
    "extras.tune.with_inputs.plan_inputs": "the plan of a merge with inputs",
}
"""Function outside experts/ that looks at a name -> what it names."""

OUTPUTS: dict[str, str] = {
    "extras.conformance.experts": "the base of a test",
    "extras.remote.push": "a repository that is written to",
    "extras.remote.source": "the folder of a file, a storage of its own",
    "extras.remote.upload": "a storage of its own",
    "extras.serving": "an output",
    "run.places": "an output",
}
"""Module outside experts/ and checkpoints/ that opens a place by itself -> what lies there."""


def calls(node: ast.AST, name: str) -> Iterator[tuple[str, str, bool]]:
    """(function, name of what it calls, whether by a bare name) of every call below a node."""
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.Call):
            called = ast.unparse(child.func)
            yield name, called.rpartition(".")[2], "." not in called
        yield from calls(child, f"{name}.{child.name}" if is_scope else name)


def outside() -> Iterator[tuple[str, str, bool]]:
    """Calls in the package outside of `experts` and `checkpoints`."""
    for path in modules(PACKAGE):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(("experts.", "checkpoints.")) and name != "extras.training.dcp.checkpoint":
            yield from calls(tree(path), name)


def test_names_are_looked_at_where_a_command_or_a_public_function_begins() -> None:
    found = {function for function, called, is_bare in outside() if is_bare and called in LOOKS}
    assert found == ENTRIES.keys()


def test_nothing_else_opens_an_input() -> None:
    found = {function for function, called, _ in outside() if called in OPENS}
    assert {f for f in found if not f.startswith(tuple(f"{m}." for m in OUTPUTS))} == set()
    assert [m for m in OUTPUTS if not any(f.startswith(f"{m}.") for f in found)] == [], "these open nothing any more"


def test_nobody_asks_a_text_what_it_names() -> None:
    gone = {"needs_base", "has_factors", "is_adapter", "open_adapter", "open_expert", "open_base", "open_stored"}
    assert not {(f, called) for f, called, _ in outside() if called in gone}


def asks_for_sort(node: ast.AST) -> bool:
    """True for `x.kind == "adapter"`, and for a look at the class of an expert."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        sorts = {s.value for s in sides if isinstance(s, ast.Constant)} & {"adapter", "checkpoint"}
        return bool(sorts) and any(isinstance(s, ast.Attribute) and s.attr == "kind" for s in sides)
    is_class = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
    return is_class and "AdapterExpert" in {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}


def test_only_experts_know_their_sort() -> None:
    """All others ask for what they need of an expert."""
    paths = [p for p in modules(PACKAGE) if not p.is_relative_to(PACKAGE / "experts")]
    found = [f"{p}: {ast.unparse(n)}" for p in paths for n in ast.walk(tree(p)) if asks_for_sort(n)]
    assert not found


def test_questions_are_seen() -> None:
    lines = ('a.kind == "adapter"', '"adapter" != a.kind', "isinstance(a, int | AdapterExpert)", 'a.kind == "other"')
    assert [asks_for_sort(ast.parse(line, mode="eval").body) for line in lines] == [True, True, True, False]
    source = ast.parse("class A:\n  def f(self):\n    x.locate(1)\n    return locate(2)")
    assert list(calls(source, "m")) == [("m.A.f", "locate", False), ("m.A.f", "locate", True)]


@pytest.mark.parametrize("layer", ["recipe", "planning", "engine", "diagnostics"])
def test_below_the_start_of_a_run_no_function_takes_a_place(layer: str) -> None:
    """Texts in these layers are names of tensors, or shown in messages."""
    taken = {
        f"{path.stem}.{f.name}"
        for path in modules(PACKAGE / layer)
        for f in ast.walk(tree(path))
        if isinstance(f, ast.FunctionDef)
        for a in (*f.args.args, *f.args.kwonlyargs)
        if a.arg in ("place", "location") and a.annotation is not None and "str" in ast.unparse(a.annotation)
    }
    assert taken <= {"missing.missing_problems", "storage._has_four_bits", "load.local_location"}


@pytest.mark.parametrize("reasons", [ENTRIES, OUTPUTS])
def test_every_exception_has_a_reason(reasons: dict[str, str]) -> None:
    assert all(reasons.values())
