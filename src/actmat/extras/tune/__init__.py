"""The best merge of some experts, found from a few unlabeled inputs of each."""
