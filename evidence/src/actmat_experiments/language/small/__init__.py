"""The language comparison at laptop size: a small T5, from its tokenizer on, and seven classification tasks.

Corpus -> tokenizer -> base (span corruption and a supervised mixture) -> experts -> comparison -> tables.
"""
