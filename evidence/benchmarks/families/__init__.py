"""A merge of every architecture that can be built tiny from its config."""
