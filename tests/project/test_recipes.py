"""tools/recipes.py, with recipes of which it is known how they are followed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "recipes.py"
CASES = "tests/functional_tests/test_cases"
BRIDGE = "src/megatron/bridge"
HAVE = {
    "lm": {
        f"{CASES}/a/one/model_config.yaml": "MODEL_ARGS:\n  --train-iters: 5\n  --use-distributed-optimizer: true\n",
        f"{CASES}/a/two/model_config.yaml": "MODEL_ARGS:\n  --train-iters: 5\n",
        f"{CASES}/a/three/model_config.yaml": "MODEL_ARGS:\n  --train-iters: 5\n  --use-megatron-fsdp: true\n",
        f"{CASES}/a/asked/model_config.yaml": "MODEL_ARGS:\n  --load: here\n",
    },
    "bridge": {
        f"{BRIDGE}/recipes/common.py": "def common(cfg):\n    cfg.optimizer.use_precision_aware_optimizer = True\n",
        f"{BRIDGE}/recipes/a.py": "def a_config():\n    cfg = common()\n    return cfg\n",
        f"{BRIDGE}/perf_recipes/b.py":
            "from a import a_config as c\ndef b_config():\n    cfg = c()\n"
            "    cfg.optimizer.use_precision_aware_optimizer = False\n    return cfg\n",
    },
    "titan": {
        "torchtitan/models/x/config_registry.py":
            "def x():\n    return Config(optimizer=default_adamw(lr=0.1), data_parallel_replicate_degree=2)\n"
            "def y():\n    config = x()\n    config.p.data_parallel_replicate_degree = 1\n    return config\n"
            "def part():\n    return Other(size=3)\n",
    },
}


def test_recipes_are_counted_as_they_are_followed(tmp_path: Path) -> None:
    for name, files in HAVE.items():
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        for words in (["init", "-q"], ["add", "-A"],
                      ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
            subprocess.run(["git", "-C", str(tmp_path / name), *words], check=True)
    done = subprocess.run([sys.executable, "-P", str(TOOL), *(str(tmp_path / name) for name in HAVE)], check=True,
                          capture_output=True, text=True)
    rows = [line.replace("%", "").split() for line in done.stdout.splitlines()[1:]]
    assert rows[:4] == [
        ["Megatron-LM", "3", "1", "33", "2", "67", "1", "33"], ["Megatron-Bridge", "2", "0", "0", "1", "50", "1", "50"],
        ["torchtitan", "2", "1", "50", "2", "100", "0", "0"], ["together", "7", "2", "29", "5", "71", "2", "29"],
    ]
    assert sorted(map(" ".join, rows[4:])) == ["neither: 1 Megatron FSDP", "neither: 1 precision-aware optimizer"]
