"""Rare families of adapters in the folders of PEFT."""
