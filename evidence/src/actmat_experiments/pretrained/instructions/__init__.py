"""The suite `llm-tasks`: public texts as instructions with answers to choose from, for a language model."""
