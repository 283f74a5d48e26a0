"""Language experiments: T5 on tasks with several choices, as text to text, scored by rank classification.

    rows, templates -> items -> tokens -> train (experts) -> compare (merge, tune, test by rank) -> tables

`suite` is the paper's comparison on T5-base and T5-large; `small` the same at laptop size, from tokenizer to table.
"""
