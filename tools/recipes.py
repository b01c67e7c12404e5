"""How many public recipes of large jobs are followed as they are configured: by a mirror, by a feed, by neither.

    .venv/bin/python -P tools/recipes.py MEGATRON_LM MEGATRON_BRIDGE TORCHTITAN        git directories

    Megatron-LM          tests/functional_tests/test_cases/*/*/model_config.yaml that train
    Megatron-Bridge      functions *_config of its recipes
    torchtitan           functions of its config_registry.py files

Settings are read from the text, nothing is run: of a function its assignments and keywords of constants, with those of
the functions that it calls, the last one counts. A condition is taken for true. The rules are docs/use/frameworks.md's
and docs/use/feed.md's.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

DEEP = 8  # calls within calls
FEED = (  # the first that holds says why it is not followed
    (lambda s: s.get("use_megatron_fsdp"), "Megatron FSDP"),
    (lambda s: s.get("use_precision_aware_optimizer"), "precision-aware optimizer"),
    (lambda s: s.get("optimizer_cpu_offload"), "optimizer on the CPU"),
    (lambda s: "muon" in str(s.get("optimizer", "")) or "DistMuon" in str(s.get("optimizer_name", "")),
     "sharded Muon"),
)
MIRROR = (
    (lambda s: s.get("use_distributed_optimizer") and int(s.get("num_distributed_optimizer_instances") or 1) < 2,
     "ReduceScatter of the distributed optimizer"),
    (lambda s: s.get("use_torch_fsdp2"), "FSDP2 without replicas"),
    (lambda s: int(s.get("expert_model_parallel_size") or 1) > 1, "experts"),
    (lambda s: int(s.get("virtual_pipeline_model_parallel_size") or s.get("num_virtual_stages_per_pipeline_rank")
                   or s.get("num_layers_per_virtual_pipeline_stage") or 1) > 1, "several model chunks"),
    (lambda s: s.get("sequence_parallel") and int(s.get("tensor_model_parallel_size") or 1) > 1,
     "sequence parallelism"),
    (lambda s: s.get("calculate_per_token_loss"), "loss per token"),
    (lambda s: int(s.get("pipeline_model_parallel_size") or 1) > 1
     and not s.get("untie_embeddings_and_output_weights"), "an embedding of two pipeline stages"),
)
TITAN = ((lambda s: int(s.get("data_parallel_replicate_degree") or 1) < 2, "FSDP2 without replicas"),)
Settings = dict[str, Any]
Rules = tuple[tuple[Callable[[Settings], Any], str], ...]


def texts(git: str, *patterns: str) -> Iterator[tuple[str, str]]:
    """Paths of the newest commit, and what they have."""
    def said(*words: str) -> str:
        return subprocess.run(["git", "-C", git, *words], check=True, capture_output=True, text=True).stdout

    for path in said("ls-tree", "-r", "--name-only", "HEAD").splitlines():
        if any(all(part in path for part in pattern.split("*")) for pattern in patterns):
            yield path, said("show", f"HEAD:{path}")


def megatron_lm(git: str) -> Iterator[tuple[str, Settings]]:
    for path, text in texts(git, "functional_tests/test_cases/*model_config.yaml"):
        arguments = (yaml.safe_load(text) or {}).get("MODEL_ARGS") or {}
        if not isinstance(arguments, Mapping) or "--train-iters" not in arguments:
            continue  # inference, or written otherwise
        yield path, {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}


class Functions:
    """Of many modules, by name; an alias is one."""

    def __init__(self, files: Iterator[tuple[str, str]]) -> None:
        self.where: dict[str, str] = {}
        self._bodies: dict[str, ast.FunctionDef] = {}
        self._alias: dict[str, str] = {}
        for path, text in files:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    self._bodies[node.name], self.where[node.name] = node, path
                elif isinstance(node, ast.ImportFrom):
                    self._alias |= {one.asname: one.name for one in node.names if one.asname}

    def settings(self, name: str, deep: int = 0) -> Settings:
        found: Settings = {}
        body = self._bodies.get(self._alias.get(name, name))
        if body is not None and deep < DEEP:
            for statement in body.body:
                for node in _in_order(statement):
                    found |= self._of(node, deep)
        return found

    def _of(self, node: ast.AST, deep: int) -> Settings:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return {target.attr: node.value.value for target in node.targets if isinstance(target, ast.Attribute)}
        if not isinstance(node, ast.Call):
            return {}
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return self.settings(called, deep + 1) | {
            one.arg: one.value.value for one in node.keywords if one.arg and isinstance(one.value, ast.Constant)}


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def bridge(git: str) -> Iterator[tuple[str, Settings]]:
    functions = Functions(texts(git, "src/megatron/bridge/*recipes/*.py"))
    for name, path in functions.where.items():
        if name.endswith("_config") and not name.startswith("_"):
            # Its defaults (training/config.py): what a recipe does not say.
            yield f"{path}:{name}", {"use_distributed_optimizer": True} | functions.settings(name)


def torchtitan(git: str) -> Iterator[tuple[str, Settings]]:
    functions = Functions(texts(git, "torchtitan/models/*config_registry.py", "components/optimizer/*.py"))
    for name, path in functions.where.items():
        settings = functions.settings(name)
        if path.endswith("config_registry.py") and not name.startswith("_") and "lr" in settings:
            yield f"{path}:{name}", settings


def why_not(settings: Settings, rules: Rules) -> str:
    return next((why for is_so, why in rules if is_so(settings)), "")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("megatron_lm", "megatron_bridge", "torchtitan"):
        asked.add_argument(name)
    given = asked.parse_args()
    kinds: dict[str, tuple[Iterator[tuple[str, Settings]], Rules]] = {
        "Megatron-LM": (megatron_lm(given.megatron_lm), MIRROR),
        "Megatron-Bridge": (bridge(given.megatron_bridge), MIRROR),
        "torchtitan": (torchtitan(given.torchtitan), TITAN),
    }
    print(f"{'':16} recipes       mirror       feed    neither")
    total, reasons = Counter[str](), Counter[str]()
    for name, (recipes, mirror) in kinds.items():
        count = Counter[str]()
        for _, settings in recipes:
            why = why_not(settings, FEED)
            count["feed" if not why else "neither"] += 1
            count["mirror"] += not why and not why_not(settings, mirror)
            reasons[why] += bool(why)
        total += count
        _print(name, count)
    _print("together", total)
    for why, number in reasons.most_common():
        if number:
            print(f"neither: {number:5} {why}")


def _print(name: str, count: Counter[str]) -> None:
    recipes = count["feed"] + count["neither"]
    shares = (f"{count[what]:5} {100 * count[what] / max(recipes, 1):3.0f} %" for what in ("mirror", "feed", "neither"))
    print(f"{name:16} {recipes:6} ", *shares)


if __name__ == "__main__":
    main()
