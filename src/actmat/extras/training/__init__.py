"""Checkpoints of training runs: torch.distributed.checkpoint (DCP)."""
