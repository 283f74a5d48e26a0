"""LoRA adapters as PEFT stores them, and bare lists of factor pairs."""
