"""Image classification: one encoder, many tasks, frozen heads. Suites `vision` (CLIP) and `vision-small`.

    sources -> images -> base (backbones) -> heads -> experts (finetune) -> merges, scores (evaluate) -> tables

`experiment.Vision` is the chain; `suite` and `small` are its two settings.
"""
