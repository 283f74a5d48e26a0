"""Runs configurations in mergekit, in one process of its environment: `python worker.py FOLDER`.

FOLDER has the models and `cases.json` (name -> configuration); outputs go to FOLDER/there, outcomes to `there.json`.
"""

import json
import logging
import os
import sys
import traceback

import yaml


def run(name: str, data: dict) -> None:
    """Run one configuration; an error is the caller's."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    seed = data.pop("seed", 0)
    options = MergeOptions(
        random_seed=seed, device="cpu", lora_merge_cache="adapted", transformers_cache="cache", write_model_card=False
    )  # a card looks at the hub
    options.apply_global_options()
    out = os.path.join("there", name)
    run_merge(MergeConfiguration.model_validate(data), out, options, yaml.safe_dump(data))


def main() -> None:
    """Run all; a configuration that fails is recorded, and the next one follows."""
    os.chdir(sys.argv[1])
    logging.disable(logging.WARNING)
    with open("cases.json", encoding="utf-8") as file:
        cases = json.load(file)
    outcomes = {}
    for name, data in cases.items():
        try:
            run(name, data)
            outcomes[name] = ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a failure of the peer is a result
            traceback.print_exc()
            outcomes[name] = f"{type(error).__name__}: {error}"
        print(name, outcomes[name][:100], flush=True)
    with open("there.json", "w", encoding="utf-8") as file:
        json.dump(outcomes, file)


if __name__ == "__main__":
    main()
