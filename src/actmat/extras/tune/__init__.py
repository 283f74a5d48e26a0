"""The best merge of some experts, found from a few unlabelled inputs of each."""
