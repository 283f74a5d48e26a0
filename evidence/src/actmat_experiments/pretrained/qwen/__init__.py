"""The suite `llm-qwen`: eight tasks on a base of half a billion weights, trained in two ways, asked in two wordings."""
