"""Text to batches: sources -> tokenizer and shards (`preparation`) -> store -> order -> loader -> batch."""
