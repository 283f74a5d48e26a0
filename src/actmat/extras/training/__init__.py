"""Checkpoints of training runs: DCP, FSDP and Megatron ranks, DeepSpeed."""
