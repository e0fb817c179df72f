"""Text to token shards: files are found and read, a tokenizer is trained, every shard is written whole."""
