"""Text to token shards: sources are read, a tokenizer is trained, every shard is written whole."""
