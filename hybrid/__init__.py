"""Train hybrid language models whose layers are mixed by a pattern string."""
