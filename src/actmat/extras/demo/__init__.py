"""The embedded demo: train a base and its experts on real data, merge them with every method, compare.

Its steps: `tasks` -> `train.pretrain` -> `heads` -> `train.finetune` -> `merging` -> `results`.
"""
