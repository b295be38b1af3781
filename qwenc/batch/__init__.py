"""Many prompts from a file: read the items, answer them, write the results. Nothing here prints."""
