"""Less common adapter families of PEFT."""
