"""base + adapter as actmat makes it, against `merge_and_unload` of several versions of PEFT."""
