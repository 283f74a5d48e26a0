"""Merges that are killed, or meet failing disks and rivals: the same command then gives the same bytes."""
